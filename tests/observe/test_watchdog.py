"""A hung process ends with code 134 and shows where it hung; a slow, stopped or resting one is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from trainer.observe import events

HEADER = """
import sys, threading, time
from trainer.observe import events, log, watchdog
out = log.get(sys.argv[1])
dog = watchdog.Watchdog(float(sys.argv[2]), out, events.EventLog(sys.argv[1]))
dog.start()
"""


def start(path, code: str, timeout: float) -> subprocess.Popen:
  command = [sys.executable, "-c", HEADER + textwrap.dedent(code), str(path), str(timeout)]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_hung_process_dumps_its_stacks_and_exits_with_134(tmp_path):
  code = """
    def stuck_in_a_collective():
      threading.Event().wait()
    def other_thread():
      time.sleep(600)
    threading.Thread(target=other_thread, daemon=True).start()
    dog.step_done(step=7)
    stuck_in_a_collective()
  """
  with start(tmp_path, code, 0.5) as process:
    out, err = process.communicate(timeout=30)
  assert process.returncode == 134
  log = (tmp_path / "log.txt").read_text()
  for text in (err, log):
    assert "stuck_in_a_collective" in text and "other_thread" in text
  assert "warning: no step completed for" in out and "last completed step: 7" in log
  (hang,) = events.read_events(str(tmp_path))
  assert hang["kind"] == "hang" and hang["step"] == 7 and 0.5 <= hang["silent_seconds"] < 5


def test_it_aborts_even_when_nobody_reads_stderr(tmp_path):
  code = """
    import fcntl, os
    fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 4096)
    os.write(2, b"x" * 4096)
    dog.step_done(step=3)
    time.sleep(600)
  """
  with start(tmp_path, code, 0.5) as process:
    assert process.wait(timeout=30) == 134
  assert [record["kind"] for record in events.read_events(str(tmp_path))] == ["hang"]


def test_beats_and_long_operations_within_their_limits_are_no_hang(tmp_path):
  code = """
    for step in range(10):
      time.sleep(0.1)
      dog.step_done(step)
    with dog.during("save"):
      with dog.during("wait for the save before"):
        time.sleep(1.0)
      time.sleep(1.0)
    for part in range(6):
      time.sleep(0.2)
      dog.part_done()
    dog.stop()
    time.sleep(1.2)
  """
  with start(tmp_path, code, 1.0) as process:
    process.communicate(timeout=30)
  assert process.returncode == 0 and events.read_events(str(tmp_path)) == []


@pytest.mark.parametrize(
  "before", ["", "dog.step_done(4)", "dog.step_done(4); dog.pause()"], ids=["at the start", "step", "rest"]
)
def test_a_long_operation_that_hangs_is_aborted_by_name(tmp_path, before):
  code = f"""
    {before}
    with dog.during("restore"):
      with dog.during("read"):
        pass
      time.sleep(60)
  """
  begin = time.monotonic()
  with start(tmp_path, code, 0.2) as process:
    out, _ = process.communicate(timeout=30)
  assert process.returncode == 134 and time.monotonic() - begin >= 2.0
  assert "warning: restore has not finished in 2 s (10 x watchdog_timeout_seconds=0.2)" in out
  (hang,) = events.read_events(str(tmp_path))
  assert (hang["operation"], hang["step"]) == ("restore", 4 if before else None)


@pytest.mark.parametrize("timeout, seconds", [(0, 0.3), (0.6, 0.6)], ids=["no timeout", "its own timeout"])
def test_a_limit_holds_from_now_on_where_there_was_none(tmp_path, timeout, seconds):
  code = """
    dog.step_done(4)
    if not sys.argv[2].startswith("0."):
      with dog.during("save"):
        time.sleep(4)
    dog.set_timeout(0.3, "elastic_timeout_seconds")
    time.sleep(60)
  """
  with start(tmp_path, code, timeout) as process:
    out, _ = process.communicate(timeout=30)
  assert process.returncode == 134
  (hang,) = events.read_events(str(tmp_path))
  assert seconds <= hang["silent_seconds"] < seconds + 2
  assert ("(elastic_timeout_seconds=0.3)" if timeout == 0 else "(watchdog_timeout_seconds=0.6)") in out


def test_a_process_that_was_stopped_and_continued_is_not_hung(tmp_path):
  code = """
    print("ready", flush=True)
    for step in range(30):
      time.sleep(0.05)
      dog.step_done(step)
  """
  with start(tmp_path, code, 1.0) as process:
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(process.pid, signal.SIGCONT)
    process.communicate(timeout=30)
  assert process.returncode == 0 and events.read_events(str(tmp_path)) == []


LATE = """
    watchdog.LATE_SECONDS = 0.4
    for step in range(1, 30):
      time.sleep(0.01)
      with dog.during("save"):
        time.sleep(0.02)  # no part of a step
      dog.step_done(step)
    assert 0.4 == dog.late_after(), dog.late_after()
    with dog.during("evaluation"):
      assert dog.late_after() is None
    def a_late_step():
      time.sleep(SECONDS)
    a_late_step()
"""


def test_a_late_step_is_reported_with_all_stacks_and_goes_on(tmp_path):
  """Without a timeout too."""
  code = LATE.replace("SECONDS)", "2.5)") + "    dog.step_done(30)\n    a_late_step()\n    dog.pause()\n"
  with start(tmp_path, code + "    assert dog.late_after() is None\n", 0.0) as process:
    out, err = process.communicate(timeout=60)
  assert process.returncode == 0, err
  assert "a_late_step" in err and "a_late_step" in (tmp_path / "log.txt").read_text()
  assert "more than max(0.4 s, 3 x the 99th percentile of the last steps), last completed step: 29" in out
  (late,) = events.read_events(str(tmp_path))  # the second one comes within ten minutes of the first
  assert (late["kind"], late["step"]) == ("late_step", 29) and 0.4 <= late["silent_seconds"] < 2.5


def test_an_adaptive_timeout_ends_a_late_process(tmp_path):
  with start(tmp_path, LATE.replace("SECONDS)", "60)"), -1.0) as process:
    out, _ = process.communicate(timeout=60)
  assert process.returncode == 134 and "(watchdog_timeout_seconds=-1)" in out
  assert [event["kind"] for event in events.read_events(str(tmp_path))] == ["hang"]
