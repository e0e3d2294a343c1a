"""What a receipt and the other files of a run contradict, and what a replay of its steps finds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.checkpoint.step_folders import StepFolders
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.metrics import METRICS_FILE, read_metrics
from trainer.trust import receipt, replay
from trainer.trust import receipt_lines as lines_lib
from trainer.trust.receipt_lines import FILE, Line
from trainer.trust.replay import Replay
from trainer.weights import stored_arrays
from trainer.world import SINGLE_WORLD

_SHOWN = 5  # differences of one kind that are printed
_COMPARED = ("examples", "loss", "grad_norm", "tokens", "weights")  # bits of a step, in the order of their cause


@dataclass(frozen=True)
class Receipt:
  """The receipt of a run. lines: up to the first wrong one. steps: its lines about steps. saved: {step: {array: its
  fingerprint}} of the checkpoints, once they are read."""

  directory: str
  lines: list[Line]
  wrong: list[str]
  steps: dict[int, Line]
  saved: dict[int, dict[str, str]] = field(default_factory=dict)


def verify(directory: str, steps: str = "", keys: Sequence[str] = ()) -> list[str]:
  """What is wrong with a run; []: nothing. Prints what was compared.

  steps: FROM:TO, which are computed again, with other values of these keys; "": none.
  """
  found = load(directory)
  print(_summary(found))
  if problems := found.wrong:
    return problems
  first_last = replay.interval(steps, found.steps) if steps else None
  for part in (lines_lib.contradictions(found.lines), _metrics(found), _checkpoints(found)):
    problems += _some(list(part))
  if first_last and not problems:
    with replay.replay(found.directory, found.lines, *first_last, keys) as again:
      return replayed(found, again)
  return problems


def load(directory: str) -> Receipt:
  """The receipt of a run. Raises ConfigError if there is none."""
  directory = os.path.expanduser(directory).rstrip("/")
  files.check_address(directory)
  try:
    raw = list(receipt.read(directory))
  except (FileNotFoundError, NotADirectoryError):
    raw = []
  if not raw:
    raise ConfigError(
      f"{directory}: has no {FILE}. Runs write it unless receipt_state_period=0.\nGive the folder of a run: "
      "base_output_directory/run_name."
    )
  if not raw[-1].endswith(b"\n") and len(raw) > 1:
    print(f"The last line of {FILE} is cut. The next start of the run removes it.")
    del raw[-1]
  lines, wrong = lines_lib.check(raw)
  return Receipt(directory, lines, wrong, {line["step"]: line for line in lines if "step" in line})


def _summary(found: Receipt) -> str:
  if not found.lines:
    return f"{found.directory}: the receipt has no sound line."
  first, last = min(found.steps, default=0), max(found.steps, default=0)
  starts = sum("after" in line for line in found.lines)
  witnessed = sum("witness" in line for line in found.steps.values())
  return (
    f"{found.directory}: steps {first} to {last}, written by {starts} starts of processes, {witnessed} with a witness"
    + ("." if found.wrong else "; every line follows the line before it.")
  )


def _some(problems: list[str]) -> list[str]:
  more = len(problems) - _SHOWN
  return problems[:_SHOWN] + ([f"... and {more} more"] if more > 0 else [])


def _metrics(found: Receipt) -> Iterator[str]:
  recorded = {int(record["step"]): record for record in read_metrics(found.directory) if "loss" in record}
  last = max(found.steps, default=0)
  for step, line in found.steps.items():
    if step not in recorded:
      if step != last:  # a kill may come between the two files
        yield f"step {step}: is not in {METRICS_FILE}"
      continue
    for name, value in receipt.numbers(recorded[step]).items():
      if line.get(name) != value:
        yield f"step {step}: {name} {_number(value)} in {METRICS_FILE}, {_number(line.get(name))} in the receipt"
  for step in recorded:
    if step not in found.steps:
      yield f"step {step}: is in {METRICS_FILE}, not in the receipt"
  print(f"{METRICS_FILE}: {len(recorded)} steps compared.")


def _checkpoints(found: Receipt) -> Iterator[str]:
  folders = StepFolders(f"{found.directory}/checkpoints", SINGLE_WORLD, lambda line: None)
  for step in folders.steps():
    try:
      meta = folders.verify(step)
      entries = stored_arrays.of_checkpoint(folders.directory / str(step), meta)
      prints = {name: fingerprint.of_host_array(entry.read()) for name, entry in entries.items()}
    except Rejected as reason:
      if not folders.is_gone(step):  # retention of a living run
        yield f"checkpoint {step}: {reason}"
      continue
    stated = {name: entry["fingerprint"] for name, entry in meta["arrays"].items()}
    found.saved[step] = prints
    line = found.steps.get(step, {})
    state = line.get("state")
    if wrong := _different(stated, prints):
      yield f"checkpoint {step}: {wrong} does not have the fingerprint that it was saved with"
    elif state is not None and (wrong := _different(state, prints)):
      yield f"checkpoint {step}: {wrong} differs from the receipt"
    elif (step and not line) or (line.get("from") and state is None):
      yield f"checkpoint {step}: the receipt has no {'state of this step' if line else 'such step'}"
    elif state is None:
      print(f"checkpoint {step}: no state in the receipt. --replay with {step} as its last step compares it.")
    else:
      print(f"checkpoint {step}: {len(prints)} arrays as in the receipt.")


def _different(a: Mapping[str, str], b: Mapping[str, str]) -> str:
  """The first array that differs, weights first, and how many do; "": none."""
  names = [name for name in {**a, **b} if a.get(name) != b.get(name)]
  first = min(names, key=lambda name: (not name.startswith("params."), name), default="")
  return first and f"{first} ({len(names)} of {len({**a, **b})} arrays)"


def _number(value: str | None) -> str:
  """The bits of a float32 and its value."""
  if value is None or value == "nan":
    return str(value)
  return f"{np.uint32(int(value, 16)).view(np.float32):.9g} (bits {value})"


def _difference(who: str, step: int, a: Line, b: Line) -> list[str]:
  """What differs between the lines a and b of a step, in what both have; []: nothing. who: both runs, in words."""
  names = [name for name in _COMPARED if a.get(name) and b.get(name) and a[name] != b[name]]
  where = _different(a["state"], b["state"]) if "state" in a and "state" in b else ""
  if not names and not where:
    return []
  found = [f"{who} differ first at step {step}: {', '.join([*names, *(['state'] if where else [])])}."]
  for name in names:
    shown = [line[name] if name in ("examples", "weights") else _number(line[name]) for line in (a, b)]
    found.append(f"  {name}: {shown[0]} and {shown[1]}")
  return found + ([f"  state: first in {where}"] if where else [])


def replayed(found: Receipt, again: Replay) -> list[str]:
  """What differs first between the run and its replay. Prints what was compared."""
  largest, exact, inexact, states = 0.0, 0, 0, 0
  who = "The run and its replay"
  for step, here in sorted(again.lines.items()):
    line = found.steps[step]
    line = {"state": found.saved[step], **line} if step in found.saved else line
    if inexact or not again.is_exact(line):  # after a step with other bits, no later one has the same
      inexact += 1
      gap = _gap(line["loss"], here["loss"])
      largest = max(largest, gap)
      if gap > again.tolerance or line["tokens"] != here["tokens"] or line["examples"] not in ("", here["examples"]):
        return [*_difference(who, step, line, here), f"  the losses differ by {gap:.3g} relative to the larger one"]
      continue
    exact, states = exact + 1, states + ("state" in line)
    if differences := _difference(who, step, line, here):
      return differences
  if exact:
    print(
      f"Replay: {exact} steps have the same bits: examples, loss, gradient norm, and the state at {states} of them."
    )
  return _inexact(again, inexact, largest) if inexact else []


def _inexact(again: Replay, steps: int, largest: float) -> list[str]:
  """Prints how near the last `steps` steps are, and returns what is wrong with the state after them."""
  why = again.unlike or "slices computed other rows than in the run"
  print(
    f"Replay: the losses of {steps} steps agree within {again.tolerance:g}, the largest relative difference is "
    f"{largest:.2g}. Equal bits are not promised: {why}."
  )
  last = max(again.lines)
  if (found := again.distance()) is None:
    print(f"The state of step {last} is not compared: the run has no checkpoint of it.")
    return []
  name, distance = found
  text = f"state of step {last}: {name} differs most, by {distance:.2g} of its norm"
  if distance > again.state_tolerance:
    return [f"The run and its replay differ in the {text}; {again.state_tolerance:g} is allowed."]
  print(f"{text[0].upper()}{text[1:]}.")
  return []


def _gap(a: str, b: str) -> float:
  x, y = (np.nan if one == "nan" else float(np.uint32(int(one, 16)).view(np.float32)) for one in (a, b))
  return 0.0 if a == b else float(abs(x - y) / max(abs(x), abs(y))) if np.isfinite(x) and np.isfinite(y) else np.inf


def against(directory: str, other: str) -> list[str]:
  """The first step at which two runs differ, and what differs first; []: nothing."""
  a, b = load(directory), load(other)
  for one in (a, b):
    print(_summary(one))
    if one.wrong:
      return [f"{one.directory}: {wrong}" for wrong in one.wrong]
  common = sorted(a.steps.keys() & b.steps.keys())
  if not common:
    raise ConfigError(f"{b.directory}: has no step in common with {a.directory}.\nGive two runs of the same steps.")
  for step in common:
    if found := _difference("The runs", step, a.steps[step], b.steps[step]):
      return found
  print(f"The runs are equal in all {len(common)} steps that both have.")
  return []
