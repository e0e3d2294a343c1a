from __future__ import annotations

import re
import threading
import time
import types

import jax
import numpy as np
import pytest
from tests.elastic.toy_run import Clock, ToyRun, simulated_cluster, train
from tests.support import guide_awk
from tests.support.command import without_times

from trainer.elastic import wait
from trainer.elastic.elastic_run import ElasticRun, Outcome
from trainer.elastic.recovery import RecoveryLog


@pytest.fixture(scope="module")
def undisturbed():
  toy = ToyRun()
  assert train(toy) == Outcome("complete", 20)
  return toy


def records(toy, kind):
  return [r for r in toy.records if r["kind"] == kind]


def same_run(toy, undisturbed, relative=1e-6):
  """Every step used the same examples, with the same loss up to the order of sums."""
  assert toy.rows == undisturbed.rows
  for step, loss in undisturbed.losses.items():
    assert toy.losses[step] == pytest.approx(loss, rel=relative), f"step {step}"


def test_degrade_and_grow_loses_nothing(undisturbed):
  toy = ToyRun()
  assert train(toy, "slice_down@7:1, slice_up@12:1").kind == "complete"
  same_run(toy, undisturbed)
  assert toy.restores == [(0, "none"), (6, "snapshot"), (12, "snapshot")]
  down, up = records(toy, "recovery")
  assert (down["event"], down["slice"], down["step_before"], down["step_after"]) == ("slice_down", [1], 6, 6)
  assert (down["slices_before"], down["slices_after"], down["tier"], down["steps_lost"]) == (4, 3, "snapshot", 0)
  assert (up["event"], up["slice"], up["slices_before"], up["slices_after"], up["steps_lost"]) == (
    "slice_up",
    [1],
    3,
    4,
    0,
  )
  assert up["compilations"] == 0  # back to a topology that was seen
  steps = [re.findall(r"^step=(\d+) .*good_slice_count=(\d)$", line) for line in toy.lines]
  assert [found for line in steps for found in line] == [("1", "4"), ("7", "3"), ("13", "4")]
  lines = [line for line in toy.lines if not line.startswith(("Prepar", "Compiling"))]  # at any time, by two threads
  (retry,) = [number for number, line in enumerate(lines) if line.startswith("Slice down event detected. Retrying.")]
  assert lines[retry].endswith(" Lost after step 6: slice 1 (the memory of a slice is lost).")
  assert lines[retry + 1] == "Elastic attempt 2 out of 10"


def recovery_log():
  """(a log of recoveries, its clock, its count of compilations, the records that it has written)."""
  clock, counter, done = Clock(), types.SimpleNamespace(compilations=0), []
  events = types.SimpleNamespace(emit=lambda kind, **fields: done.append(fields))
  return RecoveryLog(events, types.SimpleNamespace(line=str), counter, 10, clock), clock, counter, done


def test_other_work_between_a_restore_and_the_first_step_is_no_part_of_the_recovery():
  """Such as an evaluation that is made up; but the time of one that fails is lost by the fault."""
  recovery, clock, counter, done = recovery_log()
  recovery.begin("slice_down", [1], clock(), step=3, alive=3)
  clock.sleep(1)
  recovery.restored(3, "snapshot", 0.5)
  with pytest.raises(OSError), recovery.paused():
    counter.compilations += 1
    clock.sleep(20)
    raise OSError
  recovery.begin("slice_down", [2], clock() - 5, step=3, alive=2)
  clock.sleep(2)
  recovery.restored(3, "snapshot", 0.5)
  with recovery.paused():
    counter.compilations += 1
    clock.sleep(100)
  counter.compilations += 2
  clock.sleep(4)
  assert recovery.finish(alive=1) == 2 + 4  # without the 5 s that the detection took
  assert [record["seconds"] for record in done] == [1 + 20 + 2 + 4, 5 + 2 + 4]
  assert [record["first_step_seconds"] for record in done] == [4, 4]
  assert [record["compilations"] for record in done] == [2, 2]


def test_the_log_can_be_read_by_the_guides_awk_script(tmp_path):
  train(ToyRun(), "slice_down@7:1, slice_up@12:1", directory=str(tmp_path))
  (tmp_path / "bare.txt").write_text(without_times((tmp_path / "log.txt").read_text()))
  for name in ("log.txt", "bare.txt"):
    assert guide_awk.slice_count_changes(tmp_path / name) == [
      "Step: 7, Old Slice Count: 4, New Slice Count: 3",
      "Step: 13, Old Slice Count: 3, New Slice Count: 4",
    ]


