"""How a process joins a run of several worlds, and what it says if it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.command import TINY

from worlds.membership import wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.messages import message
from worlds.membership.run_rules import RunRules
from worlds.membership.server import Server
from worlds.place import Place

TOKEN = b"t" * 32


@pytest.fixture
def supervisor():
  supervisor = Server(Coordinator(RunRules(1, 1, 1)), TOKEN, kill=lambda member, reason: None)
  yield supervisor
  supervisor.close()


@pytest.fixture
def start(server, supervisor, tmp_path):
  """Runs `python -m trainer` as member 0 of the supervisor's run: its exit code, what it printed, and its files."""

  def run() -> tuple[int, str, list[Path]]:
    out, printed = tmp_path / "out", tmp_path / "printed.txt"
    keys = ["dataset_type=synthetic", "vocab_size=64", "cluster=multiprocess", f"base_output_directory={out}"]
    place = Place((supervisor.address,), TOKEN, 0)
    code = server.start([*TINY, *keys], place.environment(), printed).wait(120)
    return code, printed.read_text(), list(out.rglob("*"))

  return run


def test_a_process_that_starts_after_the_end_of_the_run_ends_with_its_code(start, supervisor):
  supervisor.end(42, "")
  code, printed, files = start()
  assert code == 42
  assert "The run has ended with exit code 42." in printed and "Traceback" not in printed
  assert files == []


def test_a_process_whose_place_is_taken_says_so_and_may_start_again(start, supervisor):
  """As after a restart, while the supervisor still waits for the death of the process before."""
  first = wire.connect(supervisor.address, TOKEN)
  first.send(message("hello", member=0, lane=0, lanes=1, address="127.0.0.1:1"))
  assert first.receive() is not None
  code, printed, _ = start()
  first.close()
  assert code == 42
  assert "member 0, lane 0, which has a connection already" in printed and "Traceback" not in printed


def test_a_supervisor_that_is_gone_is_one_message(start, supervisor):
  supervisor.close()
  code, printed, _ = start()
  assert code == 1  # no wrong input
  assert printed.count("error: ") == 1 and "cannot join the run there" in printed
