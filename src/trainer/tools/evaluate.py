"""`python -m trainer.tools.evaluate RUN_DIR[@STEP] [key=value ...]`: the loss of a checkpoint on its evaluation sets.

Each set is evaluated as in training: the same batches, and the mean loss in nats per token. The configuration is the
run's own. Keys replace its values, for example eval_sets, or num_slices and devices_per_slice on another machine.
--tasks scores tasks of lm-evaluation-harness on one device instead.
"""

from __future__ import annotations

import argparse
import math
import sys

import trainer


def main(argv: list[str] | None = None) -> int:
  """Returns the exit code: 0, or 2 with a message on stderr if the run or the data cannot be used."""
  parser = argparse.ArgumentParser(prog="python -m trainer.tools.evaluate", description=__doc__.split("\n\n")[0])
  parser.add_argument("run_directory", metavar="RUN_DIR[@STEP]")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="as for python -m trainer")
  parser.add_argument("--tasks", metavar="NAME,...", help="score these tasks of lm-evaluation-harness instead")
  parser.add_argument("--include_path", metavar="DIR", default="", help="with --tasks: a folder with YAMLs of tasks")
  arguments = parser.parse_intermixed_args(argv)
  if arguments.tasks:
    if arguments.keys:
      parser.error(f"{arguments.keys[0]}: keys belong to evaluation sets. --tasks takes none.")
    return _score(arguments.run_directory, arguments.tasks, arguments.include_path)
  from trainer.checkpoint.errors import ConfigMismatch
  from trainer.weights import sources

  try:
    directory, _ = sources.split(arguments.run_directory)
    config = trainer.load(f"{directory}/config.yml", "cluster=simulated", *arguments.keys)
    losses = trainer.Run(config).evaluate(arguments.run_directory)
  except (trainer.ConfigError, ConfigMismatch) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for name, (loss, tokens) in losses.items():
    print(f"{name}: loss {loss:.6f} nats per token, perplexity {math.exp(loss):.4f}, over {tokens:.0f} tokens")
  return 0


def _score(place: str, tasks: str, include_path: str) -> int:
  """Prints the scores of tasks of lm-evaluation-harness; returns the exit code."""
  from trainer.weights.tasks import Tasks

  try:
    found = Tasks.find(tasks, include_path)
    scores = found.score(trainer.Model.from_run(place))
  except trainer.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  for name, values in scores.items():
    print(f"{name}: {', '.join(f'{metric} {value:.6f}' for metric, value in values.items())}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
