"""One controller drives all slices: one jitted program computes a step, and the gradients are summed inside it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from input_pipeline.prefetch import Prefetcher
from input_pipeline.tally import Tally
from trainer.cluster import View
from trainer.drivers.slice_witness import SliceWitness
from trainer.elastic.wait import Task, Wait
from trainer.models.decoder import Params
from trainer.process.stop import StopRequested
from trainer.program.feed import Feed
from trainer.program.program import Program
from trainer.program.state import TrainState
from trainer.run import driver
from trainer.run.driver import LossSums, Metrics, Start
from trainer.run.session import Session

_PREPARE_AFTER = 3  # steps of an attempt: its program has run, and its speed is known


class OneController:
  """Implements Driver for the slices of one view."""

  runs_ahead = True
  coordination_errors: tuple[type[Exception], ...] = ()
  slice_seconds: dict[str, float] | None = None

  def __init__(self, session: Session, view: View, program: Program, wait: Wait) -> None:
    self._session, self._view, self._wait, self._program = session, view, wait, program
    self._evaluations = [Feed(loader, program) for loader in session.data.evaluations.values()]
    self._steps = 0  # of this attempt
    self.data_wait_seconds = 0.0
    self.tally: Any = Tally().numbers
    self.of_round: dict[str, float] = {}
    self._witness = SliceWitness(session, view, program, wait)
    self._threads = contextlib.ExitStack()  # empty if the attempt ends before it has a state

  @property
  def alive(self) -> int:
    return self._view.num_alive

  def start(self, restore: Callable[[], Start], resume: Callable[[Start], None]) -> Start:
    restoring = Task(restore, "the restore")  # while this thread compiles
    try:
      self._compile()
    except Exception:
      with contextlib.suppress(Exception):  # the next attempt restores too, and two restores need twice the memory
        self._wait.result(restoring)
      raise
    start = self._wait.result(restoring)
    resume(start)
    if self._session.stop.requested(start.step):
      return dataclasses.replace(start, stops=True)
    values = self._program.schedule.placed(self._program.mesh)
    compute = lambda state, batch: self._compiled_step(state, batch, values)
    self._compute_step = self._session.cluster.on_slices(compute, self._view)
    hashes = self._session.config.observe.receipt_state_period > 0
    self._feed = Feed(self._session.data.train, self._program)
    tallied = functools.partial(self._feed.tallied, hashes=hashes)
    self._batches = Prefetcher(tallied, start.step, self._session.config.run.steps)
    self._threads.callback(self._batches.close)
    return start

  def _compile(self) -> None:
    """Compiles the step. After a loss there may be a state to save: then a request to end does not wait for this."""
    compiling = functools.partial(self._session.elastic.compiled_step, self._view)
    if not self._session.elastic.recovery.under_way:
      self._compiled_step = compiling()
      return
    with contextlib.suppress(StopRequested):  # `start` asks next
      self._compiled_step = self._wait.until_stop(compiling, "the compilation")

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    index, (batch, tally) = next(self._batches)
    assert index == n - 1, f"step {n} got the batch of step {index + 1}"
    self.data_wait_seconds = self._batches.waited_seconds
    self._session.elastic.begin_step(n)
    state = self._witness.before_step(state, n)
    self.proof = {"computed": dict(zip(map(str, self._view.slices), self._program.plan.ranges))} | self._witness.proof
    self.tally = self._feed.over_processes(tally.numbers)
    result = self._compute_step(state, batch)
    self._steps += 1
    if self._steps == _PREPARE_AFTER:
      self._session.elastic.prepare_steps(self._view, self._other_programs)
    return result

  def _other_programs(self, view: View) -> dict[str, Callable[[], Any]]:
    """{name: compilation} of what an attempt on `view` may need besides its step."""
    compiling = lambda: self._session.programs.program(view).compile_evaluation()
    evaluation = {_evaluation_of(view): compiling} if self._evaluations else {}
    return evaluation | self._witness.programs(view.slices)

  def evaluate(self, params: Params, batches: Sequence[int]) -> list[list[LossSums]]:
    stop, step = self._session.stop, self._session.elastic.last_step
    several = self._session.cluster.world.size > 1

    def compute() -> list[list[LossSums]]:
      sums: list[list[LossSums]] = []
      compiled = self._session.programs.kept(_evaluation_of(self._view), self._program.compile_evaluation)
      compute_losses = self._session.cluster.on_slices(compiled, self._view)
      with jax.set_mesh(self._program.mesh):
        for feed, count in zip(self._evaluations, batches, strict=True):
          sums.append([])
          for index in range(count):
            if stop.requested(step) if several else stop.noticed:
              raise StopRequested
            sums[-1].append(compute_losses(params, feed(index)))
            jax.block_until_ready(sums[-1][-2:-1])  # a request to end must not wait for more than two batches
        return driver.on_host(sums)

    # Several processes must stop at the same batch. One need not even wait for the compilation.
    return self._wait.call(compute, f"the evaluation at step {step}", until_stop=not several)

  def resize_due(self, n: int) -> bool:
    return self._session.elastic.resize_due(self._view, n)

  def leaves(self) -> bool:
    return False

  def must_save(self) -> bool:
    return False

  def last_state(self) -> tuple[int, TrainState | None]:
    raise AssertionError("one controller needs no coordination")

  def close(self) -> None:
    self._threads.close()


def _evaluation_of(view: View) -> str:
  return f"evaluation on slices {list(view.slices)}"
