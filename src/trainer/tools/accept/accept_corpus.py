"""The documents of accept's runs. Each fills one example and begins with its number, so what a run has read can be
computed without the code that reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

FILE = "documents.jsonl"
DOCUMENTS = 600
_WORDS = (
  "the model reads each word once and a lost slice costs no step so all sums stay equal bit by bit in every run".split()
)
_BOS = 256  # of tokenizer_type=byte


def text(number: int, length: int) -> str:
  """Document `number`, of `length` bytes: the same on every machine."""
  words, state = [f"{number:06d}"], number
  while len(" ".join(words)) < length:
    state = (state * 1_103_515_245 + 12_345) % 2**31
    words.append(_WORDS[(state >> 16) % len(_WORDS)])
  return " ".join(words)[:length]


def write(directory: str, length: int) -> str:
  """Writes the documents to a folder, and returns the file."""
  lines = (json.dumps({"text": text(number, length)}) for number in range(DOCUMENTS))
  file = Path(directory, FILE)
  file.write_text("\n".join(lines) + "\n")
  return str(file)


def number_of(tokens: np.ndarray) -> int:
  """The document whose example begins with these tokens [T]."""
  return int(bytes(tokens[1:7].astype(np.uint8)).decode())


def digest(numbers: Sequence[int], length: int) -> str:
  """The field `examples` of a receipt's line: of a batch whose row r is the document `numbers[r]` (docs/trust.md)."""
  total = 0
  for row, number in enumerate(numbers):
    targets = np.frombuffer(text(number, length).encode(), np.uint8).astype(np.int32)
    tokens = np.concatenate([np.array([_BOS], np.int32), targets[:-1]])
    content = hashlib.sha256(row.to_bytes(8, "big"))
    ones = np.ones(length, np.int32)
    for field in (tokens, targets, ones.astype(np.float32), np.arange(length, dtype=np.int32), ones):
      content.update(field)
    total += int.from_bytes(content.digest()[:16], "big")
  return f"{total % 2**128:032x}"
