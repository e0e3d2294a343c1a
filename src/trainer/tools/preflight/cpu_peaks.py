"""The peaks of this machine's CPU, by experiment: no table has them, and simulated slices share them."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Device

from trainer.observe.chips import Chip

MATMUL = 2048  # rows and columns: larger ones are no faster on any CPU
COPIED = 1 << 28  # bytes: more than any cache holds
TURNS = 5
# Where a container reads its limit, under cgroup v2 and v1.
MEMORY_LIMITS = (
  pathlib.Path("/sys/fs/cgroup/memory.max"),
  pathlib.Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def measure(devices: Sequence[Device], dtype: str) -> Chip:
  """One of the CPU `devices`, all of which share this machine: each has its part of what all cores do together.

  Takes a second or two. peak_flops is that of matmuls of `dtype`; bandwidths count what is read and what is written,
  since "links" between CPU devices are copies in memory.
  """
  with jax.default_device(devices[0]):
    matmul = _seconds(jax.jit(lambda a: a @ a), jnp.zeros((MATMUL, MATMUL), dtype))
    # In place: what the system needs for new pages is not the memory's share.
    copy = _seconds(jax.jit(lambda a: a + 1, donate_argnums=0), jnp.zeros(COPIED // 4, jnp.float32))
  share = 1 / len(devices)
  bandwidth = 2 * COPIED / copy * share
  return Chip("this CPU", (), 2 * MATMUL**3 / matmul * share, int(memory() * share), bandwidth, bandwidth)


def memory() -> int:
  """Bytes that this process may use: what the machine has, or less where a container limits it."""
  found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
  for path in MEMORY_LIMITS:
    try:
      text = path.read_text().strip()
    except OSError:
      continue
    if text.isdigit():  # else "max": no limit
      found.append(int(text))
  return min(found)


def _seconds(function: Callable[[jax.Array], jax.Array], array: jax.Array) -> float:
  """The least time of a call; each gets what the one before it made."""
  times = []
  for _ in range(1 + TURNS):  # the first one compiles
    start = time.perf_counter()
    array = function(array).block_until_ready()
    times.append(time.perf_counter() - start)
  return min(times[1:])
