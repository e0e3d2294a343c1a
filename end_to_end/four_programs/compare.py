"""Compares curves and final weights with those of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from end_to_end.four_programs import common
from tests.support import hf_folders

REFERENCE = "transformers"
BOUNDS = {300: 1e-5, 1000: 1e-4}  # of the largest relative difference over so many first steps, to REFERENCE


def curves(found: np.ndarray, expected: np.ndarray) -> dict[int, tuple[float, float]]:
  """{n: largest relative differences of the loss and of the gradient's norm over the first n steps}."""
  assert found.shape == expected.shape, f"curves of {len(found)} and {len(expected)} steps"
  differences = np.abs(found - expected) / np.abs(expected)
  counts = [count for count in BOUNDS if count < len(found)] + [len(found)]
  return {count: (float(loss), float(norm)) for count in counts for loss, norm in [differences[:count].max(axis=0)]}


def bound(count: int) -> float:
  """The bound for the first `count` steps."""
  return next((limit for steps, limit in BOUNDS.items() if count <= steps), max(BOUNDS.values()))


def weights(found: Path, expected: Path) -> dict[str, float]:
  """{array: largest difference, relative to the array's largest number} of two Hugging Face folders."""
  ours, theirs = (hf_folders.read_folder(folder) for folder in (found, expected))
  assert ours.keys() == theirs.keys(), f"arrays of only one folder: {sorted(ours.keys() ^ theirs.keys())}"
  return {name: hf_folders.relative(ours[name], theirs[name]) for name in ours}


def report(folder: Path, programs: list[str]) -> tuple[list[dict[str, object]], bool]:
  """The rows of the table of one model, and whether the trainer is within the bounds."""
  expected, rows, good = common.read_curve(folder / REFERENCE / "curve.csv"), [], True
  for program in programs:
    found = curves(common.read_curve(folder / program / "curve.csv"), expected)
    arrays = weights(folder / program / "model", folder / REFERENCE / "model")
    worst = max(arrays, key=arrays.__getitem__)
    for count, (loss, norm) in found.items():
      rows.append({"model": folder.name, "program": program, "steps": count, "loss": loss, "grad_norm": norm})
      good &= program != "trainer" or loss <= bound(count)
    rows[-1] |= {"weights": arrays[worst], "array": worst}
  return rows, good
