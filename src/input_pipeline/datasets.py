"""The documents that a configuration names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from input_pipeline import array_record, corpus, data_files, elements, first_bytes, hf, jsonl, parquet, remote, tfds
from input_pipeline.documents import Documents, Piece, naming, uncut
from input_pipeline.folders import LeftOut
from input_pipeline.input_errors import ConfigError, require

if TYPE_CHECKING:
  from input_pipeline.options import DataOptions  # pydantic is slow to import and not needed here

_END = 2**8  # bytes at each end of a file
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
      if cfg.grain_dataset:
        return {"train": elements.find(cfg.grain_dataset, None, cfg.train_data_columns)}
      keys = {"train": "grain_train_files", "eval": "grain_eval_files"}
      if not any(getattr(cfg, key) for key in keys.values()):
        raise ConfigError(
          "dataset_type=grain: names no data.\nSet grain_train_files or grain_dataset, or give a mixture."
        )
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
    return Documents(name, pieces, corpus.documents, "text", corpus.cut_documents, left_out=str(left))

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
  file_type, column = cfg.grain_file_type, cfg.train_data_columns
  name, left = getattr(cfg, key), LeftOut()
  pieces = [Piece(found.name, found.file, 0, found.size) for found in data_files.find(key, name, file_type, left)]
  form = f"{file_type} {column}"
  match file_type:
    case "parquet":
      read, check = partial(parquet.read, column=column), partial(_check_parquet, pieces)
      return Documents(name, pieces, read, form, parquet.cut, check, str(left))
    case "jsonl":
      return Documents(name, pieces, partial(jsonl.read, column=column), form, jsonl.cut, left_out=str(left))
    case _:
      reader = partial(array_record.read, file_type=file_type, column=column)
      return Documents(name, pieces, reader, form, uncut, left_out=str(left))


def _split(cfg: DataOptions, split: str) -> Documents:
  """The documents of a split of a saved dataset: dataset_type=tfds or hf."""
  kind, folder, column = cfg.dataset_type, cfg.dataset_path, cfg.train_data_columns
  if kind == "tfds":
    pieces, read = tfds.find(folder, split), partial(tfds.read, folder=folder, split=split, column=column)
  else:
    pieces, read = hf.find(folder, split), partial(hf.read, column=column)
  return Documents(f"{folder} ({split})", pieces, read, f"{kind} {column}", uncut)


def _check_parquet(pieces: Sequence[Piece]) -> None:
  """Raises ConfigError for files without the marks of Parquet, before hours of preparation come to them."""
  bad = []
  for piece, ends in zip(pieces, _ends(pieces), strict=True):
    if not ends[:4] == ends[-4:] == _PARQUET:
      bad.append((piece, ends))
  if bad:
    piece, ends = bad[0]
    more = f" {len(bad)} files are like this, the last one {bad[-1][0].path}." if len(bad) > 1 else ""
    if problem := first_bytes.problem(ends):
      raise ConfigError(f"{piece.path} cannot be read as Parquet. {problem}.{more}")
    raise ConfigError(
      f"{piece.path} cannot be read as Parquet: it does not begin and end with {_PARQUET.decode()}, as if it were cut "
      f"off.{more} Fix or remove it."
    )


def _ends(pieces: Sequence[Piece]) -> Iterator[bytes]:
  """Yields the first and the last bytes of each file."""
  far = [piece.path for piece in pieces if isinstance(piece.path, remote.RemoteFile)]
  both = [(0, min(_END, file.size)) for file in far], [(max(0, file.size - _END), file.size) for file in far]
  heads, tails = (remote.ranges(far, side) for side in both)
  for piece in pieces:
    with naming(piece.path):
      if isinstance(piece.path, remote.RemoteFile):
        yield next(heads) + next(tails)
        continue
      with piece.path.open("rb") as file:
        content = file.read(_END)
        file.seek(max(0, piece.size - _END))
        yield content + file.read(_END)
