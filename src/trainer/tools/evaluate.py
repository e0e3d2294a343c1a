"""`python -m trainer.tools.evaluate RUN_DIR[@STEP] [key=value ...]`: the loss of a checkpoint on its evaluation sets.

Each set is evaluated as in training: the same batches, and the mean loss in nats per token. The configuration is the
run's own. Keys replace its values, for example eval_sets, or num_slices and devices_per_slice on another machine.
--tasks scores tasks of lm-evaluation-harness on one device instead.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import trainer
from trainer import cluster
from trainer.observe import screen
from trainer.tools.ends import exit_code

_LARGEST_EXPONENT = 709.0  # of a float: e to a larger one is infinite


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 with a message on stderr if the run or the data cannot be used."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.evaluate", description=__doc__.split("\n\n")[0])
  parser.add_argument("run_directory", metavar="RUN_DIR[@STEP]")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="as for python -m trainer")
  parser.add_argument("--tasks", metavar="NAME,...", help="score these tasks of lm-evaluation-harness instead")
  parser.add_argument("--include_path", metavar="DIR", default="", help="with --tasks: a folder with YAMLs of tasks")
  arguments = parser.parse_intermixed_args(argv)
  if arguments.tasks is None and arguments.include_path:
    parser.error(f"--include_path {arguments.include_path}: has the YAMLs of tasks. Give --tasks NAME,... too.")
  if arguments.tasks is not None:
    if arguments.keys:
      parser.error(f"{arguments.keys[0]}: keys belong to evaluation sets. --tasks takes none.")
    return exit_code(lambda: _score(arguments.run_directory, arguments.tasks, arguments.include_path))
  return exit_code(lambda: _evaluate(arguments.run_directory, arguments.keys))


def _evaluate(place: str, keys: Sequence[str]) -> None:
  """Prints the losses of the evaluation sets."""
  cluster.check_environment()
  from trainer.checkpoint.errors import ConfigMismatch
  from trainer.weights import sources

  directory, _ = sources.split(place)
  config = trainer.load(f"{directory}/config.yml", "cluster=simulated", *keys)
  if config.observe.eval_steps == 0:
    raise trainer.ConfigError("eval_steps=0: nothing would be evaluated. Give eval_steps=N, the batches of each set.")
  try:
    losses = trainer.Run(config).evaluate(place)
  except ConfigMismatch as error:
    raise trainer.ConfigError(str(error)) from error
  for name, (loss, tokens) in losses.items():
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    print(f"{name}: loss {loss:.6f} nats per token, perplexity {perplexity:.4f}, over {tokens:.0f} tokens")


def _score(place: str, tasks: str, include_path: str) -> None:
  """Prints the scores of tasks of lm-evaluation-harness."""
  cluster.check_environment()
  from trainer.weights.tasks import Tasks

  found = Tasks.find(tasks, include_path)
  for name, values in found.score(trainer.Model.from_run(place)).items():
    print(f"{name}: {', '.join(f'{metric} {value:.6f}' for metric, value in values.items())}")


if __name__ == "__main__":
  screen.command(main)
