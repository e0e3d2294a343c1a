"""Waits that detect slices that do not answer, and requests to stop."""

from __future__ import annotations

import threading
import types

import jax
import numpy as np
import pytest

from trainer.cluster.simulated import SimulatedCluster
from trainer.elastic.classification import SliceHang
from trainer.elastic.wait import Wait
from trainer.observe.log import get
from trainer.process.stop import StopRequested
from trainer.run.driver import on_host

CHECK, SILENCE = 0.0625, 0.5  # seconds


class Guarded:
  """Waits on four slices: the health check returns `alive`, and the work ends with `release`."""

  def __init__(self):
    devices = jax.devices()
    self.cluster = SimulatedCluster({i: tuple(devices[2 * i : 2 * i + 2]) for i in range(4)})
    self.view = self.cluster.view(range(4))
    self.lines = []
    log = get(None)
    log.redirect(self.lines.append)
    self.waits = Wait(self.cluster, self.view, CHECK, SILENCE, log)
    self.ended = threading.Event()

  def answer(self, *answers):
    """The health checks return these sets of slices in turn; after that, always the last set."""
    rest = list(answers)
    self.cluster.alive = lambda: frozenset(rest.pop(0) if len(rest) > 1 else rest[0])

  def wait(self):
    return self.waits.call(lambda: self.ended.wait() and "done", "step 7")


@pytest.fixture
def guarded():
  guarded = Guarded()
  yield guarded
  guarded.ended.set()


def test_a_slice_that_is_silent_while_others_answer_hangs(guarded):
  guarded.answer({0, 2, 3})
  with pytest.raises(SliceHang, match=r"step 7 has not finished in 0.0625 s and slices \[1\] do not answer") as caught:
    guarded.wait()
  assert caught.value.slices == {1}


def test_a_slice_that_hangs_when_its_result_is_read_hangs(guarded):
  """The result is computed, and the copy to the host never arrives."""

  class Result:
    def __array__(self, dtype=None, copy=None):
      guarded.ended.wait()
      return np.zeros(6, np.float32)

  guarded.answer({0, 2, 3})
  with pytest.raises(SliceHang, match=r"step 7 .* slices \[1\] do not answer"):
    guarded.waits.call(lambda: on_host({"metrics": Result()}), "step 7")
  guarded.ended.set()
  assert guarded.waits.call(lambda: on_host({"metrics": Result()}), "step 8")["metrics"].shape == (6,)


def test_slices_that_are_all_silent_may_only_be_busy(guarded):
  """A long step or evaluation delays the health checks of all its slices."""
  guarded.answer(set(), set(), {0, 1, 2, 3})
  threading.Timer(5 * CHECK, guarded.ended.set).start()
  assert guarded.wait() == "done"
  assert any("no slice answers; waiting for up to 0.5 s" in line for line in guarded.lines)


def test_slices_that_stay_silent_are_given_up(guarded):
  guarded.answer(set())
  with pytest.raises(SliceHang, match=r"has not finished in 0.5 s and slices \[0, 1, 2, 3\]"):
    guarded.wait()


def test_a_slow_call_on_answering_slices_is_waited_for(guarded):
  threading.Timer(3.5 * CHECK, guarded.ended.set).start()
  assert guarded.wait() == "done"
  assert any("all its slices answer" in line for line in guarded.lines)


@pytest.mark.parametrize("answers", [{0, 1, 2, 3}, set()])
def test_a_long_wait_has_few_warnings(guarded, answers):
  """The slices are asked every 5 s for ten minutes."""
  guarded.answer(answers)
  waits = Wait(guarded.cluster, guarded.view, 60.0, 3600.0, guarded.waits._log, late_after=lambda: 5.0)
  answered = iter([False] * 120 + [True])
  task = types.SimpleNamespace(what="step 7", is_done=lambda timeout: next(answered), result=lambda: "done")
  assert waits.result(task) == "done"
  assert len(guarded.lines) == 7 and "has not finished in 320 s" in guarded.lines[-1]


@pytest.mark.parametrize("asks", [0.0, CHECK])
def test_a_wait_until_the_process_must_stop_asks_the_slices_too(guarded, asks):
  stops = []
  waits = Wait(guarded.cluster, guarded.view, asks, SILENCE, guarded.waits._log, stop=lambda: bool(stops))
  guarded.answer({0, 1, 2, 3})
  work = lambda: guarded.ended.wait() and "done"
  threading.Timer(3 * CHECK, stops.append, [True]).start()
  with pytest.raises(StopRequested):
    waits.call(work, "step 7", until_stop=True)
  assert any("all its slices answer" in line for line in guarded.lines) == bool(asks)
  with pytest.raises(StopRequested):
    waits.until_stop(work, "the compilation")
  guarded.ended.set()
  assert waits.call(work, "step 7", until_stop=True) == waits.until_stop(work, "the compilation") == "done"
