"""The ids of a BpeTokenizer, computed by tokie: many times as fast as the `tokenizers` library, and compared with it.

Only kinds of tokenizers are accepted for which tokie 0.1.4 gave the ids of `tokenizers` for every code point. Texts for
which it is known to differ are left to `tokenizers`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline import packages
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.documents import BadRecord, BadRecords, Document, Documents, Piece, place
from input_pipeline.errors import ConfigError, shorten
from input_pipeline.tokenizer import BpeTokenizer, Tokenizer, encodable

PACKAGE = "tokie"
_REMEDY = "Leave out --fast."
# Characters of each file that are compared, at its beginning and after each step.
_EXCERPT, _STEP = 500, 100_000
_FIRST = 200_000  # characters of a dataset that are compared before the work begins, in whole documents
# Bytes that tokie gets at once. It cuts texts of 10,000 bytes for its threads, and not always at the end of a word.
_LONGEST = 8000
_LETTER = "A-Za-z\u0410-\u044f\u0621-\u063a\u0905-\u0939\u3041-\u3093\u4e00-\u9fa5\uac00-\ud7a3"
_AFTER_WORD = r" \t\r\n,;()=\u3001\u3002\uff0c"
# Where a text may be cut: each of the patterns below ends a word there.
_SEAM = re.compile(rf"(?<=[0-9{_LETTER}])(?=[{_AFTER_WORD}])")
_NFC = re.compile("[\u0300-\U0010ffff]")  # NFC changes no text of other characters
# Where tokie ends words elsewhere.
_UNLIKE = "'\u017f", "\x0b", "\x0c"
_UNLIKE_TAB = re.compile(r"\t(?:[^\s\w]|_)")
_LETTERS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The patterns of Qwen 2 and 3, Llama 3, Qwen 3.5, GPT-4 (also OLMo 2 and 3), GPT-4o.
_SPLITS = (
  _LETTERS,
  _LETTERS.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),
  _LETTERS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),
  r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
  r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


class FastTokenizer(BpeTokenizer):
  """A BpeTokenizer with the same ids and the same fingerprint, whose `encode_batch` uses tokie."""

  def __init__(self, json_text: str, bos_token: str = "", eos_token: str = "") -> None:
    """Raises ConfigError if tokie is absent, or this kind of tokenizer is not known to have the same ids there."""
    super().__init__(json_text, bos_token, eos_token)
    import tokenizers

    tokie = packages.load(PACKAGE, package=PACKAGE, extra="fast", reason="--fast")
    content = json.loads(json_text)
    if wrong := _unsupported(content):
      raise ConfigError(f"--fast: {PACKAGE} does not have the ids of {wrong}. {_REMEDY}")
    added = content.get("added_tokens") or []
    self._normalizes = content.get("normalizer") is not None
    self._added = re.compile("|".join(re.escape(token["content"]) for token in added) or "(?!)")
    special = [token["content"] for token in added if token["special"]]
    self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
    self._special_begins = {name[:2] for name in special}  # found many times as fast as a pattern
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    self._has_all_bytes = content["model"]["vocab"].keys() >= {*alphabet}
    with tempfile.TemporaryDirectory() as folder:
      path = Path(folder) / "tokenizer.json"
      path.write_text(json.dumps(content | {"normalizer": None, "post_processor": None}), encoding="utf-8")
      try:
        self._fast = tokie.Tokenizer.from_json(str(path))
      except ValueError as error:
        raise ConfigError(f"--fast: {PACKAGE} cannot read this tokenizer ({error}). {_REMEDY}") from error

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    parts = [list(self._parts(encodable(text))) for text in texts]
    exact = iter(super().encode_batch([part for some in parts for part, is_exact in some if is_exact]))
    return [
      np.concatenate([next(exact) if is_exact else self._encode(part) for part, is_exact in some]) for some in parts
    ]

  def lost(self, text: str, ids: np.ndarray) -> tuple[int, int]:
    return (0, 0) if self._has_all_bytes else super().lost(text, ids)

  def _encode(self, part: str) -> np.ndarray:
    ids, _ = self._fast.encode_batch_flat([part], add_special_tokens=False)
    return ids.view(np.int32)

  def _parts(self, text: str) -> Iterator[tuple[str, bool]]:
    """Yields the parts of a text, and whether tokie may give them other ids."""
    if any(begin in text for begin in self._special_begins) and self._special.search(text):
      yield text, True
      return
    if self._normalizes and not text.isascii() and _NFC.search(text):
      if self._added.search(text):
        yield text, True
        return
      text = self.normalized(text)
    longest, begin = _LONGEST if text.isascii() else _LONGEST // 4, 0
    while len(text) - begin > longest:
      near = _SEAM.search(text, begin + longest // 2, begin + longest)
      seam = near or _SEAM.search(text, begin + longest)
      if seam is None:
        yield text[begin:], True
        return
      part, begin = text[begin : seam.start()], seam.start()
      yield part, near is None or _is_unlike(part)
    part = text[begin:]
    yield part, _is_unlike(part)

  def compare(self, texts: Sequence[str], where: Callable[[int], str]) -> None:
    """Raises ConfigError for the first text with other ids than in `tokenizers`: names it, and the first other token.

    where: names a text by its index.
    """
    for number, (found, wanted) in enumerate(zip(self.encode_batch(texts), super().encode_batch(texts), strict=True)):
      if np.array_equal(found, wanted):
        continue
      first = next((n for n, (a, b) in enumerate(zip(found, wanted)) if a != b), min(len(found), len(wanted)))
      libraries = [
        f"{self.decode(ids[first : first + 1])!r} {ids[first : first + 1].tolist()} in {package} "
        f"{importlib.metadata.version(package)}"
        for package, ids in ((PACKAGE, found), ("tokenizers", wanted))
      ]
      raise ConfigError(
        f"{where(number)}: its token {first + 1} is {' and '.join(libraries)}, after "
        f"{self.decode(wanted[:first])[-40:]!r}. {_REMEDY}"
      )

  def compare_first(self, documents: Documents, max_bad_records: int) -> None:
    """Compares the first documents. Raises ConfigError for a difference."""
    size = 0
    for where, document in documents.valid(BadRecords(max_bad_records)):
      assert isinstance(document, str), "only text has a tokenizer"
      self.compare([document[: _FIRST - size]], lambda _, where=where: where)  # type: ignore[misc]
      size += len(document)
      if size >= _FIRST:
        break

  def compare_vocabulary(self) -> None:
    """Compares the text of each token, so that every merge is used. Raises ConfigError for a difference."""
    texts = [self.decode([token]) for token in range(self.vocab_size)]
    self.compare(texts, lambda number: f"the text {texts[number]!r} of a token")

  def compared(self, documents: Documents) -> Documents:
    """The same documents; excerpts of each file are compared while it is read."""

    def read(piece: Piece) -> Iterator[Document | BadRecord]:
      seen = next_excerpt = 0  # characters of the piece
      for number, document in enumerate(documents.read(piece), 1):
        if isinstance(document, str):
          while next_excerpt < seen + len(document):
            start = next_excerpt - seen
            where = f"{place(piece, number)}, after its character {start}"
            self.compare([document[start : start + _EXCERPT]], lambda _, where=where: where)  # type: ignore[misc]
            next_excerpt += _STEP
          seen += len(document)
        yield document

    return dataclasses.replace(documents, read=read)


def make(given: Tokenizer | None, splits: Mapping[str, Documents], max_bad_records: int) -> FastTokenizer:
  """`given` with the speed of tokie, after a comparison of both. Raises ConfigError if that is impossible."""
  if not isinstance(given, BpeTokenizer):
    raise ConfigError(
      f"--fast: has no effect with {f'tokenizer_type={given.name}' if given else 'token ids'}. {_REMEDY}"
    )
  if isinstance(given, ChatTokenizer):
    raise ConfigError(f"--fast: {PACKAGE} does not say where the tokens of a conversation are. {_REMEDY}")
  fast = FastTokenizer(*given.arguments)
  for documents in splits.values():
    fast.compare_first(documents, max_bad_records)
  fast.compare_vocabulary()
  return fast


def _is_unlike(part: str) -> bool:
  return any(some in part for some in _UNLIKE) or ("\t" in part and _UNLIKE_TAB.search(part) is not None)


def _unsupported(content: dict[str, Any]) -> str:
  """What of a tokenizer.json is not known to be the same in tokie; "" if it is all known."""
  model, normalizer = content["model"], content.get("normalizer")
  if model.get("type") != "BPE":
    return f"the model {model.get('type')}"
  for name in ("byte_fallback", "unk_token", "fuse_unk", "continuing_subword_prefix", "end_of_word_suffix"):
    if model.get(name):
      return f"a BPE with {name}={model[name]}"
  if normalizer is not None and normalizer["type"] != "NFC":
    return f"the normalizer {normalizer['type']}"
  for token in content.get("added_tokens") or ():
    strange = [name for name in ("single_word", "lstrip", "rstrip") if token.get(name)]
    if not token["special"] and (strange or re.search(f"[{_AFTER_WORD}]", token["content"])):
      return f"the added token {token['content']!r} with {' and '.join(strange) or 'a space or comma'}"
  return _unsupported_words(content.get("pre_tokenizer") or {"type": None})


def _unsupported_words(found: dict[str, Any]) -> str:
  """As `_unsupported`, for the pre_tokenizer."""
  parts = found["pretokenizers"] if found["type"] == "Sequence" else [found]
  *before, last = parts
  if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
    return f"the pre_tokenizer {last['type']}" + (" with add_prefix_space" if last.get("add_prefix_space") else "")
  if not before or (len(before) == 1 and before[0] == {"type": "Digits", "individual_digits": True}):
    return "" if last.get("use_regex", True) else "the pre_tokenizer ByteLevel with use_regex=false"
  for part in before:
    pattern = (part.get("pattern") or {}).get("Regex")
    isolated = part.get("behavior") == "Isolated" and not part.get("invert")
    if (
      len(before) > 1
      or part["type"] != "Split"
      or pattern not in _SPLITS
      or not isolated
      or last.get("use_regex", True)
    ):
      return f"the pre_tokenizer {part['type']} ({shorten(str(pattern))})"
  return ""
