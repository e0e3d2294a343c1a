"""The memory of this machine and of its devices, and the check that the training state fits it."""

from __future__ import annotations

import math
import os
import pathlib
import re
from typing import Any

import jax

from stepcost import chips, gpus
from trainer.config.errors import ConfigError, counted

# Files with the memory limit of a container, for cgroup v2 and v1.
CONTAINER_LIMITS = (
  pathlib.Path("/sys/fs/cgroup/memory.max"),
  pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
MEMINFO = pathlib.Path("/proc/meminfo")  # Linux only


def of_host() -> int:
  """Returns the bytes that this process may use: the memory of the machine, or the limit of the container."""
  found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
  for path in CONTAINER_LIMITS:
    try:
      text = path.read_text().strip()
    except OSError:
      continue
    if text.isdigit():  # "max" means no limit
      found.append(int(text))
  return min(found)


def of_device(device: jax.Device, cluster_kind: str) -> int | None:
  """Returns the bytes that arrays can have on an accelerator; None if they are not known."""
  if cluster_kind == "pathways":  # a proxy device reports no statistics
    chip = chips.find(device.device_kind)
    return None if chip is None else chip.hbm_bytes
  try:
    return (device.memory_stats() or {}).get("bytes_limit")
  except jax.errors.JaxRuntimeError:  # a described GPU, which is not here
    chip = chips.find(device.device_kind)
    return None if chip is None else int(chip.hbm_bytes * gpus.share_of_jax())


def require_fit(state: Any, parameters: int, cluster_kind: str) -> None:
  """Raises ConfigError if the parameters and the optimizer state alone are larger than the memory that holds them.

  Without this check, the run would fail much later, while it makes its first arrays. A state that fits may still leave
  too little memory for gradients and activations.

  Args:
    state: abstract, with shardings over all slices.
    parameters: their number, for the message.
    cluster_kind: the key `cluster` of the run.
  """
  leaves = jax.tree.leaves(state)
  each = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
  devices = list(leaves[0].sharding.addressable_devices)
  needs = f"A model of {parameters:,} parameters: parameters and optimizer state need {_gib(each)} on each device"
  smaller = "Choose a smaller model (base_emb_dim, base_mlp_dim, base_num_decoder_layers, vocab_size)"
  if devices[0].platform == "cpu":
    available = of_host() + _swap()
    if each * len(devices) > available:
      raise ConfigError(
        f"{needs}, so {_gib(each * len(devices))} for {counted(len(devices), 'CPU device')}, and this machine has "
        f"{_gib(available)} of memory and swap.\n{smaller}, or fewer devices (num_slices, devices_per_slice)."
      )
    return
  limit = of_device(devices[0], cluster_kind)
  if limit is not None and each > limit:
    raise ConfigError(
      f"{needs}, and a {devices[0].device_kind} has {_gib(limit)}.\n{smaller}, or spread the state over more "
      "devices of a slice (ici_fsdp_parallelism=-1)."
    )


def _swap() -> int:
  """Returns the bytes of swap space; 0 where /proc/meminfo does not exist."""
  try:
    found = re.search(r"^SwapTotal:\s+(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
  except OSError:
    return 0
  return int(found.group(1)) * 1024 if found else 0


def _gib(count: int) -> str:
  return f"{count / 2**30:,.1f} GiB"
