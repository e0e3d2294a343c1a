"""kill -9 at many moments of a run: the final state and all losses equal those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.support.seeds import few

ROOT = Path(__file__).parents[2]
STEPS = 12


class Server:
  """Starts toy runs; see checkpoint_run.py."""

  def __init__(self) -> None:
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.checkpoint.kill_run"]
    self.process = subprocess.Popen(
      command, env=env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

  def start(self, folder: Path) -> int:
    folder.mkdir(exist_ok=True)
    self.process.stdin.write(f"{folder} {STEPS}\n")
    self.process.stdin.flush()
    word, pid = self.process.stdout.readline().split()
    assert word == "started"
    return int(pid)

  def end(self) -> int:
    """Wait status of the last started run."""
    word, status = self.process.stdout.readline().split()
    assert word == "ended"
    return int(status)


@pytest.fixture(scope="module")
def server():
  s = Server()
  yield s
  s.process.kill()
  s.process.communicate(timeout=60)


@pytest.fixture(scope="module")
def undisturbed(server, tmp_path_factory):
  folder = tmp_path_factory.mktemp("kill") / "undisturbed"
  begin = time.monotonic()
  server.start(folder)
  assert server.end() == 0
  return folder, time.monotonic() - begin


def kill_when(server: Server, folder: Path, moment: Callable[[], bool]) -> bool:
  """Runs until `moment()` is true, then kills the process. False if the run ended before."""
  pid = server.start(folder)
  while not moment():
    time.sleep(0.0005)
    if (folder / "final.npz").exists():
      assert server.end() == 0
      return False
  os.kill(pid, signal.SIGKILL)
  return os.WTERMSIG(server.end()) == signal.SIGKILL


def losses(folder: Path) -> dict[int, str]:
  """{step: loss}. A repeated step must have the same loss."""
  found: dict[int, str] = {}
  for line in (folder / "losses.jsonl").read_text().splitlines():
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      continue  # a line that the kill has truncated
    assert found.setdefault(record["step"], record["loss"]) == record["loss"], record
  return found


def assert_same_outcome(folder: Path, reference: Path) -> None:
  assert losses(folder) == losses(reference)
  with np.load(folder / "final.npz") as got, np.load(reference / "final.npz") as want:
    assert got.files == want.files
    for name in want.files:
      assert got[name].tobytes() == want[name].tobytes(), name


def finish(server: Server, folder: Path) -> None:
  """Runs to the end. Nothing of a killed save is left."""
  server.start(folder)
  assert server.end() == 0
  left = {path.name for path in (folder / "run").rglob("*") if "tmp" in path.name or path.name == "DELETED"}
  assert not left and not (folder / "run" / "checkpoints_rejected").exists()


def exists(folder: Path, pattern: str, since: int = 0) -> Callable[[], bool]:
  """A condition: after step `since`, a file matches the pattern."""

  def moment() -> bool:
    try:
      done = (folder / "losses.jsonl").read_text().count("\n")
      return done >= since and any(folder.glob(pattern))
    except OSError:
      return False

  return moment


MOMENTS = {
  "in a save": ("run/checkpoints/*.orbax-checkpoint-tmp", 4),
  "before the commit": ("run/checkpoints/*.orbax-checkpoint-tmp/manifest.json", 4),
  "in the first save": ("run/checkpoints/2.orbax-checkpoint-tmp/state", 1),
  "in a deletion": ("run/checkpoints/*/DELETED", 6),
  "in a local save": ("ram/*/*/*.bin", 5),
  "between local parts": ("ram/*/*/*.json.tmp", 5),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed(server, undisturbed, moment):
  reference, _ = undisturbed
  pattern, since = MOMENTS[moment]
  for attempt in range(5):  # the moment lasts microseconds, so the kill may miss it
    folder = reference.parent / f"{moment.replace(' ', '_')}{attempt}"
    killed = kill_when(server, folder, exists(folder, pattern, since))
    if killed:
      finish(server, folder)
    assert_same_outcome(folder, reference)
    if killed:
      return
  pytest.skip("the moment passed unseen five times: the disk is too fast")


@pytest.mark.parametrize("seed", few([0], range(4)))
def test_killed_again_and_again_at_random(server, undisturbed, seed):
  reference, duration = undisturbed
  folder = reference.parent / f"random{seed}"
  rng = random.Random(seed)
  for _ in range(3):
    if (folder / "final.npz").exists():
      break
    until = time.monotonic() + rng.uniform(0.1, 1.0) * duration
    kill_when(server, folder, lambda until=until: time.monotonic() > until)
  if not (folder / "final.npz").exists():
    finish(server, folder)
  assert_same_outcome(folder, reference)
