"""Ray's workers as members and lanes of a run, and the environment in which each sees only its own slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from worlds.place import Place

# GKE gives these variables to the pods of several slices. Each slice is a JAX world of its own here: with them, libtpu
# would wait for the other slices, also for lost ones.
_MULTISLICE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_PORT", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")

Environment = Mapping[str, str | None]  # None: the variable is removed


@dataclass(frozen=True)
class RayWorker:
  """One worker process of Ray Train."""

  rank: int
  host: str  # address
  port: int  # free on its host, for jax.distributed within the slice
  slice_name: str = ""  # Ray's name of the TPU slice of its host; "": it has none
  actor: Any = None  # Ray's handle of the process


@dataclass(frozen=True)
class RaySlot:
  """The place of a worker among the members: a member is a slice, and a lane is one of its hosts."""

  member: int
  lane: int


def slots(workers: Sequence[RayWorker], lanes: int) -> dict[int, RaySlot]:
  """{rank: its slot}. lanes: workers of a slice. Raises ValueError if Ray has not started whole slices."""
  if lanes == 1:
    return {worker.rank: RaySlot(worker.rank, 0) for worker in workers}
  slices: dict[str, list[int]] = {}
  for worker in sorted(workers, key=lambda worker: worker.rank):
    slices.setdefault(worker.slice_name or f"ranks from {worker.rank - worker.rank % lanes}", []).append(worker.rank)
  broken = {name: ranks for name, ranks in slices.items() if len(ranks) != lanes}
  if broken:
    raise ValueError(f"a slice has {lanes} workers, and Ray has started the ranks {broken} on parts of slices")
  return {
    rank: RaySlot(member, lane) for member, ranks in enumerate(slices.values()) for lane, rank in enumerate(ranks)
  }


def environment(place: Place, hosts: Sequence[str], *, tpu: bool) -> Environment:
  """The changes to the environment of the process at `place`. hosts: of its slice, by lane."""
  changes: dict[str, str | None] = dict(place.environment())
  changes |= dict.fromkeys(_MULTISLICE)
  if tpu:
    changes |= {"TPU_WORKER_ID": str(place.lane), "TPU_WORKER_HOSTNAMES": ",".join(hosts)}
  return changes
