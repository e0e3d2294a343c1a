"""Members that fail: how long they stay away, and when the run ends because of them."""

from __future__ import annotations

import signal

import pytest

from worlds.exit_codes import BAD_INPUT, FAILED
from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effects, Note, Send
from worlds.membership.failures import PROGRESS
from worlds.membership.run_rules import RunRules

ABORTED, KILLED = -signal.SIGABRT, -signal.SIGKILL


class Run:
  """A coordinator, and members that connect and do rounds."""

  def __init__(self, *, members: int = 3, elastic: bool = True, minimum: int = 1, attempts: int = 10) -> None:
    self.now, self.step = 0.0, 0
    rules = RunRules(3, minimum, 3, elastic=elastic, attempts=attempts)
    self.run = Coordinator(rules, clock=lambda: self.now)
    self.effects: Effects = []
    for member in range(members):
      self.join(member)

  def do(self, effects: Effects) -> Effects:
    """Also carries out what a leader is asked for."""
    self.effects += effects
    for effect in effects:
      if isinstance(effect, Send) and effect.message["kind"] == "lead" and effect.message["leader"] == effect.member:
        self.do(self.run.restored(effect.member, 0, effect.message["epoch"], self.step))
    return effects

  def join(self, member: int) -> None:
    self.do(self.run.hello(member, 0, 1, f"address-{member}"))
    self.do(self.run.ready(member, 0, self.step))

  def commit(self, steps: int = 1) -> None:
    for _ in range(steps):
      self.step += 1
      for member in sorted(self.run.active):
        self.do(self.run.done(member, 0, self.run.epoch, f"step {self.step}", 0))
      assert self.run.committed == f"step {self.step}"

  def end(self, member: int, code: int, host: str = "host") -> float:
    """The member's process ends. Returns the pause until its next start."""
    self.do(self.run.lost(member, f"ended with {code}"))
    if self.run.code is not None:
      return 0.0
    _, pause = self.run.failures.ended(member, code, host, waits=self.run.phase != "running")
    self.do(self.run.judge())
    return pause

  @property
  def reason(self) -> str:
    return next(effect.text for effect in reversed(self.effects) if isinstance(effect, Note))


@pytest.mark.parametrize("code", [ABORTED, FAILED, BAD_INPUT, KILLED])
def test_a_member_that_fails_alone_stays_away_for_growing_times_and_the_run_goes_on(code):
  run = Run()
  run.commit()
  pauses = []
  for _ in range(12):
    pauses.append(run.end(2, code))
    run.commit(PROGRESS)  # of the others: no progress of member 2
  assert pauses[:5] == [0.5, 1, 2, 4, 8] and pauses[-2:] == [300, 300]
  assert run.run.code is None and run.run.active == {0, 1} and run.run.failures.attempt == 1


def test_only_the_progress_of_the_member_itself_ends_its_pauses():
  run = Run()
  for pause in (0.5, 1.0, 2.0):
    run.commit()  # it dies again after each first step
    assert run.end(2, KILLED) == pause
    run.join(2)
  run.commit(PROGRESS - 1)
  assert run.run.active == {0, 1, 2} and run.end(2, KILLED) == 4.0
  run.join(2)
  run.commit(1 + PROGRESS)  # it joins after the first one
  assert run.end(2, KILLED) == 0.5 and run.end(2, KILLED) == 1.0
  assert run.end(2, KILLED, host="another") == 0.5  # an agent has moved


def test_an_error_that_follows_the_work_ends_the_run_when_it_is_repeated():
  run = Run()
  run.commit(20)
  for member in range(3):  # the shares go from one to the next, and the error with them
    run.end(member, FAILED)
  run.step = 10  # of the newest checkpoint: steps that are done again are no progress
  for member in range(3):
    run.join(member)
  run.commit(10)
  assert run.run.code is None
  for member in range(3):
    run.end(member, FAILED)
  assert run.run.code == FAILED and run.reason == "Without a new step, these members have failed again: 0, 1, 2."


@pytest.mark.parametrize(
  ("codes", "elastic", "minimum", "code"),
  [
    ({0: [FAILED, ABORTED], 1: [FAILED] * 2, 2: [FAILED] * 2}, True, 1, FAILED),
    ({0: [2], 1: [2], 2: [2]}, True, 1, BAD_INPUT),
    ({0: [2] * 9, 1: [FAILED] * 9}, True, 1, None),  # the last one may work
    ({0: [2]}, True, 3, BAD_INPUT),  # it cannot be done without
    ({0: [FAILED] * 9, 1: [FAILED] * 9}, True, 3, None),  # elastic_timeout_seconds is the limit
    ({0: [FAILED] * 2}, False, 3, FAILED),
    ({0: [KILLED] * 9, 1: [KILLED] * 9, 2: [KILLED] * 9}, True, 1, None),
  ],
)
def test_failures_at_the_start_end_the_run_if_no_member_is_left_to_work(codes, elastic, minimum, code):
  run = Run(members=0, elastic=elastic, minimum=minimum)
  for member, own in codes.items():
    for one in own:
      assert run.run.code is None
      run.do(run.run.hello(member, 0, 1, ""))
      run.end(member, one)
  assert run.run.code == code


@pytest.mark.parametrize(("code", "ends"), [(BAD_INPUT, True), (KILLED, False)])
def test_a_state_that_does_not_fit_is_refused_once_and_not_by_each_member_in_turn(code, ends):
  run = Run(members=0)
  for member in range(3):
    run.run.hello(member, 0, 1, "")
    run.run.ready(member, 0, 7)
  assert run.run.phase == "leading"
  if code == BAD_INPUT:
    run.run.finished(0, BAD_INPUT)
  assert run.run.code is None, "it prints the message before it ends"
  run.run.lost(0, f"ended with {code}")
  assert run.run.phase == ("over" if ends else "gathering") and (run.run.code == BAD_INPUT) == ends


def test_one_refusal_is_printed_although_the_members_start_far_apart():
  """The first member has printed it and has ended. The second one only has to say that it refuses as well."""
  run = Run(members=0, minimum=2)
  run.run.hello(2, 0, 1, "")
  run.run.finished(2, BAD_INPUT)
  run.end(2, BAD_INPUT)
  run.run.hello(2, 0, 1, "")  # started again
  run.run.hello(0, 0, 1, "")
  assert run.run.code is None  # two are left, and may do better
  run.run.finished(0, BAD_INPUT)
  assert run.run.code == BAD_INPUT


def lose_and_return(run: Run, members: list[int], steps: int) -> None:
  for member in members:
    run.end(member, KILLED)
    run.join(member)
    run.commit(steps)


def test_attempts_of_a_run_that_needs_all_members_are_limited():
  run = Run(minimum=3, attempts=3)
  run.commit()
  lose_and_return(run, [0, 1, 2] * 4, PROGRESS)
  assert run.run.failures.attempt == 1
  lose_and_return(run, [2, 2], PROGRESS - 1)
  assert run.run.failures.attempt == 3 and run.run.code is None
  run.end(2, KILLED)
  assert run.run.code == FAILED and "elastic_max_retries=3: so many" in run.reason
