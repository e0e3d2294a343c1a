"""Measures the peak rates of this machine's CPU. No table lists them, and simulated slices share them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Device

from stepcost.chips import Chip
from trainer.parallel import memory

MATMUL = 2048  # rows and columns; larger matmuls are not faster on a CPU
COPIED = 1 << 28  # bytes; more than any cache holds
REPEATS = 5


def measure(devices: Sequence[Device], dtype: str) -> Chip:
  """Returns the peak rates of one of the CPU `devices`. Each device gets an equal share of the whole machine.

  Takes one or two seconds. peak_flops is measured with matmuls of `dtype`. Bandwidths count bytes read plus bytes
  written. The "links" between CPU devices are copies in memory.
  """
  with jax.default_device(devices[0]):
    matmul = _seconds(jax.jit(lambda a: a @ a), jnp.zeros((MATMUL, MATMUL), dtype))
    # In place (donated), so that the time does not include the allocation of new pages.
    copy = _seconds(jax.jit(lambda a: a + 1, donate_argnums=0), jnp.zeros(COPIED // 4, jnp.float32))
  share = 1 / len(devices)
  bandwidth = 2 * COPIED / copy * share
  return Chip("this CPU", (), 2 * MATMUL**3 / matmul * share, int(memory.of_host() * share), bandwidth, bandwidth)


def _seconds(function: Callable[[jax.Array], jax.Array], array: jax.Array) -> float:
  """Returns the least seconds of a call. Each call receives the result of the call before."""
  times = []
  for _ in range(1 + REPEATS):  # the first call compiles
    start = time.perf_counter()
    array = function(array).block_until_ready()
    times.append(time.perf_counter() - start)
  return min(times[1:])
