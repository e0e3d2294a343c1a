"""Runs of `python -m trainer.launch.ray` on a real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.command import ROOT, cpu_environment
from tests.support.process_runs import MARK, ProcessRun

# As Ray Train's controller prints the workers that it has started.
_STARTED = re.compile(r"pid=(\d+)\) world_rank=(\d+)")
_ENVIRONMENT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1", "RAY_USAGE_STATS_ENABLED": "0"}
_START_SECONDS = 120


class RayRun(ProcessRun):
  """A run of several slices, on nodes that claim to be TPU hosts."""

  def __init__(
    self,
    folder: Path,
    keys: Sequence[str],
    *,
    slices: int = 3,
    minimum: int = 1,
    hosts: int = 1,
    replace_lost: bool = False,
  ) -> None:
    """hosts: of a slice, 1 or 2."""
    super().__init__(folder, keys, slices=slices)
    set_by_launcher = ("elastic_enabled=", "elastic_min_slice_count=")
    self.keys = [key for key in self.keys if not key.startswith(set_by_launcher)]
    kind = ["--topology=2x4", "--accelerator-type=TPU-V6E"]
    if hosts == 2:
      kind = ["--topology=2x2x2", "--accelerator-type=TPU-V4"]
    self._options = [f"--min-slices={minimum}", f"--max-slices={slices}", *kind]
    self._options += ["--replace-lost"] if replace_lost else []
    self._hosts = hosts
    self._cluster: subprocess.Popen[str] | None = None
    self._address = ""

  @contextlib.contextmanager
  def cluster(self) -> Iterator[None]:
    """A Ray cluster with the hosts of all slices. At the end of the block no process of it is left."""
    with self.log.open("ab") as file:
      self._cluster = subprocess.Popen(
        [sys.executable, "-m", "tests.support.ray_cluster", str(self.slices), str(self._hosts)],
        cwd=ROOT,
        env=cpu_environment({MARK: self.mark, **_ENVIRONMENT}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=file,
        text=True,
        start_new_session=True,
      )
    try:
      self._address = self._answer()
      assert self._address, f"no Ray cluster:\n{self.tail()}"
      yield
    finally:
      assert self._cluster.stdin is not None
      self._cluster.stdin.close()
      with contextlib.suppress(subprocess.TimeoutExpired):
        self._cluster.wait(30)
      self.end_processes()
      self._cluster.wait(30)

  def change_cluster(self, command: str) -> None:
    """ "add": one more slice. "remove": the newest host dies, with all its processes."""
    assert self._cluster is not None and self._cluster.stdin is not None
    self._cluster.stdin.write(f"{command}\n")
    self._cluster.stdin.flush()
    assert self._answer() == command

  def _answer(self) -> str:
    assert self._cluster is not None and self._cluster.stdout is not None
    return self._cluster.stdout.readline().strip()

  def launch(self, *keys: str) -> subprocess.Popen[bytes]:
    """Starts the job on the cluster."""
    changes = {MARK: self.mark, "RAY_ADDRESS": self._address, **_ENVIRONMENT}
    with self.log.open("ab") as file:
      return subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.ray", *self._options, *self.argv(*keys)],
        cwd=ROOT,
        env=cpu_environment(changes),
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  @contextlib.contextmanager
  def launched(self, *keys: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the job; at the end of the block the job has ended, and the cluster is there."""
    job = self.launch(*keys)
    try:
      yield job
    finally:
      if job.poll() is None:
        job.terminate()
      try:
        job.wait(60)
      except subprocess.TimeoutExpired:
        job.kill()
        job.wait(30)

  def workers(self) -> dict[int, int]:
    """{rank: process id} of the living workers. With slices of one worker, the rank is the member."""
    living = self.processes()
    return {int(rank): int(pid) for pid, rank in _STARTED.findall(self.printed) if int(pid) in living}
