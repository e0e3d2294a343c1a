"""`python -m trainer.tools.compare_checkpoints A B`: how the arrays of two checkpoints differ, in values and bits.

A and B are RUN_DIR (its newest checkpoint), RUN_DIR@STEP, or the folder of a checkpoint. Needs no device, and the
memory of two arrays. Exit code 0: all are equal; 1: not; 2: wrong input.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainer import commands
from trainer.observe import screen
from trainer.weights.stored_arrays import Entries, entries

_BLOCK = 1 << 20  # values that are compared at once


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  for name in ("A", "B"):
    parser.add_argument(name, help="RUN_DIR, RUN_DIR@STEP, or the folder of a checkpoint")
  return commands.main(parser, lambda options: _compare(options.A, options.B), argv)


def _compare(a: str, b: str) -> int:
  ours, theirs = entries(a), entries(b)
  lines = list(differences(ours, theirs, (a, b)))
  print(*lines, f"{len(ours.keys() & theirs.keys())} arrays compared, {len(lines)} differences", sep="\n")
  return 1 if lines else 0


def differences(ours: Entries, theirs: Entries, names: tuple[str, str]) -> Iterator[str]:
  """A line for each array that differs. names: of both, for the lines."""
  for name in {**ours, **theirs}:
    if name not in ours or name not in theirs:
      yield f"{name}: only in {names[name in theirs]}"
      continue
    a, b = ours[name], theirs[name]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      yield f"{name}: {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    elif found := _difference(a.read(), b.read()):
      yield f"{name}: {found}"


def _difference(a: np.ndarray, b: np.ndarray) -> str:
  """How two arrays of one shape and type differ; "": they do not."""
  values = flipped = 0
  absolute = relative = 0.0
  x, y = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
  unsigned = np.dtype(f"u{x.dtype.itemsize}")
  for first in range(0, x.size, _BLOCK):
    p, q = x[first : first + _BLOCK], y[first : first + _BLOCK]
    bits = np.bitwise_count(p.view(unsigned) ^ q.view(unsigned))
    differs = bits != 0
    flipped += int(bits.sum(dtype=np.int64))
    values += int(np.count_nonzero(differs))
    with np.errstate(all="ignore"):
      left, right = p[differs].astype(np.float64), q[differs].astype(np.float64)
      gap = np.nan_to_num(np.abs(left - right), nan=np.inf)
      ratio = np.where(gap == 0, 0.0, gap / np.maximum(np.abs(left), np.abs(right)))
    absolute = max(absolute, float(gap.max(initial=0.0)))
    relative = max(relative, float(np.nan_to_num(ratio, nan=np.inf, posinf=np.inf).max(initial=0.0)))
  if not values:
    return ""
  return f"{values} of {x.size} values differ in {flipped} bits; by at most {absolute:.3g}, relative {relative:.3g}"


if __name__ == "__main__":
  screen.command(main)
