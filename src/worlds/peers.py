"""The members of the run as this one sees them: who computes what in this epoch, and what is committed.

The stepper asks `Peers` before and after every exchange. Messages of the supervisor are handled in their order, in the
training thread; a blocked exchange is interrupted as soon as the members change.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from worlds.exchange import Exchange, PeerLost, Unreachable
from worlds.membership.client import Membership, SupervisorLost
from worlds.membership.messages import OPENED, Message, change, from_ranges

_END_SECONDS = 10.0  # how long a process that is done waits for the supervisor's answer


class MembershipChanged(Exception):
  """The exchange must be repeated with other members. The sums in hand stay valid."""


class RunEnded(Exception):
  """The supervisor has ended the run while this member waited or computed."""

  def __init__(self, code: int, reason: str) -> None:
    super().__init__(reason)
    self.code = code


@dataclasses.dataclass(frozen=True)
class Change:
  """Members that were lost ({member: (reason, seconds ago)}) and that have joined, and those that compute now."""

  epoch: int
  lost: dict[int, tuple[str, float]]
  joined: tuple[int, ...]
  members: tuple[int, ...]
  before: int  # how many computed before
  holds: bool  # too few members: the run waits
  attempt: int  # see RunRules.attempts


class Peers:
  """This process among the members of the run."""

  def __init__(
    self, membership: Membership, exchange: Exchange, lane: int, supervisor_lives: Callable[[], bool] = lambda: False
  ) -> None:
    """supervisor_lives: asked when the connection to it has ended."""
    self.member = membership.member
    self.membership, self.exchange = membership, exchange
    self.lane = lane
    self.epoch = self.committed_epoch = 0  # the present one, and the epoch of the last commit
    self.members: tuple[int, ...] = ()  # that compute in this epoch
    self.dealt: dict[int, tuple[int, ...]] = {}  # {member: its shares}
    self.slow_steps: dict[int, int] = {}  # see dealing.turns
    self.fresh: tuple[int, ...] = ()  # members that have no state yet
    self.source = -1  # the member that sends them the state
    self.primary = -1
    self.run_id = ""  # of the run, if its folder does not exist yet
    self.check: Message = {}  # the last message `check`, of the witness, whose epoch has begun
    self._next_check: Message = {}
    self.begun = False  # other members have opened the run's folder
    self.stopping = False  # the last commit ends the run, or the round after it was interrupted
    self.interrupted = False  # the round under way ends without a result: the run ends, or this member has left
    self.left = False  # the run goes on without this member
    self.ended: int | None = None  # the exit code of the run, once the supervisor has ended it
    self._completed: Callable[[], int] = lambda: 0  # of `train`
    self._changed: Callable[[Change], None] = lambda change: None
    self._noticed: Callable[[Message], None] = lambda notice: None
    self.on_role: list[Callable[[bool], None]] = []  # called when this process becomes the primary, or is it no more
    self.addresses: dict[int, str] = {}  # of the members' exchanges
    self.supervisor_lives = supervisor_lives
    self._lanes: dict[str, list[str]] = {}  # {member: the addresses of its lanes}, of the last `world` or `hold`
    self._ranges: dict[str, list[list[int]]] = {}  # its shares
    self._holds = False
    self._connected = False  # the exchange is connected for this epoch
    self._changes = False  # the next epoch follows the last commit
    self._role = False  # is_primary when on_role was called last

  @property
  def is_primary(self) -> bool:
    """Whether this process writes the run's records and persistent checkpoints."""
    return self.primary == self.member and self.lane == 0 and not self.left

  @property
  def saves_in_storage(self) -> bool:
    """Whether this member, with all its lanes, writes the persistent checkpoints."""
    return self.primary == self.member and not self.left

  @property
  def is_fresh(self) -> bool:
    """Whether this member must receive the state before it computes."""
    return self.member in self.fresh

  @property
  def shares(self) -> tuple[int, ...]:
    """The shares that this member computes."""
    return self.dealt.get(self.member, ())

  def train(
    self, completed: Callable[[], int], changed: Callable[[Change], None], noticed: Callable[[Message], None]
  ) -> None:
    """This member has a state. completed(): its step. changed: gets every change of the members; noticed: every message
    `failing`, `slow` or `alarm`."""
    self._completed, self._changed, self._noticed = completed, changed, noticed

  # ---- the supervisor's messages ----

  def handle(self, received: Message) -> None:
    """Carries out one message. Raises RunEnded."""
    kind = received["kind"]
    if kind == "welcome":
      self.begun, self.run_id = received["run_id"].startswith(OPENED), received["run_id"].removeprefix(OPENED)
      self.set_primary(int(received["primary"]))
    elif kind in ("world", "hold"):
      self._change_world(received)
    elif kind == "commit":
      self.committed_epoch = int(received["epoch"])
      self.stopping = bool(received["stop"])
      self.left = self.member in received["leave"]
      self._changes = bool(received["changes"])
      self.check |= {"asked": [], "since": 0}  # both are about the round that is over
      self._announce_role()
    elif kind == "interrupt":
      self.interrupted = True
      self.left, self.stopping = bool(received["leave"]), not received["leave"]
      self._announce_role()
    elif kind == "regather":  # this member has received the state at the last moment
      self._connected, self._holds = False, True
      self.membership.send("ready", newest=self._completed(), holds=True)
    elif kind == "check":
      self._next_check = received
    elif kind in ("failing", "slow", "alarm"):
      if kind == "alarm":
        self.set_primary(int(received["primary"]))  # first: it records the alarm
      self._noticed(received)
    elif kind == "lead":
      self.set_primary(int(received["leader"]))
      if self.primary == self.member:
        self.membership.send("restored", epoch=received["epoch"], step=self._completed())
    elif kind == "end":
      self.ended = int(received["code"])
      raise RunEnded(self.ended, received.get("reason", ""))

  def _change_world(self, received: Message) -> None:
    before = frozenset(self.members)
    assert received["base"] in (0, self.epoch), f"{received} after epoch {self.epoch}"
    self.epoch = int(received["epoch"])
    if self._next_check.get("epoch") == self.epoch:
      self.check = self._next_check
    self._lanes = change(self._lanes, received, "members")
    self._ranges = change(self._ranges, received, "ranges")
    self.members = tuple(sorted(map(int, self._lanes)))
    now = time.monotonic()
    lost = {int(member): (why, now - at) for member, (why, at) in received["lost"].items()}
    holds = received["kind"] == "hold"
    if not holds:
      self.addresses = self.of_this_lane(self._lanes)
      self.dealt = {int(member): from_ranges(ranges) for member, ranges in self._ranges.items()}
      self.slow_steps = {int(member): steps for member, steps in received["slow_steps"].items()}
      self.fresh, self.source = tuple(received["fresh"]), int(received["source"])
    self._connected, self._holds, self._changes = False, holds, False
    self.set_primary(int(received["primary"]))  # first: the primary records the change
    joined = tuple(sorted(frozenset(self.members) - before)) if before else ()
    sizes = self.members, len(before) or len(self.members)
    self._changed(Change(self.epoch, lost, joined, *sizes, holds, int(received["attempt"])))

  def of_this_lane(self, members: Mapping[str, Sequence[str]]) -> dict[int, str]:
    """{member: where the process of this lane listens}, from the addresses of all lanes."""
    return {int(member): lanes[self.lane] for member, lanes in members.items()}

  def set_primary(self, primary: int) -> None:
    """This member writes the run's records and persistent checkpoints from now on."""
    self.primary = primary
    self._announce_role()

  def _announce_role(self) -> None:
    if self.is_primary != self._role:
      self._role = self.is_primary
      for callback in self.on_role:
        callback(self._role)

  def _read_waiting(self) -> None:
    while (received := self.membership.next(timeout=0)) is not None:
      self._handle_change(received)

  def _handle_change(self, received: Message | None) -> None:
    """Handles a message that cannot be a commit: this member has not reported its sums."""
    assert received is not None
    assert received["kind"] != "commit", f"{received} without the sums of member {self.member}"
    self.handle(received)

  def connect(self, send_state: Callable[[int], None], receive_state: Callable[[int], None]) -> None:
    """Makes the exchange ready for this epoch: waits while the run holds, begins to connect, serves members without a
    state.

    send_state(member): sends this member's state. receive_state(member): takes the state that this member has already,
    which is sent again if members were lost before the supervisor knew of its arrival. Returns without a connection if
    the round under way is interrupted. Raises RunEnded and SupervisorLost.
    """
    self._read_waiting()
    while self._changes:
      self._handle_change(self.membership.next())
    while not self._connected and not self.interrupted:
      if self._holds:
        self._handle_change(self.membership.next())
        continue
      try:
        self.exchange.begin(self.epoch, self.addresses)
        if self.source == self.member:
          for other in self.fresh:
            send_state(other)
        elif self.is_fresh:
          receive_state(self.source)
          self.membership.send("joined", epoch=self.epoch)
        self._connected = True
      except PeerLost as error:
        self.exchange_failed(error)
      self._read_waiting()  # it may be the next epoch

  def await_epoch(self, epoch: float) -> None:
    """Another process of this member knows of this epoch: waits for the same message. Infinity: the other one knows
    that the run has ended, or that the supervisor is lost. Raises RunEnded and SupervisorLost."""
    while self.epoch < epoch:
      self._handle_change(self.membership.next())

  def connected(self) -> None:
    """The exchange is connected for this epoch, and this member has the state: it joined in this epoch."""
    self._connected = True

  def commit(self, round_name: str, checksum: int) -> dict[str, float]:
    """Tells the supervisor that this member has the sums of the round, computed with weights of this checksum. Returns
    {member: seconds of its data and computation} once the round is committed. Raises MembershipChanged if it must be
    exchanged again or is interrupted, RunEnded and SupervisorLost."""
    epoch = self.epoch
    self.membership.send("done", epoch=epoch, round=round_name, checksum=checksum)
    while self.epoch == epoch and not self.interrupted:
      received = self.membership.next()
      assert received is not None
      self.handle(received)
      if received["kind"] == "commit":
        assert received["round"] == round_name, f"{received['round']} was committed, not {round_name}"
        return dict(received["seconds"])
    raise MembershipChanged

  def report(self, error: PeerLost, epoch: int) -> None:
    """Tells the supervisor which connections of the epoch have failed, unless the exchange was only interrupted."""
    if error.members:
      unreached = list(error.members) if isinstance(error, Unreachable) else []
      self.membership.send("broken", epoch=epoch, members=unreached)

  def exchange_failed(self, error: PeerLost) -> None:
    """The exchange cannot go on in this epoch: waits for the next one, or until the round is interrupted."""
    self.report(error, self.epoch)
    epoch = self.epoch
    while self.epoch == epoch and not self.interrupted:
      self._handle_change(self.membership.next())

  def await_interruption(self) -> None:
    """Another process of this member knows that the round under way is interrupted: waits for the same message."""
    while not self.interrupted:
      self._handle_change(self.membership.next())

  # ---- the ends of an attempt ----

  def await_turn(self, seconds: float) -> None:
    """After the loss of the supervisor: returns when this member is the one that saves the state. The primary is the
    first. The next member follows when the member before it has closed its connection, because it has saved and ended,
    or has died; or after `seconds`."""
    for member in sorted(self.members, key=lambda member: (member != self.primary, member)):
      if member == self.member:
        break
      self.exchange.wait_closed(member, seconds)
    self.set_primary(self.member)

  def give_up(self) -> None:
    """The run goes on without this member, which did not leave: it is not the primary any more."""
    self.left = True
    self._announce_role()

  def wait_for_end(self) -> bool:
    """For a member that has done its last step: whether it has become the primary. False: the run is over, and the
    primary has done everything that was left."""
    while not self.saves_in_storage:
      try:
        self._handle_change(self.membership.next())
      except RunEnded:
        return False
    return True

  def wait_for_code(self, seconds: float) -> int | None:
    """The exit code with which the run ends within `seconds`; None if it goes on, or the supervisor is lost."""
    deadline = time.monotonic() + seconds
    try:
      while (received := self.membership.next(timeout=max(0.01, deadline - time.monotonic()))) is not None:
        if received["kind"] == "end":
          return int(received["code"])
    except SupervisorLost:
      pass
    return None

  def finished(self, code: int) -> None:
    """This process exits with `code`, as the others would. Returns when the supervisor has ended the run for it."""
    self.membership.send("finished", code=code)
    if self.ended is None:
      self.ended = self.wait_for_code(_END_SECONDS)
