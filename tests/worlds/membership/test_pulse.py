"""Which member is considered hung, and when."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Kill
from worlds.membership.run_rules import RunRules


class Time:
  now = 0.0

  def __call__(self) -> float:
    return self.now


def running(time: Time, seconds: float = 1.0, local_steps: int = 1) -> Coordinator:
  """A run of three members that has committed ten steps, or rounds of local steps, of so many seconds."""
  run = Coordinator(RunRules(3, 1, 3, local_steps=local_steps), clock=time)
  for member in range(3):
    run.hello(member, 0, 1, "address")
  for member in range(3):
    run.ready(member, 0, 0)
  run.restored(0, 0, run.epoch, 0)
  for member in (1, 2):
    run.joined(member, 0, run.epoch)
  for step in range(1, 11):
    time.now += seconds
    for member in range(3):
      run.pulse.beat(member, 0)
      run.computed(member, run.epoch, 0.5)
    for member in range(3):
      run.done(member, 0, run.epoch, f"step {step}", 0)
  assert run.committed == "step 10"
  return run


def killed(run: Coordinator) -> list[int]:
  return [effect.member for effect in run.tick() if isinstance(effect, Kill)]


def first_killed(run: Coordinator, time: Time, living: Collection[int], seconds: float = 10.0) -> list[int]:
  """Who is ended first, while one process of each of these members gives signs of life; [] if nobody is in time."""
  for _ in range(round(10 * seconds)):
    time.now += 0.1
    for member in living:
      run.pulse.beat(member, 0)
    if dead := killed(run):
      return dead
  return []


def test_only_the_silent_member_is_blamed_for_a_step_that_stands_still():
  time = Time()
  run = running(time)
  for member in (0, 2):
    run.computed(member, run.epoch, 0.5)
  # Member 1 is stopped; the others wait for it.
  dead = first_killed(run, time, (0, 2))
  assert dead == [1] and 5.0 < time.now - 10.0 < 5.3


def test_a_member_that_computes_for_ever_is_blamed_although_it_gives_signs_of_life():
  time = Time()
  run = running(time)
  for member in (0, 2):
    run.computed(member, run.epoch, 0.5)
  dead = first_killed(run, time, range(3))
  assert dead == [1] and 5.0 < time.now - 10.0 < 5.3


@pytest.mark.parametrize("is_ready", [True, False])
def test_a_member_that_is_stopped_while_the_run_starts_is_noticed_soon(is_ready):
  """The others compile their first step for a minute, and live."""
  time = Time()
  run = Coordinator(RunRules(3, 1, 3), clock=time)
  for member in range(3):
    run.hello(member, 0, 1, "address")
  for member in range(3 if is_ready else 2):
    run.ready(member, 0, 0)
  dead: list[int] = []
  while not dead and time.now < 60.0:
    dead = first_killed(run, time, (0, 1))
  assert dead == [2] and 30.0 < time.now < 30.3


def all_compute(run: Coordinator, time: Time, seconds: float) -> list[Kill]:
  """All members have computed and live, and nobody has the sums for so long. Returns who was ended."""
  found = []
  for member in range(3):
    run.computed(member, run.epoch, 0.5)
  for _ in range(round(10 * seconds)):
    time.now += 0.1
    for member in range(3):
      run.pulse.beat(member, 0)
    found += [effect for effect in run.tick() if isinstance(effect, Kill)]
  return found


def test_members_connect_again_when_the_exchange_stands_still_and_then_one_goes():
  time = Time()
  run = running(time)
  epoch = run.epoch
  assert all_compute(run, time, 5.8) == [] and run.epoch == epoch
  assert all_compute(run, time, 0.4) == [] and run.epoch == epoch + 1
  assert all_compute(run, time, 5.8) == []
  (killed, *_) = all_compute(run, time, 0.4)
  assert killed.member == 2 and "stood still" in killed.reason


@pytest.mark.parametrize(
  ("reports", "fresh", "blamed"),
  [
    ({1: [0], 2: [0]}, (), 0),  # nobody reaches the primary
    ({1: [0]}, (), 1),  # not the primary
    ({2: [1]}, (), 2),
    ({2: [1]}, (1,), 1),  # it has no state yet
    ({2: [0, 1, 7]}, (), 2),  # 7 is no member
  ],
)
def test_of_members_that_cannot_connect_one_goes_and_returns_after_a_growing_pause(reports, fresh, blamed):
  time = Time()
  run = running(time)
  run.live -= set(fresh)
  for member, others in reports.items():
    run.broken(member, run.epoch, others)
  assert all_compute(run, time, 0.9) == []
  (killed, *_) = all_compute(run, time, 0.2)
  assert killed.member == blamed and "no connection between" in killed.reason
  for pause in (30.0, 60.0):
    run.lost(blamed, killed.reason)
    rest = sorted(run.active)
    assert len(rest) == 2
    run.hello(blamed, 0, 1, "address")
    run.ready(blamed, 0, 0)

    def commit(number: int, members: list[int]) -> None:
      for member in members:
        run.done(member, 0, run.epoch, f"step {number}", 0)

    time.now += pause - 1.0
    commit(11, rest)
    assert run.committed == "step 11" and blamed not in run.active
    time.now += 2.0
    commit(12, rest)
    assert blamed in run.active
    run.broken(blamed, run.epoch, rest)
    time.now += 1.1
    for member in range(3):
      run.pulse.beat(member, 0)
    (killed,) = (effect for effect in run.tick() if isinstance(effect, Kill))
    assert killed.member == blamed


def joined(run: Coordinator, time: Time, first_seconds: float) -> None:
  """Member 3 takes the place of member 2, which is lost. The first computations of the run took `first_seconds`."""
  run.pulse._longest_first = first_seconds
  run.lost(2, "killed")
  run.hello(3, 0, 1, "address")
  run.ready(3, 0, 0)
  for member in (0, 1):
    run.done(member, 0, run.epoch, "step 11", 0)
  run.joined(3, 0, run.epoch)
  assert run.active == {0, 1, 3}
  for member in (0, 1):
    run.computed(member, run.epoch, 0.5)


@pytest.mark.parametrize("first_seconds, limit", [(0.5, 5.0), (4.0, 12.0), (200.0, 300.0)])
def test_a_first_computation_that_hangs_has_the_limit_of_those_that_the_run_has_seen(first_seconds, limit):
  time = Time()
  run = running(time)
  joined(run, time, first_seconds)
  dead: list[int] = []
  while not dead and time.now < 400.0:
    dead = first_killed(run, time, (0, 1, 3))
  assert dead == [3] and limit < time.now - 10.0 < limit + 0.3


def test_a_member_that_saves_is_waited_for_and_then_has_time_to_compute():
  """It saves for 60 s, while the others have computed. It hangs if it then computes for more than 5 s."""
  time = Time()
  run = running(time)
  for member in (0, 2):
    run.computed(member, run.epoch, 0.5)
  for _ in range(600):
    time.now += 0.1
    for member in range(3):
      run.pulse.beat(member, 0, "save" if member == 1 else "")
    assert killed(run) == []
  saved = time.now
  dead = first_killed(run, time, range(3))
  assert dead == [1] and 5.0 < time.now - saved < 5.3


def test_silence_is_measured_in_steps_and_computation_in_rounds_of_local_steps():
  """Ten local steps take 100 s. A dead host is noticed after 30 s, a replica that is never done after 300 s."""
  time = Time()
  run = running(time, 100.0, local_steps=10)
  began = time.now
  assert first_killed(run, time, (0, 1), 400) == [2] and 30.0 < time.now - began < 30.3
  run = running(time, 100.0, local_steps=10)
  for member in (0, 2):
    run.computed(member, run.epoch, 90.0)
  began = time.now
  assert first_killed(run, time, range(3), 400) == [1] and 300.0 < time.now - began < 300.3


def test_the_first_round_of_local_steps_has_as_much_time_as_its_steps():
  """An orphan's replica is computed after the own one: in a round of 32 steps of 10 s, 320 s after the others."""
  time = Time()
  run = Coordinator(RunRules(2, 1, 2, local_steps=32), clock=time)
  for member in range(2):
    run.hello(member, 0, 1, "address")
    run.ready(member, 0, 0)
  run.restored(0, 0, run.epoch, 0)
  run.joined(1, 0, run.epoch)
  run.computed(0, run.epoch, 320.0)
  assert first_killed(run, time, range(2), 330) == []
