"""services=goodput: Google's own calculator, from local records, agrees with the report's goodput."""

from __future__ import annotations

import pytest
from tests.support import fake_run

from trainer.observe import log
from trainer.report import goodput, history
from trainer.services import goodput_recording
from trainer.services.goodput_recording import GoodputRecording, LocalRecords

library = pytest.importorskip("ml_goodput_measurement.src.goodput_elastic", reason="the extra goodput is not installed")
BADPUT = pytest.importorskip("ml_goodput_measurement.src.goodput_utils").BadputType


@pytest.fixture
def recorded(tmp_path, monkeypatch):
  """Makes processes of the run tmp_path/r, whose records go to the library as well."""
  monkeypatch.setenv("NO_GCE_CHECK", "true")  # or the library asks the network for credentials
  monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
  monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))

  def begin(**facts) -> fake_run.FakeRun:
    recording = GoodputRecording(str(tmp_path / "r"), "team/a run", log.get(None))
    return fake_run.FakeRun(tmp_path / "r", listener=recording.record, **facts)

  return begin


def next_attempt(run: fake_run.FakeRun, number: int, seconds: float) -> None:
  """The next attempt begins, and can dispatch its first step after `seconds`."""
  run.events.emit("attempt_start", attempt=number, step=0, slices=sorted(run.alive))
  run.after(seconds, "init_done", seconds=seconds)


def details(folder, tmp_path):
  """What the library computes from the local records."""
  records = LocalRecords(str(folder), "team_a_run")
  calculator = library.ElasticGoodputCalculator("team_a_run", "", cloud_logger=records, cache_dir=str(tmp_path))
  calculator.get_job_goodput()
  return calculator.get_job_goodput_details()


def test_the_library_computes_the_goodput_of_the_report(tmp_path, recorded):
  run = recorded(steps=30)
  for step in range(1, 11):
    run.step(step)
  run.after(1.5, "eval", step=10, seconds=1.5, loss=2.0)
  for step in range(11, 16):
    run.step(step)
  run.lose(1, 15, resume=14)  # steps 14 and 15 are done again
  next_attempt(run, 2, 0.8)
  for step in range(14, 21):
    run.step(step)
  run.gain(1, 20)
  next_attempt(run, 3, 0.6)
  for step in range(21, 31):
    run.step(step)
  run.after(2.0, "checkpoint_saved", step=30, seconds=2.0, blocking_seconds=0.5)
  run.after(0.0, "run_end", exit=0)
  run.close()
  ours = goodput.compute(history.load(str(tmp_path / "r")))
  theirs = details(tmp_path / "r", tmp_path)
  badput = theirs["badput_time"]
  assert theirs["total_elapsed_time"] == pytest.approx(ours["wall_seconds"], abs=0.01)
  productive = sum(theirs["goodput_time"].values())
  # The library counts a step until the next one starts, so the waits for data are in it; and it takes what a first
  # step is longer than the others as the start of the program.
  assert productive == pytest.approx(ours["seconds"]["steps"] + ours["seconds"]["data_wait"], rel=0.02)
  assert badput[BADPUT.CUSTOM_BADPUT_EVENTS]["EVALUATION"] == pytest.approx(1.5)
  assert badput[BADPUT.CUSTOM_BADPUT_EVENTS]["CHECKPOINT_SAVE"] == pytest.approx(0.5)
  assert badput[BADPUT.CUSTOM_BADPUT_EVENTS]["PROCESS_END"] == pytest.approx(1.5)  # the wait for the commit
  assert badput[BADPUT.TPU_INITIALIZATION] + badput[BADPUT.TRAINING_PREP] == pytest.approx(3.2)
  assert badput[BADPUT.ELASTIC_REINITIALIZATION] == pytest.approx(0.8 + 0.6)
  assert badput[BADPUT.ELASTIC_SLICE_DOWN] == pytest.approx(0.3) and badput[BADPUT.ELASTIC_SCALE_UP] > 0.1
  assert theirs["disruption_count"] == 2  # the loss and the return


def test_a_wait_within_an_attempt_ends_with_the_next_step(tmp_path, recorded):
  """Slices as processes: the attempt goes on with the other slices."""
  run = recorded(steps=20)
  for step in range(1, 11):
    run.step(step)
  run.lose(1, 10, resume=11)
  for step in range(11, 16):
    run.step(step)
  run.gain(1, 15)
  for step in range(16, 21):
    run.step(step)
  run.after(0.0, "run_end", exit=0)
  run.close()
  badput = details(tmp_path / "r", tmp_path)["badput_time"]
  assert badput[BADPUT.ELASTIC_SLICE_DOWN] == pytest.approx(0.3)
  assert badput[BADPUT.ELASTIC_SCALE_UP] == pytest.approx(0.15)


def test_a_second_process_is_a_disruption(tmp_path, recorded):
  first = recorded(steps=9, slices=1)
  for step in range(1, 6):
    first.step(step)
  first.close()  # killed
  second = recorded(steps=9, slices=1, wall=1.8e9 + 60)
  for step in range(4, 10):
    second.step(step)
  second.after(0.0, "run_end", exit=0)
  second.close()
  ours = goodput.compute(history.load(str(tmp_path / "r")))
  theirs = details(tmp_path / "r", tmp_path)
  assert theirs["disruption_count"] == 1
  assert theirs["total_elapsed_time"] == pytest.approx(ours["wall_seconds"], abs=0.01)
  # The library takes the start of the step that was interrupted as the moment of the disruption.
  lost = theirs["badput_time"][BADPUT.INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION]
  assert ours["seconds"]["down"] <= lost <= ours["seconds"]["down"] + 0.5
  assert sum(theirs["goodput_time"].values()) == pytest.approx(ours["seconds"]["steps"], rel=0.1)


def test_names_are_fit_for_logs_and_files():
  assert goodput_recording.job_name("team/a b\u00fc.1-x") == "team_a_b_.1-x"
