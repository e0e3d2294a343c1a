"""Text to token ids and back: bytes, or byte-level BPE with the `tokenizers` library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.config import remote
from trainer.config.errors import ConfigError

_BOS, _EOS = "<|bos|>", "<|eos|>"
# Names of these two tokens in published tokenizers (Llama, Qwen, GPT-2, Mistral, Gemma).
_BOS_NAMES = (_BOS, "<|begin_of_text|>", "<s>", "<bos>")
_EOS_NAMES = (_EOS, "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")


class Tokenizer(Protocol):
  """Ids are in [0, vocab_size). Encoding never returns special ids; code that joins documents adds them.

  decode(encode(text)) == text for all text that UTF-8 can represent, unless a given tokenizer file normalizes text.
  """

  name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int
  fingerprint: str
  """Equal if and only if encode is the same function."""

  def encode(self, text: str) -> list[int]:
    """The ids of any text. Characters that UTF-8 cannot represent (lone surrogates) become '?'."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, int32, computed on several cores if the tokenizer can."""
    ...

  def decode(self, ids: Iterable[int]) -> str:
    """The text of any ids. Never raises: skips special and unknown ids, replaces invalid UTF-8 with U+FFFD."""
    ...


class ByteTokenizer:
  """Ids 0 to 255 are the bytes of UTF-8. Ids 256 and 257 are special."""

  name = "byte"
  vocab_size = 258
  bos_id: int | None = 256
  eos_id = 257
  fingerprint = "byte-1"

  def encode(self, text: str) -> list[int]:
    return list(text.encode("utf-8", "replace"))

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32) for text in texts]

  def decode(self, ids: Iterable[int]) -> str:
    return bytes(int(token) for token in ids if 0 <= token < 256).decode("utf-8", "replace")


class BpeTokenizer:
  """A tokenizer of the `tokenizers` library, made from its JSON."""

  name = "bpe"

  def __init__(self, json_text: str) -> None:
    """Raises ValueError if the JSON is not a tokenizer, has no end-of-text token, or tokenises at random."""
    import tokenizers

    try:
      self._tokenizer = tokenizers.Tokenizer.from_str(json_text)
    except Exception as error:  # the library raises Exception itself
      raise ValueError(f"not a tokenizers JSON file: {error}") from error
    if getattr(self._tokenizer.model, "dropout", None):
      raise ValueError("its model has dropout, so each preparation would give other tokens. Set dropout to null in it")
    # Published tokenizers may cut or pad each text to the length of another program.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    # Text that looks like a special token is encoded as text, so that it cannot end a document.
    self._tokenizer.encode_special_tokens = True
    vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
    eos_id = next((vocabulary[name] for name in _EOS_NAMES if name in vocabulary), None)
    if eos_id is None:
      raise ValueError(f"the tokenizer has no end-of-text token. It must contain one of {', '.join(_EOS_NAMES)}")
    self.json_text = json_text
    self.vocab_size = max(vocabulary.values()) + 1
    self.bos_id = next((vocabulary[name] for name in _BOS_NAMES if name in vocabulary), None)
    self.eos_id = eos_id
    self.fingerprint = f"bpe-{hashlib.sha256(json_text.encode()).hexdigest()}"

  def encode(self, text: str) -> list[int]:
    return self._tokenizer.encode(_encodable(text), add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    encodings = self._tokenizer.encode_batch_fast([_encodable(text) for text in texts], add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]

  def decode(self, ids: Iterable[int]) -> str:
    return self._tokenizer.decode([int(token) for token in ids if 0 <= token < self.vocab_size])


def train_bpe(texts: Iterable[str], vocab_size: int) -> str:
  """The JSON of a byte-level BPE with at most `vocab_size` ids, learned from `texts`. Deterministic.

  It contains all bytes, so it can encode any text. Raises ConfigError if vocab_size is too small for them.
  """
  smallest = 256 + 2
  if vocab_size < smallest:
    raise ConfigError(
      f"vocab_size={vocab_size} is too small for tokenizer_type=bpe, which needs ids for 256 bytes and 2 special "
      f"tokens. Set vocab_size to at least {smallest}."
    )
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, trainers

  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    min_frequency=2,
    special_tokens=[_BOS, _EOS],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator((_encodable(text) for text in texts), trainer)
  return tokenizer.to_str()


def load_bpe(path: str) -> BpeTokenizer:
  """The tokenizer in a tokenizers JSON file. Raises ConfigError with the path if it cannot be read."""
  try:
    return BpeTokenizer(_read(path).decode("utf-8"))
  except (OSError, ValueError) as error:
    raise ConfigError(f"tokenizer_path={path}: {error}") from error


def _read(path: str) -> bytes:
  """The content of a file, local or at an address. Raises OSError."""
  if not remote.is_address(path):
    return Path(path).expanduser().read_bytes()
  for file in remote.find("tokenizer_path", path, ()):
    with file.open() as content:
      return content.read()
  raise FileNotFoundError("there is no such file")


def _encodable(text: str) -> str:
  """`text` with '?' instead of lone surrogates, which JSON can contain and the library refuses."""
  return text.encode("utf-8", "replace").decode("utf-8")
