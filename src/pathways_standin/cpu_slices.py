"""Which slices work, and what a fault does to arrays.

A lost slice is an administrative state: the data of its devices are replaced by an error, and programs that use one of
its devices give errors. The model follows what XLA's clients report: a dispatch succeeds, and the error shows where the
client waits for the result or reads it. A program that still runs on several slices when one of them is lost fails on
all of them, and so does what was computed from its results.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

from pathways_standin.arrays import Array, Store
from pathways_standin.devices import Devices
from pathways_standin.gates import Gate, Timer, merge
from pathways_standin.status import Status


@dataclasses.dataclass
class _Execution:
  """A dispatched program that may still run."""

  slices: frozenset[int]
  depends_on: frozenset[int]  # numbers of executions that may still run
  results: list[weakref.ref[Array]]

  def has_ended(self) -> bool:
    """All results of an execution are ready at the same time, so one that still exists tells."""
    for reference in self.results:
      if (array := reference()) is not None and not array.is_deleted():
        return not array.closed_gates() and array.is_computed()
    return True


@dataclasses.dataclass
class _Slowness:
  seconds: float  # that every program takes longer
  busy_until: float = 0.0  # of time.monotonic()


class Slices:
  """The state of all slices. Hold `lock` while arrays are made, so that a fault comes before or after, not between."""

  def __init__(self, devices: Devices) -> None:
    self.devices = devices
    self.lock = threading.RLock()
    self.timer = Timer()
    self._down: dict[int, Status] = {}
    self._hung: dict[int, Gate] = {}
    self._slow: dict[int, _Slowness] = {}
    self._stores: list[Store] = []
    self._running: dict[int, _Execution] = {}
    self._gate_numbers, self._execution_numbers = itertools.count(1), itertools.count(1)
    self.dispatches = 0  # programs that clients have dispatched
    self.lost_shards = 0  # by all faults so far
    self.on_dispatch: Callable[[int], None] = lambda dispatches: None  # called before a program starts

  # ---- what sessions ask

  def open_store(self) -> Store:
    store = Store()
    with self.lock:
      self._stores.append(store)
    return store

  def close_store(self, store: Store) -> None:
    with self.lock:
      self._stores.remove(store)
      store.clear()

  def why_lost(self, devices: Iterable[int]) -> Status | None:
    """The error of the first of the devices whose slice is down."""
    return next((self._down[s] for d in devices if (s := self.devices.slice_of(d)) in self._down), None)

  def admit(self, array: Array, sources: Sequence[Array] = ()) -> Array:
    """The array, with errors instead of shards on lost slices, and held back by hung slices.

    sources: the arrays that its data come from.
    """
    for i, device in enumerate(array.devices):
      if not isinstance(array.shards[i], Status) and (status := self.why_lost([device])) is not None:
        array.shards[i] = status
    array.gates = merge([*(source.closed_gates() for source in sources), self._hung_gates(array.devices)])
    array.made_by = self._still_running(sources)
    for number in array.made_by:
      self._running[number].results.append(weakref.ref(array))
    return array

  def hold_back(self, array: Array) -> None:
    """A client reads the array, from its first device. If that slice hangs, the answer waits."""
    array.gates = merge([array.closed_gates(), self._hung_gates(array.devices[:1])])

  def begin_dispatch(self) -> None:
    """Counts a program that a client dispatches, and carries out the faults that are planned for this moment."""
    with self.lock:
      self.dispatches += 1
      count = self.dispatches
    self.on_dispatch(count)

  def dispatch(self, devices: Sequence[int], arguments: Sequence[Array], results: Sequence[Array]) -> None:
    """Notes that a program runs on the devices and makes the results from the arguments."""
    slices = frozenset(map(self.devices.slice_of, devices))
    self._forget_ended()
    number = next(self._execution_numbers)
    gates = merge([*(array.closed_gates() for array in arguments), self._hung_gates(devices), self._delays(slices)])
    execution = _Execution(slices, self._still_running(arguments), list(map(weakref.ref, results)))
    for array in results:
      array.gates, array.made_by = gates, frozenset([number])
    self._running[number] = execution

  def _still_running(self, sources: Iterable[Array]) -> frozenset[int]:
    """The executions that make the arrays and may still run."""
    return frozenset(number for array in sources for number in array.made_by if number in self._running)

  def _forget_ended(self) -> None:
    """Drops the oldest executions that have ended. Two for each dispatch are enough to keep the number small."""
    for number in list(itertools.islice(self._running, 2)):
      if not self._running[number].has_ended():
        return
      del self._running[number]

  def _hung_gates(self, devices: Iterable[int]) -> dict[int, Gate]:
    if not self._hung:
      return {}
    return {s: self._hung[s] for s in map(self.devices.slice_of, devices) if s in self._hung}

  def _delays(self, slices: Iterable[int]) -> dict[int, Gate]:
    """Gates that open when slow slices have finished one more program."""
    gates = {}
    for slice_id in slices:
      if (slow := self._slow.get(slice_id)) is not None and slice_id not in self._hung:
        slow.busy_until = max(slow.busy_until, time.monotonic()) + slow.seconds
        gates[slice_id] = gate = Gate(next(self._gate_numbers))
        self.timer.call_after(slow.busy_until - time.monotonic(), gate.open)
    return gates

  # ---- faults

  def kill(self, slice_id: int, code: str, text: str) -> None:
    """The slice and its data are lost. The slice stays down until `revive`."""
    status = Status(code, text or f"slice {slice_id} is down: the Pathways stand-in was told to kill it")
    devices = frozenset(d.id for d in self.devices.all if self.devices.slice_of(d.id) == slice_id)
    with self.lock:
      self._down[slice_id] = status
      self._slow.pop(slice_id, None)
      lost = self._fail_running(slice_id, status)
      lost += sum(array.lose(status, devices) for store in self._stores for array in store.arrays())
      self.lost_shards += lost
      gate = self._hung.pop(slice_id, None)
    if gate is not None:
      gate.open()  # every waiting request gets the error now

  def _fail_running(self, slice_id: int, status: Status) -> int:
    """Fails the executions that still run on the slice, and executions that need their results."""
    failed: set[int] = set()
    lost = 0
    for number, execution in self._running.items():  # in the order of dispatch
      concerned = slice_id in execution.slices or not failed.isdisjoint(execution.depends_on)
      if concerned and not execution.has_ended():
        failed.add(number)
        results = [array for reference in execution.results if (array := reference()) is not None]
        lost += sum(array.lose(status) for array in results)
    return lost

  def revive(self, slice_id: int) -> None:
    """The slice works again, with empty memory."""
    with self.lock:
      self._down.pop(slice_id, None)

  def hang(self, slice_id: int, seconds: float | None) -> None:
    """Nothing that needs the slice becomes ready until `release`, or for the given time."""
    with self.lock:
      if slice_id not in self._hung:
        self._hung[slice_id] = Gate(next(self._gate_numbers))
      gate = self._hung[slice_id]
    if seconds is not None:
      self.timer.call_after(seconds, lambda: self._release(slice_id, gate))

  def release(self, slice_id: int) -> None:
    """Ends a hang; does nothing if the slice does not hang."""
    gate = self._hung.get(slice_id)
    if gate is not None:
      self._release(slice_id, gate)

  def _release(self, slice_id: int, gate: Gate) -> None:
    with self.lock:
      if self._hung.get(slice_id) is gate:
        del self._hung[slice_id]
    gate.open()

  def slow(self, slice_id: int, seconds: float) -> None:
    """Every program on the slice takes this much longer, one after the other. 0 ends it."""
    with self.lock:
      self._slow.pop(slice_id, None)
      if seconds > 0:
        self._slow[slice_id] = _Slowness(seconds)

  def describe(self) -> list[dict[str, object]]:
    """One entry for each slice: what is wrong with it."""
    with self.lock:
      return [
        {
          "slice": s,
          "down": f"{self._down[s].code}: {self._down[s].message}" if s in self._down else None,
          "hung": s in self._hung,
          "slow_seconds": self._slow[s].seconds if s in self._slow else 0.0,
        }
        for s in range(self.devices.slices)
      ]
