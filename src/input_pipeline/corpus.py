"""The text of a dataset: local files in a fixed order, the split into training and evaluation, and the documents."""

from __future__ import annotations

import codecs
import collections
import hashlib
import itertools
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from input_pipeline import data_files, first_bytes, folders, jsonl, storage
from input_pipeline.data_files import TEXT_SUFFIXES, File
from input_pipeline.documents import BadRecord, LongText, Piece, cut_at_lines, line_number, naming
from input_pipeline.folders import LeftOut
from input_pipeline.input_errors import ConfigError

# Folders of the standard library's sources that are not Python code to learn from: installed packages, tests with text
# that is broken on purpose, tables of code points (encodings), the documentation as one string (pydoc_data).
_NOT_LIBRARY = frozenset("__pycache__ dist-packages encodings idle_test pydoc_data site-packages test tests".split())
# The smaller side of a split has about this number of units, or more.
_UNITS = 16
_BLOCK = 2**18  # bytes of a text that are read at a time
_WHOLE = 2**20  # bytes of a text that is one string


def find(key: str, path: str, left: LeftOut | None = None) -> list[Piece]:
  """The non-empty text files at `path`, sorted by name. Empty path: the Python standard library's sources.

  `key` is the configuration key for error messages. Folders are searched as `folders.below` says. left: gets what is
  not read. Raises ConfigError if the path does not exist or contains no text.
  """
  left = left or LeftOut()
  if not path:
    return _standard_library(key)
  root = Path(path).expanduser()
  if storage.is_address(path):
    files = data_files.relative_names(data_files.text_at_address(key, path, left))
    pieces = [Piece(name, file, 0, file.size) for name, file in files]
  elif root.is_file():
    if root.suffix.lower() not in TEXT_SUFFIXES:
      raise ConfigError(
        f"{key}={path} ends in {root.suffix!r}. Give a file that ends in one of {', '.join(TEXT_SUFFIXES)}."
      )
    pieces = _pieces([root], root.parent)
  elif root.is_dir():
    pieces = _pieces(folders.once(data_files.text_below(root, left), left), root)
  else:
    raise ConfigError(f"{key}={path} does not exist. Give a file or folder of {', '.join(TEXT_SUFFIXES)}.")
  if not pieces:
    raise ConfigError(
      f"{key}={path} has no text{left.note}. Give a folder with a non-empty file of {', '.join(TEXT_SUFFIXES)}."
    )
  return pieces


def hold_out(pieces: Sequence[Piece], fraction: float) -> tuple[list[Piece], list[Piece]]:
  """(training, evaluation) pieces, in the order of `pieces`; no evaluation pieces for fraction=0 or a single line.

  Both sides are alike: the text is cut into units, the units into consecutive groups of about 1 / `fraction`, and one
  unit of each group is held out, chosen by a hash. A unit is a whole file, or a part of a file that is larger than a
  sixteenth of the held-out text, so that no file dominates the evaluation. `fraction` is below 1.
  """
  if fraction == 0:
    return list(pieces), []
  assert fraction < 1, fraction  # `DataOptions.mistakes`
  smaller_side = sum(piece.size for piece in pieces) * min(fraction, 1 - fraction)
  limit = max(1, int(smaller_side / _UNITS))
  units = [unit for piece in pieces for unit in cut_at_lines(piece, limit)]
  if len(units) == 1:
    return list(pieces), []
  # A line is never cut. Hold out an oversized line only if its group has nothing smaller.
  choose = lambda unit: (max(0, unit.size - 2 * limit), _hash(unit))
  groups = itertools.groupby(enumerate(units), key=lambda item: int(item[0] * fraction))
  held_out = {min((unit for _, unit in group), key=choose) for _, group in groups}
  return _join(unit for unit in units if unit not in held_out), _join(unit for unit in units if unit in held_out)


def cut_documents(piece: Piece, limit: int) -> list[Piece]:
  """Parts of about `limit` bytes with whole documents. Only a .jsonl file can have more than one."""
  return cut_at_lines(piece, limit) if _is_jsonl(piece) else [piece]


