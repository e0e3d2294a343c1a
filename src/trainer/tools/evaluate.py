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
  parser.add_argument("--include_path", metavar="DIR", help="with --tasks: a folder with YAMLs of tasks")
  arguments = parser.parse_intermixed_args(argv)
  if arguments.tasks:
    if arguments.keys:
      parser.error(f"{arguments.keys[0]}: keys belong to evaluation sets. --tasks takes none.")
    return _score(arguments.run_directory, arguments.tasks.split(","), arguments.include_path)
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


def _score(place: str, tasks: list[str], include_path: str | None) -> int:
  """Prints the scores of tasks of lm-evaluation-harness; returns the exit code."""
  try:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from trainer.tools.harness import Harness
  except ImportError as error:
    print(f"error: --tasks needs lm-evaluation-harness ({error}). Run pip install 'lm_eval>=0.4.13'.", file=sys.stderr)
    return 2
  manager = TaskManager(include_path=include_path)
  if unknown := [name for name in tasks if name not in manager.all_tasks]:
    names = ", ".join(unknown)
    print(f"error: --tasks: there is no {names}. Give the folder of its YAML as --include_path.", file=sys.stderr)
    return 2
  try:
    model = trainer.Model.from_run(place)
  except trainer.ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  scores = simple_evaluate(Harness(model), tasks=tasks, task_manager=manager, log_samples=False)["results"]
  for name, values in scores.items():
    numbers = [f"{metric.removesuffix(',none')} {x:.6f}" for metric, x in values.items() if isinstance(x, float)]
    print(f"{name}: {', '.join(numbers)}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
