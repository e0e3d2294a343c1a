"""The live page: a real server process, a run that grows, lines cut in half, a folder that goes away, a port in use."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
from tests.support import fake_run
from tests.support.report_page import Page

from trainer.observe import metrics
from trainer.report import exporter, history, live
from trainer.report import page as page_lib
from trainer.tools import watch


def young_run(path, steps: int = 3, **start) -> fake_run.FakeRun:
  run = fake_run.FakeRun(path, steps=20, slices=1, **start)
  for step in range(1, steps + 1):
    run.step(step)
  return run


@pytest.fixture
def short(monkeypatch):
  """Pages without pictures, which take a second to draw. Other tests look at whole pages."""
  monkeypatch.setattr(page_lib, "body", lambda run, goodput: (f"{run.steps[-1]['step']:.0f} of {run.start['steps']}",))


class Clock:
  def __init__(self):
    self.now = 1.8e9 + 4

  def __call__(self) -> float:
    self.now += 100  # no page is too young to be made again
    return self.now


def get(url: str, **headers) -> tuple[int, str]:
  try:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
      return answer.status, answer.read().decode()
  except urllib.error.HTTPError as error:
    return error.code, error.read().decode()


def test_the_page_follows_the_run_and_is_made_only_if_the_files_have_changed(tmp_path, short):
  run = young_run(tmp_path / "a")
  page = live.LivePage([str(tmp_path / "a")], period=1.0, clock=Clock())
  first = page.state()
  assert first.version == 1 and "3 of 20" in first.body and first.notice.startswith("step 3 of 20, 0:00:")
  assert page.state().version == 1
  run.step(4)
  second = page.state()
  assert second.version == 2 and "4 of 20" in second.body
  run.end(0, step=4)
  ended = page.state()
  assert "ended with exit code 0" in ended.notice and not ended.is_late


def test_a_run_that_writes_nothing_any_more_is_late(tmp_path):
  run = young_run(tmp_path / "a")
  assert live._notice(history.load(str(tmp_path / "a")), run.wall + run.now + 59)[1] is False
  text, late = live._notice(history.load(str(tmp_path / "a")), run.wall + run.now + 61)
  assert late and text.endswith("last record 0:01:01 ago")
  failing = {"host": "b", "error": "killed", "times": 5, "pause_seconds": 80}
  run.events.emit("member_failing", member=2, **failing)
  text, late = live._notice(history.load(str(tmp_path / "a")), run.wall + run.now + 1)
  assert late and "; Member 2 (host b) has failed 5 times without 10 steps of its own: next start in 80 s" in text
  run.events.emit("member_slow", member=1, factor=1.41, since=120, shares=5, of=8, steps=0)
  text, late = live._notice(history.load(str(tmp_path / "a")), run.wall + run.now + 1)
  assert late and "; Slice 1 computes a share in 1.41 times the median since step 120. It has 5 of 8 shares" in text
  saves = {"tier": "persistent", "reason": "full", "newest": 3, "newest_seconds": 60.0}
  run.events.emit("checkpoint_failed", **saves)
  text, late = live._notice(history.load(str(tmp_path / "a")), run.wall + run.now + 1)
  assert late and re.search(r", saves fail since [0-9:]{8} UTC: the newest checkpoint is of step 3, from 0:01:01", text)
  run.close()


@contextlib.contextmanager
def watching(*arguments: str):
  """The command as a process, and the address that it prints."""
  command = [sys.executable, "-m", "trainer.tools.watch", *arguments]
  process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
  try:
    yield process, process.stdout.readline().split(" on ")[1].split()[0]
  finally:
    process.kill()
    process.communicate(timeout=60)


def test_the_command_serves_the_page_and_ends_with_ctrl_c(tmp_path):
  run = young_run(tmp_path / "a", config={"run_name": "<script>alert(1)</script>"})
  run.close()
  with watching(str(tmp_path / "a"), "--port", "0", "--allow-host", "Runs.example") as (process, url):
    code, page = get(url)
    assert code == 200 and 'fetch("state?version=" + version' in page
    state = json.loads(get(f"{url}state?version=-1")[1])
    assert state["version"] == 1 and "3 of 20" in state["body"] and "<script>alert" not in state["body"]
    assert json.loads(get(f"{url}state?version=1")[1])["body"] is None
    assert get(f"{url}etc/passwd")[0] == 404
    assert get(url, Host="attacker.example:80")[0] == 403
    assert [get(url, Host=host)[0] for host in ("localhost", "127.0.0.1", "[::1]", "runs.EXAMPLE:443")] == [200] * 4
    shutil.rmtree(tmp_path / "a")
    assert get(url)[0] == 200
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 0


def test_the_list_has_states_and_numbers_to_sort_by(tmp_path):
  """A run that was killed looked like one that trains: both had not ended."""
  running = young_run(tmp_path / "a <b>")
  running.metrics.write_eval(metrics.Evaluation(3, 2.5))
  running.close()
  for name, code in (("ended", 0), ("failed", 1)):
    young_run(tmp_path / name).end(code, step=3)
  fake_run.FakeRun(tmp_path / "unborn", steps=20).close()
  now = running.wall + running.now
  page = live.LivePage([str(tmp_path)], period=1.0, clock=lambda: now)
  first = page.state()
  states = dict(re.findall(r'data-label="run" data-key="([^"]*)".*?data-label="state" data-key="([^"]*)"', first.body))
  assert list(states.values()) == ["running", "finished", "ended (exit code 1)", "running"]
  shown = Page(first.body)
  row = first.body[first.body.index("a &lt;b&gt;") :].partition("</tr>")[0]
  keys = dict(re.findall(r'data-label="([^"]*)" data-key="([^"]*)"', row))
  assert float(keys["evaluation loss"]) == 2.5 and float(keys["steps"]) == 3 and float(keys["learning rate"]) > 0
  assert float(keys["training loss"]) == pytest.approx(running.loss(3)) and all(label in shown.text for label in keys)
  now += 61  # files have not changed
  assert page.state().version == first.version + 1 and "stale or dead" in page.state().body
  assert page.state().body.count('data-key="running"') == 1  # a first step may take long


def test_a_run_on_an_object_store_is_followed(tmp_path, short):
  run = young_run(tmp_path / "a")
  run.close()
  for name in ("metrics.jsonl", "events.jsonl"):  # as an object store has them: numbered parts
    os.rename(tmp_path / "a" / name, tmp_path / "a" / f"{name}.000000")
  page = live.LivePage([f"file://{tmp_path}/a"], period=1.0, clock=Clock())
  assert "3 of 20" in page.state().body and page.state().version == 1
  part = tmp_path / "a" / "metrics.jsonl.000000"
  line = json.loads(part.read_text().splitlines()[-1]) | {"step": 4}
  (tmp_path / "a" / "metrics.jsonl.000001").write_text(json.dumps(line) + "\n")
  assert "4 of 20" in page.state().body


@contextlib.contextmanager
def serving(*folders, clock):
  """The answers of /metrics: {metric: {run: value}}, read by the parser of Prometheus' own library."""
  parser = pytest.importorskip("prometheus_client.parser", reason="the extra prometheus is not installed")
  with watch.Server(live.LivePage(list(map(str, folders)), period=1.0), 0) as server:
    server.exporter = exporter.Exporter(server.page.runs, clock)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def metrics() -> dict[str, dict[str, float]]:
      code, text = get(f"{server.url}metrics")
      assert code == 200
      samples = [one for family in parser.text_string_to_metric_families(text) for one in family.samples]
      found: dict[str, dict[str, float]] = {}
      for sample in samples:
        found.setdefault(sample.name.removeprefix("trainer_"), {})[sample.labels["run"]] = sample.value
      return found

    yield metrics
    server.shutdown()


