"""How much memory of a host a run needs for its state, besides the programs."""

from __future__ import annotations


def of_sums(gradient_bytes: float) -> float:
  """Memory for the exchange of a slice that is a process: its own sums and the total, in float32."""
  return 2 * gradient_bytes


def of_snapshots(state_bytes: float) -> float:
  """Memory of a slice while a new snapshot is written: the last one and the new one."""
  return 2 * state_bytes


def of_cpu_process(state_bytes: float, gradient_bytes: float, simulated: int) -> float:
  """Memory of a process whose devices are CPUs. simulated: slices that it simulates; 0: it is one slice of several, and
  exchanges sums. Both hold one more copy of the state while they save or receive it."""
  if simulated:
    return simulated * (state_bytes + gradient_bytes + of_snapshots(state_bytes)) + state_bytes
  return state_bytes + gradient_bytes + of_sums(gradient_bytes) + state_bytes
