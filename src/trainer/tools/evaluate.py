"""`python -m trainer.tools.evaluate RUN_DIR[@STEP] [key=value ...]`: the loss of a checkpoint on its evaluation sets.

Each set is evaluated as in training: the same batches, and the mean loss in nats per token. The configuration is the
run's own. Keys replace its values, for example eval_sets, or num_slices and devices_per_slice on another machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import trainer
from trainer import cluster, commands
from trainer.config.config_files import CONFIG_FILE
from trainer.observe import screen

_LARGEST_EXPONENT = 709.0  # of a float: e to a larger one is infinite


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("run_directory", metavar="RUN_DIR[@STEP]")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="as for python -m trainer")
  return commands.main(parser, lambda options: _evaluate(options.run_directory, options.keys), argv)


def _evaluate(place: str, keys: Sequence[str]) -> None:
  cluster.check_environment()
  from trainer.checkpoint import run_folder
  from trainer.checkpoint.checkpoint_errors import ConfigMismatch

  directory, _ = run_folder.split(place)
  config = trainer.load(f"{directory}/{CONFIG_FILE}", "cluster=simulated", *keys)
  if config.observe.eval_steps == 0:
    raise trainer.ConfigError("eval_steps=0: nothing would be evaluated. Give eval_steps=N, the batches of each set.")
  try:
    losses = trainer.Run(config).evaluate(place)
  except ConfigMismatch as error:
    raise trainer.ConfigError(str(error)) from error
  for name, (loss, tokens) in losses.items():
    perplexity = math.exp(loss) if loss < _LARGEST_EXPONENT else math.inf
    print(f"{name}: loss {loss:.6f} nats per token, perplexity {perplexity:.4f}, over {tokens:.0f} tokens")


if __name__ == "__main__":
  screen.command(main)
