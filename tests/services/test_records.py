"""Records of a run in TensorBoard's files and in metrics objects, after rewinds and on a full disk."""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap

from tests.observe import test_line_files
from tests.observe.test_metrics import record

from trainer.config.schema import ObserveSection
from trainer.observe import events, files, log, metrics
from trainer.report import page
from trainer.services.services_plugin import recorders
from trainer.services.wandb_runs import ServiceRun

bucket = test_line_files.bucket  # a fixture


def open_metrics(path, **cfg) -> metrics.Metrics:
  section, record = ObserveSection(**cfg), events.EventLog(str(path), "r")
  open_all = lambda: list(recorders(str(path), section, record.process, log.get(None), ServiceRun()))
  return metrics.Metrics(str(path), record, recorders=open_all)


def tensorboard(run) -> tuple[list[tuple[int, str, float]], list[int]]:
  """The scalars in the run's TensorBoard files, (step, tag, value), and the steps from which a file purges."""
  from tensorboardX.proto import event_pb2

  paths = sorted((run / "tensorboard").iterdir(), key=lambda path: path.name)
  found, purges = [], []
  for path in paths:
    data, at = path.read_bytes(), 0
    while at < len(data):  # TFRecord: length, crc, payload, crc
      size = int.from_bytes(data[at : at + 8], "little")
      event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      at += 16 + size
      found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
      if event.session_log.status == event.session_log.START:
        purges.append(event.step)
  return found, purges


def test_tensorboard_has_the_numbers_and_purges_what_a_rewind_replaces(tmp_path):
  out = open_metrics(tmp_path, services="tensorboard")
  for step in [0, 1, 2, 1, 2]:
    out.write(record(step, loss=10.0 - step, mfu=None, eta=8.0 - step))
  out.write_eval(metrics.Evaluation(2, 7.5))
  out.close()
  found, purges = tensorboard(tmp_path)
  assert [(step, value) for step, tag, value in found if tag == "learning/loss"] == [
    (0, 10),
    (1, 9),
    (2, 8),
    (1, 9),
    (2, 8),
  ]
  assert (2, "evaluation/loss", 7.5) in found and (2, "perf/eta_seconds", 6) in found
  assert not any(tag in ("perf/mfu", "learning/z_loss") for _, tag, _ in found)
  assert purges == [0, 1]


def test_flush_writes_all_records_to_disk(tmp_path):
  """A process killed during or after the save never writes these steps again, and no other one does."""
  out = open_metrics(tmp_path, services="tensorboard")
  for step in range(1, 9):
    out.write(record(step))
  out.write_eval(metrics.Evaluation(8, 7.5))
  out.flush()
  found, _ = tensorboard(tmp_path)
  assert [step for step, tag, _ in found if tag == "learning/loss"] == list(range(1, 9))
  assert (8, "evaluation/loss", 7.5) in found
  out.close()


def test_a_full_disk_ends_the_tensorboard_files_and_nothing_else(tmp_path):
  """By a limit on the size of the process's files. Closing must not wait for what can no longer be written."""
  code = f"""
    import resource
    from types import SimpleNamespace
    from trainer.services.background_writer import BackgroundWriter
    from trainer.services.tensorboard import TensorBoard
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
    said = []
    open_files = lambda: TensorBoard({str(tmp_path)!r}, "p")
    board = BackgroundWriter("TensorBoard files", open_files, SimpleNamespace(warning=said.append), "", waits=True)
    for step in range(2000):
      board.write(step, {{"learning/loss": 1.0}}, 0.0, is_step=True)
    board.close(0)
    board.join()
    print(len(said), said[0])
  """
  result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith("1 no TensorBoard files from here on: [Errno 27]")


def test_a_whole_run_on_an_object_store(bucket, tmp_path):
  out, record = log.get("gs://bucket/run"), events.EventLog("gs://bucket/run", "run")
  section = ObserveSection(services="gcs_metrics", log_period=2)
  objects = functools.partial(recorders, "gs://bucket/run", section, record.process, out, ServiceRun())
  writer = metrics.Metrics("gs://bucket/run", record, recorders=lambda: list(objects()))
  record.emit("run_start", num_slices=1)
  for step in (1, 2, 3):
    writer.write(
      metrics.StepRecord(step=step, seconds=0.001, loss=3.0 - step, grad_norm=1.0, lr=0.1, tokens=8, slices=1)
    )
  record.emit("run_end", exit=0)
  writer.close()
  record.close()
  assert [r["loss"] for r in metrics.read_metrics("gs://bucket/run")] == [2.0, 1.0, 0.0]
  assert [r["kind"] for r in events.read_events("gs://bucket/run")] == ["run_start", "run_end"]
  assert sorted(path.name for path in (tmp_path / "bucket/run/metrics").iterdir()) == [
    "metrics_step_000001_to_step_000002.txt",
    "metrics_step_000003_to_step_000003.txt",
  ]
  page.write_or_warn("gs://bucket/run", out, with_goodput=True, with_page=True)
  out.close()
  goodput, _, report = (line[20:] for line in files.read_lines("gs://bucket/run", "log.txt"))
  assert goodput.startswith("goodput: ") and report == "Report: gs://bucket/run/report.html"
