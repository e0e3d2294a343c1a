"""Which member is considered hung, and when."""

from __future__ import annotations

from trainer.membership.coordinator import Coordinator, Kill
from trainer.membership.pulse import Pulse


class Time:
  now = 0.0

  def __call__(self) -> float:
    return self.now


def running(time: Time) -> Coordinator:
  """A run of three members that has committed ten steps of one second."""
  run = Coordinator(3, 1, clock=time, timeout=300.0)
  for member in range(3):
    run.hello(member, 0, 1, "address")
  for member in range(3):
    run.ready(member, 0, 0)
  run.restored(0, 0, 0)
  for member in (1, 2):
    run.joined(member, 0, run.epoch)
  for step in range(1, 11):
    time.now += 1.0
    for member in range(3):
      run.pulse.beat(member)
      run.computed(member, run.epoch, 0.5)
    for member in range(3):
      run.done(member, 0, run.epoch, f"step {step}")
  assert run.committed == "step 10"
  return run


def killed(run: Coordinator) -> list[int]:
  return [effect.member for effect in run.tick() if isinstance(effect, Kill)]


def test_only_the_silent_member_is_blamed_for_a_step_that_stands_still():
  time = Time()
  run = running(time)
  for member in (0, 2):
    run.computed(member, run.epoch, 0.5)
  for _ in range(60):  # member 1 is stopped; the others wait for it and give signs of life
    time.now += 0.1
    for member in (0, 2):
      run.pulse.beat(member)
    if dead := killed(run):
      break
  assert dead == [1] and 5.0 < time.now - 10.0 < 5.3


def test_a_member_that_computes_for_ever_is_blamed_although_it_gives_signs_of_life():
  time = Time()
  run = running(time)
  for member in (0, 2):
    run.computed(member, run.epoch, 0.5)
  for _ in range(100):
    time.now += 0.1
    for member in range(3):
      run.pulse.beat(member)
    if dead := killed(run):
      break
  assert dead == [1] and 5.0 < time.now - 10.0 < 5.3


def test_a_member_that_saves_is_waited_for():
  time = Time()
  run = running(time)
  for member in (0, 2):
    run.computed(member, run.epoch, 0.5)
  for _ in range(600):
    time.now += 0.1
    for member in range(3):
      run.pulse.beat(member, "save" if member == 1 else "")
    assert killed(run) == []


def test_slow_steps_have_a_higher_limit():
  time = Time()
  pulse = Pulse(time, hang_seconds=5.0, start_seconds=300.0)
  assert pulse.limit == 300.0
  for _ in range(10):
    time.now += 4.0
    pulse.committed(is_step=True)
  assert pulse.limit == 12.0
