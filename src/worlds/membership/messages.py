"""What supervisor, members and agents tell each other. Every message is a JSON object with the field `kind`.

A round is "step N" (the update after which N steps are completed) or "eval N" (the evaluation after step N). `commit`
and `world` reach each member in one order, on one connection. So a member that has computed a round and hears nothing
keeps its state and its sums: next it hears either `commit`, and applies them, or `world`, and repeats only the
exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
OPENED = "+"
_NUMBER = (int, float)
_NUMBER_OR_NONE = (int, float, type(None))
FieldTypes = Mapping[str, type | tuple[type, ...]]

FROM_MEMBER: Mapping[str, FieldTypes] = {
  # The first message of a connection. A member is a slice; a slice of several processes has one lane per process.
  # address: where the exchange of this process listens.
  "hello": {"member": int, "lane": int, "lanes": int, "address": str},
  # It can compute now. newest: the step of the state that it holds in memory, or, if it holds no state, the newest step
  # that the backups of its own slice can restore (0: none).
  "ready": {"newest": int, "holds": bool},
  # It was asked to lead in this epoch, and has the state after this step.
  "restored": {"epoch": int, "step": int},
  # It has received the state from a peer.
  "joined": {"epoch": int},
  # Only with a witness, before `ready`. where: its host and devices. numerics: what the bits of its sums depend on.
  "device": {"where": str, "numerics": str},
  # Before `done`, from members that compute the share of the witness: its `witness.Sums`.
  "witness": {"epoch": int, "round": str, "sums": dict},
  # Its shares of the round are computed. seconds: of the wait for their data and of the computation.
  "computed": {"epoch": int, "round": str, "seconds": _NUMBER},
  # It has the sums of all shares; it applies them when the round is committed. checksum: of the weights with which it
  # computed its shares, the same on all members.
  "done": {"epoch": int, "round": str, "checksum": int},
  # The exchange cannot go on in this epoch, because connections have failed. members: it cannot connect with these.
  "broken": {"epoch": int, "members": list},
  # It begins its next round, which may be interrupted: an evaluation, or a round of local steps. Other work of the
  # round may come before the sums.
  "interruptible": {},
  # It has SIGTERM: it wants to leave after the step under way, or in the interruptible round under way.
  "leave": {},
  # The run is over for this member, everything that it owes is done; it would exit with this code. 2: it has found
  # wrong input, and exits unless the run ends before.
  "finished": {"code": int},
  # A sign of life. busy: what it does besides steps ("save"), or "".
  "beat": {"busy": str},
  # A rehearsed fault that the supervisor shall cause: "lose", "hang" or "give_back".
  "fault": {"action": str, "target": int, "seconds": _NUMBER_OR_NONE},
}
_CHANGE: FieldTypes = {"base": int, "gone": list, "members": dict, "ranges": dict}
_WORLD: FieldTypes = {"epoch": int, **_CHANGE, "primary": int, "lost": dict, "attempt": int}
FROM_SUPERVISOR: Mapping[str, FieldTypes] = {
  # The answer to `hello`. primary: writes the records until a `world` says otherwise. run_id: the id of the run, if its
  # folder does not exist yet; after OPENED, if other members have opened the folder.
  "welcome": {"primary": int, "run_id": str},
  # `leader` restores the newest state of all backups, unless it holds a state, and answers with `restored`. It is the
  # primary, so that the log has what it restores.
  "lead": {"epoch": int, "leader": int},
  # A new epoch begins. What changes since the epoch `base`, of the last `world` or `hold` that this member got, or 0:
  # without the members `gone`, and with `members` {id: address of each lane} that are new or have other addresses.
  # ranges: of those that compute other shares than before, {id: [[first share, end], ...]}. fresh: members without a
  # state; `source` sends it to them. lost: {id: [reason, seconds since the loss]}: no two hosts have the same clock.
  # attempt: see RunRules.attempts. slow_steps: {id: steps}, see dealing.turns.
  "world": {**_WORLD, "fresh": list, "source": int, "slow_steps": dict},
  # Before the `world` of the same epoch, sent only when the draw of the witness is overridden. asked: who computes the
  # share of the witness; []: as drawn. since: sums of epochs before this one are computed again.
  "check": {"epoch": int, "asked": list, "since": int},
  # The sums of a share have differed. outcome: "removed": `members` are wrong and taken out; "transient": all computed
  # again and agree; "undecided": the run ends. where: {member: its host and devices}. agreed: {member: the last
  # round in which its sums did not differ}. arrays: {array: how many bits, at least}. primary: writes the records from
  # here on.
  "alarm": {
    "outcome": str,
    "round": str,
    "members": list,
    "where": dict,
    "agreed": dict,
    "arrays": dict,
    "primary": int,
  },
  # As `world`, but there are too few members to go on: wait for the next `world`.
  "hold": _WORLD,
  # No member is known to have the state: answer with `ready`. A member that has received the state at the last moment
  # keeps it, and says so.
  "regather": {},
  # Apply the sums of the round. stop: save, and end the run after this round. leave: members that end after this round.
  # changes: `world` or `hold` follows at once: wait for it, because a member that computes keeps the others waiting.
  # seconds: {id: seconds of its data and computation}, for the primary; the others get {}.
  "commit": {"epoch": int, "round": str, "stop": bool, "leave": list, "changes": bool, "seconds": dict},
  # The member has ended so many times in a row without progress of its own, and starts again after so many seconds.
  "failing": {"member": int, "host": str, "error": str, "times": int, "pause_seconds": _NUMBER},
  # The member needs so many times the median of all members for a share, since this step. 1: not any more. It has so
  # many of the shares of a slice. steps: how many steps of its replica it takes in a round; 0: all.
  "slow": {"member": int, "factor": _NUMBER, "since": int, "shares": int, "of": int, "steps": int},
  # SIGTERM came in an interruptible round, which ends here without a result. leave: only for this member, which ends;
  # the others repeat the exchange without it. Otherwise the run ends with the state that all members have.
  "interrupt": {"epoch": int, "leave": bool},
  # The run must end. Ignored until the current round has committed or was interrupted.
  "stop": {},
  # The run is over; exit with this code. reason: why it cannot go on, or "".
  "end": {"code": int, "reason": str},
}
FROM_AGENT: Mapping[str, FieldTypes] = {  # an agent runs the processes of other members on its host
  # The first message of a connection: it can run so many slices; other members reach them at host.
  "agent": {"slices": int, "host": str},
  # A process of the member has ended, with this exit code or minus the number of the signal.
  "ended": {"member": int, "code": int},
}
TO_AGENT: Mapping[str, FieldTypes] = {
  # Start the processes of these members with these arguments. grace: seconds that they may need to save.
  "work": {"argv": list, "members": list, "lanes": int, "grace": _NUMBER, "run_command": str},
  # Start the member again after so many seconds.
  "restart": {"member": int, "seconds": _NUMBER},
  # End its processes.
  "kill": {"member": int},
  # Cause a rehearsed fault, as in `fault`.
  "act": {"action": str, "member": int, "seconds": _NUMBER_OR_NONE},
  # The run is over. Send the signal to all processes, SIGKILL after `seconds`, and exit.
  "close": {"code": int, "number": int, "seconds": _NUMBER},
}


def message(kind: str, **fields: Any) -> Message:
  return {"kind": kind, **fields}


def check(received: Message, kinds: Mapping[str, FieldTypes]) -> None:
  """Raises ValueError unless the message has a kind of `kinds`, and the fields of this kind with their types."""
  kind = received.get("kind")
  fields = kinds.get(kind) if isinstance(kind, str) else None
  if fields is None:
    raise ValueError(f"sent a message of the unknown kind {kind!r}")
  for name, types in fields.items():
    value = received.get(name)
    if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
      raise ValueError(f"sent {kind!r} with {name}={value!r}")


def slow_line(slow: Mapping[str, Any]) -> str:
  """The message `slow`, or its record in events.jsonl, in words."""
  has = f"It has {slow['shares']} of {slow['of']} shares"
  if slow["steps"]:
    has = f"It takes the last {slow['steps']} steps of its replica in each round, and faster slices take the others"
  elif slow["of"] == 1 != slow["factor"]:
    has = "It keeps its share; with a larger shares_per_slice, faster slices take a part of its work"
  if slow["factor"] == 1:
    return f"Slice {slow['member']} is as fast as the others again, from step {slow['since']} on. {has}."
  what = f"computes a share in {slow['factor']:.2f} times the median since step {slow['since']}"
  return f"Slice {slow['member']} {what}. {has}."


def change(known: dict[str, Any], received: Message, name: str) -> dict[str, Any]:
  """Returns the field `name` of all members {id: value}, from the values `known` so far and a `world` or `hold`."""
  kept = {} if received["base"] == 0 else known
  return {member: value for member, value in kept.items() if int(member) not in received["gone"]} | received[name]


def failing_line(failing: Mapping[str, Any]) -> str:
  """The message `failing`, or its record in events.jsonl, in words."""
  return (
    f"Member {failing['member']} (host {failing['host']}) has failed {failing['times']} times without 10 steps of its "
    f"own: next start in {failing['pause_seconds']:g} s."
  )


def step_of(round_name: str) -> int | None:
  """N of the round "step N"; None for an evaluation."""
  kind, _, number = round_name.partition(" ")
  return int(number) if kind == "step" else None


def to_ranges(shares: Sequence[int]) -> list[list[int]]:
  """[[first, end], ...] of ascending shares: a message has room for many shares, of which each member has few runs."""
  ranges: list[list[int]] = []
  for share in shares:
    if ranges and ranges[-1][1] == share:
      ranges[-1][1] += 1
    else:
      ranges.append([share, share + 1])
  return ranges


def from_ranges(ranges: Sequence[Sequence[int]]) -> tuple[int, ...]:
  return tuple(share for first, end in ranges for share in range(first, end))
