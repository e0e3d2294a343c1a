"""Runs of two slices of two processes each, on two hosts with local copies of the state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.agent_runs import AgentRun
from tests.support.forked_runs import Server

STEPS, PERIOD = 40, 5
# The only checkpoint in storage is that of the last step.
KEYS = (f"steps={STEPS}", "devices_per_slice=2", f"checkpoint_period={STEPS}")
COPIES = ("enable_emergency_checkpoint=true", "local_checkpoint_directory=~/ram", f"local_checkpoint_period={PERIOD}")
LIMIT_SECONDS = 240.0
PROCESSES = 2  # of a slice


class TwoHosts(AgentRun):
  """A run of two slices of two processes each, one slice per host, and no process on the supervisor's host."""

  def __init__(self, folder: Path, keys: Sequence[str], *, server: Server | None = None) -> None:
    options = ["--processes-per-slice", str(PROCESSES)]
    super().__init__(folder, [*KEYS, *COPIES, *keys], slices=2, options=options, server=server)
    self.homes = [folder / "host0", folder / "host1"]

  def start_hosts(self) -> None:
    """Starts the agents. Each host has a home folder of its own."""
    for number, home in enumerate(self.homes):
      home.mkdir(exist_ok=True)
      self.agent(f"127.0.0.{number + 2}", home=str(home))

  def copies(self, *suffixes: str) -> list[Path]:
    """The files of local copies that end with one of the suffixes, in order."""
    return sorted(path for home in self.homes for path in home.rglob("*.s*.p*.*") if path.suffix in suffixes)

  def kill_after(self, step: int) -> int:
    """Starts the run, and kills all its processes after this step. Returns the last recorded step."""
    with self.launched() as supervisor:
      self.start_hosts()
      self.wait_for(lambda: self.last_step >= step, supervisor, LIMIT_SECONDS)
    return self.last_step

  def finish(self) -> int:
    """Starts the run again, and returns its exit code when no process of it is left."""
    with self.launched() as supervisor:
      self.start_hosts()
      code = supervisor.wait(LIMIT_SECONDS)
      self.wait_for_processes(30)  # the agents end after the supervisor
    return code
