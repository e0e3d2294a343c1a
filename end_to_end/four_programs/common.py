"""The work that each program gets and the curve that it leaves. The other programs' environments have no trainer."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Work:
  """One experiment: a folder with a Hugging Face model, token ids, and the numbers of the optimizer."""

  model: str  # qwen3, llama or qwen3-moe
  steps: int
  schedule_steps: int
  rows: int
  length: int
  peak: float
  warmup: int
  final: float  # the last learning rate, as a share of peak
  decay: float
  clip: float
  b1: float
  b2: float
  epsilon: float
  balance: float  # weight of the loss that balances the experts

  def rate(self, step: int) -> float:
    """The learning rate of step 0, 1, ...: a linear warm-up whose first step is 1 / warmup, then a cosine."""
    if step < self.warmup:
      return self.peak * (step + 1) / self.warmup
    progress = (step - self.warmup) / (self.schedule_steps - self.warmup)
    return self.peak * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))

  def decays(self, name: str) -> bool:
    """Whether the Hugging Face weight `name` decays: matrices do, norms and the embedding do not."""
    return "norm" not in name and "embed_tokens" not in name


def write(folder: Path, work: Work, tokens: np.ndarray) -> None:
  """Writes the work and the tokens [examples, length + 1] of all steps, in their order."""
  np.save(folder / "tokens.npy", tokens.astype(np.int32))
  (folder / "work.json").write_text(json.dumps(dataclasses.asdict(work), indent=2))


def read(folder: Path) -> Work:
  return Work(**json.loads((folder / "work.json").read_text()))


def batches(folder: Path) -> Iterator[np.ndarray]:
  """The batch of every step [rows, length + 1]: the inputs, and shifted by one the targets."""
  work, tokens = read(folder), np.load(folder / "tokens.npy")
  for step in range(work.steps):
    yield tokens[step * work.rows : (step + 1) * work.rows]


def config_of(folder: Path) -> dict[str, Any]:
  """The config.json of the model."""
  return json.loads((folder / "model" / "config.json").read_text())


def write_curve(path: Path, curve: Sequence[tuple[float, float]]) -> None:
  """curve: the loss and the norm of the gradient before clipping, of each step."""
  with path.open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(("step", "loss", "grad_norm"))
    writer.writerows((step, f"{loss:.9g}", f"{norm:.9g}") for step, (loss, norm) in enumerate(curve, 1))


def read_curve(path: Path) -> np.ndarray:
  """[steps, 2]: loss and norm of the gradient."""
  with path.open(newline="") as file:
    return np.array([(float(row["loss"]), float(row["grad_norm"])) for row in csv.DictReader(file)])
