"""Faults at the worst moments, on the real training loop: nothing is lost, and every event leaves its whole record."""

from __future__ import annotations

import os
import signal
import time

import pytest
from end_to_end.histories.elastic import KEYS, STEPS
from tests.support import guide_awk
from tests.support.seeds import few

from trainer.elastic import wait as wait_lib
from trainer.elastic.elastic_run import Outcome

DEGRADE, FIXED = "elastic_min_slice_count=1", "elastic_min_slice_count=-1"


def check(history, undisturbed, relative=1e-5):
  assert history.outcome == Outcome("complete", STEPS)
  assert history.used == undisturbed.used
  for step, loss in undisturbed.losses.items():
    assert history.losses[step] == pytest.approx(loss, rel=relative), f"step {step}"


FAULTS = (
  "slice_down@1:0",
  "slice_down@12:2",
  "slice_down@12:2:save",
  "slice_down@4:0, slice_down@4:1",
  "slice_down@4:1, slice_up@4:1:recovery, slice_down@4:2:recovery",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", few(FAULTS[-1:], FAULTS))
def test_no_step_is_lost(harness, undisturbed_run, faults):
  history = harness.run("faults", [*KEYS, DEGRADE, f"fault_injection={faults}"])
  check(history, undisturbed_run)
  assert all(record["steps_lost"] <= 1 for record in history.of_kind("recovery"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  ("step", "tier", "mode"),
  few(
    [(1, "none", FIXED), (6, "persistent", DEGRADE)],
    [(step, tier, mode) for step, tier in ((1, "none"), (6, "persistent")) for mode in (DEGRADE, FIXED)],
  ),
)
def test_all_slices_at_once_fall_back_to_the_checkpoint(harness, undisturbed_run, mode, step, tier):
  faults = ", ".join(f"slice_down@{step}:{i}" for i in range(3))
  history = harness.run("all", [*KEYS, mode, f"fault_injection={faults}"])
  check(history, undisturbed_run, 0 if mode == FIXED else 1e-5)
  (recovery,) = history.of_kind("recovery")
  assert (recovery["slice"], recovery["tier"]) == ([0, 1, 2], tier)
  assert (recovery["step_before"], recovery["step_after"]) == (step - 1, 4 * (step // 6))


EVALUATED = [*KEYS, DEGRADE, "eval_interval=6", "eval_steps=2"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("hangs", "lost"), few([(6, STEPS)], [(6, STEPS), (STEPS, 6)]))
def test_slices_that_fail_in_an_evaluation(monkeypatch, harness, undisturbed_run, hangs, lost):
  """No step is repeated, and neither the evaluation nor the last checkpoint is missing."""
  monkeypatch.setattr(wait_lib, "CHECK_SECONDS", 0.3)
  failed = []

  def fail_in_the_second_batch(session, cluster):
    read, asked = session.data.evaluations["eval"].batch, []

    def batch(index, rows=None):
      asked.append(index)
      for at, fail in ((hangs, lambda: cluster.hang(1)), (lost, lambda: cluster.lose(2))):
        # Each evaluation has two batches, and the first is repeated.
        if at not in failed and len(asked) == (2 if at == 6 else 6):
          failed.append(at)
          fail()
          break
      else:
        time.sleep(0.2)
      return read(index, rows)

    session.data.evaluations["eval"].batch = batch

  history = harness.run("evaluation", EVALUATED, fail_in_the_second_batch)
  check(history, undisturbed_run)
  assert failed == [6, STEPS]
  assert [record["step"] for record in history.of_kind("eval")] == [6, STEPS]
  (hang,) = history.of_kind("hang")
  assert hang["step"] == hangs
  downs = [record for record in history.of_kind("recovery") if record["event"] == "slice_down"]
  assert sorted(record["slice"] for record in downs) == [[1], [2]]
  assert [record["steps_lost"] for record in downs] == [0, 0]
  for record, evaluation, found in zip(downs, history.of_kind("eval"), history.of_kind("slice_down"), strict=True):
    passed = record["monotonic"] - found["monotonic"] + found["detect_seconds"]
    assert record["seconds"] <= passed - evaluation["seconds"] + 0.2, "the evaluation is a part of the recovery"
  (saved,) = [save for save in history.of_kind("checkpoint_saved") if save["step"] == STEPS]
  assert downs[-1]["monotonic"] < saved["monotonic"] - saved["seconds"]


@pytest.mark.timeout(900)
def test_every_event_leaves_its_whole_record(harness, undisturbed_run, tmp_path, monkeypatch):
  for _ in range(2):  # the first run compiles what the recoveries need, unless tests before this one did
    history = harness.run("records", [*KEYS, DEGRADE, "fault_injection=slice_down@3:1, slice_up@5:1"])
    monkeypatch.setattr(harness, "_cache", None)  # a program that the second run finds there would not be counted
  check(history, undisturbed_run)
  down, up = history.of_kind("recovery")
  expected = {
    "slice": [1], "slices_before": 3, "slices_after": 2, "step_before": 2, "step_after": 2, "steps_lost": 0,
    "tokens_lost": 0, "tier": "snapshot", "compilations": 0,
  }  # fmt: skip
  assert {key: down[key] for key in expected} == expected
  assert (up["event"], up["slice"], up["slices_before"], up["slices_after"]) == ("slice_up", [1], 2, 3)
  for record in (down, up):
    parts = [record[f"{part}_seconds"] for part in ("detect", "wait", "restore", "compile", "first_step")]
    assert all(seconds >= 0 for seconds in parts)
    assert 0 < record["first_step_seconds"] < record["seconds"]
  starts, ready = history.of_kind("attempt_start"), history.of_kind("init_done")
  assert len(starts) == len(ready) == 3
  for start, done in list(zip(starts, ready))[1:]:  # the start-up time of an attempt does not include earlier steps
    assert done["seconds"] <= done["monotonic"] - start["monotonic"] + 0.001
  (tmp_path / "log.txt").write_text(history.log)
  changes = [line.split(", ", 1)[1] for line in guide_awk.slice_count_changes(tmp_path / "log.txt")]
  assert changes == ["Old Slice Count: 3, New Slice Count: 2", "Old Slice Count: 2, New Slice Count: 3"]


@pytest.mark.timeout(900)
def test_sigterm_during_the_wait_for_a_replacement(harness, undisturbed_run):
  """The living slices save their state. No further step is computed, and no step is lost."""

  def send_sigterm_while_waiting(session, cluster):
    wait_for = cluster.wait_for

    def waiting(count, timeout, stop):
      if len(cluster.alive()) < count:
        os.kill(os.getpid(), signal.SIGTERM)
      return wait_for(count, timeout, stop)

    cluster.wait_for = waiting

  history = harness.run("terminated", [*KEYS, FIXED, "fault_injection=slice_down@6:1/inf"], send_sigterm_while_waiting)
  assert history.outcome == Outcome("preempted", 5)
  (saved,) = [record for record in history.of_kind("checkpoint_saved") if record["step"] == 5]
  assert saved["tier"] == "persistent"
  assert max(history.losses) == 5
  (recovery,) = history.of_kind("recovery")
  assert (recovery["slices_after"], recovery["steps_lost"]) == (2, 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
  ("step", "mode"), few([(1, FIXED), (7, DEGRADE)], [(1, FIXED), (1, DEGRADE), (2, FIXED), (7, DEGRADE)])
)
def test_a_real_hang_is_recovered_from_with_snapshots_on(monkeypatch, harness, undisturbed_run, mode, step):
  """The arrays are never ready, so snapshot and record of the step cannot be complete. Both are repeated."""
  monkeypatch.setattr(wait_lib, "CHECK_SECONDS", 0.3)
  history = harness.run("hang", [*KEYS, mode, f"fault_injection=hang@{step}:1"])
  check(history, undisturbed_run, 0 if mode == FIXED else 1e-5)
  recovery = history.of_kind("recovery")[0]
  assert (recovery["slice"], recovery["step_before"]) == ([1], step - 1)
  assert recovery["steps_lost"] in (0, 1), "a snapshot of a step that was never recorded was restored"
  assert len(history.of_kind("hang")) == 1
