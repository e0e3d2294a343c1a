"""One part of a dataset: documents from some pieces of input files become the records of one output file."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline import in_place, packages, prepare, windows
from input_pipeline.documents import BadRecords, Documents, Piece
from input_pipeline.tokenizer import Tokenizer, ends
from trainer.config.errors import ConfigError

_GROUP = 250_000  # characters that are tokenised at a time: about 25 MB of memory of each process
_OPTIONS = "group_size:1,zstd:1"  # of ArrayRecord: every record can be read alone


@dataclasses.dataclass(frozen=True)
class TokenizeJob:
  """What is the same for all parts. Can be pickled."""

  splits: Mapping[str, Documents]
  tokenizer: Tokenizer | None  # None: the documents are token ids
  vocab_size: int
  length: int  # T of a window
  packing: str
  records: str  # documents or windows
  max_bad_records: int

  @property
  def file_type(self) -> str:
    """The value of grain_file_type that reads the output."""
    if self.records == "windows":
      return "arrayrecord_windows"
    return "arrayrecord_uint16" if self.ids <= 2**16 else "arrayrecord_int32"

  @property
  def ids(self) -> int:
    """All tokens are below this number."""
    return self.tokenizer.vocab_size if self.tokenizer else self.vocab_size

  def description(self) -> dict[str, Any]:
    """Everything that the output depends on except the documents and their division into parts, as JSON."""
    windowed = self.records == "windows"
    return {
      "tokenizer": self.tokenizer.fingerprint if self.tokenizer else None,
      **ends(self.tokenizer),
      "vocab_size": self.ids,
      "records": self.records,
      "grain_file_type": self.file_type,
      "max_target_length": self.length if windowed else None,
      "packing": self.packing if windowed else None,
      "versions": {name: importlib.metadata.version(name) for name in ("tokenizers", "array-record")},
    }


def write(
  job: TokenizeJob, split: str, pieces: Sequence[Piece], path: Path, report: Callable[[int], None]
) -> dict[str, Any]:
  """Writes the records of `pieces` to `path`, whole or not at all. Returns its counts, hashes and bad records as JSON.

  report: called with the number of tokens that have been added. Raises ConfigError if a document is wrong, OSError if
  the file cannot be written.
  """
  counts = {"documents": 0, "tokens": 0, "records": 0, "targets": 0, "bad_records": 0}
  documents = dataclasses.replace(job.splits[split], pieces=pieces)
  bad, lost = BadRecords(job.max_bad_records), prepare.Lost()
  hashes: list[str] = []
  groups = prepare.token_groups(prepare.groups(documents, _GROUP, bad, hashes), job.tokenizer, job.ids, bad, lost)
  temporary = path.with_name(f".{path.name}.{os.getpid()}")
  try:
    try:
      writer = packages.array_record().ArrayRecordWriter(str(temporary), _OPTIONS)
      for record in _records(job, _counted(groups, counts, report), counts):
        writer.write(record)
      writer.close()
    except RuntimeError as error:
      raise OSError(f"{path} cannot be written: {error}") from error
    with temporary.open("rb") as file:
      os.fsync(file.fileno())
      digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = temporary.stat().st_size
    temporary.rename(path)
  finally:
    temporary.unlink(missing_ok=True)
  counts["bad_records"] = bad.count
  inputs = [
    {"file": piece.name, "start": piece.start, "stop": piece.stop, "sha256_of_documents": content}
    for piece, content in zip(pieces, hashes, strict=True)
  ]
  return {
    "file": f"{split}/{path.name}",
    "bytes": size,
    "sha256": digest,
    **counts,
    "bad": bad.messages,
    "lost": str(lost),
    "inputs": inputs,
  }


def write_in_worker(
  job: TokenizeJob, split: str, pieces: Sequence[Piece], path: Path, report: Callable[[int], None]
) -> dict[str, Any]:
  """`write` in one of many processes. Raises ConfigError also if the file cannot be written."""
  os.putenv("TOKENIZERS_PARALLELISM", "false")  # this process is one of as many as the user wants cores used
  try:
    return write(job, split, pieces, path, report)
  except OSError as error:
    raise ConfigError(str(error)) from error


def _counted(
  groups: Iterable[windows.Group], counts: dict[str, int], report: Callable[[int], None]
) -> Iterator[windows.Group]:
  for group in groups:
    yield group
    tokens = sum(len(document) for document in group)  # a long document has been read only now
    counts["documents"] += len(group)
    counts["tokens"] += tokens
    report(tokens)


def _records(job: TokenizeJob, groups: Iterable[windows.Group], counts: dict[str, int]) -> Iterator[bytes]:
  if job.records == "windows":
    for window in prepare.packed(job.packing, job.tokenizer)(groups, job.length):
      counts["records"] += 1
      counts["targets"] += windows.count_targets(window)
      yield windows.pack(window, in_place.DTYPE)
    return
  dtype = "<u2" if job.file_type == "arrayrecord_uint16" else "<i4"
  for group in groups:
    for document in group:
      counts["records"] += 1
      ids = document if isinstance(document, np.ndarray) else document.whole()
      if len(ids) and ids.min() < 0:
        raise ConfigError("A document has a mask, and the first one has none. Use --records=windows.")
      counts["targets"] += len(ids) - 1
      yield ids.astype(dtype).tobytes()
