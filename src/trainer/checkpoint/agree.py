"""Small values on which all processes of one JAX world agree. Every process must call, in the same order."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np


def gather(value: Any) -> list[Any]:
  """The JSON value of every process, in process order."""
  if jax.process_count() == 1:
    return [value]
  from jax.experimental import multihost_utils

  data = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = np.asarray(multihost_utils.process_allgather(np.int32(data.size))).reshape(-1)
  padded = np.zeros(int(sizes.max()), np.uint8)
  padded[: data.size] = data
  rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
  return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes)]


def from_primary(value: Any) -> Any:
  """Process 0's JSON value, on every process; what the others pass is ignored."""
  return gather(value if jax.process_index() == 0 else None)[0]


def veto(reason: str) -> str:
  """The first reason against going on that a process has; "" where none has one."""
  return next((told for told in gather(reason) if told), "")
