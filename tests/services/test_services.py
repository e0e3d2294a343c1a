"""wandb: each step and evaluation once, whatever the processes of the run do, and no harm if they fail.

One test uses the real package, offline, where it is installed (extra wandb).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from trainer.config import ConfigError
from trainer.config import paths as config_paths
from trainer.config.load import load
from trainer.config.schema import ObserveSection
from trainer.observe import events, metrics
from trainer.services import background_writer, objects, plugin, wandb_runs
from trainer.services.wandb_runs import WandbRun


class Kept:
  """A service that keeps rows in a list, which outlives the process that it stands for."""

  def __init__(self, rows: list[tuple[int, dict[str, float]]]):
    self.rows = rows
    self.last_step = max((step for step, _ in rows), default=0)
    self.last_evaluation = int(max((row.get(wandb_runs.EVALUATED, 0) for _, row in rows), default=0))

  def add(self, step, scalars):
    assert step > max((step for step, _ in self.rows), default=0), "a service drops such a row"
    self.rows.append((step, dict(scalars)))

  def finish(self, exit_code):
    pass


def process(rows, history=()) -> wandb_runs.EachStepOnce:
  recorded = [(step, {"loss": step}, {"eval": step} if evaluated else {}) for step, evaluated in history]
  return wandb_runs.EachStepOnce(lambda: Kept(rows), lambda: recorded)


def steps(writer, *numbers):
  for step in numbers:
    writer.write(step, {"loss": float(step)}, 0.0, is_step=True)


def seen(rows) -> list[tuple[int, int | None]]:
  """(step, step of the evaluation in its row)."""
  return [(step, row.get(wandb_runs.EVALUATED)) for step, row in rows]


def test_steps_that_are_done_again_and_their_evaluations_are_there_once():
  rows = []
  writer = process(rows)
  steps(writer, 1, 2)
  writer.write(2, {"eval": 2.0}, 0.0, is_step=False)
  steps(writer, 3, 2)
  writer.write(2, {"eval": 2.0}, 0.0, is_step=False)
  steps(writer, 3, 4)
  writer.close(0)
  assert seen(rows) == [(1, None), (2, 2), (3, None), (4, None)] and rows[1][1]["loss"] == 2.0


def test_the_next_process_goes_on_where_the_service_is():
  rows = []
  first = process(rows)
  steps(first, 1, 2, 3, 4)  # killed: step 4 was not added
  assert seen(rows) == [(1, None), (2, None), (3, None)]
  second = process(rows)  # from the checkpoint of step 2
  steps(second, 3, 4, 5)
  second.close(0)
  assert [step for step, _ in rows] == [1, 2, 3, 4, 5]


def test_rows_that_are_missing_come_from_the_records_of_the_run():
  """The service was down, or was turned on in the middle of the run."""
  rows = [(1, {"loss": 1.0})]
  writer = process(rows, history=[(1, False), (2, True), (3, False), (4, True), (5, False)])
  steps(writer, 5, 6)
  writer.close(42)
  assert seen(rows) == [(1, None), (2, 2), (3, None), (4, 4), (5, None), (6, None)]


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_evaluation_that_is_made_up_for_is_in_the_next_row(goes_on):
  rows = [(3, {"loss": 3.0})]
  writer = process(rows)
  writer.write(3, {"eval": 3.5}, 0.0, is_step=False)
  if goes_on:
    steps(writer, 4)
  writer.close(0)
  assert seen(rows)[1:] == [(4, 3)] and rows[1][1]["eval"] == 3.5


class Said:
  def __init__(self):
    self.lines = []
    self.warning = self.line = self.lines.append


def test_a_service_that_cannot_be_reached_is_named_once_and_delays_nothing():
  said = Said()

  def unreachable():
    raise ConnectionError("no route")

  writer = background_writer.BackgroundWriter("records in x", unreachable, said, "training goes on", waits=False)
  for step in range(50):
    writer.write(step, {}, 0.0, is_step=True)
    writer.flush()
  writer.close(0)
  writer.join()
  assert said.lines == ["no records in x from here on: no route (training goes on)"]


def test_a_service_that_never_answers_does_not_hold_the_end_of_the_process(monkeypatch):
  monkeypatch.setattr(background_writer, "LONGEST_WAIT_SECONDS", 0.2)
  said, release = Said(), threading.Event()
  writer = background_writer.BackgroundWriter("records in x", release.wait, said, "training goes on", waits=False)
  writer.write(1, {}, 0.0, is_step=True)
  writer.flush()
  writer.close(42)
  writer.join()
  assert said.lines == ["no records in x from here on: no answer for 0.2 s (training goes on)"]
  assert background_writer.has_pending()  # so that the command ends without waiting for the library
  release.set()


def recorders_of_objects(said) -> list:
  cfg = ObserveSection(services="gcs_metrics")
  return list(plugin.recorders("gs://b", cfg, "process", said, wandb_runs.ServiceRun()))


def test_an_object_store_that_never_answers_does_not_hold_the_end_of_the_process(monkeypatch):
  monkeypatch.setattr(background_writer, "LONGEST_WAIT_SECONDS", 0.2)
  said, release = Said(), threading.Event()
  monkeypatch.setattr(objects, "_put_object", lambda *args: release.wait())
  (out,) = recorders_of_objects(said)
  for step in (1, 2):
    out.write({"step": step, "loss": 1.0}, "{}")
  out.close(None)
  out.join()
  assert said.lines == ["no metrics objects from here on: no answer for 0.2 s (metrics.jsonl has all records)"]
  assert background_writer.has_pending()
  release.set()


def test_a_metrics_object_that_cannot_be_written_does_not_stop_the_next_ones(monkeypatch):
  said, written = Said(), []

  def put(directory, stem, text):
    if "000002" in stem:
      raise OSError("503")
    written.append(text)

  monkeypatch.setattr(objects, "_put_object", put)
  (out,) = recorders_of_objects(said)
  for step in (1, 2, 3):
    out.write({"step": step, "loss": 1.0}, str(step))
  out.close(None)
  out.join()
  assert written == ["1\n", "3\n"]
  assert said.lines == ["cannot write a metrics object under gs://b/metrics: 503"]


@pytest.mark.parametrize("offline", [True, False])
def test_the_folder_of_wandb_for_a_run_on_an_object_store(monkeypatch, offline):
  """It is deleted at the end, unless its files are the only ones."""
  folders = []
  finished = SimpleNamespace(
    offline=offline, resumed=False, summary={}, url="x", define_metric=lambda *a, **k: None, finish=lambda **k: None
  )

  def init(**options):
    folders.append(options["dir"])
    return finished

  settings = SimpleNamespace(settings=SimpleNamespace(mode="online", project=None, run_name=None))
  fake = SimpleNamespace(Settings=dict, setup=lambda *a: settings, login=lambda **k: True, init=init)
  monkeypatch.setitem(sys.modules, "wandb", fake)
  run = WandbRun("gs://bucket/run", wandb_runs.ServiceRun(), Said())
  run.finish(0)
  assert folders[0].exists() == offline
  shutil.rmtree(folders[0], ignore_errors=True)


def test_the_records_for_a_service_that_hangs_are_bounded(monkeypatch):
  monkeypatch.setattr(background_writer, "MOST_WAITING", 100)
  said, release = Said(), threading.Event()
  writer = background_writer.BackgroundWriter("records in x", release.wait, said, "training goes on", waits=False)
  for step in range(1000):
    writer.write(step, {}, 0.0, is_step=True)
    writer.flush()
  assert said.lines == ["no records in x from here on: no answer, and 100 records wait (training goes on)"]
  assert writer._tasks.qsize() <= 101
  release.set()


def test_a_disk_that_hangs_delays_one_checkpoint_and_no_last_save(monkeypatch):
  monkeypatch.setattr(background_writer, "LONGEST_WAIT_SECONDS", 2.0)
  said, release = Said(), threading.Event()
  writer = background_writer.BackgroundWriter("TensorBoard files", release.wait, said, "off", waits=True)
  writer.write(1, {}, 0.0, is_step=True)
  seconds = []
  for wait in (False, True, True, False):
    began = time.monotonic()
    writer.flush(wait=wait)
    seconds.append(time.monotonic() - began)
  assert seconds[1] >= 2.0 and max(seconds[0], *seconds[2:]) < 1.0
  assert said.lines == ["no TensorBoard files from here on: no answer for 2 s (off)"]
  release.set()


@pytest.mark.parametrize(("service", "package"), [("wandb", "wandb"), ("goodput", "ml_goodput_measurement")])
def test_a_missing_package_is_refused_before_anything_else(service, package, monkeypatch, tmp_path):
  installed = config_paths.is_installed
  monkeypatch.setattr(config_paths, "is_installed", lambda name: name != package and installed(name))
  words = ["configs/quickstart.yml", f"services=tensorboard,{service}", f"base_output_directory={tmp_path}/runs"]
  with pytest.raises(ConfigError, match=rf"services={service}: needs the package {package}.*\n.*setup.sh --{service} "):
    load(words)
  assert not (tmp_path / "runs").exists()


# ---- the real package

PROCESS = """
import json, os, sys
from trainer.config.schema import ObserveSection
from trainer.observe import events, log, metrics
from trainer.services.plugin import recorders
from trainer.services.wandb_runs import ServiceRun, WandbRun

