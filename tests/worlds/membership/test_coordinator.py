"""The protocol of membership, in every order of events that a seed can produce."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.worlds.membership.protocol_model import Model

from worlds.membership.coordinator import Coordinator
from worlds.membership.dealing import deal
from worlds.membership.effects import Effects, Kill, Note, Send
from worlds.membership.messages import from_ranges, to_ranges
from worlds.membership.run_rules import RunRules

STEPS = 7
GATHERS = "The member that restores the newest state is lost: waiting for all members."
EVERY_ROUND = [name for n in range(1, STEPS + 1) for name in ([f"step {n}"] + [f"eval {n}"] * (n % 3 == 0))]


def test_an_undisturbed_run_applies_every_round_once():
  model = Model(0)
  assert model.run(faults=0.0) == 0
  assert model.applied == EVERY_ROUND


@pytest.mark.parametrize("total, spares, minimum", [(3, 0, 1), (3, 1, 1), (4, 2, 2), (3, 0, 3), (1, 0, 1), (2, 1, 2)])
def test_no_order_of_faults_loses_or_repeats_a_round(total, spares, minimum):
  kills = leaves = interruptions = 0
  for seed in range(60):
    model = Model(seed, total=total, spares=spares, minimum=minimum, local_steps=seed % 2 == 1)
    code = model.run(faults=(0.005, 0.02, 0.1)[seed % 3])
    assert code == 0, (seed, code)
    assert model.applied == EVERY_ROUND, (seed, model.applied)
    kills += model.kills
    leaves += model.leaves
    interruptions += model.interruptions
  assert kills > 40 and leaves > 20 and interruptions > 1, "the faults did not happen"


def test_a_witness_of_every_step_names_only_members_that_are_wrong():
  """A member is wrong always, in other runs once, in others never. Members die and join meanwhile."""
  outcomes, comparisons = Counter(), 0
  for seed in range(60):
    wrong = {seed % 4} if seed % 3 == 0 else set()
    once = {(seed % 4, 2 + seed % 4)} if seed % 3 == 1 else set()
    model = Model(seed, total=4, steps=12, witness=True, wrong=wrong, wrong_once=once)
    code = model.run(faults=(0.0, 0.01)[seed % 2])
    found = {alarm["outcome"] for alarm in model.alarms}
    named = {member for alarm in model.alarms for member in alarm["members"]}
    assert code == (1 if "undecided" in found else 0), (seed, code, model.alarms)
    assert model.coordinator.failures.excluded.keys() <= (wrong | {member for member, _ in once}), seed
    assert named <= wrong | {member for member, _ in once} or found & {"undecided", "transient"}, (seed, model.alarms)
    assert bool(wrong or once) or not model.alarms, (seed, model.alarms)
    if code == 0:
      assert model.applied[-1] == "eval 12" and len(model.applied) == 16
    outcomes.update(found or {"nothing"})
    comparisons += model.comparisons
  assert outcomes["removed"] > 12 and outcomes["nothing"] > 12 and comparisons > 1200, (outcomes, comparisons)


def test_shares_move_from_a_slow_member_and_back_without_a_round_lost():
  """Member 1 needs twice as long for a share from the first step to step 40."""
  dealings, kills = 0, 0
  for seed in range(8):
    model = Model(seed, steps=80, group=4, slow_until={1: 40})
    assert model.run(faults=0.002 * (seed % 2)) == 0, seed
    assert model.applied[-1] == "step 80" and len(model.applied) == 80 + 80 // 3
    numbers = [
      [len(list(itertools.chain(*(range(*part) for part in own)))) for own in world["ranges"].values()]
      for world in model.worlds.values()
    ]
    dealings += [5, 2, 5] in numbers
    kills += model.kills
    if not model.kills + model.leaves:
      assert numbers == [[4, 4, 4], [5, 2, 5], [4, 4, 4]], (seed, numbers)
  assert dealings > 3 and kills > 1


def test_a_stop_ends_at_one_step_or_in_an_evaluation_with_the_state_saved():
  interruptions = 0
  for seed in range(100):
    model = Model(seed, steps=10**6)
    for _ in range(300 + seed):
      model.event(0.01)
    model.carry_out(model.coordinator.stop())
    assert model.run(faults=0.01, most_faults=20) == 42, seed
    # Nothing that any member has applied is missing in the checkpoint.
    assert model.checkpoint == model.applied, seed
    interruptions += model.interruptions
  assert interruptions > 50


def test_orphaned_shares_go_one_by_one_and_a_returned_member_gets_its_group_back():
  full = deal(64, list(range(8)), 8)
  for lost in range(8):
    rest = deal(64, [member for member in range(8) if member != lost], 8, full)
    assert sorted(map(len, rest.values())) == [9] * 6 + [10]
    for member, own in rest.items():
      assert set(full[member]) <= set(own)
    assert deal(64, list(range(8)), 8, rest) == full


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_no_other_numbers_of_shares_end_much_earlier(members, group, data):
  speeds = {member: data.draw(st.sampled_from((0.3, 0.5, 0.77, 1.0, 1.5))) for member in range(members)}
  dealt = deal(members * group, list(range(members)), group, None, speeds)
  assert sorted(share for own in dealt.values() for share in own) == list(range(members * group))
  ends = [len(own) / speeds[member] for member, own in dealt.items() if len(own) > 1]
  # Nobody could have taken the last share of the slowest and ended before it.
  assert all(max(ends) <= (len(own) + 1) / speeds[member] + 1e-9 for member, own in dealt.items()) if ends else True


class Start:
  """A run of three members that starts after the loss of all. Every member can compute."""

  def __init__(
    self, newest: dict[int, int], *, minimum: int = 1, expected: int | None = None, pause: float = 0.0
  ) -> None:
    """newest: {member: the newest step that it can restore by itself}. pause: RunRules.join_interval."""
    self.now = 0.0
    self.run = Coordinator(RunRules(3, minimum, 3, join_interval=pause), clock=lambda: self.now, expected=expected)
    for member in newest:
      self.run.hello(member, 0, 1, f"address-{member}")
    self.sent: Effects = []
    for member, step in newest.items():
      self.sent = self.ready(member, step)

  def ready(self, member: int, newest: int, holds: bool = False) -> Effects:
    self.run.hello(member, 0, 1, f"address-{member}")
    return self.run.ready(member, 0, newest, holds)

  def wait(self, seconds: float) -> Effects:
    """What the supervisor decides in this time. All members live."""
    effects: Effects = []
    for _ in range(round(10 * seconds)):
      self.now += 0.1
      for member in self.run._members:
        self.run.pulse.beat(member, 0)
      effects += self.run.tick()
    return effects


def lead(effects: Effects) -> tuple[int, list[int]]:
  """(the leader, the members that are told of it)."""
  told = {e.member: e.message for e in effects if isinstance(e, Send) and e.message["kind"] == "lead"}
  (message, *others) = told.values()
  assert all(other == message for other in others)
  return message["leader"], sorted(told)


def test_the_member_with_the_newest_backup_leads():
  start = Start({0: 10, 1: 20, 2: 0})
  assert lead(start.sent) == (1, [0, 1, 2])
  assert start.run.primary == 1  # so that the log has what it restores
  assert start.run.restored(0, 0, start.run.epoch, 10) == []  # it was not asked
  assert start.run.restored(1, 0, start.run.epoch - 1, 20) == []  # an earlier answer
  worlds = start.run.restored(1, 0, start.run.epoch, 25)
  assert [e.message["kind"] for e in worlds] == ["world"] * 3
  assert worlds[0].message["source"] == 1 and worlds[0].message["fresh"] == [0, 2]


def test_a_member_joins_at_once_unless_the_members_have_just_changed():
  """A start with two of three members is no change, and new connections of the same members are none."""
  start = Start({0: 0, 1: 0}, expected=2, pause=30.0)
  run = start.run
  run.restored(0, 0, run.epoch, 0)
  run.joined(1, 0, run.epoch)

  def active_after(step: int) -> set[int]:
    for member in sorted(run.active):
      run.done(member, 0, run.epoch, f"step {step}", 7)
    assert run.committed == f"step {step}"
    return run.active

  assert active_after(1) == {0, 1}
  start.ready(2, 0)
  run.broken(0, run.epoch)
  start.wait(1.2)
  assert active_after(2) == {0, 1, 2}
  run.lost(2, "killed")
  start.ready(2, 0)
  assert active_after(3) == {0, 1}
  start.wait(30.0)
  assert active_after(4) == {0, 1, 2}


@pytest.mark.parametrize(
  ("checksums", "wrong"),
  [
    ({0: 1, 1: 2, 2: 2}, [0]),  # most members, also against the primary
    ({0: 2, 1: 2, 2: 1}, [2]),
    ({0: 1, 1: 2, 2: 3}, [1, 2]),  # the primary, if there are no most
    ({0: 1, 1: 2}, [1]),
  ],
)
def test_members_whose_weights_differ_are_ended_before_the_step_is_committed(checksums, wrong):
  start = Start(dict.fromkeys(checksums, 0), expected=len(checksums))
  run = start.run
  run.restored(0, 0, run.epoch, 0)
  assert run.primary == 0

  def do(step: int, checksums: dict[int, int]) -> Effects:
    return [effect for m, own in checksums.items() for effect in run.done(m, 0, run.epoch, f"step {step}", own)]

  assert {effect.message["kind"] for effect in do(1, dict.fromkeys(checksums, 7))} == {"commit"}
  ended = do(2, checksums)
  assert [effect.member for effect in ended] == wrong and all("'step 2' with other" in kill.reason for kill in ended)
  worlds = [effect for member in wrong for effect in run.lost(member, "ended")]
  right = sorted(checksums.keys() - set(wrong))
  assert sorted(run.active) == right and run.primary == right[0] and worlds[-1].message["kind"] == "world"
  assert run.committed == "step 1"
  assert {effect.message["kind"] for effect in do(2, {m: checksums[m] for m in right})} == {"commit"}


def test_a_leader_that_is_lost_is_waited_for_because_it_has_the_newest_backup():
  start = Start({0: 10, 1: 20, 2: 0})
  assert start.run.lost(1, "killed") == [Note(GATHERS)] and start.run.phase == "gathering"
  assert start.wait(9) == []
  (told,) = start.wait(60)  # people are told once of a long wait
  assert told == Note("Ready members: 2 of 3. The run waits for the others; after 300 s in all, it starts with 1.")
  assert lead(start.ready(1, 20)) == (1, [0, 1, 2])


def test_members_that_received_the_state_at_the_last_moment_go_on_with_it():
  """Members 1 and 2 have received the state of step 7. The source is lost before the supervisor knows."""
  start = Start({0: 0, 1: 0, 2: 0})
  start.run.restored(0, 0, start.run.epoch, 7)
  assert [e.message["kind"] for e in start.run.lost(0, "killed") if isinstance(e, Send)] == ["regather"] * 2
  start.ready(0, 9)  # of an older history: this step was not done again
  start.ready(1, 7, holds=True)
  assert lead(start.ready(2, 7, holds=True))[0] == 1
  (world, *_) = start.run.restored(1, 0, start.run.epoch, 7)
  assert world.message["fresh"] == [0]


@pytest.mark.parametrize("shares", [1, 10, 1000])
def test_ranges_are_the_shares(shares):
  chance = random.Random(shares)
  for _ in range(20):
    chosen = sorted(chance.sample(range(shares), chance.randrange(shares + 1)))
    ranges = to_ranges(chosen)
    assert list(from_ranges(ranges)) == chosen
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(ranges))


def test_a_slow_member_that_returns_gets_a_share_though_the_others_keep_theirs():
  """Found by a history of real processes: it had no share, and ended with a traceback in its first sum."""
  dealt = deal(3, [0, 1, 2], 1, {1: [0, 1], 2: [2]}, {0: 0.05}, keeps=True)
  assert sorted(map(len, dealt.values())) == [1, 1, 1] and dealt[2] == [2]


def test_a_loss_is_told_in_seconds_and_not_as_a_time_of_one_host(monkeypatch):
  monkeypatch.setattr(time, "time", lambda: 3e6)
  now = 0.0
  run = Coordinator(RunRules(2, 1, 2), clock=lambda: now)
  for member in range(2):
    run.hello(member, 0, 1, "")
    run.ready(member, 0, 0)
  run.restored(0, 0, run.epoch, 0)
  run.joined(1, 0, run.epoch)
  now = 100.0
  (world,) = [effect.message for effect in run.lost(1, "killed", 4.0) if effect.message["kind"] == "world"]
  assert world["lost"] == {"1": ["killed", 4.0]}


def test_a_member_that_hangs_after_it_has_connected_is_replaced_once_before_the_run_ends():
  now = 0.0
  run = Coordinator(RunRules(2, 2, 2, timeout=60.0), clock=lambda: now, hang_seconds=1e9)
  kills = lambda effects: [effect.member for effect in effects if isinstance(effect, Kill)]

  def beat_until(end: float) -> Effects:
    nonlocal now
    effects: Effects = []
    while now < end and not effects:
      now += 5.0
      for member in (0, 1):
        run.pulse.beat(member, 0)
      effects = run.tick()
      effects = [effect for effect in effects if not isinstance(effect, Note)]
    return effects

  for member in (0, 1):
    run.hello(member, 0, 1, "address")
  run.ready(0, 0, 0)
  assert kills(beat_until(200.0)) == [1] and now == 65.0 and run.code is None
  run.lost(1, "ended")
  run.hello(1, 0, 1, "address")
  assert not kills(beat_until(200.0)) and now == 130.0 and run.code == 1, "one time is enough"
