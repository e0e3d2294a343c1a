"""What the loop does after a step, as a pure function of what is due."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Due:
  last: bool = False  # no step is left
  stop: bool = False  # the process must end (SIGTERM)
  resize: bool = False  # slices have returned and should be used
  evaluation: bool = False
  checkpoint: bool = False
  snapshot: bool = False


@dataclass(frozen=True)
class Actions:
  """What to do, in this order: snapshot "early", record, snapshot "late", evaluate, save, end."""

  snapshot: Literal["none", "early", "late"] = "none"
  record: bool = False  # wait for the step and record it now; otherwise after the next one is dispatched
  evaluate: bool = False
  save: Literal["none", "due", "final"] = "none"  # final: in the persistent tier, and wait until it is committed
  end: Literal["", "complete", "preempted", "slice_up"] = ""


def decide(due: Due, *, uses_snapshots: bool) -> Actions:
  """The actions after a step.

  - Nothing is evaluated or saved before the step is recorded, that is, known to be good.
  - On SIGTERM the grace period is short: no evaluation begins, and one that is under way stops. Then the caller asks
    again, with `stop` and without `last`.
  - A snapshot is taken early, while the step is still being computed, and before an evaluation, so that a slice that is
    lost in the evaluation or the save costs no step. After the last step only an evaluation needs one.
  - A resize passes the state on in a late snapshot, which waits for the one before it, or in a persistent checkpoint if
    the run takes no snapshots.
  """
  stop, resize = due.stop and not due.last, due.resize and not due.last
  evaluate = due.evaluation and not stop
  snapshot: Literal["none", "early", "late"] = "none"
  if uses_snapshots and (due.snapshot or due.checkpoint or resize) and (evaluate or not due.last):
    snapshot = "late" if resize else "early"
  final = due.last or stop or (resize and not uses_snapshots)
  return Actions(
    snapshot=snapshot,
    record=due.last or stop or resize or due.evaluation or due.checkpoint,
    evaluate=evaluate,
    save="final" if final else "due" if due.checkpoint else "none",
    end="complete" if due.last else "preempted" if stop else "slice_up" if resize else "",
  )
