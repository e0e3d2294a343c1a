from __future__ import annotations

import datetime

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
