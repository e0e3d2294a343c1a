"""`python -m trainer.tools.evaluate RUN_DIR[@STEP] [key=value ...]`: the loss of a checkpoint on its evaluation sets.

Each set is evaluated as in training: the same batches, and the mean loss in nats per token. The configuration is the
run's own. Keys replace its values, for example eval_sets, or num_slices and devices_per_slice on another machine.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.config.load import load
from trainer.config.schema import Config

if TYPE_CHECKING:
  from trainer.models.decoder import Params
  from trainer.program import Feed, Program
  from trainer.weights.sources import Source


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 with a message on stderr if the run or the data cannot be used."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.evaluate", description=__doc__.split("\n\n")[0])
  parser.add_argument("run_directory", metavar="RUN_DIR[@STEP]")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="as for python -m trainer")
  arguments = parser.parse_args(argv)
  from trainer.checkpoint.errors import ConfigMismatch
  from trainer.weights import sources

  try:
    directory, _ = sources.split(arguments.run_directory)
    config = load([f"{directory}/config.yml", "cluster=simulated", *arguments.keys])
    losses = evaluate(config, sources.open_source(arguments.run_directory))
  except (ConfigError, ConfigMismatch) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for name, (loss, tokens) in losses.items():
    print(f"{name}: loss {loss:.6f} nats per token, perplexity {math.exp(loss):.4f}, over {tokens:.0f} tokens")
  return 0


def evaluate(config: Config, source: Source) -> Mapping[str, tuple[float, float]]:
  """{set: (mean loss in nats per token, number of tokens)} on the first eval_steps batches of each set.

  Raises ConfigError if the devices, the data or the parameters do not fit `config`, ConfigMismatch if the run has other
  numbers.
  """
  from trainer import cluster as cluster_lib
  from trainer import program
  from trainer.run import run_data

  source.check(config.model)
  cluster = cluster_lib.start(config.cluster)
  try:
    prog = program.of_view(config, cluster.view(cluster.slices))
    batch = program.global_batch_size(config, cluster.num_slices, cluster.devices_per_slice)
    with run_data.open_data(config, batch, print) as data:
      if not data.evaluations:
        raise ConfigError(f"{source.where}: the run has no evaluation data. Set eval_sets or eval_dataset_path.")
      data.use_order(source.meta if source.meta.get("cursor") else None)
      params = source.load(prog.state.params)
      counts = data.eval_batches(config.observe.eval_steps)
      sets = zip(data.evaluations.items(), counts, strict=True)
      return {name: _loss(prog, params, program.Feed(loader, prog), count) for (name, loader), count in sets}
  finally:
    cluster.stop()


def _loss(prog: Program, params: Params, feed: Feed, count: int) -> tuple[float, float]:
  """The mean loss and the number of tokens of `count` batches."""
  import jax

  with jax.set_mesh(prog.mesh):
    parts: Sequence[tuple[jax.Array, jax.Array]] = [prog.evaluate(params, feed(index)) for index in range(count)]
  loss, weight = (sum(float(value) for value in values) for values in zip(*parts))
  return loss / weight if weight else math.nan, weight


if __name__ == "__main__":
  sys.exit(main())
