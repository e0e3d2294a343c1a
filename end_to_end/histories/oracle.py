"""What a run has left behind, and the one judgement of every history: `broken`."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.checkpoint import checksums

Record = dict[str, Any]
# Fields of a line of metrics.jsonl that say how fast it was, where and when. All others must have the same value.
VARYING = set(
  "seconds eval_seconds slices data_wait tflops_per_device tokens_per_second_per_device mfu eta slice_seconds "
  "bytes_sent process attempt wall monotonic".split()
)
ROUNDED = {"loss", "grad_norm", "eval_loss"}  # depend on the order of a sum
FAILURES = ("Traceback", "Exception in thread")  # of a thread or a process


@dataclasses.dataclass(frozen=True)
class Promise:
  """What a history promises. tolerance: the relative difference of sums that are added in another order; 0: the same
  bits, and the same bits of the final state. repeats: a line may be recorded again, with the same values. lost: the
  most completed steps that a recovery may lose. codes: the exit codes that a process may have."""

  steps: int
  tolerance: float = 0.0
  repeats: bool = False
  lost: int = 0
  codes: Collection[int] = (0,)


@dataclasses.dataclass(frozen=True)
class Left:
  """What a run has left: its lines of metrics.jsonl and receipt.jsonl, its events, the arrays of its last checkpoint as
  fingerprints, the names in its folder, what it has printed, and the exit codes of its processes."""

  lines: Sequence[Record]
  receipt: Sequence[Record]
  events: Sequence[Record]
  state: Mapping[str, Any]
  files: Collection[str] = ()
  printed: str = ""
  codes: Sequence[int] = (0,)

  def of_kind(self, kind: str) -> list[Record]:
    return [event for event in self.events if event["kind"] == kind]


def read(directory: Path, steps: int, *, printed: str = "", codes: Sequence[int] = (0,)) -> Left:
  """What the run in this folder has left after so many steps."""
  meta = directory / "checkpoints" / str(steps) / "meta.json"
  state = checksums.parse(meta.read_bytes(), meta.name)["arrays"] if meta.exists() else {}
  files = {re.sub(r"\.\d+$", "", path.name) for path in directory.iterdir()}  # in a bucket, lines have parts
  files |= {f"checkpoints/{path.name}" for path in (directory / "checkpoints").iterdir() if not path.name.isdigit()}
  lines, receipt, events = (records(directory / f"{name}.jsonl") for name in ("metrics", "receipt", "events"))
  return Left(lines, receipt, events, state, files, printed, codes)


def records(path: Path) -> list[Record]:
  """The records of a file of lines, without a line that a kill has cut. In a bucket it has parts, NAME.000001."""
  found = []
  for part in sorted(path.parent.glob(f"{path.name}*")):
    for line in part.read_text().splitlines():
      with contextlib.suppress(json.JSONDecodeError):
        found.append(json.loads(line))
  return found


def broken(run: Left, undisturbed: Left, promise: Promise) -> list[str]:
  """The rules that a run breaks; [] if it breaks none."""
  found = [f"exit code {code}" for code in run.codes if code not in promise.codes]
  found += [f"{failure!r} was printed" for failure in FAILURES if failure in run.printed]
  found += _lines(run.lines, undisturbed.lines, promise)
  found += _examples(run.receipt, undisturbed.receipt, promise.steps)
  if run.state.keys() != undisturbed.state.keys() or not run.state:
    found.append(f"the final state has other arrays: {sorted(run.state.keys() ^ undisturbed.state.keys())}")
  elif not promise.tolerance:
    found += [f"{name} differs in the final state" for name in run.state if run.state[name] != undisturbed.state[name]]
  if left := set(run.files) - set(undisturbed.files):
    found.append(f"these files are left: {sorted(left)}")
  for event in run.of_kind("recovery"):
    if event["steps_lost"] > promise.lost:
      found.append(f"{event['steps_lost']} completed steps lost by {event['event']} of {event['slice']}")
  return found


def _lines(ours: Sequence[Record], theirs: Sequence[Record], promise: Promise) -> list[str]:
  """Each line of metrics once, in order, with the same values."""
  wanted = {_key(line): line for line in theirs}
  times = Counter(map(_key, ours))
  found = [f"{_key(line)} is not recorded" for line in theirs if _key(line) not in times]
  found += [f"{key} is recorded, and not in the undisturbed run" for key in times if key not in wanted]
  if not promise.repeats:
    found += [f"{key} is recorded {count} times" for key, count in times.items() if count > 1]
    steps = [line["step"] for line in ours]
    found += ["the lines are not in the order of the steps"] if steps != sorted(steps) else []
  for line in ours:
    if differs := _differing(line, wanted.get(_key(line), line), promise.tolerance):
      found.append(f"{_key(line)} has other values: {differs}")
  return found


def _key(line: Record) -> str:
  return f"step {line['step']}" if "loss" in line else f"the evaluation of step {line['step']}"


def _differing(ours: Record, theirs: Record, tolerance: float) -> dict[str, tuple[Any, Any]]:
  """{field: (our value, their value)} of the fields that differ."""
  found = {}
  for field in (ours.keys() | theirs.keys()) - VARYING:
    here, there = ours.get(field), theirs.get(field)
    is_close = tolerance and field in ROUNDED and None not in (here, there)
    if here != there and not (is_close and abs(here - there) <= tolerance * abs(there)):
      found[field] = here, there
  return found


def _examples(ours: Sequence[Record], theirs: Sequence[Record], steps: int) -> list[str]:
  """Each example once: each step has the examples of the undisturbed run, by the loader's own digest, and each of its
  rows was computed by one slice."""
  digests, wanted = ({line["step"]: line["examples"] for line in lines if "step" in line} for lines in (ours, theirs))
  order = [line["step"] for line in ours if "step" in line]
  found = [] if order == list(range(1, steps + 1)) else [f"the receipt has not each step once: {order}"]
  found += [f"step {step} used other examples" for step in wanted if step in digests and digests[step] != wanted[step]]
  for line in ours:
    if computed := _flat(line.get("computed", {}).values()):
      ends = [0, *(end for _, end in computed)]
      if any(first != end for (first, _), end in zip(computed, ends)):
        found.append(f"step {line['step']} computed a part twice or not at all: {line['computed']}")
  return found


def _flat(ranges: Iterable[Sequence[Sequence[int]]]) -> list[tuple[int, int]]:
  return sorted((first, end) for first, end in itertools.chain.from_iterable(ranges))
