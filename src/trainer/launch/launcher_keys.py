"""Checks that the commands of this package share: their options, and the keys that they set."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from trainer.cluster import inherited_environment, run_command
from trainer.config import ConfigError
from trainer.config.keys import all_keys, convert
from worlds.worker_processes import MemberProgram


def program() -> MemberProgram:
  """The program that the processes of a run execute: this one."""
  return MemberProgram((sys.executable, "-m", "trainer"), inherited_environment(), run_command())


def refuse_other(arguments: Sequence[str], command: str, ours: Mapping[str, str]) -> list[str]:
  """`ours` as key=value arguments. Raises ConfigError if an argument gives one of these keys another value."""
  if not arguments:
    raise ConfigError(f"{command}: needs a config file.\nGive CONFIG.yml key=value ..., as for python -m trainer.")
  for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
    name, equals, value = argument.partition("=")
    key, value = name.lstrip("-").replace("-", "_"), value if equals else following
    if key in ours and not _are_equal(key, value, ours[key]):
      raise ConfigError(f"{argument}: {command} sets {key}={ours[key]}.\nRemove {argument}.")
  return [f"{key}={value}" for key, value in ours.items()]


def _are_equal(key: str, one: str, other: str) -> bool:
  """Whether both texts are the same value of the key, as true and True are."""
  try:
    return convert(all_keys()[key], one, "").value == convert(all_keys()[key], other, "").value
  except ConfigError:
    return False


def ray_keys(least: int, most: int) -> dict[str, str]:
  """The keys that trainer.launch.ray sets for a run of at least `least` and at most `most` slices."""
  return {
    "cluster": "multiprocess",
    "num_slices": str(most),
    "elastic_enabled": "true",
    "elastic_min_slice_count": str(least),
  }
