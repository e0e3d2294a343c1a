"""Trains a dense model and mixtures of experts of equal active size, step by step on the same batches.

    JAX_PLATFORMS=cpu python -m end_to_end.benchmarks.experts [--steps 400] [--seeds 5] [--trial "key=value ..."] ...

Prints a row for each model and every quarter of the steps: the held-out loss in nats per token, the load of the most
and the least used expert and the entropy of the loads (means over the quarter), the median tokens/s, and the share of
the dense model's FLOP/s. The models take turns after every step, so that other jobs on the machine slow down all.
At the end, a row for each model: means over the seeds, and the difference of its loss to the dense model's of the same
seed, with the standard error. A seed is one of the weights and of the order of the text.
--trial replaces the default mixtures and can be repeated: keys of one model. Other keys are for all models. `exact`
among the keys of a trial: the balance loss uses the load of the same micro-batch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from end_to_end.benchmarks.common import positive
from tests.support.command import ROOT

from input_pipeline.loader import make_loader
from trainer.config import counts
from trainer.config.load import load
from trainer.models import experts
from trainer.program import program, step

MODEL = (
  "base_emb_dim=128 base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=1 base_mlp_dim=256 "
  "base_moe_mlp_dim=128 vocab_size=1024 max_target_length=128 "
  "opt_type=adamw learning_rate=0.002"  # Muon takes most of a step of so small a model
)
EXACT = "exact"
LOSSES = [f"load_balance_loss_weight={weight} routed_bias_update_rate=0" for weight in (0.001, 0.005, 0.02)]
TRIALS = ["", *(form + loss for loss in LOSSES for form in ("", f"{EXACT} "))]
EVALUATIONS = 8  # batches
FIELDS = ("router_load_max", "router_load_min", "router_entropy")
_HEADER = "| held-out loss | busiest | least used | entropy | tokens/s | share of FLOP/s |\n" + "|---" * 8 + "|"
_FORMS = (".3f", ".2f", ".2f", ".2f", ".0f", ".2f")  # of the columns of numbers


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=positive, default=400)
  parser.add_argument("--seeds", type=positive, default=5)
  parser.add_argument("--trial", action="append")
  parser.add_argument("keys", nargs="*")
  args = parser.parse_args()
  results = []
  for seed in range(args.seeds):
    seeds = [f"data_shuffle_seed={seed}", f"init_weights_seed={seed}"]
    keys = [*MODEL.split(), *args.keys, f"steps={args.steps}", *seeds]
    models = [Model("dense", "quickstart", keys)]
    models += [Model(trial, "quickstart_experts", [*keys, *trial.split()]) for trial in args.trial or TRIALS]
    print(f"\nseed {seed}\n| model | step {_HEADER}", flush=True)
    results.append(_train(models, args.steps))
  print(f"\n{args.seeds} seeds, means\n| model | loss less dense {_HEADER}")
  for i, model in enumerate(models):
    values = np.array([rows[i] for rows in results])
    differences = values[:, 0] - [rows[0][0] for rows in results]
    error = np.std(differences, ddof=1) / len(results) ** 0.5 if len(results) > 1 else np.nan
    print(f"| {model.name} | {np.mean(differences):+.3f} +- {error:.3f} {_cells(np.mean(values, axis=0))}")


def _train(models: list[Model], steps: int) -> list[list[float]]:
  """Trains them in turns, prints their rows, and returns the last row of each."""
  period = max(1, steps // 4)
  rows: list[list[float]] = []
  for done in range(1, steps + 1):
    for model in models:
      model.train()
    if done % period == 0:
      rows = [model.row(period, models[0]) for model in models]
      for model, row in zip(models, rows, strict=True):
        print(f"| {model.name} | {done} {_cells(row)}", flush=True)
  return rows


def _cells(row: Sequence[float]) -> str:
  return "".join(f"| {value:{form}} " for value, form in zip(row, _FORMS, strict=True)) + "|"


class Model:
  """A model in training."""

  def __init__(self, name: str, base: str, keys: list[str]) -> None:
    self.name = name or base
    given = [str(ROOT / "configs" / f"{base}.yml"), *(key for key in keys if key != EXACT)]
    config = load(given, check_paths=False)
    self._flops = counts.flops_per_token(config.model, config.data.max_target_length)
    self._program = program.build(config, [jax.devices()[:1]], 1)
    with mock.patch.object(experts, "_balanced", _exact if EXACT in keys else experts._balanced):
      self._step = self._program.compile()
    vocab, shape = config.model.vocab_size, self._program.batch.tokens.shape
    self._tokens = int(np.prod(shape))
    feed = lambda split: program.Feed(
      make_loader(config.data, vocab_size=vocab, global_batch_size=shape[1], split=split), self._program
    )
    self._train, self._held_out = feed("train"), feed("eval")
    self._state = self._program.init(jax.random.key(config.run.init_weights_seed))
    self._values: list[dict[str, float]] = []
    self._seconds: list[float] = []

  def train(self) -> None:
    batch = self._train(len(self._values))
    started = time.perf_counter()
    self._state, metrics = self._step(self._state, batch)
    self._values.append(step.metric_values(metrics))
    self._seconds.append(time.perf_counter() - started)

  def row(self, period: int, dense: Model) -> list[float]:
    """The columns of numbers, for the last `period` steps."""
    sums = [self._program.evaluate(self._state.params, self._held_out(i)) for i in range(EVALUATIONS)]
    loss, weight = np.sum(jax.device_get(sums), axis=0)
    last = [float(np.mean([values.get(field, np.nan) for values in self._values[-period:]])) for field in FIELDS]
    rates = [each._tokens / np.median(each._seconds[-period:]) for each in (self, dense)]
    return [loss / weight, *last, rates[0], rates[0] * self._flops / (rates[1] * dense._flops)]


def _exact(
  out: jax.Array,
  probs: jax.Array,
  chosen: jax.Array,
  load: jax.Array,
  real: jax.Array,
  strength: float,
  function: Callable[..., jax.Array] = experts._balanced,
) -> jax.Array:
  """`_balanced` with the load of this micro-batch; the gradient of `load` stays a count."""
  tokens: Any = jnp.maximum(jnp.sum(real, dtype=jnp.float32), 1.0)
  now = jnp.sum(jax.nn.one_hot(chosen, len(load)) * real[..., None, None], axis=(0, 1, 2)) / tokens
  return function(out, probs, chosen, load + jax.lax.stop_gradient(now - load), real, strength)


if __name__ == "__main__":
  main()
