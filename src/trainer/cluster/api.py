"""What every cluster answers: which slices exist, which live, wait for k of them, was this exception a lost slice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from jax import Device

  from trainer.world import World


@dataclass(frozen=True)
class View:
  """The slices that one attempt runs on, in ascending order of their ids; never changed during the attempt."""

  slices: tuple[int, ...]
  devices: tuple[tuple[Device, ...], ...]  # one tuple per slice, in the order of `slices`
  num_slices_total: int  # of the full topology
  lives: tuple[int, ...]  # per slice: how often it had died before the view was made

  @property
  def num_alive(self) -> int:
    return len(self.slices)

  @property
  def is_full(self) -> bool:
    return len(self.slices) == self.num_slices_total


class Cluster(ABC):
  """The slices of this run. A slice fails and returns as a whole and keeps its id and its devices for life."""

  kind: str

  def __init__(self, slices: Mapping[int, Iterable[Device]], world: World) -> None:
    self.slices: dict[int, tuple[Device, ...]] = {i: tuple(slices[i]) for i in sorted(slices)}
    self.world = world
    sizes = {i: len(devices) for i, devices in self.slices.items()}
    if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
      raise ValueError(f"slices have {sizes} devices (slice: devices); all must have equally many, and at least one")
    self.devices_per_slice = next(iter(sizes.values()))

  @property
  def num_slices(self) -> int:
    """Slices of the full topology, dead or alive."""
    return len(self.slices)

  def view(self, alive: Iterable[int]) -> View:
    """The slices `alive` as one attempt sees them."""
    ids = tuple(sorted(alive))
    assert ids and set(ids) <= set(self.slices), f"slices {ids} are not all among {sorted(self.slices)}"
    devices = tuple(self.slices[i] for i in ids)
    lives = tuple(self.deaths(i) for i in ids)
    return View(ids, devices, self.num_slices, lives)

  def survivors(self, view: View) -> frozenset[int]:
    """Ids of the slices of `view` that have lived, with their memories, ever since the view was made."""
    alive = self.alive()
    return frozenset(i for i, died in zip(view.slices, view.lives) if i in alive and self.deaths(i) == died)

  def deaths(self, slice_id: int) -> int:
    """How often the slice has died, as far as the cluster can know."""
    return 0

  @abstractmethod
  def alive(self) -> frozenset[int]:
    """Ids of the slices that pass a health check now. May take a second on a real cluster."""

  @abstractmethod
  def wait_for(self, count: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> frozenset[int]:
    """Ids of the living slices as soon as there are at least `count` of them; TimeoutError after `timeout` seconds.

    Of those that live, however few, once stop() is true; it is asked every poll.
    """

  @abstractmethod
  def returned(self, view: View) -> frozenset[int]:
    """Ids of slices outside `view` that live. Cheap enough for every step; on a real cluster up to one poll old."""

  @abstractmethod
  def is_slice_loss(self, error: BaseException) -> bool:
    """True when the error by itself proves that a slice was lost; False when it does not, or only may mean it."""

  def poison(self, batch: Any, view: View) -> Any:
    """The batch; if a simulated slice of `view` is down, arrays in error state that fail the step they enter."""
    return batch

  def block_until_ready(self, arrays: Any, view: View) -> None:
    """Returns when every array has been computed; raises the error of the first that has failed."""
    import jax

    jax.block_until_ready(arrays)

  def stop(self) -> None:  # noqa: B027 -- most clusters have nothing to leave
    """Leaves the JAX world, if it was joined here."""
