"""Text to token ids and back: bytes, or a tokenizer file of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from input_pipeline import first_bytes, long_text, remote, storage
from input_pipeline.input_errors import ConfigError

_FILE = "tokenizer.json"  # of a folder
_BOS, _EOS = "<|bos|>", "<|eos|>"
# Names of these two tokens in published tokenizers (Llama, Qwen, GPT-2, Mistral, Gemma).
_BOS_NAMES = (_BOS, "<|begin_of_text|>", "<s>", "<bos>")
_EOS_NAMES = (_EOS, "<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>")
_NO_TOKEN = "none"  # value of bos_token
_ADDING = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")  # post-processors that add tokens to a text
_LONG = 250_000  # characters of a text that is encoded in one piece. Each needs about 100 bytes of memory
COMPLETE = "Give a tokenizer for this text, or one that has all bytes"
"""The remedy for text that a tokenizer cannot represent."""
# Increase it when the ids of a text change.
_FORMAT = 2


class Tokenizer(Protocol):
  """Ids are in [0, vocab_size). Encoding never returns bos_id and eos_id; code that joins documents adds them.

  Encoding raises ConfigError if the tokenizer lacks both a token for a text and a token for unknown text.
  decode(encode(text)) == text for all text that UTF-8 can represent, unless a given tokenizer file normalizes text.
  """

  name: str
  vocab_size: int
  bos_id: int | None
  eos_id: int
  fingerprint: str
  """Equal if and only if encode is the same function, and the ids of both tokens are the same."""

  def encode(self, text: str) -> list[int]:
    """The ids of any text. Characters that UTF-8 cannot represent (lone surrogates) become '?'."""
    ...

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    """The ids of each text, int32, computed on several cores if the tokenizer can."""
    ...

  def encode_parts(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields the ids of a text that comes in parts, in parts of another length."""
    ...

  def lost(self, text: str, ids: np.ndarray) -> tuple[int, int]:
    """(how many of the `ids` of `text` mean unknown text, how many of its characters have no id)."""
    ...

  def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
    """The text of any ids, with the names of special tokens or without. Never raises: skips unknown ids, replaces
    invalid UTF-8 with U+FFFD.
    """
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

  def encode_parts(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
    return (ids for part in parts for ids in self.encode_batch([part]))

  def lost(self, text: str, ids: np.ndarray) -> tuple[int, int]:
    return 0, 0

  def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
    names = {256: _BOS.encode(), 257: _EOS.encode()} if specials else {}
    known = (bytes([token]) if 0 <= token < 256 else names.get(token, b"") for token in map(int, ids))
    return b"".join(known).decode("utf-8", "replace")


class BpeTokenizer:
  """A tokenizer of the `tokenizers` library, made from its JSON."""

  name = "bpe"

  def __init__(self, json_text: str, bos_token: str = "", eos_token: str = "") -> None:
    """`bos_token`, `eos_token`: values of these keys. Raises ValueError if the JSON is not a tokenizer, tokenises at
    random, or does not say which tokens these are; see `_token`.
    """
    import tokenizers

    try:
      content = json.loads(json_text)
      self._tokenizer = tokenizers.Tokenizer.from_str(_without_control_pieces(content) or json_text)
    except Exception as error:  # the library raises Exception itself
      raise ValueError(f"not a tokenizers JSON file ({error}). Give a tokenizer.json of that library") from error
    if getattr(self._tokenizer.model, "dropout", None):
      raise ValueError("its model has dropout, so each preparation would give other tokens. Set dropout to null in it")
    # Published tokenizers may cut or pad each text to the length of another program.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    # Text that looks like a special token is encoded as text, so that it cannot end a document.
    self._tokenizer.encode_special_tokens = True
    self.json_text = json_text
    self._arguments = json_text, bos_token, eos_token
    model = content["model"]
    # The number of the token in a Unigram, the token in others.
    given, name = model.get("unk_id"), model.get("unk_token")
    self._unknown = self._tokenizer.token_to_id(name) if given is None and name else given
    self._has_id: dict[str, bool] = {"\ufffd": True}  # by character, if nothing stands for unknown text
    self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    before, after = _template(content.get("post_processor") or {})
    self.bos_id = None if bos_token == _NO_TOKEN else self._token("bos_token", bos_token, before, _BOS_NAMES)
    eos_id = self._token("eos_token", eos_token, after, _EOS_NAMES)
    assert eos_id is not None, "only bos_token may be absent"
    self.eos_id = eos_id
    digest = hashlib.sha256(json_text.encode()).hexdigest()
    self.fingerprint = f"bpe-{_FORMAT}-{digest} bos={self.bos_id} eos={self.eos_id}"

  def __reduce__(self) -> tuple[Any, ...]:
    """Another process makes it from its file: the library's pickles forget encode_special_tokens."""
    return type(self), self._arguments

  def encode(self, text: str) -> list[int]:
    with _naming_failures():
      return self._tokenizer.encode(encodable(text), add_special_tokens=False).ids

  def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
    is_long = [len(text) > _LONG for text in texts]
    short = [encodable(text) for text, long in zip(texts, is_long) if not long]
    with _naming_failures():
      encoded = iter(self._tokenizer.encode_batch_fast(short, add_special_tokens=False))
      return [
        np.concatenate([*long_text.encode(self._tokenizer, [encodable(text)])])
        if long
        else np.array(next(encoded).ids, np.int32)
        for text, long in zip(texts, is_long)
      ]

  def encode_parts(self, parts: Iterable[str]) -> Iterator[np.ndarray]:
    with _naming_failures():
      yield from long_text.encode(self._tokenizer, map(encodable, parts))

  def lost(self, text: str, ids: np.ndarray) -> tuple[int, int]:
    if self._unknown is not None:
      return int(np.count_nonzero(ids == self._unknown)), 0
    characters = set(text)
    for character in characters - self._has_id.keys():
      tokens = self.encode(character)
      # One of several bytes that have no ids leaves a character that is not whole.
      self._has_id[character] = character.isspace() or (bool(tokens) and "\ufffd" not in self.decode(tokens))
    return 0, sum(text.count(character) for character in characters if not self._has_id[character])

  def json_of_documents(self) -> str:
    """The JSON of a tokenizer that gives a text its ids and those before it in a document, but no token after it."""
    begin = [] if self.bos_id is None else [self.bos_id]
    if self._tokenizer.encode("a").ids == [*begin, *self.encode("a")]:
      return self.json_text
    content = json.loads(self.json_text)
    processor = content.get("post_processor") or {}
    parts = processor["processors"] if processor.get("type") == "Sequence" else [processor] if processor else []
    parts = [part for part in parts if part["type"] not in _ADDING]
    if self.bos_id is not None:
      name = self._tokenizer.id_to_token(self.bos_id)
      piece = lambda kind, id, type_id: {kind: {"id": id, "type_id": type_id}}
      single, second = ([piece("SpecialToken", name, i), piece("Sequence", "AB"[i], i)] for i in range(2))
      tokens = {name: {"id": name, "ids": [self.bos_id], "tokens": [name]}}
      template = {"single": single, "pair": [*single, *second], "special_tokens": tokens}
      parts.append({"type": "TemplateProcessing", **template})
    whole = {"type": "Sequence", "processors": parts} if len(parts) > 1 else parts[0] if parts else None
    return json.dumps(content | {"post_processor": whole}, ensure_ascii=False, indent=2)

  def decode(self, ids: Iterable[int], *, specials: bool = False) -> str:
    known = [int(token) for token in ids if 0 <= token < self.vocab_size]
    return self._tokenizer.decode(known, skip_special_tokens=not specials)

  def special_tokens(self) -> dict[str, int]:
    added = sorted(self._tokenizer.get_added_tokens_decoder().items())
    return {token.content: id for id, token in added if token.special}

  def token_names(self) -> dict[str, str]:
    """The names of bos_token, if there is one, and eos_token."""
    return {key: token[0] for key, token in ends(self).items() if token}

  def _token(self, key: str, given: str, in_template: Sequence[str], names: Sequence[str]) -> int | None:
    """The id of the token `given`, else of the template's token, else of the first special token of the `names`.

    Raises ValueError if the token is not special, or a text may contain it.
    """
    special = self.special_tokens()
    some = ", ".join(list(special)[:8]) or "it has none, so add one to the file"
    remedy = f"Set {key} to one of its special tokens: {some}"
    if len(in_template) > 1 and not given:
      raise ValueError(f"{key}: its template has more than one token there, {' '.join(in_template)}. {remedy}")
    special |= {name: id for name in in_template if (id := self._tokenizer.token_to_id(name)) is not None}
    name = given or next((name for name in (*in_template, *names) if name in special), None)
    if name is None and key == "bos_token":
      return None
    if name is None or name not in special:
      ordinary = [name for name in ([given] if given else names) if self._tokenizer.token_to_id(name) is not None]
      why = f", and {ordinary[0]} is an ordinary token of it, which any text may contain" if ordinary else ""
      raise ValueError(f"{key}={given}: it has no special token named {given or ', '.join(names)}{why}. {remedy}")
    if special[name] in self.encode(name):
      raise ValueError(f"{key}={name}: its model makes this token of ordinary text with this name. {remedy}")
    return special[name]


@contextmanager
def _naming_failures() -> Iterator[None]:
  """Turns an error of the library into a ConfigError."""
  try:
    yield
  except Exception as error:  # the library raises Exception itself
    raise ConfigError(f"the tokenizer fails ({error}). {COMPLETE}.") from error


def _without_control_pieces(content: dict[str, Any]) -> str | None:
  """The JSON of a Unigram model that cannot find the names of special tokens in a text. None: it is another model.

  SentencePiece does not find them either. The library would prefer them to all pieces of text: their score is 0.
  """
  pieces = content["model"]["vocab"]
  if not isinstance(pieces, list):
    return None
  for token in content.get("added_tokens", ()):
    if token["special"] and token["id"] < len(pieces):
      pieces[token["id"]][1] = -1e6
  return json.dumps(content)


def _template(processor: dict[str, Any]) -> tuple[list[str], list[str]]:
  """The names of the tokens that a post-processor puts before and after a text."""
  kind = processor.get("type")
  if kind == "Sequence":
    found = [_template(part) for part in processor["processors"]]
    return [name for before, _ in found for name in before], [name for _, after in found for name in after]
  if kind in ("BertProcessing", "RobertaProcessing"):
    return [processor["cls"][0]], [processor["sep"][0]]
  if kind == "TemplateProcessing":
    names = [piece.get("SpecialToken", {}).get("id") for piece in processor["single"]]  # None: the text
    return names[: names.index(None)], names[names.index(None) + 1 :]
  return [], []


def prompt(tokenizer: Tokenizer, text: str) -> list[int]:
  """The ids of the beginning of a document; the end token if there are none."""
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  return [*begin, *tokenizer.encode(text)] or [tokenizer.eos_id]


def continuation(tokenizer: Tokenizer, before: Sequence[int], ids: Iterable[int], *, specials: bool = False) -> str:
  """The text that `ids` add to the text of `before`. Some decoders remove a blank at the beginning of their result."""
  head = tokenizer.decode(before, specials=specials)
  whole = tokenizer.decode([*before, *ids], specials=specials)
  return whole[len(os.path.commonprefix([head, whole])) :]  # noqa: RUF071 -- of characters


def ends(tokenizer: Tokenizer | None) -> dict[str, Any]:
  """[name, id] of bos_token and eos_token, as JSON; None: there is no such token."""
  ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id} if tokenizer else {}
  named = {key: [tokenizer.decode([id], specials=True), id] for key, id in ids.items() if tokenizer and id is not None}
  return {"bos_token": None, "eos_token": None} | named


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
  tokenizer.train_from_iterator((encodable(text) for text in texts), trainer)
  return tokenizer.to_str()


def load_bpe(path: str, bos_token: str = "", eos_token: str = "") -> BpeTokenizer:
  """The tokenizer in a tokenizers JSON file. Raises ConfigError with the path if it cannot be read."""
  content = b""
  try:
    content = _read(path)
    return BpeTokenizer(content.decode("utf-8-sig"), bos_token, eos_token)
  except (OSError, ValueError) as error:
    storage.raise_outage("read", path, error)
    raise ConfigError(f"tokenizer_path={path}: {first_bytes.problem(content[:512]) or error}") from error


def _read(path: str) -> bytes:
  """The content of a file, local or at an address, or of tokenizer.json in a local folder. Raises OSError."""
  in_folder = not storage.is_address(path) and Path(path).expanduser().is_dir()
  return remote.read("tokenizer_path", f"{path}/{_FILE}" if in_folder else path)


def encodable(text: str) -> str:
  """`text` with '?' instead of lone surrogates, which JSON can contain and the library refuses."""
  return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")