def documents(piece: Piece) -> Iterator[str | LongText | BadRecord]:
  """Yields the non-empty documents of a piece in order: its whole text, or the field "text" of each line of a .jsonl.

  Bad records are text that is not UTF-8, and lines without such a field. Raises ConfigError if a file cannot be read.
  """
  if _is_jsonl(piece):
    yield from _json_lines(piece)
    return
  try:
    parts = _parts(piece)
    if piece.size > _WHOLE:
      text = next(parts, "")
      collections.deque(parts, 0)  # a text that is not UTF-8 at its end is bad as a whole
    else:
      text = "".join(parts)
  except UnicodeDecodeError as error:
    line = line_number(piece.path, error.start)
    remedy = first_bytes.problem(_head(piece)) or "Convert or remove the file"
    yield BadRecord(f"{piece.path}:{line}: not UTF-8 ({error.reason}). {remedy}.")
    return
  if not piece.start and (problem := first_bytes.problem(text[:512].encode(), is_page=False)):
    yield BadRecord(f"{piece.path} cannot be read as text. {problem}.")
  elif piece.size > _WHOLE:
    yield LongText(piece.size, _parts_again(piece))
  elif text:
    yield text


def _head(piece: Piece) -> bytes:
  with _opened(piece.path) as file:
    return file.read(512)


def _parts(piece: Piece) -> Iterator[str]:
  """Yields the text of a piece in parts. Raises UnicodeDecodeError, whose start is an offset in the file."""
  decoder = codecs.getincrementaldecoder("utf-8")()
  with _opened(piece.path) as file:
    file.seek(piece.start)
    place = piece.start
    while place < piece.stop and (data := file.read(min(piece.stop - place, _BLOCK))):
      waiting = len(decoder.getstate()[0])  # bytes of a character that the last part has begun
      try:
        text = decoder.decode(data, final=place + len(data) >= piece.stop)
      except UnicodeDecodeError as error:
        error.start += place - waiting
        raise
      yield text if place else text.removeprefix("\ufeff")  # some editors begin a file with this mark
      place += len(data)


def _parts_again(piece: Piece) -> Iterator[str]:
  """`_parts` of a text that was UTF-8."""
  try:
    yield from _parts(piece)
  except UnicodeDecodeError as error:
    raise ConfigError(f"{piece.path} has changed while it was read. Start again when it is complete.") from error


def _standard_library(key: str) -> list[Piece]:
  root = Path(sysconfig.get_path("stdlib"))
  files = [
    file for file in data_files.text_below(root, LeftOut(), _NOT_LIBRARY) if file.suffix == ".py" and _is_utf8(file)
  ]
  pieces = _pieces(files, root)
  if not pieces:
    raise ConfigError(f"{key} is empty, and the interpreter has no library sources in {root}. Set {key}.")
  return pieces


def _pieces(files: Sequence[Path], root: Path) -> list[Piece]:
  """The non-empty files as pieces, sorted by name."""
  pieces = []
  for file in files:
    with naming(file):
      pieces.append(Piece(file.relative_to(root).as_posix(), file, 0, file.stat().st_size))
  return sorted((piece for piece in pieces if piece.size), key=lambda piece: piece.name)


@contextmanager
def _opened(path: File) -> Iterator[BinaryIO]:
  """The file, open for reading. An OSError inside the block becomes a ConfigError with the path."""
  with naming(path), path.open("rb") as file:
    yield file


def _is_jsonl(piece: Piece) -> bool:
  return piece.path.suffix.lower() == ".jsonl"


def _is_utf8(file: Path) -> bool:
  try:
    with naming(file):
      file.read_bytes().decode("utf-8")
  except UnicodeDecodeError:
    return False
  return True


def _hash(piece: Piece) -> bytes:
  name = piece.name.encode("utf-8", "surrogateescape")
  return hashlib.sha256(name + b"\0" + str(piece.start).encode()).digest()


def _join(units: Iterable[Piece]) -> list[Piece]:
  """The units in order, with neighbouring parts of a file joined again."""
  joined: list[Piece] = []
  for unit in units:
    if joined and joined[-1].path == unit.path and joined[-1].stop == unit.start:
      joined[-1] = replace(joined[-1], stop=unit.stop)
    else:
      joined.append(unit)
  return joined


def _json_lines(piece: Piece) -> Iterator[str | BadRecord]:
  with _opened(piece.path) as file:
    for number, line in enumerate(jsonl.lines(file, piece)):
      try:
        text = jsonl.value(line, "text") if line.strip() else ""
        if not isinstance(text, str):
          raise ValueError('no field "text" with a string')
      except ValueError as error:
        number += line_number(piece.path, piece.start)
        yield BadRecord(f'{piece.path}:{number}: {error}. Every line must be like {{"text": "..."}}.')
      else:
        if text:
          yield text
