"""wandb: each step and evaluation once, whatever the processes of the run do, and no harm if they fail.

One test uses the real package, offline, where it is installed (extra wandb).
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from trainer.config import ConfigError
from trainer.config import paths as config_paths
from trainer.config.load import load
from trainer.config.schema import ObserveSection
from trainer.services import background_writer, objects, services_plugin, wandb_runs
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
  return list(services_plugin.recorders("gs://b", cfg, "process", said, wandb_runs.ServiceRun()))


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
