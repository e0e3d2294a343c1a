"""Documents of ArrayRecord files. A record is a tf.train.Example, UTF-8 text, or little-endian token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from trainer.config.errors import ConfigError
from trainer.data import packages, tf_example
from trainer.data.documents import Document, Piece


def read(piece: Piece, file_type: str, column: str) -> Iterator[Document]:
  """Yields the documents of a file. `file_type` is a value of grain_file_type; `column` names a feature of an Example.

  Raises ConfigError, naming file and record, if a record cannot be read or has another format.
  """
  decode = decoder(file_type, column)
  number = 0
  try:
    # Without threads that read ahead: the file system does that.
    reader = packages.array_record().ArrayRecordReader(str(piece.path), "readahead_buffer_size:0,max_parallelism:0")
    try:
      for number in range(reader.num_records()):  # noqa: B007 (for the error messages)
        yield decode(reader.read())
    finally:
      reader.close()
  except ValueError as error:  # UnicodeDecodeError is one
    raise ConfigError(f"record {number} of {piece.path}: {error}.") from error
  except (RuntimeError, IndexError) as error:
    raise ConfigError(f"record {number} of {piece.path} cannot be read ({error}). Fix or remove the file.") from error


def decoder(file_type: str, column: str) -> Callable[[bytes], Document]:
  """The function that makes a document of a record. It raises ValueError for a record of another format."""
  match file_type:
    case "arrayrecord":
      return partial(tf_example.feature, name=column)
    case "arrayrecord_text":
      return lambda record: record.decode("utf-8")
    case "arrayrecord_uint16":
      return lambda record: np.frombuffer(record, "<u2")
    case _:
      assert file_type == "arrayrecord_int32", file_type
      return lambda record: np.frombuffer(record, "<i4")
