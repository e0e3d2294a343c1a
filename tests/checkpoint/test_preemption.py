"""SIGTERM to one of several processes: all agree on the step at which they save and end."""

from __future__ import annotations

import re
import signal
import time

import pytest
from tests.support.jax_processes import Processes

from trainer.checkpoint.preemption import Preemption
from trainer.config.schema import CheckpointSection
from trainer.signals import Signals
from trainer.world import SINGLE_WORLD


class Signalled(Signals):
  """Signals of which none, or one, was received."""

  noticed = False


def test_a_request_is_announced_once_and_stays():
  signals, lines, events = Signalled(), [], []
  preemption = Preemption(
    CheckpointSection(), SINGLE_WORLD, signals, lines.append, lambda kind, **fields: events.append((kind, fields))
  )
  assert not preemption.requested(1) and not preemption.noticed
  signals.noticed = True
  assert preemption.noticed
  assert preemption.requested(2) and preemption.requested(3)
  assert lines == ["SIGTERM received: finishing the step, saving a checkpoint and exiting."]
  assert events == [("preemption", {"step": 2, "signal": "SIGTERM"})]


@pytest.mark.parametrize("key", ["enable_autocheckpoint", "enable_checkpointing"])
def test_switched_off_there_is_no_request(key):
  signals = Signalled()
  signals.noticed = True
  assert not Preemption(CheckpointSection(**{key: False}), SINGLE_WORLD, signals).requested(1)


@pytest.mark.timeout(600)
def test_four_processes_agree_on_the_step(server, tmp_path):
  processes = Processes(server, "preempted", tmp_path, 4)
  wait_for_text(processes, 2, "step 5\n")
  processes.processes[2].send_signal(signal.SIGTERM)  # only to one process, as when a single host is reclaimed
  texts = processes.finish()
  stops = [re.findall(r"stopped at (\d+), committed (\d+)", text) for text in texts]
  assert stops[0] and all(stop == stops[0] for stop in stops)
  assert stops[0][0][0] == stops[0][0][1]


@pytest.mark.timeout(600)
def test_a_second_signal_ends_one_of_several_at_once(server, tmp_path):
  processes = Processes(server, "ignoring_preemption", tmp_path, 2)
  try:
    for line in ("ready", "asked"):
      wait_for_text(processes, 1, line)
      processes.processes[1].send_signal(signal.SIGTERM)
      time.sleep(1.3)
    assert processes.processes[1].wait(30) == 143
  finally:
    processes.kill()


def wait_for_text(processes: Processes, index: int, text: str) -> None:
  deadline = time.monotonic() + 180
  while text not in processes.logs[index].read_text() and time.monotonic() < deadline:
    time.sleep(0.05)
