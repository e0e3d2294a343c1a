"""Runs slices as workers of Ray Train, on a Ray cluster that is already there.

  python -m trainer.launch.ray --min-slices 1 --max-slices 3 --topology 2x4 --accelerator-type TPU-V6E \
    CONFIG.yml key=value ...

Each slice has its own JAX world. Slices of TPUs are started as a whole; without --topology a slice is one worker with
--gpus-per-slice GPUs, or one CPU. All other arguments and the exit codes are as for `python -m trainer`.
"""

from __future__ import annotations

import argparse
import sys

from trainer import commands
from trainer.config import Config, ConfigError, faults, load
from trainer.config.option_types import whole
from trainer.launch.launcher_keys import ray_keys, refuse_other
from trainer.observe import screen


def main(argv: list[str] | None = None) -> int:
  return commands.main(parser(), _run, argv, rest="arguments")


def parser() -> argparse.ArgumentParser:
  parser = commands.parser(__doc__)
  parser.add_argument("--min-slices", type=whole(1), required=True, help="slices that training needs")
  parser.add_argument("--max-slices", type=whole(1), required=True, help="slices of the full run")
  parser.add_argument("--topology", help="of a TPU slice, such as 2x4")
  parser.add_argument("--accelerator-type", help="of a TPU slice, by Ray's name, such as TPU-V6E")
  parser.add_argument("--gpus-per-slice", type=whole(0), default=0, help="GPUs of a slice, which is one worker")
  parser.add_argument(
    "--replace-lost",
    action="store_true",
    help="Ray replaces only lost workers, and the other slices train on; otherwise it restarts all workers. A slice "
    "must be one worker, and the run starts when --max-slices slices are there",
  )
  return parser


def _run(options: argparse.Namespace) -> int:
  arguments = trainer_arguments(options, options.arguments)
  config = load(arguments, repeats=False)
  _check_config(config, options)
  from trainer.launch.ray import job

  return job.run(config, arguments, options)


def trainer_arguments(options: argparse.Namespace, others: list[str]) -> list[str]:
  """The arguments of `python -m trainer`: the others of this command, and the keys that it sets. Raises ConfigError for
  wrong options."""
  _check(options)
  ours = ray_keys(options.min_slices, options.max_slices)
  return [*others, *refuse_other(others, "trainer.launch.ray", ours)]


def _check(options: argparse.Namespace) -> None:
  if options.max_slices < options.min_slices:
    raise ConfigError(f"--max-slices {options.max_slices}: it must be at least --min-slices {options.min_slices}.")
  if (options.topology is None) != (options.accelerator_type is None):
    raise ConfigError(
      f"--topology {options.topology}, --accelerator-type {options.accelerator_type}: a TPU slice needs both.\n"
      "Give both, for example --topology 2x4 --accelerator-type TPU-V6E, or neither."
    )
  if options.topology is not None and options.gpus_per_slice:
    raise ConfigError(
      f"--topology {options.topology}, --gpus-per-slice {options.gpus_per_slice}: a slice has TPUs or GPUs.\n"
      "Remove one of them."
    )


def _check_config(config: Config, options: argparse.Namespace) -> None:
  """Raises ConfigError for keys that do not fit Ray."""
  if not config.checkpoint.enable_checkpointing and not options.replace_lost:
    raise ConfigError(
      "enable_checkpointing=false: after a loss Ray restarts all workers, and the run would begin at step 0.\n"
      "Set enable_checkpointing=true, or give --replace-lost."
    )
  for fault in faults.parse(config.elastic.fault_injection):
    if isinstance(fault, faults.RandomFaults) or fault.kind in ("slice_up", "hang") or fault.seconds is not None:
      raise ConfigError(
        f"fault_injection={config.elastic.fault_injection}: Ray decides when a lost slice returns, and cannot stop its "
        "processes.\nUse only slice_down@STEP:SLICE and ckpt_kill@STEP."
      )


if __name__ == "__main__":
  screen.protect()
  sys.exit(main())
