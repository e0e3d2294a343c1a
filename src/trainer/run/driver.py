"""How the slices of a run work together: the interface of `one_controller` and `many_worlds` of `drivers/`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from trainer.models.decoder import Params
from trainer.program.state import TrainState

Metrics: TypeAlias = jax.Array  # float32 [len(step.METRICS)]; see step.apply_gradients
LossSums = tuple[Any, Any]  # float32 scalars: sum of weighted cross-entropy in nats, sum of weights


@dataclasses.dataclass(frozen=True)
class Start:
  """The state that an attempt starts from, after `step` completed steps; tier "none": a fresh state."""

  state: TrainState
  step: int
  tier: str
  seconds: float
  evaluated: bool  # whether this state has been evaluated
  meta: Mapping[str, Any] | None = None
  eval_loss: float | None = None  # of this state, if an earlier process or attempt has recorded it
  stops: bool = False  # the process must stop: it saves this state and computes nothing more


def on_host(arrays: Any) -> Any:
  """The arrays on the host, for `Wait.call`: a slice may also hang between a computation and the copy to the host."""
  return jax.device_get(jax.block_until_ready(arrays))


class Driver(Protocol):
  """The steps of one attempt. `n` counts completed steps: step(state, n) turns the state after n - 1 steps into n's.
  With local steps it does a whole round, which ends with step n: metrics and tallies have a row for each of its steps.
  """

  runs_ahead: bool  # whether `step` returns before the step is computed: its record is written during the next one
  coordination_errors: tuple[type[Exception], ...]  # what says that the worlds of the run cannot agree any more
  data_wait_seconds: float  # how long the last step waited for its batch
  slice_seconds: dict[str, float] | None  # {slice: seconds of its data and computation in the step}; None: not timed
  tally: Any  # the numbers of the Tally of the whole batch of the last step, perhaps not computed yet
  of_round: dict[str, float]  # numbers of the last round of local steps: fields of StepRecord; {}: it was one step
  proof: dict[str, Any]  # what the receipt says of the last step besides its numbers: see docs/trust.md

  @property
  def alive(self) -> int:
    """Slices that compute."""

  def start(self, restore: Callable[[], Start], resume: Callable[[Start], None]) -> Start:
    """What the attempt starts from: the result of restore(), or a newer state received from another slice. Compiles
    the step, and calls resume(start) before it reads the first batch. `Start.stops`: it only restores."""

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    """The next state (the old one's buffers are donated) and the step's metrics, perhaps not computed yet. Raises only
    if the attempt must end: in a round of local steps StopRequested(the state with which the round began)."""

  def evaluate(self, params: Params, batches: Sequence[int]) -> list[list[LossSums]]:
    """For each set, sums over its first batches[set] batches, in parts to be added, on the host. Raises StopRequested
    on all processes after the same batch, if they must end."""

  def resize_due(self, n: int) -> bool:
    """Whether the attempt should end after step n, so that the next one uses slices that have returned."""

  def leaves(self) -> bool:
    """Whether this process ends and the run goes on without it: the other members evaluate and save."""

  def must_save(self) -> bool:
    """The last save of this process is committed. Returns whether it must also save in storage: another process was to
    do that, and is lost. Waits until this is known."""

  def last_state(self) -> tuple[int, TrainState | None]:
    """The attempt ends after one of `coordination_errors`. Returns the completed steps, and the last state if this
    process must save it, so that a restart of the whole run loses nothing."""

  def close(self) -> None:
    """Ends the threads that prepare the next steps."""
