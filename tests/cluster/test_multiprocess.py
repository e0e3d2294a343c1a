"""How a process joins a run of several worlds, and what it says if it cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.command import ROOT, TINY, cpu_environment

from worlds.membership import wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.messages import message
from worlds.membership.rules import RunRules
from worlds.membership.server import Server
from worlds.place import Place

TOKEN = b"t" * 32


@pytest.fixture
def server():
  server = Server(Coordinator(RunRules(1, 1, 1)), TOKEN, kill=lambda member, reason: None)
  yield server
  server.close()


def start(server: Server, *keys: str) -> subprocess.CompletedProcess[str]:
  """The result of `python -m trainer` as member 0 of the server's run."""
  place = Place((server.address,), TOKEN, 0)
  return subprocess.run(
    [sys.executable, "-m", "trainer", *TINY, "dataset_type=synthetic", "vocab_size=64", "cluster=multiprocess", *keys],
    env=cpu_environment(place.environment()),
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=120,
  )


def test_a_process_that_starts_after_the_end_of_the_run_ends_with_its_code(server, tmp_path):
  server.end(42, "")
  ended = start(server, f"base_output_directory={tmp_path}")
  assert ended.returncode == 42
  assert "The run has ended with exit code 42." in ended.stderr and "Traceback" not in ended.stderr
  assert list(tmp_path.iterdir()) == []


def test_a_process_whose_place_is_taken_says_so_and_may_start_again(server, tmp_path):
  """As after a restart, while the supervisor still waits for the death of the process before."""
  first = wire.connect(server.address, TOKEN)
  first.send(message("hello", member=0, lane=0, lanes=1, address="127.0.0.1:1"))
  assert first.receive() is not None
  refused = start(server, f"base_output_directory={tmp_path}")
  first.close()
  assert refused.returncode == 42
  assert "member 0, lane 0, which has a connection already" in refused.stderr and "Traceback" not in refused.stderr


def test_a_supervisor_that_is_gone_is_one_message(server, tmp_path):
  server.close()
  lost = start(server, f"base_output_directory={tmp_path}")
  assert lost.returncode == 1  # no wrong input
  assert lost.stderr.count("error: ") == 1 and "cannot join the run there" in lost.stderr
