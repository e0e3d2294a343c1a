"""The documents that a configuration names."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from input_pipeline import array_record, corpus, data_files, hf, jsonl, parquet, remote, tfds
from input_pipeline.documents import Documents, Piece, naming, uncut
from input_pipeline.errors import ConfigError, require
from input_pipeline.folders import LeftOut

if TYPE_CHECKING:
  from input_pipeline.options import DataOptions  # pydantic is slow to import and not needed here

_SAMPLED = 2**16  # bytes at each end of a file
_PARQUET = b"PAR1"  # at both ends of a file


def find(cfg: DataOptions) -> dict[str, Documents]:
  """The documents of each split: "train", and "eval" if the configuration has evaluation data.

  Raises ConfigError if options contradict each other, or there are no files. The files are not read yet, except to
  split text.
  """
  require(cfg.mistakes())
  match cfg.dataset_type:
    case "text":
      return _text(cfg)
    case "grain":
      keys = {"train": "grain_train_files", "eval": "grain_eval_files"}
      if not any(getattr(cfg, key) for key in keys.values()):
        raise ConfigError("dataset_type=grain: names no files.\nSet grain_train_files, or give a mixture.")
      return {split: _files(cfg, key) for split, key in keys.items() if getattr(cfg, key)}
    case _:
      if cfg.dataset_type == "hf" and cfg.eval_split and not hf.has_splits(cfg.dataset_path):
        raise ConfigError(
          f"eval_split={cfg.eval_split}: dataset_path={cfg.dataset_path} is a single dataset without splits. "
          "Save a DatasetDict, or evaluate another dataset with eval_sets."
        )
      names = {"train": cfg.train_split, "eval": cfg.eval_split}
      return {split: _split(cfg, name) for split, name in names.items() if name}


def _text(cfg: DataOptions) -> dict[str, Documents]:
  name = cfg.dataset_path or "the Python standard library"

  def documents(pieces: Sequence[Piece], name: str, left: object = "") -> Documents:
    digest = partial(corpus.digest, pieces)
    return Documents(name, pieces, corpus.documents, digest, corpus.cut_documents, str(left))

  left = LeftOut()
  pieces = corpus.find("dataset_path", cfg.dataset_path, left)
  if cfg.eval_dataset_path:
    other = LeftOut()
    held_out = corpus.find("eval_dataset_path", cfg.eval_dataset_path, other)
    return {"train": documents(pieces, name, left), "eval": documents(held_out, cfg.eval_dataset_path, other)}
  train, held_out = corpus.hold_out(pieces, cfg.eval_fraction)
  splits = {"train": documents(train, name, left)}
  return splits | {"eval": documents(held_out, name)} if held_out else splits


def _files(cfg: DataOptions, key: str) -> Documents:
  """The documents of the files that `key` names."""
  file_type, column = cfg.grain_file_type, cfg.train_data_columns
  name, left = getattr(cfg, key), LeftOut()
  pieces = [Piece(found.name, found.file, 0, found.size) for found in data_files.find(key, name, file_type, left)]
  digest = partial(_digest, pieces, file_type, column)
  match file_type:
    case "parquet":
      return Documents(name, pieces, partial(parquet.read, column=column), digest, parquet.cut, str(left))
    case "jsonl":
      return Documents(name, pieces, partial(jsonl.read, column=column), digest, jsonl.cut, str(left))
    case _:
      read = partial(array_record.read, file_type=file_type, column=column)
      return Documents(name, pieces, read, digest, uncut, str(left))


def _split(cfg: DataOptions, split: str) -> Documents:
  """The documents of a split of a saved dataset: dataset_type=tfds or hf."""
  kind, folder, column = cfg.dataset_type, cfg.dataset_path, cfg.train_data_columns
  if kind == "tfds":
    pieces, read = tfds.find(folder, split), partial(tfds.read, folder=folder, split=split, column=column)
  else:
    pieces, read = hf.find(folder, split), partial(hf.read, column=column)
  return Documents(f"{folder} ({split})", pieces, read, partial(_digest, pieces, kind, column), uncut)


def _digest(pieces: Sequence[Piece], file_type: str, column: str) -> str:
  """Identity of files: format, names, sizes, and the first and last bytes of each. Reading all would take too long.

  It does not depend on the place of the files, so they may be moved to another folder or to an object store.
  """
  total = hashlib.sha256(json.dumps([file_type, column]).encode())
  bad = []
  for piece, ends in zip(pieces, _ends(pieces), strict=True):
    total.update(json.dumps([piece.name, piece.size, hashlib.sha256(ends).hexdigest()]).encode())
    if file_type == "parquet" and not ends[:4] == ends[-4:] == _PARQUET:
      bad.append(str(piece.path))
  if bad:  # now, and not when hours of preparation have come to this file
    more = f" {len(bad)} files are like this, the last one {bad[-1]}." if len(bad) > 1 else ""
    raise ConfigError(
      f"{bad[0]} cannot be read as Parquet: it does not begin and end with {_PARQUET.decode()}, as if it were cut off."
      f"{more} Fix or remove it."
    )
  return total.hexdigest()


def _ends(pieces: Sequence[Piece]) -> Iterator[bytes]:
  """Yields the beginning and the end of each file. Parquet and ArrayRecord have their index at the end."""
  far = [piece.path for piece in pieces if isinstance(piece.path, remote.RemoteFile)]
  both = [(0, min(_SAMPLED, file.size)) for file in far], [(max(0, file.size - _SAMPLED), file.size) for file in far]
  heads, tails = (remote.ranges(far, side) for side in both)
  for piece in pieces:
    with naming(piece.path):
      if isinstance(piece.path, remote.RemoteFile):
        yield next(heads) + next(tails)
        continue
      with piece.path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != piece.size:
          raise ConfigError(
            f"{piece.path} had {piece.size} bytes and now has {size}. Start again when no program writes to it."
          )
        content = file.read(_SAMPLED)
        file.seek(max(0, piece.size - _SAMPLED))
        yield content + file.read(_SAMPLED)