def test_fixed_mesh_waits_for_the_replacement_and_is_bit_identical(undisturbed):
  toy, clock = ToyRun(), Clock()
  assert train(toy, "slice_down@7:1", clock=clock, elastic_min_slice_count=-1).kind == "complete"
  assert toy.losses == undisturbed.losses
  np.testing.assert_array_equal(toy.state, undisturbed.state)
  (recovery,) = records(toy, "recovery")
  assert (recovery["slices_after"], recovery["compilations"], recovery["tier"]) == (4, 0, "snapshot")
  assert 0.9 < recovery["wait_seconds"] < 1.2
  assert [r["wanted"] for r in records(toy, "wait_slices")] == [4]


def test_backup_in_checkpoints_goes_back_to_the_last_one(undisturbed):
  toy = ToyRun(backup="checkpoint")
  train(toy, "slice_down@14:2", elastic_min_slice_count=-1, snapshot_period=-1)
  assert toy.losses == undisturbed.losses
  (recovery,) = records(toy, "recovery")
  assert (recovery["step_before"], recovery["step_after"], recovery["steps_lost"]) == (13, 10, 3)
  assert (recovery["tokens_lost"], recovery["tier"]) == (300, "persistent")


@pytest.mark.parametrize(
  "faults",
  [
    "slice_down@7:1, slice_down@7:2",  # two at once
    "slice_down@7:1, slice_down@8:2",  # one after the other
    "slice_down@7:1, slice_down@7:2:recovery",  # during the recovery
    "slice_down@7:1, slice_down@7:2:recovery, slice_down@7:3:recovery",
    "slice_down@7:1:snapshot",
    "slice_down@10:1:save",
    "slice_down@7:1, slice_up@7:1",  # returned before the loss was detected, with empty memory
    "slice_down@7:1, slice_up@7:1:recovery",
    "slice_down@3:1, slice_up@5:1, slice_down@6:1, slice_up@8:1, slice_down@9:1, slice_up@9:1",  # flapping
    "slice_down@7:0, slice_down@9:1, slice_down@11:2, slice_up@13:0, slice_up@14:1, slice_up@15:2",
    "slice_down@20:3",
  ],
)
def test_fault_histories_keep_every_step(undisturbed, faults):
  toy = ToyRun()
  assert train(toy, faults) == Outcome("complete", 20)
  same_run(toy, undisturbed)
  assert not any("never happened" in line for line in toy.lines)
  assert all(r["steps_lost"] <= 1 for r in records(toy, "recovery"))
  assert len(records(toy, "recovery")) == len(records(toy, "slice_down")) + len(records(toy, "slice_up"))


def test_all_replicas_lost_falls_back_to_the_checkpoint(undisturbed):
  toy = ToyRun()
  faults = "slice_down@13:0, slice_down@13:1, slice_down@13:2, slice_down@13:3"
  assert train(toy, faults).kind == "complete"
  assert toy.restores[1] == (10, "persistent")
  same_run(toy, undisturbed)


def test_slices_prepared_in_the_background_cost_no_compilation():
  toy, cluster = ToyRun(cache={}), simulated_cluster(4, Clock())
  real = toy.attempt

  def patient(elastic, view, survivors):
    prepare = ElasticRun.prepare_steps
    elastic.prepare_steps = lambda view: (prepare(elastic, view), elastic.programs.wait(60))
    return real(elastic, view, survivors)

  toy.attempt = patient
  train(toy, "slice_down@7:2", cluster=cluster)
  assert [r["compilations"] for r in records(toy, "recovery")] == [0]
  background = [r["what"] for r in records(toy, "compile") if r["background"]]
  assert background[:4] == [f"slices {s}" for s in ([1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2])]
  assert background[4:7] == [f"slices {s}" for s in ([1, 3], [0, 3], [0, 1])]


def test_a_hang_is_found_by_the_health_check(undisturbed, monkeypatch):
  monkeypatch.setattr(wait, "CHECK_SECONDS", 0.1)
  toy = ToyRun()
  train(toy, "hang@7:2")
  same_run(toy, undisturbed)
  assert records(toy, "hang")[0]["step"] == 6
  assert records(toy, "recovery")[0]["slice"] == [2]


def test_slices_that_died_during_a_wait_have_no_copy_to_restore(undisturbed):
  """Slice 1 dies; while its replacement is waited for, slice 2 dies and is replaced too."""
  toy, clock = ToyRun(), Clock()
  cluster = simulated_cluster(4, clock)
  wait_for, survivors, real = cluster.wait_for, [], toy.attempt

  def waiting(*args):
    if toy.restores:
      cluster.lose(2)
    return wait_for(*args)

  cluster.wait_for = waiting
  toy.attempt = lambda elastic, view, alive: survivors.append(alive) or real(elastic, view, alive)
  train(toy, "slice_down@7:1", cluster=cluster, clock=clock, elastic_min_slice_count=-1)
  assert survivors == [{0, 1, 2, 3}, {0, 3}]
  assert toy.losses == undisturbed.losses


