"""A model of a run: the real coordinator, members as the protocol sees them, and a scheduler that orders events.

A member computes rounds "step N", and "eval N" after every third step. An exchange completes for a member once every
member of its epoch has computed the round in this epoch. Messages between a member and the supervisor keep their order;
everything else happens in an order that a seed determines: kills, SIGTERM, restarts, and the speed of every member.
The primary records a committed round before the next one; a new primary records what is missing. With a witness, every
step compares one share, and some members compute wrong sums.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effects, Kill, Note, Send
from worlds.membership.messages import change, from_ranges
from worlds.membership.run_rules import RunRules
from worlds.membership.witness import draw

EVAL_PERIOD = 3


@dataclass
class Member:
  """One life of a member. `history` is its state: the rounds that are applied to it."""

  id: int
  newest: int  # the step of its own backup
  inbox: deque[dict[str, Any]] = field(default_factory=deque)  # from the supervisor
  outbox: deque[dict[str, Any]] = field(default_factory=deque)  # to the supervisor
  history: list[str] | None = None
  world: dict[str, Any] | None = None
  mode: str = "starting"  # starting, waiting, receiving, computing, exchanging, undecided, ended
  before: list[str] | None = None  # its state when another one is sent to it
  led: bool = False  # the state is from a backup, and nobody has trained on it yet
  stop: bool = False
  told: str = ""  # the evaluation that it has told of
  unrecorded: list[str] = field(default_factory=list)  # committed rounds whose records it will write if it is primary
  check: dict[str, Any] = field(default_factory=dict)  # the last message of this kind
  sums: dict[tuple[str, int], int] = field(default_factory=dict)  # by round and `since`
  exit: int | None = None

  @property
  def step(self) -> int:
    assert self.history is not None
    return max((int(name.split()[1]) for name in self.history if name.startswith("step")), default=0)

  @property
  def round(self) -> str:
    """The next round."""
    step = self.step
    if step and step % EVAL_PERIOD == 0 and f"eval {step}" not in (self.history or []):
      return f"eval {step}"
    return f"step {step + 1}"

  def say(self, kind: str, **fields: Any) -> None:
    self.outbox.append({"kind": kind, **fields})


class Model:
  """One run of `steps` steps with random events."""

  def __init__(
    self,
    seed: int,
    *,
    total: int = 3,
    spares: int = 0,
    minimum: int = 1,
    steps: int = 7,
    group: int = 1,
    slow_until: dict[int, int] | None = None,
    witness: bool = False,
    local_steps: bool = False,
    wrong: Collection[int] = (),
    wrong_once: Collection[tuple[int, int]] = (),
  ) -> None:
    """slow_until: {member: the step up to which it needs twice as long for a share}. local_steps: a step may be
    interrupted, as an evaluation. wrong: members whose sums are always wrong. wrong_once: (member, step) of sums that
    are right when they are computed again."""
    self.interruptible = ("eval", "step") if local_steps else ("eval",)
    self.witness, self.wrong, self.wrong_once = witness, set(wrong), set(wrong_once)
    self.alarms: list[dict[str, Any]] = []  # as each member got them
    self.comparisons = 0
    self.random = random.Random(seed)
    self.now = 0.0
    self.steps = steps
    rules = RunRules(total, minimum, total * group, timeout=1e9)
    self.slow_until = slow_until or {}
    self.coordinator = Coordinator(rules, clock=lambda: self.now, hang_seconds=1e9)
    self.members: dict[int, Member] = {}
    self.backup = 0  # the step of the newest checkpoint in storage
    self.checkpoint: list[str] = []
    self.computed: dict[tuple[int, str], set[int]] = {}  # (epoch, round): members whose data are on the way
    self.states: dict[tuple[int, int], list[str]] = {}  # (epoch, member): state that was sent to it
    self.applied: list[str] = []  # the longest history of any member
    self.recorded: list[str] = []
    self.worlds: dict[int, dict[str, Any]] = {}  # by epoch, as the first member knew it
    self.shares = total * group
    self.losses_of_all = 0  # how often no member with a state was left
    self.kills = self.leaves = self.interruptions = 0
    for i in range(total + spares):
      self.start(i)

  # ---- processes ----

  def start(self, member: int) -> None:
    self.members[member] = Member(member, self.backup)
    self.carry_out(self.coordinator.hello(member, 0, 1, f"address-{member}"))

  def kill(self, member: int) -> None:
    dead = self.members.pop(member)
    dead.mode = "ended"
    had_state = any(m.history is not None for m in [dead, *self.members.values()])
    self.carry_out(self.coordinator.lost(member, "killed"))
    if had_state and not any(m.history is not None for m in self.members.values()):
      self.losses_of_all += 1
      self.applied = list(self.checkpoint)
      self.recorded = [name for name in self.recorded if name in self.checkpoint]

  def carry_out(self, effects: Effects) -> None:
    for effect in effects:
      if isinstance(effect, Kill):  # members with different states must never do the same round
        assert effect.member in self.coordinator.failures.excluded, effect
      if isinstance(effect, Send) and effect.member in self.members:
        self.members[effect.member].inbox.append(effect.message)
      assert isinstance(effect, Send | Note | Kill)
    for effect in effects:
      if isinstance(effect, Kill):
        self.kill(effect.member)

  # ---- one event ----

  def supervise(self, member: Member) -> None:
    """The supervisor reads the next message of the member."""
    received = member.outbox.popleft()
    run, i = self.coordinator, member.id
    if received["kind"] == "ready":
      self.carry_out(run.ready(i, 0, received["newest"], received["holds"]))
    elif received["kind"] == "restored":
      self.carry_out(run.restored(i, 0, received["epoch"], received["step"]))
    elif received["kind"] == "joined":
      self.carry_out(run.joined(i, 0, received["epoch"]))
    elif received["kind"] == "computed":
      shares = [share for ranges in (member.world or {})["ranges"][str(i)] for share in range(*ranges)]
      slow = int(received["round"].split()[1]) <= self.slow_until.get(i, 0)
      self.carry_out(run.computed(i, received["epoch"], len(shares) * (2.0 if slow else 1.0)))
    elif received["kind"] == "done":
      self.carry_out(run.done(i, 0, received["epoch"], received["round"], received["checksum"]))
    elif received["kind"] == "device":
      self.carry_out(run.device(i, received["where"], received["numerics"]))
    elif received["kind"] == "witness":
      self.carry_out(run.witnessed(i, received["epoch"], received["sums"]))
      self.comparisons += 1
    elif received["kind"] == "interruptible":
      self.carry_out(run.interruptible(i, 0))
    elif received["kind"] == "leave":
      self.carry_out(run.leave(i))
    elif received["kind"] == "finished":
      self.carry_out(run.finished(i, received["code"]))

  def act(self, member: Member) -> None:
    """The member does the next thing that it can do. It looks at its messages where the program does."""
    if member.mode == "starting":
      if self.witness:
        member.say("device", where=f"host {member.id}", numerics="chip")
      member.say("ready", newest=member.newest, holds=member.history is not None)
      member.mode = "waiting"
    elif member.mode == "receiving":
      assert member.world is not None
      state = self.states.get((member.world["epoch"], member.id))
      if member.inbox:
        self.read(member)
      elif state is not None:
        member.history = list(state)
        assert member.before in (None, state), "a member that trains must have the state that is sent to it"
        member.say("joined", epoch=member.world["epoch"])
        member.mode = "computing"
    elif member.mode == "computing":
      assert member.world is not None
      if member.unrecorded:
        self.record(member)
        return
      if member.inbox:
        self.read(member)
        return
      if member.round.startswith(self.interruptible) and member.told != member.round:
        member.told = member.round
        member.say("interruptible")
        return
      epoch = member.world["epoch"]
      member.say("computed", epoch=epoch, round=member.round)
      self.computed.setdefault((epoch, member.round), set()).add(member.id)
      member.mode = "exchanging"
    elif member.mode == "exchanging":
      assert member.world is not None
      epoch = member.world["epoch"]
      if self.computed[epoch, member.round] >= {int(i) for i in member.world["members"]}:
        if self.witness and member.round.startswith("step"):
          self.compare(member, epoch)
        checksum = zlib.crc32(repr(member.history).encode())
        member.say("done", epoch=epoch, round=member.round, checksum=checksum)
        member.mode = "undecided"
      elif member.inbox:
        self.read(member)
    elif member.mode in ("undecided", "waiting") and member.inbox:
      self.read(member)

  def compare(self, member: Member, epoch: int) -> None:
    """The member computes the share of the witness, if it is drawn or asked, or owns the share now."""
    assert member.world is not None
    dealt = {int(i): from_ranges(ranges) for i, ranges in member.world["ranges"].items()}
    check = member.check if member.check.get("epoch") == epoch else {"asked": [], "since": 0}
    drawn = draw(1, member.step, dealt)
    if member.id not in (check["asked"] or drawn.members) and drawn.share not in dealt[member.id]:
      return
    step = int(member.round.split()[1])
    if (member.round, check["since"]) not in member.sums:
      again = check["since"] > 0
      wrong = member.id in self.wrong or (not again and (member.id, step) in self.wrong_once)
      member.sums[member.round, check["since"]] = member.id + 1 if wrong else 0
    sums = {"w": [member.sums[member.round, check["since"]], 0], f"share {drawn.share}": [step, 0]}
    member.say("witness", epoch=epoch, round=member.round, sums=sums)

  def read(self, member: Member) -> None:
    """The member handles the supervisor's next message."""
    received = member.inbox.popleft()
    kind = received["kind"]
    if kind == "lead":
      if received["leader"] == member.id:
        if member.history is None:
          member.history = list(self.checkpoint)
          member.led = True
        member.say("restored", epoch=received["epoch"], step=member.step)
      elif member.led:
        member.history, member.led = None, False
    elif kind == "check":
      member.check = received
    elif kind == "alarm":
      self.alarms.append(received)
      assert received["outcome"] != "removed" or received["primary"] not in received["members"], received
    elif kind in ("world", "hold"):
      before, member.world = member.world or {"epoch": 0, "members": {}, "ranges": {}}, dict(received)
      assert received["base"] in (0, before["epoch"]), (received, before)
      for name in ("members", "ranges"):
        member.world[name] = change(before[name], received, name)
      self.check_world(member.world)
      if before.get("primary") != member.id == member.world["primary"]:
        known = {*self.recorded, *member.unrecorded}
        self.recorded += [name for name in member.history or () if name not in known]
      if kind == "hold":
        member.mode = "waiting"
        return
      epoch = received["epoch"]
      fresh = member.id in received["fresh"]
      if not fresh and member.history is not None and received["source"] == member.id:
        for other in received["fresh"]:
          self.states[epoch, other] = list(member.history)
      if fresh:  # it may have the state already: then its report of that was on the way
        member.before, member.history = None if member.led else member.history, None
      member.led = False
      member.mode = "receiving" if fresh else "computing"
      if not fresh:
        assert member.history is not None, "a live member has no state"
        self.finish_if_complete(member)
    elif kind == "commit":
      assert member.history is not None
      assert member.mode == "undecided" and received["round"] == member.round, (received, member)
      member.unrecorded.append(member.round)
      member.history.append(member.round)
      member.check |= {"asked": [], "since": 0}
      self.check(member)
      member.mode = "computing"
      if member.id in received["leave"]:
        self.leave(member)
      elif received["stop"]:
        member.stop = True
        self.finish(member, 42)
      else:
        self.finish_if_complete(member)
    elif kind == "interrupt":
      assert member.history is not None and member.round.startswith(self.interruptible), (received, member)
      self.interruptions += 1
      if received["leave"]:
        self.leave(member)
      elif not member.stop:
        member.stop = True
        self.finish(member, 42)
    elif kind == "regather":
      member.newest, member.mode = self.backup if member.history is None else member.step, "starting"
    elif kind == "end":
      member.exit, member.mode = received["code"], "ended"
      del self.members[member.id]
      self.carry_out(self.coordinator.lost(member.id, "ended"))

  def check_world(self, world: dict[str, Any]) -> None:
    """Members that have heard of different changes know the same members and shares."""
    first = self.worlds.setdefault(world["epoch"], world)
    if world["kind"] == "world":
      shares = [share for ranges in world["ranges"].values() for share in from_ranges(ranges)]
      assert sorted(shares) == list(range(self.shares)) and world["ranges"].keys() == world["members"].keys(), world
      assert (world["members"], world["ranges"]) == (first["members"], first["ranges"]), (world, first)
    assert world["members"].keys() == first["members"].keys(), (world, first)

  def record(self, member: Member) -> None:
    """The member writes what it has not recorded, if it is the primary as far as it knows."""
    assert member.world is not None
    if member.world["primary"] == member.id:
      assert not {*self.recorded} & {*member.unrecorded}, (member, self.recorded)
      self.recorded += member.unrecorded
    member.unrecorded = []

  def leave(self, member: Member) -> None:
    member.say("finished", code=42)
    member.mode, member.history = "waiting", None

  def finish_if_complete(self, member: Member) -> None:
    if member.stop:
      self.finish(member, 42)
    elif member.step >= self.steps and not member.round.startswith("eval"):
      self.finish(member, 0)

  def finish(self, member: Member, code: int) -> None:
    """The last step is done. The primary saves; the others wait for its end, or for their turn to be primary."""
    assert member.world is not None
    self.record(member)
    member.mode = "waiting"
    if member.world["primary"] == member.id:
      self.save(member)
      member.say("finished", code=code)

  def save(self, member: Member) -> None:
    if member.history is not None and member.step >= self.backup:
      self.backup, self.checkpoint = member.step, list(member.history)

  def check(self, member: Member) -> None:
    """The member's state is a prefix of every other state, or the other way around."""
    history = member.history or []
    assert len(set(history)) == len(history), f"a round was applied twice: {history}"
    shorter = min(len(history), len(self.applied))
    assert history[:shorter] == self.applied[:shorter], (history, self.applied)
    if len(history) > len(self.applied):
      assert len(history) == len(self.applied) + 1, "a member skipped a round"
      self.applied = list(history)

  # ---- the run ----

  def run(self, *, faults: float, most_faults: int = 12) -> int:
    """Runs to the end and returns the exit code. faults: probability of a fault per event."""
    for _ in range(200_000):
      if self.coordinator.phase == "over" and all(not m.inbox for m in self.members.values()):
        assert self.coordinator.code is not None
        return self.coordinator.code
      self.now += 1.0
      self.event(faults if self.kills + self.leaves < most_faults else 0.0)
    raise AssertionError(f"no progress: {self.coordinator.phase}, {self.members}")

  def event(self, faults: float) -> None:
    alive = list(self.members)
    if alive and self.random.random() < faults:
      member = self.random.choice(alive)
      if self.random.random() < 0.7:
        self.kills += 1
        self.kill(member)
      else:
        self.leaves += 1
        self.members[member].say("leave")
      return
    excluded = self.coordinator.failures.excluded
    missing = [i for i in range(self.coordinator._total) if i not in self.members and i not in excluded]
    if missing and self.coordinator.phase != "over" and self.random.random() < 0.05:
      self.start(self.random.choice(missing))
    if not alive:
      return
    member = self.members[self.random.choice(alive)]
    if member.outbox and self.random.random() < 0.5:
      self.supervise(member)
    else:
      self.act(member)
    if member.history is not None and member.step % 2 == 0 and self.random.random() < 0.1:
      self.save(member)
