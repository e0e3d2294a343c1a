"""Rounds of local steps on slices that are processes, against one process that computes all replicas."""

from __future__ import annotations

import re
import signal
import statistics

import pytest
from tests.support.command import Run, differences
from tests.support.forked_runs import SLOW, SLOWED
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import OneWorker

from trainer.tools import verify

STEPS, H = 62, 4  # the last round is shorter
KEYS = [
  *(f"steps={STEPS}", f"local_steps={H}", "outer_learning_rate=0.7", "outer_momentum=0.9"),
  *("checkpoint_period=40", "eval_interval=20", "eval_steps=2", "shares_per_slice=2", "per_device_batch_size=2"),
]


@pytest.mark.slow
def test_faults_in_rounds_and_a_restart_cost_no_bit_and_no_line(server, tmp_path):
  """A slice is killed, and the others compute its replicas too; then the slice that writes the records is killed, and
  the run waits for one of the two. SIGTERM stops it in a round, and the same command continues it."""
  keys = [*KEYS, f"jax_cache_dir={tmp_path / 'compiled'}"]
  undisturbed = OneWorker(tmp_path / "undisturbed", keys, server=server)
  with undisturbed.launched() as worker:
    assert undisturbed.wait(worker) == 0, undisturbed.tail()
  run = ProcessRun(tmp_path / "run", [*keys, "elastic_min_slice_count=2"], environment=SLOW, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= H, supervisor)
    primary = run.first_primary
    assert run.kill((primary + 1) % 3)
    run.wait_for(lambda: run.count("recovery") == 1, supervisor)
    assert run.kill(primary)
    run.wait_for(lambda: run.count("primary") == 1 and run.count("slice_up") >= 1, supervisor)
    before = run.last_step
    run.wait_for(lambda: run.last_step > before, supervisor)
    assert run.send(supervisor.pid, signal.SIGTERM)
    assert run.wait(supervisor) == 42, run.tail()
  assert "6 replicas on 2 slices: the next round takes up to 1.50 times as long as with all slices." in run.printed
  (stopped,) = re.findall(r"The round of local steps after step (\d+) stops here", run.printed)
  assert int(stopped) == run.last_step == run.committed_steps()[-1] < STEPS - H
  assert run.last_step % H == 0
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  assert run.steps() == list(range(1, STEPS + 1)), run.tail()
  assert run.evaluations() == undisturbed.evaluations() and len(run.evaluations()) == 4
  assert differences(run, undisturbed, STEPS) == []
  assert {event["steps_lost"] for event in run.events("recovery")} == {0}
  assert verify.main([str(run.directory)]) == 0


@pytest.mark.soak  # tests/drivers/test_local_rounds.py has turns with members that are threads
def test_slices_compute_the_replica_of_an_absent_slice_in_turns(server, tmp_path):
  """Two slices have three replicas: each computes half of the third one, so both compute equally long."""
  keys = ["steps=90", "local_steps=10", "checkpoint_period=90", f"jax_cache_dir={tmp_path / 'compiled'}"]
  undisturbed = OneWorker(tmp_path / "undisturbed", [*keys, "num_slices=3"], server=server)
  with undisturbed.launched() as worker:
    assert undisturbed.wait(worker) == 0, undisturbed.tail()
  faults = "fault_injection=slice_down@12:2/inf, slice_up@32:2"
  run = ProcessRun(tmp_path / "run", [*keys, faults], slices=3, environment=SLOW, server=server)
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  told = (
    "3 replicas on 2 slices: the next round takes up to 2.00 times as long as with all slices, and each later one, in "
  )
  assert f"{told}which slices take turns, 1.50 times." in run.printed and run.count("slice_up") == 1
  # Without turns, as in the first round, one of the two slices computes twice as long as the other one.
  of_two = [line["slice_seconds"].values() for line in run.records("metrics") if line.get("replica_distance")]
  unequal = [max(seconds) / min(seconds) for seconds in of_two if len(seconds) == 2]
  assert statistics.median(unequal[1:]) < 1.5, unequal
  assert differences(run, undisturbed, 90) == []
  assert verify.main([str(run.directory)]) == 0


@pytest.mark.soak
def test_faster_slices_take_the_first_steps_of_a_slow_one(server, tmp_path):
  keys = ["steps=210", "local_steps=10", "checkpoint_period=210", f"jax_cache_dir={tmp_path / 'compiled'}"]
  undisturbed = OneWorker(tmp_path / "undisturbed", keys, slices=4, server=server)
  with undisturbed.launched() as worker:
    assert undisturbed.wait(worker) == 0, undisturbed.tail()
  run = ProcessRun(tmp_path / "run", keys, slices=4, environment=SLOW | {SLOWED: "2:0.3"}, server=server)
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  (named,) = run.events("member_slow")
  assert named["member"] == 2 and named["steps"] in (1, 2) and "faster slices take the others" in run.printed
  seconds = [line["seconds"] for line in run.records("metrics") if line.get("replica_distance")]
  assert statistics.median(seconds[-3:]) < 0.75 * statistics.median(seconds[:15]), seconds
  assert differences(run, undisturbed, 210) == []
  assert verify.main([str(run.directory)]) == 0


def test_one_program_for_all_slices_is_refused(server, tmp_path):
  run = Run(tmp_path, ["local_steps=10", "checkpoint_period=10", "num_slices=2"], server.start)
  assert run.finish() == 2
  assert "one program drives all slices here" in run.printed and "trainer.launch.local" in run.printed
  assert not run.directory.exists()