def test_prometheus_gets_the_numbers_of_each_run_and_the_ages_of_one_that_is_dead(tmp_path):
  fake_run.elastic_run(tmp_path / "ended", wall=1.7e9)
  dead = young_run(tmp_path / "older" / 'dead "x\n')
  dead.events.emit("eval", step=2, seconds=1.0, loss=2.75)
  dead.after(1.0, "checkpoint_saved", step=2, tier="persistent", seconds=1.0, blocking_seconds=0.1)
  dead.after(5.0, "checkpoint_saved", step=3, tier="persistent", seconds=1.0, blocking_seconds=0.1)
  dead.after(1.0, "checkpoint_rejected", step=3, tier="persistent", reason="damaged")
  fake_run.FakeRun(tmp_path / "unborn").close()
  now = dead.wall + dead.now
  with serving(tmp_path, clock=lambda: now) as metrics:
    found, name = metrics(), 'older/dead "x\n'
    assert found["readable"] == {"ended": 1, name: 1, "unborn": 1}
    assert found["step"] == {"ended": 60, name: 3} and found["steps_wanted"]["unborn"] == 60
    assert found["loss"][name] == pytest.approx(dead.loss(3)) and found["tokens"][name] == 3 * 6144
    assert found["slices_alive"] == {"ended": 3, name: 1}
    assert found["slices_lost_total"] == {"ended": 1, name: 0, "unborn": 0}
    assert (
      found["evaluation_loss"] == {name: 2.75}
      and found["recoveries_total"]["ended"] == 2
      and found["exit_code"] == {"ended": 0}
    )
    assert found["seconds_since_step"][name] == pytest.approx(7.0, abs=0.01)
    assert found["seconds_since_checkpoint"][name] == pytest.approx(6.0, abs=0.01)
    now += 1000.0  # nothing is written any more
    later = metrics()
    assert later["seconds_since_step"][name] == pytest.approx(1007.0, abs=0.01) and later["step"] == found["step"]
    dead.events.emit("slice_down", step=3, slice=[0], slices=[])
    dead.step(4)
    events_file, whole = tmp_path / name / "events.jsonl", (tmp_path / name / "events.jsonl").read_bytes()
    events_file.write_bytes(whole + b'{"kind": "slice_down"}\n\x00\xff\n[1]\n' + whole.splitlines()[-1][:30])
    (tmp_path / "unborn" / "events.jsonl").write_text('{"kind": "run_end"}')  # another file
    (tmp_path / "ended" / "metrics.jsonl").write_text(json.dumps({"step": 10**400, "loss": "nan", "wall": "x"}) + "\n")
    changed = metrics()
    assert changed["step"] == {name: 4} and changed["slices_lost_total"] == {"ended": 1, name: 1, "unborn": 0}
    assert "ended" not in changed["loss"]  # no step of the trainer
    shutil.rmtree(tmp_path / "ended")
    assert "ended" not in metrics()["readable"]
  dead.close()
  with serving(tmp_path / "unborn", tmp_path / name, tmp_path / "away", clock=lambda: now) as metrics:
    assert metrics()["readable"] == {"unborn": 1, 'dead "x\n': 1, "away": 0}