folder, first, last, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
cfg = ObserveSection(services="wandb")
add = WandbRun.add


def added(run, step, scalars):
  print(json.dumps({"step": step} | scalars), flush=True)
  add(run, step, scalars)


WandbRun.add = added
run = ServiceRun("a 'b' \\u00fc", "0123456789ab", {"learning_rate": 0.1})
record, lines = events.EventLog(folder, "r"), log.get(folder)
out = metrics.Metrics(folder, record, recorders=lambda: list(recorders(folder, cfg, record.process, lines, run)))
for step in range(first, last + 1):
  numbers = dict(seconds=0.1, loss=1 / step, grad_norm=float("nan"), lr=0, tokens=step, slices=1)
  out.write(metrics.StepRecord(step=step, **numbers))
  if step % 5 == 0:
    out.write_eval(metrics.Evaluation(step, 2 / step, 0.1))
    out.flush()
if end == "kill":
  out._writers[0]._writer._waits = True
  out.flush()  # the service has begun
  os.kill(os.getpid(), 9)
out.close(42)
"""


def test_every_process_of_an_offline_run_writes_the_whole_run(tmp_path):
  """Steps 1 to 7, then 6 to 12 and a kill, then 11 to 16."""
  pytest.importorskip("wandb", reason="the extra wandb is not installed")
  for first, last, end in ((1, 7, "close"), (6, 12, "kill"), (11, 16, "close")):
    arguments = [str(tmp_path / "run"), str(first), str(last), end]
    environment = os.environ | {"WANDB_MODE": "offline"}
    result = subprocess.run(
      [sys.executable, "-c", PROCESS, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == (-9 if end == "kill" else 0), result.stdout + result.stderr
    assert "from here on" not in result.stdout
  rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
  assert [row["step"] for row in rows] == list(range(1, 17))
  assert [row["learning/loss"] for row in rows] == [1 / step for step in range(1, 17)]
  evaluated = [(row["evaluation/step"], row["evaluation/loss"]) for row in rows if "evaluation/step" in row]
  assert evaluated == [(5, 2 / 5), (10, 2 / 10), (15, 2 / 15)]
  folder = tmp_path / "run" / "wandb" / "latest-run"
  assert (
    len(list(folder.parent.glob("offline-run-*"))) == 3 and (folder / "run-0123456789ab.wandb").stat().st_size > 2000
  )
  assert f"`wandb sync {folder}` uploads the run\n" in (tmp_path / "run" / "log.txt").read_text()


def test_the_rows_for_services_are_those_of_the_metrics(tmp_path):
  """Written, done again, evaluated: what a later process would send is the history as it stands."""
  out = metrics.Metrics(str(tmp_path), events.EventLog(str(tmp_path)))
  for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 3.5)):
    out.write(metrics.StepRecord(step=step, seconds=0.1, loss=loss, grad_norm=1, lr=0, tokens=1, slices=1))
  out.write_eval(metrics.Evaluation(2, 3.25, 0.1, {"a": 3.25, "b": 7.0}))
  out.close()
  (one, first, none), (two, second, evaluation) = plugin.service_rows(str(tmp_path))
  assert (one, two, first["learning/loss"], second["learning/loss"], none) == (1, 2, 5.0, 3.5, {})
  assert evaluation == {"evaluation/loss": 3.25, "evaluation/loss of a": 3.25, "evaluation/loss of b": 7.0}
