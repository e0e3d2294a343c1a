"""Trains small models from several initialisations and prints which one learns fastest.

    python -m end_to_end.benchmarks.initialisation [--widths 192 512 1024] [--optimizers adamw] [--heads tied untied]
      [--rates 0.001 0.002] [--initialisations trainer transformers] [--steps 100]

All runs of a width train on the same batches of the quickstart's text. No token is used twice, so the training loss
is a held-out loss. Printed for each run: the first loss (ln V is 6.93), the mean loss of the last 40 steps, the largest
gradient norm after the first tenth of the steps, before clipping, and the seconds with compilation.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from end_to_end.benchmarks.common import positive

from input_pipeline.loader import make_loader
from trainer.config.load import load
from trainer.config.schema import Config
from trainer.models.decoder import Params
from trainer.program import optimizers, program, state, step

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yml")
VOCABULARY, LENGTH, ROWS = 1024, 64, 4
TAIL = 40  # steps whose losses are averaged


@dataclass(frozen=True)
class Width:
  """The model, steps and learning rate of a width, chosen so that a run takes about 30 CPU seconds."""

  keys: str
  steps: int
  rate: float


WIDTHS = {
  192: Width(
    "base_num_decoder_layers=2 base_num_query_heads=3 base_num_kv_heads=1 base_mlp_dim=256", steps=200, rate=0.002
  ),
  512: Width(
    "base_num_decoder_layers=1 base_num_query_heads=8 base_num_kv_heads=4 base_mlp_dim=512", steps=150, rate=0.002
  ),
  1024: Width(
    "base_num_decoder_layers=1 base_num_query_heads=16 base_num_kv_heads=4 base_mlp_dim=1024", steps=80, rate=0.001
  ),
}


@dataclass(frozen=True)
class Initialisation:
  """Standard deviations of a fresh model of width D. All norms start at 1, except the final norm of a tied model."""

  table: Callable[[int], float] = lambda D: 0.02
  tied_norm: Callable[[int], float] = lambda D: 1.0
  head: Callable[[int], float] = lambda D: min(0.02, 0.28 / D**0.5)  # of an untied model
  out: float | None = None  # matrices that write to the residual stream; None: 0.02 / sqrt(2 L)


# "trainer" is the initialisation of trainer.models. The others are set on top of it.
INITIALISATIONS = {
  "transformers": Initialisation(head=lambda D: 0.02, out=0.02),
  "capped_table": Initialisation(table=lambda D: min(0.02, 2 / D)),
  "small_norm": Initialisation(tied_norm=lambda D: min(1.0, 4 / (0.02 * D))),
  "wide_table": Initialisation(table=lambda D: 0.1, tied_norm=lambda D: min(1.0, 4 / (0.1 * D))),
  "zero_out": Initialisation(out=0.0),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--widths", type=int, nargs="+", choices=WIDTHS, default=list(WIDTHS))
  parser.add_argument("--optimizers", nargs="+", choices=["adamw", "muon"], default=["adamw"])
  parser.add_argument("--heads", nargs="+", choices=["tied", "untied"], default=["tied", "untied"])
  parser.add_argument("--rates", type=float, nargs="+", help="default: of the width")
  names = ["trainer", *INITIALISATIONS]
  parser.add_argument("--initialisations", nargs="+", choices=names, default=names)
  parser.add_argument("--steps", type=positive, help="default: of the width")
  args = parser.parse_args()
  print("width  optimizer  head    initialisation  rate    first   last    norm  seconds", flush=True)
  for width in args.widths:
    for optimizer in args.optimizers:
      for head in args.heads:
        trial = Trial(_config(width, optimizer, head == "tied", args.steps or WIDTHS[width].steps))
        for name, rate in itertools.product(args.initialisations, args.rates or [WIDTHS[width].rate]):
          started = time.monotonic()
          first, last, norm = trial.run(name, rate)
          print(
            f"{width:5}  {optimizer:9}  {head:6}  {name:14}  {rate:<6g}  {first:5.2f}  {last:6.3f}  {norm:5.2f}"
            f"  {time.monotonic() - started:7.0f}",
            flush=True,
          )


def _config(width: int, optimizer: str, tied: bool, steps: int) -> Config:
  sizes = f"base_emb_dim={width} {WIDTHS[width].keys} vocab_size={VOCABULARY} logits_via_embedding={str(tied).lower()}"
  data = f"max_target_length={LENGTH} per_device_batch_size={ROWS} attention=dot_product"
  # The rate is a factor of the schedule, see Trial: one program serves all rates.
  run = f"opt_type={optimizer} steps={steps} learning_rate=1"
  return load([QUICKSTART, *f"{sizes} {data} {run}".split()], check_paths=False)


class Trial:
  """Runs of one model and optimizer that differ in initialisation and learning rate only."""

  def __init__(self, config: Config) -> None:
    self._config = config
    self._program = program.build(config, [jax.devices()[:1]], 1)
    self._schedule = optimizers.schedule(config.optimizer, config.run.steps)
    vocab = config.model.vocab_size
    self._loader = make_loader(config.data, vocab_size=vocab, global_batch_size=ROWS, split="train")
    self._feed = program.Feed(self._loader, self._program)
    self._train = jax.jit(self._step, donate_argnums=0)

  def _step(self, current: state.TrainState, batch: Any, rate: jax.Array) -> Any:
    prog, cfg = self._program, self._config.optimizer
    sums = step.loss_and_grads(prog.model, cfg, current.params, batch)
    return step.apply_gradients(cfg, prog.optimizer, lambda n: rate * self._schedule(n), current, sums)

  def run(self, name: str, rate: float) -> tuple[float, float, float]:
    """(first loss, mean loss of the last TAIL steps, largest gradient norm after the warm-up)."""
    with jax.set_mesh(self._program.mesh):
      current = self._program.init(jax.random.key(0))
      if name != "trainer":
        params = _rescale(INITIALISATIONS[name], self._config, current.params)
        current = state.TrainState(current.step, params, self._program.optimizer.init(params), current.skipped)
      losses, norms = [], []
      for index in range(self._config.run.steps):
        current, metrics = self._train(current, self._feed(index), jnp.float32(rate))
        values = step.metric_values(metrics)
        losses.append(values["loss"])
        norms.append(values["grad_norm"])
    warm = len(losses) // 10
    return losses[0], float(np.mean(losses[-TAIL:])), max(norms[warm:])


def _rescale(init: Initialisation, config: Config, params: Params) -> Params:
  """The fresh weights `params` with the standard deviations of `init`."""
  cfg = config.model
  out = init.out if init.out is not None else 0.02 / (2 * cfg.num_decoder_layers) ** 0.5
  std = {"embedding": init.table(cfg.emb_dim), "lm_head": init.head(cfg.emb_dim), "out": out, "down": out}

  def rescale(path: Any, leaf: jax.Array) -> jax.Array:
    names = [entry.key for entry in path]
    if names[-1] == "scale":
      scale = init.tied_norm(cfg.emb_dim) if names[0] == "final_norm" and cfg.logits_via_embedding else 1.0
      return jnp.full(leaf.shape, scale, leaf.dtype)
    return leaf * (std.get(names[-1], 0.02) / jnp.std(leaf))

  return jax.tree_util.tree_map_with_path(rescale, params)


if __name__ == "__main__":
  main()
