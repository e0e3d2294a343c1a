"""Decides who trains together and what is committed: a state machine without sockets, threads or processes.

The server passes in what happened (a message of a member, a lost member, the time) and carries out the effects that
come back. All rules of the protocol are here, so that a test can try every order of events.

A run has at most `total` active members, among which its shares are dealt out. Active members compute; the others are
ready (spares and members that have returned) or still starting. A member with the state of the run is live. A member
that joins becomes active first and live when it has received the state from a live member (`joined`).

  gathering   no member has the state: wait until enough members are ready
  leading     one member restores the newest state
  running     rounds are computed and committed
  holding     too few members: those that are left keep the state and wait
  over        nothing is committed any more
"""

from __future__ import annotations

from collections import Counter

from worlds.exit_codes import BAD_INPUT, FAILED
from worlds.membership.effects import Effects, Kill, Note, Send, to_all
from worlds.membership.epochs import Epochs, Member, SentState
from worlds.membership.messages import OPENED, message, step_of
from worlds.membership.witness import Witness

_SHORT_WAIT_SECONDS = 10.0  # for members at a start, without a line about it
_SLOW_STEPS = 60  # after which a slow member may be replaced


class Coordinator(Epochs):
  """Epochs, members and commits of one run."""

  @property
  def starting(self) -> set[int]:
    """Connected members that have never been able to compute."""
    members = list(self._members.items())  # another thread may change them
    return {member for member, found in members if not found.ready and not found.was_active}

  # ---- what happens ----

  def hello(self, member: int, lane: int, lanes: int, address: str) -> Effects:
    """A process of `member` has connected."""
    if self.code is not None:
      return [Send(member, message("end", code=self.code, reason=""))]
    if reason := self.failures.excluded.get(member):
      return [Send(member, message("end", code=FAILED, reason=f"The supervisor refuses this process. {reason}"))]
    found = self._members.setdefault(member, Member(lanes, self.clock()))
    if found.lanes != lanes:
      raise ValueError(f"says that member {member} has {lanes} lanes; its other lanes say {found.lanes}")
    found.addresses[lane] = address
    if lane == 0:
      self._dealing.speeds.starts(member, address.rpartition(":")[0])
    self.pulse.beat(member, lane)
    if self.primary < 0:
      self.primary = member
    run_id = f"{OPENED}{self._run_id}" if self._run_id and self.epoch else self._run_id
    return [Send(member, message("welcome", primary=self.primary, run_id=run_id))]

  def ready(self, member: int, lane: int, newest: int, holds: bool = False) -> Effects:
    """`member` can compute. It holds the state of the step `newest`, or can restore it (0: none)."""
    found = self._members.get(member)
    if found is None or not found.add_report(("ready",), lane):
      return []
    found.set_state(newest, holds=holds)
    if self.phase == "gathering":
      return self._gather()
    if self.phase == "holding":
      return self._reform()
    # It joins at the next commit, if a place is free.
    return [_waits(member)] if len(self.active) == self._total else []

  def restored(self, member: int, lane: int, epoch: int, step: int) -> Effects:
    """`member` was asked to lead in this epoch and has the state after `step`."""
    found = self._members.get(member)
    if self.phase != "leading" or found is None or (member, epoch) != (self._leader, self.epoch):
      return []
    if not found.add_report(("restored", epoch), lane):
      return []
    ready = self._ready()
    self.live = {member, *(other for other in ready if ready[other].holds and ready[other].newest == step)}
    # Those that wait may be more than can be active: spares stay ready.
    others = sorted(ready.keys() - {member}, key=lambda m: (m not in self.live, self._preference(m)))
    self.active = {member, *others[: self._total - 1]}
    self.live &= self.active
    return [*map(_waits, sorted(ready.keys() - self.active)), *self._world()]

  def joined(self, member: int, lane: int, epoch: int) -> Effects:
    """`member` has received the state in this epoch."""
    found = self._members.get(member)
    if (
      found is not None and epoch == self.epoch and member in self.active and found.add_report(("joined", epoch), lane)
    ):
      self.live.add(member)
      return self._interrupt()
    return []

  def interruptible(self, member: int, lane: int) -> Effects:
    """`member` begins the next round of all, which may be interrupted: an evaluation, or local steps. Its lane 0 has
    written all records so far, if it is the primary."""
    if lane or member not in self.active or self._interrupted:
      return []
    self._interruptible.add(member)
    return self._interrupt()

  def computed(self, member: int, epoch: int, seconds: float) -> Effects:
    """`member` has computed its shares of the round under way."""
    if epoch == self.epoch and member in self.active:
      self.pulse.computed(member, seconds)
    return []

  def done(self, member: int, lane: int, epoch: int, round_name: str, checksum: int) -> Effects:
    """`member` has the sums of the round in this epoch, and has computed its shares with weights of this checksum. The
    last report of an epoch's round commits it, if all have the same weights."""
    step_of(round_name)  # ValueError before anything changes
    found = self._members.get(member)
    if self.phase != "running" or found is None or epoch != self.epoch or member not in self.active:
      return []
    if self._done and round_name != self._round:
      raise ValueError(f"has done {round_name!r}, and the other members {self._round!r}")
    if not found.add_report(("done", epoch, round_name), lane):
      return []
    self._round = round_name
    self._done[member] = checksum
    self.live.add(member)
    if not self._done.keys() >= self.active:
      return []
    if differing := self._differing():
      return differing
    effects, commits = self._compared()
    return [*effects, *(self._commit(round_name) if commits else [])]

  def _differing(self) -> Effects:
    """Ends the members whose weights differ from the weights of most members. If two groups of members are equally
    large, the primary's group stays."""
    counts = Counter(self._done.values())
    right = self._done[max(self._done, key=lambda m: (counts[self._done[m]], m == self.primary, -m))]
    what = "another state (weights or optimizer)" if self.witness.sums else "other weights"
    reason = f"it has computed {self._round!r} with {what} than the other members"
    return [Kill(member, reason, 0.0) for member in sorted(self._done) if self._done[member] != right]

  def leave(self, member: int) -> Effects:
    """`member` has SIGTERM."""
    found = self._members.get(member)
    if self.phase == "running" and found is not None and found.was_active and member not in self.active:
      return []  # another one of its processes has said so, and it ends by itself
    if member not in self.active:  # it has no work that it could finish
      return [Send(member, message("end", code=42, reason=""))] if member in self._members else []
    if not self._rules.elastic:
      return self.stop()
    self._leaving.add(member)
    return [*(self._world(force=True) if self.phase == "holding" else []), *self._interrupt()]

  def stop(self) -> Effects:
    """The run must end: after the step under way or in the interruptible round under way, with a checkpoint."""
    if self.stopping:
      return []
    self.stopping = True
    if self.phase in ("gathering", "leading"):
      return self._stop_start()
    return [*(self._world(force=True) if self.phase == "holding" else []), *self._interrupt()]

  def _interrupt(self) -> Effects:
    """Ends the interruptible round under way if the run must end, or for the members that leave. All live members have
    the state after the last commit, so no committed step is lost. Not before the primary has begun the round: it may
    still write the records of the last commit, and the next primary would write them too."""
    leaving = self._leaving & self.live
    if self.primary not in self._interruptible or self.phase != "running" or not (self.stopping or leaving):
      return []
    staying = self.live - leaving
    if not self.stopping and not staying and (joiners := self._joiners()):  # they need the state of one that leaves
      self.active |= set(joiners)
      return self._world()
    if not self.stopping and not staying and self.active - self.live:  # they are about to have it
      return []
    if self.stopping or not staying:
      self._interruptible, self._interrupted, self.epoch = set(), True, self.epoch + 1
      self.pulse.begin_epoch()
      fresh = to_all(self.active - self.live, message("end", code=42, reason=""))
      return [*to_all(self.live, message("interrupt", epoch=self.epoch, leave=False)), *fresh]
    effects = to_all(leaving, message("interrupt", epoch=self.epoch + 1, leave=True))
    self._release(leaving)
    return [*effects, *self._world()]

  def finished(self, member: int, code: int) -> Effects:
    """`member` has done everything that it owes, or has found wrong input (code 2)."""
    if code == BAD_INPUT:
      self.failures.refuses(member)
      self._refused.add(member)
      return self.judge() if self._told_of_refusal else []
    if member == self.primary and self.phase != "over" and (code != 42 or self.stopping):
      return self.end(code)
    # A member that leaves, or the last one that was left and got SIGTERM: the run may go on without it.
    return [Send(member, message("end", code=code, reason=""))] if code == 42 and member in self._members else []

  def lost(self, member: int, reason: str, seconds: float = 0.0) -> Effects:
    """The processes of `member` have ended, or must not be waited for, since `seconds`."""
    if self._members.pop(member, None) is None:
      return []
    self.pulse.forget(member)
    self._dealing.speeds.forget(member)
    self._leaving.discard(member)
    self._interruptible.discard(member)
    was_active = member in self.active
    self.active.discard(member)
    self.live.discard(member)
    if member == self.primary:
      self.primary = min(self.live, default=min(self._members, default=-1))
    self._survivors.discard(member)
    self._told_of_refusal |= member in self._refused  # it prints the message before it ends
    self._sent.informed_members.discard(member)
    if self.phase in ("gathering", "leading") and self.stopping:
      return self._stop_start()
    if self.phase == "leading":
      if member == self._leader and member in self._refused and not self.failures.progress:
        return self.end(BAD_INPUT)  # the newest state does not fit: no other leader would do better
      return self._gather_again() if member == self._leader else []
    if self.phase not in ("running", "holding") or not was_active:
      return []
    if not self._rules.elastic and not self.stopping:
      return self.end(1, f"Member {member} is lost ({reason}), and elastic_enabled=false.")
    self._lost[member] = (reason, self.clock() - seconds)
    if self.failures.loses(member) and (ends := self._try_again()):
      return ends
    if not self.live:
      return self._regather()
    return self._reform()

  def judge(self) -> Effects:
    """To be called when a member has ended and `failures` knows it: ends the run if all members would fail again. A run
    that needs all of them, and has done nothing yet, ends with the first one that has wrong input."""
    waiting = self._ready().keys() if self.phase in ("gathering", "leading") else set()  # they may do better
    able = waiting | self.live
    failing = {member: code for member, code in self.failures.failing().items() if member not in able}
    wrong_input = bool(failing) and set(failing.values()) == {BAD_INPUT}
    needs_minimum = not self._rules.elastic or (wrong_input and not self.failures.progress)
    others = max(self._expected, len(self._members.keys() | failing.keys())) - len(failing)
    if others >= (self._minimum if needs_minimum else 1):
      return []
    if wrong_input:
      return self.end(BAD_INPUT)
    names = ", ".join(map(str, sorted(failing)))
    return self.end(FAILED, f"Without a new step, these members have failed again: {names}.")

  def tick(self) -> Effects:
    """To be called several times a second: limits of waits and of silence."""
    if self.phase == "over":
      return []
    effects: Effects = [Kill(*silent) for silent in self.pulse.silent(self._members, self.starting)]
    if self.phase == "running" and not effects:  # a silent member holds up the others, who are not to blame
      effects = [Kill(*stuck) for stuck in self.pulse.stuck(self.active)] or self._reconnect()
    if self.phase == "gathering":
      effects += self._gather() or self._tell_of_wait()
    if self.phase == "holding" and not self.stopping and self._joiners():  # one that was apart may join now
      effects += self._reform()
    if self.phase == "holding" and self.clock() - self._waits_since > self._timeout:
      effects += self._replace_starting() or self.end(1, self._too_few())
    return effects

  # ---- the first epoch ----

  def _gather(self) -> Effects:
    ready, late = self._ready().keys(), self.clock() - self._waits_since > self._timeout
    least = 1 if self.stopping else self._minimum
    if late and len(ready) < least:
      return self._replace_starting() or self.end(1, self._too_few())
    if not late and not self._survivors <= ready:
      return []
    enough = least if late or self.stopping else self._expected
    enough = max(least, enough - len(self.failures.unreliable() - ready))
    return self._lead() if len(ready) >= enough else []

  def _replace_starting(self) -> Effects:
    """Ends members that have connected and are not ready in time, while others are, and waits for them again: each
    once. Such a member lives, and hangs in what its start does, such as reading its data."""
    now = self.clock()
    late = {member: now - self._members[member].since for member in self.starting - self._replaced}
    late = {member: seconds for member, seconds in late.items() if seconds > self._timeout / 2}
    if not late or self.stopping or not (self._ready() or self.active):
      return []
    self._waits_since = now
    self._replaced |= late.keys()
    of = sorted(late.items())
    return [Kill(member, f"not ready {seconds:.0f} s after it connected", seconds) for member, seconds in of]

  def _tell_of_wait(self) -> Effects:
    """A line, once, about members that are waited for while others are ready."""
    ready, now = len(self._ready()), self.clock()
    if not ready:
      self._ready_since = None
    elif self._ready_since is None:
      self._ready_since = now
    elif now - self._ready_since > _SHORT_WAIT_SECONDS:
      self._ready_since = float("inf")
      then = f"it starts with {self._minimum}" if self._minimum < self._expected else "it ends with an error"
      what = f"Ready members: {ready} of {self._expected}. The run waits for the others"
      return [Note(f"{what}; after {self._timeout:g} s in all, {then}.")]
    return []

  def _lead(self) -> Effects:
    """Asks one member to restore the newest state."""
    self.phase, self.epoch, self._refused = "leading", self.epoch + 1, set()
    ready = self._ready()
    # A state in memory needs no backup. With equal backups the primary leads, because it holds the records.
    leader = max(ready, key=lambda m: (ready[m].holds, ready[m].newest, m == self.primary, -m))
    self._leader = self.primary = leader  # so the log says what is restored, and what is damaged
    return to_all(ready, message("lead", epoch=self.epoch, leader=leader))

  def _gather_again(self) -> Effects:
    """The leader is lost: waits for all members again, because only its host may have the newest state."""
    self.phase, self._waits_since, self._leader = "gathering", self.clock(), -1
    if ends := self._try_again():
      return ends
    return [Note("The member that restores the newest state is lost: waiting for all members."), *self._gather()]

  def _regather(self) -> Effects:
    """No member is known to have the state: starts from the backups, or from a state that has just arrived."""
    self.phase, self._waits_since = "gathering", self.clock()
    self._survivors, self._expected = self.active, self._total
    self.active, self.live, self._done, self._leaving = set(), set(), {}, set()
    self._sent = SentState()
    self.witness = Witness(agreed=self.witness.agreed, numerics=self.witness.numerics)
    self._interruptible, self._interrupted = set(), False
    for member in self._survivors:
      self._members[member].set_state(-1, holds=False)
    note = Note("Every member with the state is lost: the run continues from the newest backup.")
    asked = to_all(self._survivors, message("regather"))
    return [note, *asked, *(self._stop_start() if self.stopping else self._gather())]

  def _stop_start(self) -> Effects:
    """The run must end before a member has restored the state: at once, unless a survivor may have to save it."""
    if not self._survivors:
      return self.end(42)
    return self._gather() if self.phase == "gathering" else []

  # ---- changes of the members ----

  def _reform(self) -> Effects:
    """A new epoch after a loss, or after a member became ready while the run holds."""
    if not self.stopping:
      self.active |= set(self._joiners())
    return [*self._world(), *self._interrupt()]

  def _commit(self, round_name: str) -> Effects:
    step = step_of(round_name)
    seconds = self.pulse.committed(is_step=step is not None)
    self.committed, self._done, self._stood_still, self._interruptible = round_name, {}, False, set()
    self.witness.committed(round_name)
    self.failures.committed(round_name, self.active)
    for member in self.active:
      self._apart.pop(member, None)
    staying = self.live - self._leaving
    alone = bool(self._leaving) and not staying and not self._joiners()
    stop = step is not None and (self.stopping or alone)
    leave = sorted(self._leaving) if step is not None and staying and not stop else []
    epoch, active, primary = self.epoch, sorted(self.active), self.primary
    follows = [] if stop else self._change_after(step, seconds, leave)
    self._committed_epoch = epoch
    committed = message(
      "commit", epoch=epoch, round=round_name, stop=stop, leave=leave, changes=self.epoch > epoch, seconds={}
    )
    recorded = committed | {"seconds": seconds}  # the primary writes the records
    return [*(Send(member, recorded if member == primary else committed) for member in active), *follows]

  def _change_after(self, step: int | None, seconds: dict[str, float], leave: list[int]) -> Effects:
    """What follows a commit: slow members are named, some leave, others join, and shares move."""
    effects = [] if step is None else self._follow_speeds(step, seconds)
    joins = self.clock() - self._changed_at >= self._rules.join_interval or bool(self._leaving)
    joiners = self._joiners() if joins else []
    if not leave and not joiners:
      return effects + self._deal_again()
    self._source = max(self.live - self._leaving or self.live)  # sends its state to the joiners: it has this round
    self._release(leave)
    self.active |= set(joiners)
    return effects + self._world(keeps=False)

  def _follow_speeds(self, step: int, seconds: dict[str, float]) -> Effects:
    """Tells of members that have become slow, or are no longer slow, and ends one that is too slow if another waits."""
    of_members = {int(member): took for member, took in seconds.items()}
    in_turns = self._committed_epoch == self.epoch  # of the commit before this one
    effects = self._tell_slow(self._dealing.computed(step, of_members, in_turns=in_turns))
    limit, speeds = self._rules.slow_factor, self._dealing.speeds
    for slow in speeds.slow if limit else ():
      is_slow = min(slow.factor, speeds.newest_factor(slow.member)) >= limit
      if is_slow and step - slow.since >= _SLOW_STEPS and self._spare_waits(limit):
        reason = f"it computes a share in {slow.factor:.2f} times the median since step {slow.since}, and a spare waits"
        return [*effects, Kill(slow.member, reason, 0.0)]
    return effects

  def _deal_again(self) -> Effects:
    """Moves shares to faster members, if that is worth a new epoch."""
    if not self._dealing.better():
      return []
    self._dealing.speeds.dealt()
    return [Note("Work moves between members, because their speeds have changed."), *self._world(keeps=False)]

  def _too_few(self) -> str:
    ready = sum(found.ready for found in self._members.values())
    reasons = sorted(self.failures.excluded.items())
    excluded = "".join(f" Member {member} may not return: {why}" for member, why in reasons)
    return (
      f"waited {self._timeout:g} s for {self._minimum} members; only {max(ready, len(self.active))} are there."
      f"{excluded} Raise elastic_timeout_seconds, or lower elastic_min_slice_count."
    )


def _waits(member: int) -> Note:
  return Note(f"Member {member} is ready and waits as a spare.")
