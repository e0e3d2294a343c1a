"""Compares gradients that are summed over slices in float32 and in bfloat16: their error, and the losses of whole runs.

    python -m end_to_end.benchmarks.grad_reduce_dtype [--seeds 4] [--optimizer adamw] [--steps 1000] [--gradients-only]

A small model trains on 3 simulated slices of one CPU device, on the quickstart's text. The weights and activations are
float32, so that only the sum over slices differs. All runs share one process and one program for each variant. A run of
1,000 steps with AdamW takes 1 to 2 CPU minutes.

First table: the error of the summed gradient, relative to the sum in float64 of the gradients of the slices, computed
one slice at a time. Second table: the losses. Every seed has its own initial weights and order of examples, and the
same seed is used for all variants. "float32, perturbed" starts from weights that differ by 1 part in 10^6. It shows how
far a difference of that size alone moves a run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from end_to_end.benchmarks.common import positive
from tests.support.command import ROOT

from trainer.config.load import load
from trainer.config.schema import Config
from trainer.program import step as step_lib

SLICES = 3
QUICKSTART = str(ROOT / "configs" / "quickstart.yml")
MODEL = (
  "base_emb_dim=96 base_num_decoder_layers=2 base_num_query_heads=3 base_num_kv_heads=1 head_dim=32 base_mlp_dim=256 "
  "vocab_size=1024 max_target_length=64 per_device_batch_size=4 attention=dot_product num_slices=3 devices_per_slice=1"
)
BFLOAT16 = "grad_reduce_dtype=bfloat16"
RATES = {"adamw": 0.002, "muon": 0.005}
MARKS = (0.1, 0.25, 0.5, 0.75, 1.0)  # shares of the steps at which the curve is printed
EVALUATION_BATCHES = 64
PERTURBATION = 1e-6  # relative, of the initial weights of the perturbed runs
TRAINED_STEPS = 100  # before the error of a gradient is measured a second time


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--seeds", type=positive, default=4)
  parser.add_argument("--optimizer", choices=RATES, default="adamw")
  parser.add_argument("--steps", type=positive, default=1000)
  parser.add_argument("--gradients-only", action="store_true", help="leave out the second table")
  args = parser.parse_args()
  if args.seeds < 2:
    parser.error("--seeds must be at least 2: the standard deviation over seeds is the noise")
  os.environ["JAX_PLATFORMS"] = "cpu"
  keys = f"{MODEL} opt_type={args.optimizer} learning_rate={RATES[args.optimizer]} steps={args.steps}"
  print_gradient_errors(keys)
  if not args.gradients_only:
    print_losses(keys, args.steps, args.seeds)


def _config(keys: str) -> Config:
  return load([QUICKSTART, *keys.split()], check_paths=False)


@functools.cache
def _devices() -> list[Any]:
  """Returns the simulated slices, each with one device."""
  from trainer import cluster

  machine = cluster.start(_config(MODEL).cluster)
  return [list(devices) for devices in machine.view(machine.slices).devices]


def print_losses(keys: str, steps: int, seeds: int) -> None:
  """Trains every variant with every seed and prints losses, differences and standard deviations in nats per token."""
  float32, bfloat16 = Trial(keys, _devices()), Trial(f"{keys} {BFLOAT16}", _devices())
  variants = {"float32": (float32, 0.0), "bfloat16": (bfloat16, 0.0), "float32, perturbed": (float32, PERTURBATION)}
  marks = [max(1, round(share * steps)) for share in MARKS]
  window = max(1, steps // 20)
  curves: dict[str, list[np.ndarray]] = {name: [] for name in variants}
  for seed in range(seeds):
    for name, (trial, perturbation) in variants.items():
      started = time.monotonic()
      losses, held_out = trial.run(steps, seed, perturbation)
      curve = np.array([np.mean(losses[max(0, mark - window) : mark]) for mark in marks] + [held_out])
      curves[name].append(curve)
      print(f"  seed {seed}, {name}: {_cells(curve)}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
  print(f"\n| mean loss of {window} steps up to step | {' | '.join(map(str, marks))} | held-out |")
  print("|---" * (len(marks) + 2) + "|")
  base = np.stack(curves.pop("float32"))
  _row("float32: mean over seeds", base.mean(0))
  _row("float32: standard deviation over seeds", base.std(0, ddof=1))
  for name, values in curves.items():
    difference = np.stack(values) - base
    _row(f"{name} minus float32: mean over seeds", difference.mean(0), "+.4f")
    _row(f"{name} minus float32: standard deviation over seeds", difference.std(0, ddof=1))


def _row(name: str, values: np.ndarray, form: str = ".4f") -> None:
  print(f"| {name} | {_cells(values, form)} |", flush=True)


def _cells(values: np.ndarray, form: str = ".4f") -> str:
  return " | ".join(format(value, form) for value in values)


class Trial:
  """The compiled program of one variant, which trains from any seed."""

  def __init__(self, keys: str, slices: Sequence[Sequence[Any]]) -> None:
    from trainer.program import program

    self._keys = keys
    self.config = _config(keys)
    self.program = program.build(self.config, slices, len(slices))
    self.train_step = self.program.compile()

  def feed(self, seed: int, split: str = "train") -> Callable[[int], Any]:
    """Returns a function from the number of completed steps to the next batch, in the order of `seed`."""
    from input_pipeline.loader import make_loader
    from trainer.program import program

    data = _config(f"{self._keys} data_shuffle_seed={seed}").data
    vocab, rows = self.config.model.vocab_size, self.program.batch.tokens.shape[1]
    loader = make_loader(data, vocab_size=vocab, global_batch_size=rows, split=split)
    return program.Feed(loader, self.program)

  def run(self, steps: int, seed: int, perturbation: float) -> tuple[list[float], float]:
    """Returns (loss of each step, held-out loss of the final weights)."""
    import jax

    state, feed = self.program.init(jax.random.key(seed)), self.feed(seed)
    if perturbation:
      noise = np.random.default_rng(seed)
      change = lambda w: jax.device_put(w * np.float32(1 + perturbation * noise.standard_normal(w.shape)), w.sharding)
      state = dataclasses.replace(state, params=jax.tree.map(change, state.params))
    losses = []
    for index in range(steps):
      state, metrics = self.train_step(state, feed(index))
      losses.append(step_lib.metric_values(metrics)["loss"])
    held_out = self.feed(seed, "eval")
    with jax.set_mesh(self.program.mesh):
      sums = [self.program.evaluate(state.params, held_out(index)) for index in range(EVALUATION_BATCHES)]
    total, weight = (sum(float(value) for value in values) for values in zip(*sums, strict=True))
    return losses, total / weight


def print_gradient_errors(keys: str) -> None:
  """Prints the relative error of the summed gradient, of a fresh model and after TRAINED_STEPS steps."""
  import jax

  slices = _devices()
  trial = Trial(keys, slices)
  configs = {"float32": trial.config, "bfloat16": _config(f"{keys} {BFLOAT16}")}
  feed = trial.feed(0)
  state = trial.program.init(jax.random.key(0))
  print("| relative error of the summed gradient | all weights | worst array |\n|---|---|---|", flush=True)
  for step in (0, TRAINED_STEPS):
    while int(state.step) < step:
      state, _ = trial.train_step(state, feed(int(state.step)))
    batch = feed(step)
    parts = slice_gradients(trial.config, slices, state.params, batch)
    exact = _sum(parts, np.add)
    sums = {f"{name} on the wire": summed_gradient(config, slices, state, batch) for name, config in configs.items()}
    sums["bfloat16, and every addition rounded to bfloat16"] = _sum(parts, _add_in_bfloat16)
    sums["float64, of the next batch"] = _sum(
      slice_gradients(trial.config, slices, state.params, feed(step + 1)), np.add
    )
    for name, gradient in sums.items():
      worst = max(_error([g], [e]) for g, e in zip(gradient, exact, strict=True))
      print(f"| step {step}, {name} | {_error(gradient, exact):.2g} | {worst:.2g} |", flush=True)


def summed_gradient(config: Config, slices: Sequence[Any], state: Any, batch: Any) -> list[np.ndarray]:
  """Returns the mean gradient that the optimizer of the training step receives, as float64."""
  import jax
  import jax.numpy as jnp
  import optax

  from trainer.program import program, step
  from trainer.program.state import TrainState

  prog = program.build(config, slices, len(slices))
  # An optimizer whose state is the last gradient, and that changes no weight.
  zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
  recorder = optax.GradientTransformation(zeros, lambda grads, _, params: (zeros(params), grads))
  settings = config.optimizer.model_copy(update={"gradient_clipping_threshold": 0.0})
  train_step = step.build_train_step(prog.model, settings, recorder, lambda count: jnp.zeros(()), prog.mesh)
  with jax.set_mesh(prog.mesh):
    fresh = TrainState(state.step, state.params, recorder.init(state.params), state.skipped)
    after, _ = jax.jit(train_step)(fresh, batch)
  return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(after.opt_state)]


def slice_gradients(config: Config, slices: Sequence[Any], params: Any, batch: Any) -> list[list[np.ndarray]]:
  """Returns the share of every slice in the mean gradient, computed on one device, one slice at a time."""
  import jax

  from trainer.program import program, step

  prog = program.build(config, slices[:1], 1)
  place = lambda tree: jax.device_put(jax.tree.map(np.asarray, tree), prog.mesh.devices.flat[0])
  own = place(params)
  found, weight = [], 0.0
  with jax.set_mesh(prog.mesh):
    gradient = jax.jit(lambda params, rows: step.loss_and_grads(prog.model, config.optimizer, params, rows))
    for part in range(SLICES):
      sums = gradient(own, place(_rows_of_slice(batch, part)))
      found.append([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(sums.grads)])
      weight += float(sums.weight)
  return [[leaf / weight for leaf in part] for part in found]


def _rows_of_slice(batch: Any, index: int) -> Any:
  return type(batch)(*(np.split(np.asarray(array), SLICES, axis=1)[index] for array in batch))


def _sum(parts: Sequence[Sequence[np.ndarray]], add: Any) -> list[np.ndarray]:
  total = list(parts[0])
  for part in parts[1:]:
    total = [add(a, b) for a, b in zip(total, part, strict=True)]
  return total


def _add_in_bfloat16(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  import ml_dtypes

  short = ml_dtypes.bfloat16
  return (a.astype(short) + b.astype(short)).astype(np.float64)


def _error(gradient: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
  """Returns the norm of the difference, relative to the norm of `exact`."""
  norm = lambda arrays: sum(float(np.sum(array**2)) for array in arrays) ** 0.5
  return norm([g - e for g, e in zip(gradient, exact, strict=True)]) / norm(exact)


if __name__ == "__main__":
  main()
