from __future__ import annotations

import datetime
import signal
import subprocess
import sys
import textwrap

from trainer.observe import events, metrics


def test_records_have_process_time_and_fields(tmp_path):
  log = events.EventLog(str(tmp_path), "demo")
  first = log.emit("run_start", steps=10, slices={2, 0, 1})
  log.emit("attempt_start", attempt=2, slices=(0, 2), step=5)
  log.emit("slice_down", slice=1, step=4, error=ValueError("boom"))
  log.close()
  start, attempt, down = events.read_events(str(tmp_path))
  assert start["kind"] == "run_start" and start["run"] == "demo" and start["slices"] == [0, 1, 2]
  assert (start["attempt"], attempt["attempt"], down["attempt"]) == (1, 2, 2)
  assert down["error"] == "boom" and len({r["process"] for r in (start, attempt, down)}) == 1
  assert start["monotonic"] <= attempt["monotonic"] <= down["monotonic"]
  moment = datetime.datetime.fromisoformat(start["time"])
  assert moment.utcoffset() == datetime.timedelta(0) and abs(moment.timestamp() - start["wall"]) < 1e-5
  assert first["kind"] == "run_start"


def test_a_new_process_appends_under_a_new_id(tmp_path):
  for _ in range(2):
    log = events.EventLog(str(tmp_path), "demo")
    log.emit("run_start")
    log.close()
  one, two = events.read_events(str(tmp_path))
  assert one["process"] != two["process"]


def test_a_new_primary_tells_listeners_of_the_records_that_the_one_before_it_did_not_write(tmp_path):
  before, after = (events.EventLog(str(tmp_path), is_primary=is_primary) for is_primary in (True, False))
  before.epoch = after.epoch = 1
  heard = []
  after.subscribe(heard.append)
  for log in (before, after):
    log.emit("slice_down", slice=[1])
  before.close()
  after.emit("slice_up", slice=[1])
  assert heard == []
  after.take_over(str(tmp_path))
  after.close()
  assert [record["kind"] for record in heard] == ["slice_up"]
  assert [record["kind"] for record in events.read_events(str(tmp_path))] == ["slice_down", "slice_up"]


def test_without_a_directory_nothing_is_written(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  assert events.EventLog(None).emit("eval", loss=1.0)["loss"] == 1.0
  assert events.EventLog(str(tmp_path), is_primary=False).emit("eval")["kind"] == "eval"
  assert list(tmp_path.iterdir()) == []


def test_listeners_hear_only_the_records_that_this_process_writes(tmp_path):
  """Otherwise each process of a run would record each step again for ml-goodput-measurement."""
  heard = []
  for is_primary in (True, False):
    record = events.EventLog(str(tmp_path), is_primary=is_primary)
    record.subscribe(heard.append)
    record.emit("run_start")
    out = metrics.Metrics(str(tmp_path), record, is_primary=is_primary)
    out.write(metrics.StepRecord(step=1, seconds=0.1, loss=1.0, grad_norm=1.0, lr=0.1, tokens=8, slices=1))
    out.close()
  assert [one.get("kind") for one in heard] == ["run_start", None]


def test_a_kill_leaves_a_readable_file(tmp_path):
  code = f"""
    import itertools
    from trainer.observe import events
    log = events.EventLog({str(tmp_path)!r})
    for i in itertools.count():
      log.emit("eval", step=i, text="x" * 2000)
      print(i, flush=True)
  """
  with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
    last = [int(process.stdout.readline()) for _ in range(200)][-1]
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
  events.EventLog(str(tmp_path)).emit("run_start")
  records = events.read_events(str(tmp_path))
  steps = [r["step"] for r in records if r["kind"] == "eval"]
  assert steps == list(range(len(steps))) and len(steps) > last
  assert records[-1]["kind"] == "run_start"
