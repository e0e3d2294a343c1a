"""What the training loop calls for each step: FusedStepper where one controller drives all slices with one program.

`peer_stepper.PeerStepper` is the other one: each slice is a JAX world of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax

from trainer.cluster import View
from trainer.data import Batch, Prefetcher
from trainer.elastic.attempt import ElasticRun
from trainer.elastic.hang import HangGuard
from trainer.models.decoder import Params
from trainer.program import Program
from trainer.state import TrainState

Metrics: TypeAlias = jax.Array  # float32 [len(step.METRICS)]; see step.apply_gradients
LossSums = tuple[jax.Array, jax.Array]  # float32 scalars: sum of weighted cross-entropy in nats, sum of weights
_PREPARE_AFTER = 3  # steps of an attempt: its program has run, and its speed is known


class Stepper(Protocol):
  """The steps of one attempt. `n` counts completed steps: step(state, n) turns the state after n - 1 steps into n's."""

  runs_ahead: bool  # whether `step` returns before the step is computed: its record is written during the next one

  @property
  def alive(self) -> int:
    """Slices that compute."""
    ...

  @property
  def data_wait_seconds(self) -> float:
    """How long the last step waited for its batch."""
    ...

  @property
  def slice_seconds(self) -> dict[str, float] | None:
    """{slice: seconds that it computed in the last step}; None if slices are not timed one by one."""
    ...

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    """The next state (the old one's buffers are donated) and the step's metrics, perhaps not computed yet.

    Raises only if the attempt must end.
    """
    ...

  def evaluate(self, params: Params, batches: Sequence[int]) -> list[list[LossSums]]:
    """For each set, sums over its first batches[set] batches, perhaps not computed yet, in parts to be added."""
    ...

  def wait(self, arrays: Any, what: str) -> None:
    """Returns when the arrays are computed; raises their error, or SliceHang. `what` names the work in messages."""
    ...

  def read(self, arrays: Any, what: str) -> Any:
    """The arrays on the host; raises their error, or SliceHang."""
    ...

  def call(self, work: Callable[[], None], what: str) -> None:
    """Calls work(), which waits for the slices; raises its error, or SliceHang."""
    ...

  def resize_due(self, n: int) -> bool:
    """Whether the attempt should end after step n, so that the next one uses slices that have returned."""
    ...

  def close(self) -> None:
    """Ends the threads that prepare the next steps."""
    ...


class FusedStepper:
  """One jitted program computes a step on all slices of the view; their gradients are summed inside it."""

  runs_ahead = True

  def __init__(
    self,
    elastic: ElasticRun,
    view: View,
    guard: HangGuard,
    program: Program,
    compiled_step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
    batches: Prefetcher[Batch],
    eval_batches: Sequence[Callable[[int], Batch]],
  ) -> None:
    """batches: yields (n - 1, batch of step n) in order; eval_batches: of each set, the batch of an index."""
    self._elastic, self._view, self._guard = elastic, view, guard
    self._program, self._compiled_step = program, compiled_step
    self._batches, self._eval_batches = batches, eval_batches
    self._steps = 0  # of this attempt

  @property
  def alive(self) -> int:
    return self._view.num_alive

  @property
  def data_wait_seconds(self) -> float:
    return self._batches.waited_seconds

  @property
  def slice_seconds(self) -> None:
    return None

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    index, batch = next(self._batches)
    assert index == n - 1, f"step {n} got the batch of step {index + 1}"
    self._elastic.steps.current_step = n
    self._elastic.reached("step", n)
    result = self._compiled_step(state, self._on_slices(batch))
    self._steps += 1
    if self._steps == _PREPARE_AFTER:
      self._elastic.prepare_steps(self._view)
    return result

  def evaluate(self, params: Params, batches: Sequence[int]) -> list[list[LossSums]]:
    with jax.set_mesh(self._program.mesh):
      return [
        [self._program.evaluate(params, self._on_slices(batch(index))) for index in range(count)]
        for batch, count in zip(self._eval_batches, batches, strict=True)
      ]

  def wait(self, arrays: Any, what: str) -> None:
    self._guard.wait_for_arrays(arrays, what)

  def read(self, arrays: Any, what: str) -> Any:
    return self._guard.read(arrays, what)

  def call(self, work: Callable[[], None], what: str) -> None:
    self._guard.call(work, what)

  def resize_due(self, n: int) -> bool:
    return self._elastic.resize_due(self._view, n)

  def close(self) -> None:
    self._batches.close()

  def _on_slices(self, batch: Batch) -> Batch:
    """The batch as the slices get it: in error state if one of them is lost and only simulated."""
    return self._elastic.cluster.poison(batch, self._view)
