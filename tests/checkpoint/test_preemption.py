"""SIGTERM to real processes: one, one that is stuck, and four of which one is told."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest
from tests.support.jax_processes import SOURCES, Processes

LOOP = """
import sys, time
from trainer.checkpoint.preemption import Preemption
from trainer.config.schema import CheckpointSection
p = Preemption(CheckpointSection({changes}), log=print)
p.__enter__()
print("ready", flush=True)
for step in range(1, 2000):
  if p.requested(step):
    break
  time.sleep(0.02)
print("stopped", p.noticed, p.requested(step + 1), flush=True)
{after}
"""
# A call into C that releases the GIL and that no signal interrupts, as a compilation or a collective is.
CALL = "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', {})"
STUCK = CALL.format(2**31 - 1)


def start(code: str) -> subprocess.Popen:
  env = os.environ | {"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu"}
  process = subprocess.Popen([sys.executable, "-uc", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  assert process.stdout.readline() == b"ready\n"
  return process


@pytest.fixture
def running():
  processes = []
  yield lambda code: processes.append(start(code)) or processes[-1]
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()


def test_first_signal_is_a_request(running):
  process = running(LOOP.format(after="sys.exit(42)", changes=""))
  process.send_signal(signal.SIGTERM)
  text = process.stdout.read()
  assert process.wait(60) == 42
  assert text == b"SIGTERM received: finishing the step, saving a checkpoint and exiting.\nstopped True True\n"


@pytest.mark.parametrize("after", ["time.sleep(1000)", STUCK], ids=["interruptible", "in a call"])
def test_second_signal_ends_at_once(running, after):
  process = running(LOOP.format(after=after, changes=""))
  for _ in range(3):  # as `timeout` does: to the process, then to its group
    process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
  assert b"SIGTERM received" in process.stdout.readline()
  assert b"stopped" in process.stdout.readline()
  time.sleep(1.3)
  assert process.poll() is None
  begin = time.monotonic()
  process.send_signal(signal.SIGTERM)
  assert process.wait(30) == 143
  assert time.monotonic() - begin < 15
  assert b"second SIGTERM" in process.stdout.read()


def test_switched_off_the_signal_ends_the_process(running):
  process = running(LOOP.format(after="", changes="enable_autocheckpoint=False"))
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == -signal.SIGTERM


def test_leaving_gives_the_signal_back(running):
  process = running(
    LOOP.format(after="", changes="").replace('print("ready', 'p.__exit__(None, None, None)\nprint("ready')
  )
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == -signal.SIGTERM


@pytest.mark.timeout(600)
def test_four_processes_agree_on_the_step(tmp_path):
  world = Processes("preempted", tmp_path, 4)
  deadline = time.monotonic() + 180
  while "step 5\n" not in world.logs[2].read_text() and time.monotonic() < deadline:
    time.sleep(0.05)
  world.processes[2].send_signal(signal.SIGTERM)  # one of them, as when a single host is reclaimed
  texts = world.finish()
  stops = [re.findall(r"stopped at (\d+), committed (\d+)", text) for text in texts]
  assert stops[0] and all(stop == stops[0] for stop in stops)
  assert stops[0][0][0] == stops[0][0][1]


def test_a_signal_during_a_long_call_is_one_notice(running):
  """The handler runs when the call is over, long after the thread has seen the signal."""
  process = running(
    LOOP.format(after="sys.exit(42)", changes="").replace("for step", f"{CALL.format(4_000_000)}\nfor step")
  )
  process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 42


def test_second_signal_ends_one_of_several_at_once(tmp_path):
  world = Processes("ignoring_preemption", tmp_path, 2)
  try:
    for line in ("ready", "asked"):
      deadline = time.monotonic() + 180
      while line not in world.logs[1].read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
      world.processes[1].send_signal(signal.SIGTERM)
      time.sleep(1.3)
    assert world.processes[1].wait(30) == 143
  finally:
    world.kill()
