"""Text to token ids and back."""

from __future__ import annotations

from typing import Protocol


class Tokenizer(Protocol):
  """Ids are in [0, vocab_size). Encoding puts no special ids anywhere: who joins documents does that."""

  name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int

  def encode(self, text: str) -> list[int]:
    """The ids of any text; characters that UTF-8 cannot hold (lone surrogates) become '?'."""
    ...

  def decode(self, ids: list[int]) -> str:
    """The text of any ids. Never raises: special and unknown ids are left out, broken UTF-8 becomes U+FFFD."""
    ...
