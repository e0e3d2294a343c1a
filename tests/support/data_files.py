"""Documents in files of every format, written independently of the code that reads them; and loaders for them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from input_pipeline import packages
from input_pipeline.batch import Batch
from input_pipeline.loader import Loader, check, make_loader
from input_pipeline.options import DataOptions

LENGTH = 24
TEXTS = [f"document {number} " + "\u00e9x" * (number * 7 % 13) for number in range(40)]
TOKENS = [np.arange(number, number + 2 + number * 5 % 17) for number in range(40)]
ARROW = "pyarrow is not installed: it belongs to the extra arrow, which setup.sh --dev installs"


def load(folder: Path, split: str = "train", batch: int = 4, vocab_size: int = 300, **keys) -> Loader:
  cfg = DataOptions(
    **{"dataset_type": "grain", "max_target_length": LENGTH, "dataset_cache_directory": str(folder / "cache"), **keys}
  )
  check([cfg], vocab_size)
  return make_loader(cfg, vocab_size=vocab_size, global_batch_size=batch, split=split, log=lambda line: None)


def everything(loader: Loader) -> list[bytes]:
  """All examples of an epoch, in order."""
  batches = [loader.batch(step) for step in range(-(-loader.num_examples // 4))]
  rows = Batch(*(np.concatenate(fields) for fields in zip(*batches)))
  return [b"".join(field[row].tobytes() for field in rows) for row in range(loader.num_examples)]


# ---- writers, independent of the readers


def lines(column: str, values: list) -> bytes:
  values = [value if isinstance(value, str) else value.tolist() for value in values]
  return "\n".join(json.dumps({"id": 1, column: value}) for value in values).encode() + b"\n\n"


def write_jsonl(path: Path, column: str, values: list) -> str:
  path.with_suffix(".jsonl").write_bytes(lines(column, values))
  return str(path.with_suffix(".jsonl"))


def write_gzip(path: Path, column: str, values: list) -> str:
  """Two members, as concatenated files have."""
  content = gzip.compress(lines(column, values[:15])) + gzip.compress(lines(column, values[15:]))
  path.with_suffix(".jsonl.gz").write_bytes(content)
  return str(path.with_suffix(".jsonl.gz"))


def write_zstd(path: Path, column: str, values: list) -> str:
  """Two frames."""
  codec = pytest.importorskip("pyarrow", reason=ARROW).Codec("zstd")
  parts = [codec.compress(lines(column, part), asbytes=True) for part in (values[:15], values[15:])]
  path.with_suffix(".jsonl.zst").write_bytes(b"".join(parts))
  return str(path.with_suffix(".jsonl.zst"))


def write_parquet(path: Path, column: str, values: list) -> str:
  """Two files, small row groups, a null."""
  arrow = pytest.importorskip("pyarrow", reason=ARROW)
  parquet = pytest.importorskip("pyarrow.parquet", reason=ARROW)
  path.mkdir()
  values = [value if isinstance(value, str) else value.tolist() for value in values]
  for number, part in enumerate((values[:15], [None, *values[15:]])):
    table = arrow.table({"id": arrow.array(range(len(part))), column: arrow.array(part)})
    parquet.write_table(table, path / f"{number}.parquet", row_group_size=7)
  return f"{path}/*.parquet"


def write_records(path: Path, records: list[bytes], options: str = "group_size:1") -> str:
  writer = packages.array_record().ArrayRecordWriter(str(path.with_suffix(".array_record")), options)
  for record in records:
    writer.write(record)
  writer.close()
  return str(path.with_suffix(".array_record"))


def varint(value: int) -> bytes:
  """Two's complement of 64 bits, 7 bits per byte."""
  value %= 2**64
  return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def field(number: int, content: bytes) -> bytes:
  return varint(number << 3 | 2) + varint(len(content)) + content


def tf_example_of(features: dict[str, str | np.ndarray], packed: bool = True) -> bytes:
  entries = b""
  for name, value in features.items():
    if isinstance(value, str):
      message = field(1, field(1, value.encode()))
    elif value.dtype.kind == "f":
      message = field(2, field(1, value.astype("<f4").tobytes()))
    elif packed:
      message = field(3, field(1, b"".join(varint(int(number)) for number in value)))
    else:
      message = field(3, b"".join(varint(1 << 3) + varint(int(number)) for number in value))
    entries += field(1, field(1, name.encode()) + field(2, message))
  return field(1, entries)


def write_examples(path: Path, column: str, values: list) -> str:
  records = [tf_example_of({"a": np.zeros(2, np.float32), column: value, "z": "x"}) for value in values]
  return write_records(path, records, "group_size:4,zstd")


TEXT_WRITERS = {
  "jsonl": [write_jsonl, write_gzip, write_zstd],
  "parquet": [write_parquet],
  "arrayrecord": [write_examples],
  "arrayrecord_text": [lambda path, column, values: write_records(path, [value.encode() for value in values])],
}
TOKEN_WRITERS = {
  "jsonl": [write_jsonl, write_gzip, write_zstd],
  "parquet": [write_parquet],
  "arrayrecord": [write_examples],
  "arrayrecord_uint16": [lambda path, column, values: write_records(path, [v.astype("<u2").tobytes() for v in values])],
  "arrayrecord_int32": [lambda path, column, values: write_records(path, [v.astype("<i4").tobytes() for v in values])],
}


def written(folder: Path, kind: str, file_type: str, number: int = 0, values: list | None = None) -> dict[str, str]:
  """Writes the documents, and returns the keys that name them."""
  writer = (TEXT_WRITERS if kind == "text" else TOKEN_WRITERS)[file_type][number]
  values = values or (TEXTS if kind == "text" else TOKENS)
  return {
    "grain_train_files": writer(folder / "data", "body", values),
    "grain_file_type": file_type,
    "train_data_columns": "body",
  }
