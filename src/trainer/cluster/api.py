"""The interface of every cluster: its slices, which of them are alive, and which have died during an attempt."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.errors import ConfigError

if TYPE_CHECKING:
  from jax import Device

  from trainer.world import World


@dataclass(frozen=True)
class View:
  """The slices that one attempt runs on, in ascending order of their ids. Never changes during the attempt."""

  slices: tuple[int, ...]
  devices: tuple[tuple[Device, ...], ...]  # one tuple per slice, in the order of `slices`
  num_slices_total: int  # of the full topology
  deaths: tuple[int, ...]  # per slice: the cluster's count of its deaths when the view was made

  @property
  def num_alive(self) -> int:
    return len(self.slices)

  @property
  def is_full(self) -> bool:
    return len(self.slices) == self.num_slices_total


class FaultTarget(Protocol):
  """Slices that can be lost on command. seconds: until the slice returns; None: when it is given back or waited for."""

  def lose(self, slice_id: int, seconds: float | None = None) -> None: ...
  def hang(self, slice_id: int, seconds: float | None = None) -> None: ...
  def give_back(self, slice_id: int) -> None: ...


class ProxyLost(RuntimeError):
  """The connection to the Pathways proxy is lost: no slice can be reached any more."""


_STOP_CHECK_SECONDS = 1.0  # between two looks at stop() while slices are waited for


class Cluster(ABC):
  """The slices of this run, and this process among its processes. A slice fails and returns as a whole; its id and its
  devices never change."""

  kind: str
  # Whether the loss of a slice ends the attempt, and the elastic loop starts another. Where slices are worlds of their
  # own, a lost slice is a lost process, and the others need no new attempt.
  recovers_in_process = True
  is_behind_proxy = False  # whether this process reaches its devices, and every byte of their memory, through a proxy
  poll_seconds = 10.0  # between two looks at slices that are waited for
  # The id of this launch, and of the run if it is new, where several worlds start it. "": the primary chooses the id.
  launch_id = ""
  # Whether other worlds have opened the run's folder before this process: it must not create the folder.
  joins = False

  def __init__(
    self,
    slices: Mapping[int, Iterable[Device]],
    world: World,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
  ) -> None:
    self._clock, self._sleep = clock, sleep
    self.slices: dict[int, tuple[Device, ...]] = {i: tuple(slices[i]) for i in sorted(slices)}
    self.world = world
    sizes = {i: len(devices) for i, devices in self.slices.items()}
    if not sizes or len(set(sizes.values())) != 1 or 0 in sizes.values():
      raise ConfigError(f"slices have {sizes} devices (slice: devices); all need the same number, at least one")
    self.devices_per_slice = next(iter(sizes.values()))
    self._barred: frozenset[int] = frozenset()
    self._deaths = dict.fromkeys(self.slices, 0)  # increases whenever a slice is found to have died
    self._deaths_lock = threading.Lock()

  @property
  def num_slices(self) -> int:
    """Slices of the full topology, dead or alive."""
    return len(self.slices)

  @property
  def fault_target(self) -> FaultTarget | None:
    """Where rehearsed faults of slices happen; None: slices of this cluster cannot be lost on command."""
    return None

  def view(self, alive: Iterable[int]) -> View:
    """A view of the slices `alive`, for one attempt."""
    ids = tuple(sorted(alive))
    assert ids and set(ids) <= set(self.slices), f"slices {ids} are not all among {sorted(self.slices)}"
    devices = tuple(self.slices[i] for i in ids)
    return View(ids, devices, self.num_slices, tuple(self._deaths[i] for i in ids))

  def bar(self, slice_ids: Iterable[int]) -> None:
    """These slices compute wrongly: to this process, they are dead from now on."""
    self._barred |= frozenset(slice_ids)

  def copied(self, view: View) -> dict[int, tuple[Device, ...]]:
    """{id: devices} of the slices of `view` whose hosts write local copies of the state."""
    return dict(zip(view.slices, view.devices))

  def died(self, view: View) -> frozenset[int]:
    """Ids of the slices of `view` that are known to have died since the view was made, even if they have returned:
    their memory is lost. Makes no health check; `lost` does."""
    return frozenset(i for i, before in zip(view.slices, view.deaths) if self._deaths[i] != before)

  def lost(self, view: View, named: Iterable[int] = ()) -> frozenset[int]:
    """Ids of the slices of `view` that an event has cost: they died since the view was made, do not answer now, or are
    `named` by the event itself. Makes a health check. Call it once per event, at the event, before waiting for
    replacements: from here on `died(view)` contains these slices, even if they answer again."""
    gone = (frozenset(view.slices) - self.alive() | frozenset(named)) & frozenset(view.slices)
    self._record_deaths(gone - self.died(view))
    return self.died(view)

  def _record_deaths(self, slice_ids: Iterable[int]) -> None:
    with self._deaths_lock:
      for slice_id in slice_ids:
        self._deaths[slice_id] += 1

  @abstractmethod
  def alive(self) -> frozenset[int]:
    """Ids of the slices that pass a health check now. On a real cluster it takes up to a time limit."""

  def wait_for(self, count: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> frozenset[int]:
    """Ids of all living slices, as soon as there are at least `count`, or stop() is true. Calls stop() at every poll,
    and each second between two polls. TimeoutError after `timeout` seconds."""
    end = self._clock() + timeout
    while len(alive := self.alive()) < count and not stop():
      if (left := end - self._clock()) <= 0:
        barred = sorted(self._barred)
        wrong = f"; slices {barred} are not used any more, because they computed wrong sums" if barred else ""
        raise TimeoutError(
          f"waited {timeout:g} s for {count} slices; only {sorted(alive)} of {sorted(self.slices)} are alive"
          f"{self._reasons()}{wrong}. Raise elastic_timeout_seconds, or lower elastic_min_slice_count."
        )
      self._replace_lost()
      next_poll = self._clock() + min(left, self.poll_seconds)
      while (left := next_poll - self._clock()) > 0 and not stop():
        self._sleep(min(left, _STOP_CHECK_SECONDS))
    return alive

  def _reasons(self) -> str:
    """Why slices do not answer, as the end of a sentence; "": unknown."""
    return ""

  def _replace_lost(self) -> None:  # noqa: B027 -- on real clusters a scheduler does it
    """The run waits for slices: where losses are simulated, lost slices are replaced now."""

  @abstractmethod
  def returned(self, view: View) -> frozenset[int]:
    """Ids of living slices outside `view`. Never waits; on a real cluster the answer is up to one poll old."""

  def on_slices(self, compute: Callable[..., Any], view: View) -> Callable[..., Any]:
    """`compute`, a function whose last argument is a batch, as the slices of `view` execute it. Called once for an
    attempt or evaluation: only a cluster that simulates losses returns another function, in the path of every batch."""
    return compute

  # ---- this process among the processes of the run

  @property
  def is_primary(self) -> bool:
    """Whether this process writes the files that exist once per run. May change during the run."""
    return self.world.is_primary

  def saves_in_storage(self) -> bool:
    """Whether this world writes the persistent checkpoints; of several worlds one does. May change during the run."""
    return True

  def stop_agreed(self, requested: bool, asked: int) -> bool:
    """Whether this process must stop after this step, see `World.stop_agreed`."""
    return self.world.stop_agreed(requested, asked)

  def stop_asked(self) -> bool:
    """Whether the process that supervises the run was asked to end it."""
    return False

  def on_role(self, callback: Callable[[bool], None]) -> None:  # noqa: B027 -- the role of most processes never changes
    """Has `callback` called with `is_primary` whenever that changes during the run."""

  def watch(  # noqa: B027 -- most runs have one world
    self, *, busy: Callable[[], str], noticed: Callable[[], bool], unsupervised: Callable[[], None]
  ) -> None:
    """Keeps the other worlds informed, so that they do not take a long save for a hang. busy(): what this process does
    between steps, "" if nothing. noticed(): whether it has received SIGTERM. unsupervised(): called from a thread when
    the supervisor, which would end this process if it hung, is lost."""

  def finished(self, code: int) -> None:  # noqa: B027 -- as above
    """This process has done everything, or has failed as the others must, and will exit with `code`."""

  def is_reported(self) -> bool:
    """Whether another process has already reported an error of the user, and has ended the run with exit code 2. Call
    this before reporting such an error, because all processes find the same one. May wait for some seconds."""
    return False

  def stop(self) -> None:  # noqa: B027 -- most clusters have nothing to leave
    """Leaves the JAX world, if `start` joined one, and ends the connections with the other worlds."""
