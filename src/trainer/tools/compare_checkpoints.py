"""`python -m trainer.tools.compare_checkpoints A B`: how the arrays of two checkpoints differ, in values and bits.

A and B are RUN_DIR (its newest checkpoint), RUN_DIR@STEP, the folder of a checkpoint, or a Hugging Face folder, which
has only parameters. Needs no device, and the memory of two arrays.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.checkpoint import array_parts, checksums, run_id
from trainer.checkpoint.errors import CheckpointError, Rejected
from trainer.checkpoint.step_folders import MANIFEST, META, StepFolders
from trainer.config.errors import ConfigError
from trainer.tools.ends import exit_code
from trainer.weights import sources
from trainer.world import SINGLE_WORLD

_BLOCK = 1 << 20  # values that are compared at once
_STACKED = re.compile(r"(.*\blayers)\.(?!\d)(.+)")  # the name of an array that has all layers
_NUMBERED = re.compile(r"\blayers\.\d+\.")


@dataclass(frozen=True)
class Entry:
  """An array that can be read."""

  shape: tuple[int, ...]
  dtype: np.dtype
  read: Callable[[], np.ndarray]


Entries = dict[str, Entry]


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0 if all arrays are equal, 1 if not, or 2 with a message on stderr for wrong input."""
  parser = argparse.ArgumentParser(
    prog="python -m trainer.tools.compare_checkpoints",
    description=f"{__doc__.split(': ', 1)[1]}\nExit code 0: all are equal; 1: not; 2: wrong input.",
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  for name in ("A", "B"):
    parser.add_argument(name, help="RUN_DIR, RUN_DIR@STEP, or the folder of a checkpoint or of a Hugging Face model")
  options = parser.parse_args(argv)
  return exit_code(lambda: _compare(options.A, options.B), CheckpointError, Rejected, OSError)


def _compare(a: str, b: str) -> int:
  (ours, of_parameters), (theirs, also) = entries(a), entries(b)
  if of_parameters or also:
    ours, theirs = ({name: x for name, x in one.items() if name.startswith("params.")} for one in (ours, theirs))
  ours, theirs = _alike(ours, theirs)
  lines = list(differences(ours, theirs, (a, b)))
  print(*lines, f"{len(ours.keys() & theirs.keys())} arrays compared, {len(lines)} differences", sep="\n")
  return 1 if lines else 0


def entries(place: str) -> tuple[Entries, bool]:
  """({name: array} of what `place` names, whether it has only parameters). Raises ConfigError, CheckpointError, and
  Rejected for a checkpoint that is damaged."""
  place = os.path.expanduser(place).rstrip("/")
  folder = run_id.folder(place)
  if (folder / META).exists():
    manifest, meta = (checksums.parse(checksums.read(folder / name), name) for name in (MANIFEST, META))
    checksums.check(folder, manifest)
    return of_checkpoint(folder, meta), False
  if (folder / sources.CONFIG).exists():
    found = sources.open_source(place)
    whole = lambda stored: functools.partial(stored.part, (slice(None),) * len(stored.weight.shape))
    return {name: Entry(x.weight.shape, x.dtype, whole(x)) for name, x in found.stored.items()}, True
  run, step = sources.split(re.sub(r"(?<=[^:]):(\d+)$", r"@\1", place))
  folders = StepFolders(f"{run}/checkpoints", SINGLE_WORLD, lambda line: None)
  steps = folders.steps()
  if not steps or (step and int(step) not in steps):
    there = f"checkpoint {step}; there are {steps}" if steps else "checkpoints"
    raise ConfigError(
      f"{place}: has no {there}.\nGive RUN_DIR, RUN_DIR@STEP, the folder of a checkpoint, or a Hugging Face folder."
    )
  number = int(step) if step else steps[-1]
  return of_checkpoint(folders.directory / str(number), folders.verify(number)), False


def of_checkpoint(folder: Any, meta: dict[str, Any]) -> Entries:
  """{name: array} of a committed checkpoint."""
  import ml_dtypes  # noqa: F401 -- numpy knows bfloat16 then

  read = lambda name: functools.partial(array_parts.read_whole, folder, name)
  return {name: Entry(tuple(x["shape"]), np.dtype(x["dtype"]), read(name)) for name, x in meta["arrays"].items()}


def _alike(ours: Entries, theirs: Entries) -> tuple[Entries, Entries]:
  """Both with separate layers, if one of them has them."""
  numbered = [any(map(_NUMBERED.search, one)) for one in (ours, theirs)]
  return (_separate(ours) if numbered[1] else ours), (_separate(theirs) if numbered[0] else theirs)


def _separate(found: Entries) -> Entries:
  separate: Entries = {}
  for name, entry in found.items():
    match = _STACKED.fullmatch(name)
    layers = range(entry.shape[0]) if match else ()
    for i in layers:
      layer = lambda entry=entry, i=i: entry.read()[i]
      separate[f"{match[1]}.{i}.{match[2]}"] = Entry(entry.shape[1:], entry.dtype, layer)  # type: ignore[index]
    if not match:
      separate[name] = entry
  return separate


def differences(ours: Entries, theirs: Entries, names: tuple[str, str]) -> Iterator[str]:
  """A line for each array that differs. names: of both, for the lines."""
  for name in {**ours, **theirs}:
    if name not in ours or name not in theirs:
      yield f"{name}: only in {names[name in theirs]}"
      continue
    a, b = ours[name], theirs[name]
    if a.shape != b.shape:
      yield f"{name}: shape {list(a.shape)} and {list(b.shape)}"
      continue
    kinds = f"{a.dtype} and {b.dtype}, " if a.dtype != b.dtype else ""
    if found := _difference(a.read(), b.read()):
      yield f"{name}: {kinds}{found}"
    elif kinds:
      yield f"{name}: {kinds}with equal values"


def _difference(a: np.ndarray, b: np.ndarray) -> str:
  """How two arrays of one shape differ; "": they do not."""
  values = flipped = 0
  absolute = relative = 0.0
  x, y = a.reshape(-1), b.reshape(-1)
  same_type = x.dtype == y.dtype
  for first in range(0, x.size, _BLOCK):
    p, q = x[first : first + _BLOCK], y[first : first + _BLOCK]
    if same_type:
      unsigned = np.dtype(f"u{p.dtype.itemsize}")
      changed = np.ascontiguousarray(p).view(unsigned) ^ np.ascontiguousarray(q).view(unsigned)
      flipped += int(np.bitwise_count(changed).sum(dtype=np.int64))
      differs = changed != 0
    else:
      differs = p.astype(np.float64) != q.astype(np.float64)
    if not differs.any():
      continue
    values += int(np.count_nonzero(differs))
    with np.errstate(all="ignore"):
      left, right = p[differs].astype(np.float64), q[differs].astype(np.float64)
      gap = np.abs(left - right)
      gap[~np.isfinite(gap)] = np.inf
      ratio = gap / np.maximum(np.abs(left), np.abs(right))
      ratio[np.isnan(ratio)] = np.where(gap[np.isnan(ratio)] == 0, 0.0, np.inf)
    absolute, relative = max(absolute, float(gap.max())), max(relative, float(ratio.max()))
  if not values:
    return ""
  in_bits = f" in {flipped} bits" if same_type else ""
  return f"{values} of {x.size} values differ{in_bits}; by at most {absolute:.3g}, relative {relative:.3g}"


if __name__ == "__main__":
  sys.exit(main())