def test_a_slow_step_on_healthy_slices_is_waited_for(undisturbed, monkeypatch):
  monkeypatch.setattr(wait, "CHECK_SECONDS", 0.1)
  toy, slow = ToyRun(steps=3), [True]

  def blocking(arrays):
    if slow.pop() if slow else False:
      time.sleep(0.35)
    jax.block_until_ready(arrays)

  toy.block = blocking
  assert train(toy, cluster=simulated_cluster(4, Clock())).kind == "complete"
  assert not records(toy, "slice_down")
  assert any("all its slices answer" in line for line in toy.lines)


def test_deterministic_errors_are_not_retried():
  for error in (
    ValueError("shapes differ"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"),
    FloatingPointError("loss is nan"),
  ):
    toy = ToyRun()
    toy.fail_at[7] = error
    with pytest.raises(type(error)) as caught:
      train(toy)
    assert caught.value is error
    assert any("not retried" in note for note in error.__notes__)
    assert len(toy.restores) == 1
    assert records(toy, "attempt_end")[-1]["outcome"] == "failed"


def test_an_unknown_error_once_is_recovered_from_with_a_new_compilation(undisturbed):
  toy = ToyRun(cache={})
  toy.fail_at[7] = jax.errors.JaxRuntimeError("INTERNAL: an unexpected error occurred")
  real = toy.restore

  def once(survivors):
    if toy.restores:
      toy.fail_at.clear()
    return real(survivors)

  toy.restore = once
  assert train(toy).kind == "complete"
  assert toy.losses == undisturbed.losses
  assert not records(toy, "slice_down")
  assert len([r for r in records(toy, "compile") if not r["background"]]) == 2


def test_a_step_that_would_not_get_faster_is_not_interrupted():
  """6 of 8 slices need two rounds, as 4 to 7 do: only the eighth is worth a resize."""
  toy = ToyRun(num_slices=8)
  train(toy, "slice_down@3:1, slice_down@3:2, slice_up@6:1", num_slices=8)
  assert not records(toy, "slice_up")
  toy = ToyRun(num_slices=8)
  train(toy, "slice_down@3:1, slice_down@3:2, slice_up@6:1, slice_up@8:2", num_slices=8)
  assert [r["slice"] for r in records(toy, "slice_up")] == [[1, 2]]


def test_a_rehearsed_fault_may_wait_for_the_preparation(undisturbed):
  """As in elastic_demo: on a busy machine, the loss would come before the steps for fewer slices are compiled."""
  toy = ToyRun(cache={})
  compile_now = toy.compile_now

  def slowly(view):  # so slowly that the rest of the run is too short for a compilation to be of use
    time.sleep(0.5)
    return compile_now(view)

  toy.compile_now = slowly
  assert train(toy, "slice_down@7:1:prepared, slice_up@12:1").kind == "complete"
  same_run(toy, undisturbed)
  assert [recovery["compilations"] for recovery in records(toy, "recovery")] == [0, 0]
  (wait,) = records(toy, "rehearsal_wait")
  assert wait["step"] == 7 and "seconds" in wait  # on a clock that stands still here
  assert toy.lines.index("A rehearsed fault waits before step 7 until the other steps are prepared.") < next(
    number for number, line in enumerate(toy.lines) if line.startswith("Slice down event detected.")
  )


def test_a_step_prepared_too_late_is_the_only_program_that_a_recovery_waits_for(tmp_path):
  """Nothing is compiled twice: the recovery waits for the compilation under way, and the queue behind it is dropped."""
  toy = ToyRun(cache={}, steps=8)
  compiling, release = threading.Event(), threading.Event()
  compile_now, compiled = toy.compile_now, []

  def slowly(view):
    compiled.append(view.slices)
    if threading.current_thread().name.startswith("compile next topologies"):
      compiling.set()
      assert release.wait(60)
    return compile_now(view)

  toy.compile_now = slowly
  lose = toy.example

  def example(step, rows):
    if step == 4 and not release.is_set():
      assert compiling.wait(60)  # slices (1, 2, 3), the first in the queue
      toy.elastic.cluster.lose(0)
      threading.Timer(0.2, release.set).start()
    return lose(step, rows)

  toy.example = example
  assert train(toy, directory=str(tmp_path)).kind == "complete"
  first = compiled[:2]
  assert first == [(0, 1, 2, 3), (1, 2, 3)]
  assert len(set(compiled)) == len(compiled), "a step was compiled twice"
  (recovery,) = records(toy, "recovery")
  assert recovery["compilations"] == 0  # the compilation that it waited for had started in the background
  log = (tmp_path / "log.txt").read_text()
  assert "Preparing in the background the steps for slices [1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]." in log
  assert "Prepared the step for slices [1, 2, 3] in " in log
