"""Makes the faults of fault_injection happen, each once and at its moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast, get_args

from jax import Device

from trainer.cluster.api import FaultTarget
from trainer.config.errors import ConfigError
from trainer.config.faults import Fault, Kind, Moment, RandomFaults
from trainer.elastic.flips import Flatten, Flips


def expand(faults: Iterable[Fault | RandomFaults], num_slices: int, steps: int) -> list[Fault]:
  """All faults of a run, with the random ones drawn. Raises ConfigError for a fault that could never happen."""
  listed: list[Fault] = []
  for fault in faults:
    if isinstance(fault, RandomFaults):
      listed += draw(fault, num_slices, steps)
      continue
    if fault.slice is not None and fault.slice >= num_slices:
      raise ConfigError(
        f"fault_injection={fault}: the last slice is {num_slices - 1}.\nRaise num_slices, or name another slice."
      )
    if fault.step > steps:
      raise ConfigError(f"fault_injection={fault}: would never happen with steps={steps}.\nUse an earlier step.")
    listed.append(fault)
  return listed


def draw(faults: RandomFaults, num_slices: int, steps: int) -> list[Fault]:
  """Random losses at all moments, returns, double faults and flapping slices. The seed spares one slice."""
  generator = random.Random(faults.seed)
  spared = generator.randrange(num_slices)
  down: set[int] = set()
  drawn: list[Fault] = []
  for step in range(1, steps + 1):
    while generator.random() < faults.rate:  # a second fault at the same step is a double fault
      alive = sorted(set(range(num_slices)) - down - {spared})
      if down and (not alive or generator.random() < 0.5):
        slice_id = generator.choice(sorted(down))
        down.discard(slice_id)
        drawn.append(Fault("slice_up", step, slice_id))
      elif alive:
        slice_id = generator.choice(alive)
        down.add(slice_id)
        # A process restores once at its start: a later fault of that moment would never happen.
        moments = [moment for moment in get_args(Moment) if moment != "prepared" and (moment != "restore" or step == 1)]
        moment = generator.choice(["step", "step", *moments])
        drawn.append(Fault("slice_down", step, slice_id, cast(Moment, moment)))
      else:
        break  # a single slice, which is spared
  return drawn


@dataclass
class FaultInjector:
  """Makes every fault happen once, at its moment. Calls `record` before each fault."""

  faults: list[Fault]
  slices: FaultTarget | None = None
  record: Callable[[Fault, int], None] = lambda fault, step: None
  kill: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGKILL)
  clock: Callable[[], float] = time.monotonic
  acts: Callable[[], bool] = lambda: True  # False: another process of the run makes the faults; here they only pass
  fired: list[Fault] = field(default_factory=list)
  last_fired_at: float = -float("inf")  # on the clock
  flipping: list[Fault] = field(default_factory=list)  # flips that are due, and those that are sticky

  def at(self, moment: Moment, step: int) -> None:
    """Makes the faults happen that are due at `moment` of `step`. The faults of one slice keep their order."""
    waiting: set[int] = set()  # slices with an earlier fault whose moment has not come
    for fault in sorted(self.faults, key=lambda fault: fault.step):
      if fault.moment != moment or fault.step > step or fault.slice in waiting:
        if fault.slice is not None:
          waiting.add(fault.slice)
        continue
      self.faults.remove(fault)
      self.fired.append(fault)
      self.last_fired_at = self.clock()
      self.flipping += [fault] * fault.is_flip  # in the process of the slice itself
      if self.acts():
        self.record(fault, step)
        self._make(fault)

  def flips(self, kind: Kind, slice_id: int, flatten: Flatten, devices: Sequence[Device] | None = None) -> Flips:
    """The flips of this kind that hit the slice now, in the step under way. flatten, devices: see `Flips`."""
    found = [fault for fault in self.flipping if (fault.kind, fault.slice) == (kind, slice_id)]
    self.flipping = [fault for fault in self.flipping if fault.sticky or fault not in found]
    return Flips(found, flatten, devices)

  def waits(self, step: int) -> bool:
    """Whether a fault that is due at `step` needs the compilations in the background."""
    return any(fault.moment == "prepared" and fault.step <= step for fault in self.faults)

  def _make(self, fault: Fault) -> None:
    if fault.kind == "ckpt_kill":
      self.kill()
    if fault.kind == "ckpt_kill" or fault.is_flip:
      return
    assert self.slices is not None and fault.slice is not None
    if fault.kind == "slice_down":
      self.slices.lose(fault.slice, fault.seconds)
    elif fault.kind == "hang":
      self.slices.hang(fault.slice, fault.seconds)
    else:
      self.slices.give_back(fault.slice)
