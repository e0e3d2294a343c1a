"""Faults of a stand-in that a run has started, and the configuration of one. tests/elastic has runs behind it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.command import Run

from pathways_standin.process import StandinError
from trainer.cluster import standin
from trainer.cluster.pathways import PathwaysCluster
from trainer.config import ConfigError, load
from trainer.config.schema import ClusterSection

SECTION = ClusterSection(cluster="pathways", cluster_standin="2x1")


class Server:
  """Records the commands."""

  def __init__(self):
    self.commands = []
    self.down = set()

  def control(self, *words):
    if words == ("status",):
      return {"slices": [{"slice": s, "down": "DATA_LOSS: lost" if s in self.down else None} for s in range(4)]}
    self.commands.append(" ".join(map(str, words)))
    return {}


def faults(replacement_seconds=0.05):
  server = Server()
  return standin.Faults(server, replacement_seconds), server.commands


def until(condition, seconds=20):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "did not happen in time"
    time.sleep(0.005)


def test_a_lost_slice_stays_lost_until_it_is_given_back():
  slices, commands = faults()
  slices.lose(1)
  time.sleep(0.1)
  slices.give_back(1)
  slices.give_back(1)  # it is back already
  assert commands == ["kill 1", "revive 1"]


def test_a_hanging_slice_goes_on_with_its_memory():
  slices, commands = faults()
  slices.hang(0)
  slices.give_back(0)
  slices.hang(0, 0.05)
  until(lambda: len(commands) == 4)
  assert commands == ["hang 0", "release 0"] * 2


def test_slices_that_the_run_waits_for_are_replaced_with_empty_memory():
  slices, commands = faults()
  slices.lose(0)
  slices.hang(1)
  slices.lose(2, float("inf"))
  for _ in range(3):  # at every poll
    slices.replace()
  until(lambda: len(commands) == 6)
  time.sleep(0.1)
  assert commands[:4] == ["kill 0", "hang 1", "kill 2", "kill 1"]
  assert sorted(commands[4:]) == ["revive 0", "revive 1"]


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    (
      ["cluster_standin=3x4"],
      "cluster_standin=3x4: is a stand-in for Pathways, but cluster=auto.\nSet cluster=pathways",
    ),
    (["cluster=pathways", "cluster_standin=3"], "cluster_standin"),
    (["cluster=pathways", "cluster_standin=0x4"], "cluster_standin"),
    (["cluster=pathways", "cluster_standin=3x4:processes"], "cluster_standin"),
  ],
)
def test_wrong_values_are_refused(keys, message):
  with pytest.raises(ConfigError) as refused:
    load(["configs/base.yml", *keys])
  assert message in str(refused.value)


def test_a_stand_in_that_does_not_start_is_wrong_input(monkeypatch):
  def fails(slices, devices):
    raise StandinError(f"{slices} slices of {devices}: grpcio is missing")

  monkeypatch.setattr(standin, "start_standin", fails)
  with pytest.raises(ConfigError, match="cluster_standin=2x1: 2 slices of 1: grpcio is missing"):
    PathwaysCluster.start(SECTION, {})


def test_a_stand_in_that_is_killed_while_it_starts_is_1(tmp_path):
  """The same command may succeed the next time: a scheduler restarts after 1, and not after 2."""
  run = Run(tmp_path, ["cluster=pathways", "cluster_standin=2x1", "steps=2"])
  run.keys = [key for key in run.keys if not key.startswith(("num_slices=", "devices_per_slice="))]
  process = run.start()
  try:
    is_server = lambda pid: "pathways_standin\0--child" in command_of(pid)
    while not (found := list(filter(is_server, processes_below(process.pid)))):
      assert process.poll() is None, run.printed
      time.sleep(0.01)
    os.kill(found[0], signal.SIGKILL)
    assert process.wait(120) == 1, run.printed
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait(30)
  assert "did not start" in run.printed and "Traceback" not in run.printed


def command_of(pid: int) -> str:
  try:
    return Path(f"/proc/{pid}/cmdline").read_text()
  except OSError:
    return ""


def processes_below(pid: int) -> list[int]:
  """The ids of the living processes that the process has started, directly or not."""
  found = [int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
  return [*found, *(below for child in found for below in processes_below(child))]
