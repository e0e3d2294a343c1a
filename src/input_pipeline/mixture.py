"""A mixture of sources: the examples of several sources in fixed proportions, by global index."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from input_pipeline.batch import Example
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.schedule import Schedule, shares
from input_pipeline.source import Source


class Member(NamedTuple):
  name: str
  source: Source
  weights: tuple[tuple[int, Fraction], ...]
  """(first step, weight from then on), ascending. The first step is 0."""
  limit: float
  """Number of examples that may be read; infinity: without a limit."""

  def weight(self, step: int) -> Fraction:
    """The weight of the examples of the step after `step` completed steps."""
    return max(pair for pair in self.weights if pair[0] <= step)[1]


class Steps(NamedTuple):
  """Which example a step begins with."""

  batch: int  # examples of a step
  offset: int  # of a step's first example, relative to step * batch

  def first_example(self, step: int) -> int:
    return step * self.batch + self.offset


class _Era(NamedTuple):
  """A range of indices in which the same members take part, with the same weights."""

  start: int  # global index
  before: tuple[int, ...]  # examples of each member before it
  active: tuple[int, ...]  # numbers of the members that take part
  schedule: Schedule


class MixtureSource(Source):
  """A member that has reached its limit leaves, and the others keep their proportions. Weights may change at a step.

  The examples of a member come in its own order, so an example is repeated only when its member starts another epoch.
  """

  def __init__(self, members: Sequence[Member], batch: int) -> None:
    """`batch`: examples of a step."""
    assert members, "a mixture has at least one member"
    self._members = tuple(members)
    self._changes = sorted({step for member in members for step, _ in member.weights})  # the first is 0
    self._steps = Steps(batch, 0)
    self.name = f"mixture of {'; '.join(self._proportions(step) for step in self._changes)}"
    tokenizers = [m.source.tokenizer for m in members if m.source.tokenizer]
    self.tokenizer = next((t for t in tokenizers if isinstance(t, ChatTokenizer)), next(iter(tokenizers), None))
    self.bad_records = sum(member.source.bad_records for member in members)
    self._ids = [short(member.source.fingerprint()) for member in members]
    self._begin(0, [0] * len(members))

  def _proportions(self, step: int) -> str:
    """The names of the members with their share from `step` on."""
    taking_part = [member for member in self._members if member.weight(step)]
    parts = shares([member.weight(step) for member in taking_part])
    percent = [f"{member.name} {100 * part / sum(parts):.4g} %" for member, part in zip(taking_part, parts)]
    return (f"from step {step} " if step else "") + ", ".join(percent)

  def _begin(self, since: int, before: Sequence[int]) -> None:
    """Sets the number of examples of each member before index `since`, and computes the order from there on."""
    self._since, self._before = since, tuple(before)
    self._eras: list[_Era] = []
    self.limit: int | None = None
    counts, start = tuple(before), since
    starts = [self._steps.first_example(step) for step in self._changes]
    starts[0] = min(since, starts[0])  # step 0 can have a later number after a change of the batch size
    while True:
      step = self._changes[bisect_right(starts, start) - 1]
      active = tuple(n for n, one in enumerate(self._members) if counts[n] < one.limit and one.weight(step))
      if not active:
        break
      schedule = Schedule(shares([self._members[number].weight(step) for number in active]))
      self._eras.append(_Era(start, counts, active, schedule))
      limited = [(rank, self._members[n].limit - counts[n]) for rank, n in enumerate(active)]
      ends = [schedule.index_of(rank, int(left) - 1) + 1 for rank, left in limited if math.isfinite(left)]
      ends += [first - start for first in starts if first > start][:1]
      if not ends:
        return
      counts, start = self._counts_in(self._eras[-1], start + min(ends)), start + min(ends)
    self.limit = start

  def _counts_in(self, era: _Era, index: int) -> tuple[int, ...]:
    """Examples of each member before `index`, which is in the era or at its end."""
    added = dict(zip(era.active, era.schedule.counts(index - era.start)))
    return tuple(count + added.get(number, 0) for number, count in enumerate(era.before))

  def _era(self, index: int) -> _Era:
    assert index >= self._since, (index, self._since)
    return self._eras[bisect_right(self._eras, index, key=lambda era: era.start) - 1]

  def example(self, index: int) -> Example:
    """Example `index`. Raises OSError, naming the member, if it cannot be read or all members are at their limits."""
    if self.limit is not None and index >= self.limit:
      raise OSError(f"the mixture has {self.limit} examples, and example {index} is asked for. Raise epochs")
    era = self._era(index)
    rank, count = era.schedule.locate(index - era.start)
    number = era.active[rank]
    try:
      return self._members[number].source.example(era.before[number] + count)
    except OSError as error:
      raise OSError(f"{self._members[number].name}: {error}") from error

  def counts(self, index: int) -> dict[str, int]:
    """Examples of each member before `index`, since the start of the run, by name."""
    at_start = index <= self._since or not self._eras
    counts = self._before if at_start else self._counts_in(self._era(index), index)
    return {member.name: count for member, count in zip(self._members, counts)}

  def examples_read(self, index: int) -> dict[str, int]:
    """Like `counts`, by `short` of the fingerprint of each member's source."""
    return dict(zip(self._ids, self.counts(index).values()))

  def cursor(self, index: int) -> dict[str, Any]:
    """The state of the mixture before `index` as JSON for a checkpoint: what `resume` needs."""
    before = dict(zip(self._ids, self._before))
    counts = self.counts(index)
    return {
      "since": self._since,
      "steps": list(self._steps),
      "members": {
        member.name: {"id": key, "before": before[key], "count": counts[member.name]}
        for member, key in zip(self._members, self._ids)
      },
    }

  def resume(
    self, index: int, cursor: Mapping[str, Any], read: Mapping[str, int], steps: Steps, *, same: bool
  ) -> list[str]:
    """Continues at `index` after a checkpoint with this cursor. Returns lines for the log.

    cursor: {} if the run has no mixture yet. read: `examples_read` of all sources that the run has read. same: the
    checkpoint is of the same mixture, so the order stays, unless its weights change at steps that now begin with other
    examples. Otherwise a new order begins at `index`, in which each member continues after its last example.
    """
    self._steps = steps
    members = cursor.get("members", {})
    if same and (len(self._changes) == 1 or cursor.get("steps") == list(steps)):
      before = {entry["id"]: entry["before"] for entry in members.values()}
      self._begin(cursor["since"], [before[key] for key in self._ids])
      return []
    counts = [read.get(key, 0) for key in self._ids]
    self._begin(index, counts)
    if not read:
      return []
    lines = [
      f"Mixture: {member.name} {f'continues at its example {count}' if key in read else 'is new'}"
      for member, key, count in zip(self._members, self._ids, counts)
    ]
    gone = [(name, entry["count"]) for name, entry in members.items() if entry["id"] not in self._ids]
    lines += [f"Mixture: {name} is removed after {count} examples" for name, count in gone]
    return [f"The mixture changes at example {index}.", *lines]

  def fingerprint(self) -> str:
    # The first weight alone, as a mixture without changes has it.
    parts = [
      [member.name, str(member.weights[0][1]), str(member.limit), key, *map(str, member.weights[1:])]
      for member, key in zip(self._members, self._ids)
    ]
    return f"mixture-1 {json.dumps(parts)}"

  def close(self) -> None:
    for member in self._members:
      member.source.close()


def short(fingerprint: str) -> str:
  """16 hex digits that stand for a fingerprint in a checkpoint."""
  return hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
