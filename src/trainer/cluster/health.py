"""Health checks of slices: a small program on all devices of a slice, with a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.cluster.api import ProxyLost
from trainer.observe import compiles
from trainer.process import runtime_errors

# A healthy slice answers in a fraction of a second. A slice that is busy with a step answers after the step.
TIME_LIMIT = 30.0
# After this time without an answer a check is started again, in case the runtime has forgotten the first one.
_RENEW_SECONDS = 60.0


@dataclass
class _Check:
  """One health check, under way or finished."""

  asked: float  # the time of the first question since the last answer of this slice
  began: float
  finished: threading.Event = field(default_factory=threading.Event)
  failure: str | None = None  # why the slice failed the check; None while it is under way, or if it passed
  disconnected: Exception | None = None


class HealthChecks:
  """Asks slices for an answer, each in a daemon thread.

  A slice that does not answer delays a caller by at most the time limit. Its check stays under way, and the slice
  counts as silent, until it answers: later calls do not wait again, and repeat the check only after a minute or more.
  """

  def __init__(
    self,
    slices: Mapping[int, tuple[jax.Device, ...]],
    failed: Callable[[int], None],
    *,
    time_limit: float = TIME_LIMIT,
    run: Callable[[int], None] | None = None,
  ) -> None:
    """failed: called with the id of a slice whose check raised an error (not for a silent one), in any thread.
    run: replaces the program, for tests; raises JaxRuntimeError if the slice is down."""
    self._slices = slices
    self._failed = failed
    self._limit = time_limit
    self._run = run or self._run_program
    self._programs: dict[int, Callable[[], None]] = {}  # compiled once per slice; kept while the slice passes
    self._checks: dict[int, _Check] = {}
    self._lock = threading.Lock()

  def check(self, slice_ids: Iterable[int]) -> frozenset[int]:
    """Ids of those slices that pass a health check now, after at most the time limit. Raises ProxyLost."""
    checks = {i: self.begin(i) for i in slice_ids}
    for check in checks.values():
      check.finished.wait(max(0.0, check.asked + self._limit - time.monotonic()))
    return frozenset(i for i, check in checks.items() if _passed(check))

  def begin(self, slice_id: int) -> _Check:
    """Starts a check of the slice, unless one is under way. Does not wait."""
    with self._lock:
      check, now = self._checks.get(slice_id), time.monotonic()
      asked = now
      if check is not None and not check.finished.is_set():
        if now - check.began < max(_RENEW_SECONDS, check.began - check.asked):  # longer each time: threads pile up
          return check
        asked = check.asked
      check = self._checks[slice_id] = _Check(asked, now)
    threading.Thread(target=self._answer, args=(slice_id, check), name=f"health-{slice_id}", daemon=True).start()
    return check

  def passed(self, slice_ids: Iterable[int]) -> frozenset[int]:
    """Ids of those slices whose last check has finished and passed. Does not wait. Raises ProxyLost."""
    return frozenset(i for i in slice_ids if (check := self._checks.get(i)) is not None and _passed(check))

  def describe(self, slice_ids: Iterable[int]) -> str:
    """The slices that did not pass their last check, each with the reason."""
    failed = {i: check for i in slice_ids if (check := self._checks.get(i)) is not None and not _passed(check)}
    return "; ".join(f"slice {i}: {check.failure or 'no answer'}" for i, check in failed.items())

  def stop(self) -> None:
    """Gives checks under way a second to finish: the interpreter should not end while a thread is in the runtime."""
    end = time.monotonic() + 1.0
    for check in list(self._checks.values()):
      check.finished.wait(max(0.0, end - time.monotonic()))

  def _answer(self, slice_id: int, check: _Check) -> None:
    try:
      with compiles.uncounted():
        self._run(slice_id)
    except jax.errors.JaxRuntimeError as error:
      self._programs.pop(slice_id, None)  # its executable may belong to an earlier life of the slice
      if runtime_errors.is_disconnected(error):
        check.disconnected = error
      elif not runtime_errors.is_out_of_memory(error):  # a full device has answered
        check.failure = str(error).partition("\n")[0]
        self._failed(slice_id)
    except Exception as error:  # noqa: BLE001 -- reported by `describe`; a thread has no caller
      check.failure = f"{type(error).__name__}: {error}"
      self._failed(slice_id)
    finally:
      check.finished.set()

  def _run_program(self, slice_id: int) -> None:
    if slice_id not in self._programs:
      self._programs[slice_id] = _compile(self._slices[slice_id])
    self._programs[slice_id]()


def _passed(check: _Check) -> bool:
  if check.disconnected is not None:
    raise ProxyLost(str(check.disconnected)) from check.disconnected
  return check.finished.is_set() and check.failure is None


def _compile(devices: tuple[jax.Device, ...]) -> Callable[[], None]:
  """A program that adds 1 on each of the devices, and checks the result."""
  sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
  values = np.arange(len(devices), dtype=np.float32)
  # Raises an error if the slice is down. It is asked at every poll, and each time would compile a program.
  first = jax.block_until_ready(jax.device_put(values, sharding))
  compiled = jax.jit(lambda x: x + 1, out_shardings=sharding).lower(first).compile()

  def run() -> None:
    result = np.asarray(compiled(jax.device_put(values, sharding)))
    if not np.array_equal(result, values + 1):
      raise RuntimeError(f"a health check returned {result.tolist()} instead of {(values + 1).tolist()}")

  return run
