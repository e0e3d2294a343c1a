"""Rules that the configuration is checked against, and a component again with its real sizes.

Each function yields one message per broken rule: value, rule, remedy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from input_pipeline.storage import is_address
from trainer.config.errors import counted
from trainer.config.schema import CheckpointSection, ElasticSection, OptimizerSection, ParallelismSection

AXES = ("data", "fsdp", "tensor", "context")


def group_sizes(parallelism: ParallelismSection, group: str) -> dict[str, int]:
  """The sizes of a group ("dcn": across slices, "ici": inside one) by key; -1 means "fill".

  "ici" has ici_expert_parallelism besides AXES: the devices that share experts belong to the axis fsdp. "dcn" has only
  data and fsdp.
  """
  axes = {"dcn": AXES[:2], "ici": (*AXES, "expert")}[group]
  data, *others = (f"{group}_{axis}_parallelism" for axis in axes)
  sizes = {key: getattr(parallelism, key) for key in others}
  replicas = getattr(parallelism, data)
  return {data: 1 if replicas == -1 in sizes.values() else replicas} | sizes


def axis_sizes(parallelism: ParallelismSection, group: str, total: int) -> dict[str, int]:
  """{axis of AXES: its size in a group} of sizes that fit, with -1 filled in; with 1 if `total` is 0, not known yet."""
  sizes = group_sizes(parallelism, group)
  fill = max(1, total // math.prod(size for size in sizes.values() if size > 0))
  filled = {key: fill if size == -1 else size for key, size in sizes.items()}
  by_axis = {axis: filled.get(f"{group}_{axis}_parallelism", 1) for axis in AXES}
  return by_axis | {"fsdp": by_axis["fsdp"] * filled.get(f"{group}_expert_parallelism", 1)}


def multiprocess_conflicts(elastic: ElasticSection) -> Iterator[str]:
  """Refuses keys of runs that recover inside one process: here each slice is a process."""
  for name, value, default in _given(elastic, "snapshot_period"):
    yield (
      f"{name}={value}: has no effect where each slice is a process: a slice gets the state from another slice, so "
      f"no snapshots are taken.\nRemove it, or give {name}={default}."
    )


def single_controller_conflicts(elastic: ElasticSection, cluster: str) -> Iterator[str]:
  """Refuses keys of slices that are processes: on this kind of cluster, one program sums the slices."""
  names = "shares_per_slice", "exchange_network", "elastic_slow_factor"
  for name, value, default in _given(elastic, *names):
    yield (
      f"{name}={value}: the slices of a {cluster} cluster sum inside one program.\n"
      f"Remove the key ({name}={default}), or start the slices as processes with `python -m trainer.launch.local`."
    )


def needs_processes(optimizer: OptimizerSection) -> Iterator[str]:
  """Refuses local steps where one program drives all slices."""
  if optimizer.has_local_steps:
    yield (
      f"local_steps={optimizer.local_steps}, outer_learning_rate={optimizer.outer_learning_rate:g}, outer_momentum="
      f"{optimizer.outer_momentum:g}: one program drives all slices here, and sums their gradients in each step.\n"
      "Start the slices as processes with `python -m trainer.launch.local`, or remove these keys."
    )


def _given(elastic: ElasticSection, *names: str) -> Iterator[tuple[str, Any, Any]]:
  """(name, value, default) of these keys that do not have their defaults."""
  for name in names:
    value, default = getattr(elastic, name), type(elastic).model_fields[name].default
    if value != default:
      yield name, value, default


def group_fits(sizes: dict[str, int], group: str, total: int) -> Iterator[str]:
  """The sizes of a group multiply to `total` slices or devices per slice; total=0 is not known yet."""
  zeros = [name for name, size in sizes.items() if size == 0]
  filled = [name for name, size in sizes.items() if size == -1]
  for name in zeros:
    yield f"{name}=0: must be a positive size, or -1 to fill.\nUse 1 for an unused axis."
  if len(filled) > 1:
    yield f"{' and '.join(filled)} are -1: only one size of a group can be filled.\nSet the others."
  data = f"{group}_data_parallelism"
  if filled and sizes[data] > 1:
    yield (
      f"{data}={sizes[data]}: {filled[0]}=-1 takes the rest, and leaves no replicas.\n"
      f"Give {filled[0]} a size, and remove {data}, which follows."
    )
  if zeros or len(filled) > 1 or total == 0:
    return
  product = math.prod(size for size in sizes.values() if size > 0)
  if total == product or (filled and total % product == 0):
    return
  written = " x ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, -1))
  there = counted(total, "slice") if group == "dcn" else f"{counted(total, 'device')} per slice"
  yield (
    f"{written or f'every {group}_* size is 1'}: the product {product} must {'divide' if filled else 'equal'} the "
    f"{there}.\nChange the sizes{'' if filled else f', or remove {data}, which follows'}."
  )


def heads_share(num_query_heads: int, num_kv_heads: int) -> Iterator[str]:
  """Every key/value head serves the same number of query heads."""
  if num_query_heads % num_kv_heads:
    yield (
      f"base_num_query_heads={num_query_heads}, base_num_kv_heads={num_kv_heads}: the number of query heads must be a "
      "multiple of the number of key/value heads.\nChange one of them."
    )


def splits(name: str, size: int, axis: str, ways: int, *, scaled: bool = False) -> Iterator[str]:
  """`size`, the value of the key `name`, splits over the `ways` of a mesh axis. scaled: by global_parameter_scale."""
  if size % ways:
    note = " (after global_parameter_scale)" if scaled else ""
    yield (
      f"{name}={size}{note}: does not split over the {ways} ways of the {axis} axis.\n"
      f"Choose ici_{axis}_parallelism so that the axis divides {size}."
    )


def emergency_tier(checkpoint: CheckpointSection) -> Iterator[str]:
  """The emergency tier has a local folder and a period."""
  missing = {
    "local_checkpoint_directory, a ramdisk or local disk": checkpoint.local_checkpoint_directory,
    "local_checkpoint_period above 0, the steps between local saves": checkpoint.local_checkpoint_period,
  }
  for needed, present in missing.items():
    if not present:
      yield f"enable_emergency_checkpoint=true: needs {needed}.\nSet it, or set enable_emergency_checkpoint=false."
  if is_address(checkpoint.local_checkpoint_directory):
    yield (
      f"local_checkpoint_directory={checkpoint.local_checkpoint_directory}: must be a folder of this machine.\n"
      "Give a ramdisk or local disk. For an object store use base_output_directory."
    )
