"""How each launcher starts the runs of accept, and how accept watches and ends them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import cluster
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.metrics import METRICS_FILE
from trainer.process import child

_LOCAL = "{python} -m trainer.launch.local --slices {slices}"
_SUPERVISOR = _LOCAL + " --local-slices 0 --listen {listen}"
_COMMANDS = {  # CONFIG: the configuration and the keys of a run, which otherwise come last
  "local": _LOCAL,
  "torchrun": "{python} -m torch.distributed.run --standalone --nproc-per-node {slices} --max-restarts=3 -m trainer"
  " CONFIG num_slices={slices}",
  "agents": _SUPERVISOR,
  "slurm": _SUPERVISOR,
  "ray": "{python} -m trainer.launch.ray --min-slices 1 --max-slices {slices} --replace-lost",
  "pathways": "{python} -m trainer CONFIG cluster=pathways {controller}",
  "command": "{command} CONFIG num_slices={slices}",
}
NAMES = tuple(_COMMANDS)
_SRUN = "srun --kill-on-bad-exit=0 {python} -m trainer.launch.agent --supervisor {listen}"
_MEMBER = re.compile(r"Member (\d+) is process (\d+)")
_POLL_SECONDS = 0.05
_END_SECONDS = 30.0  # until killed processes have ended
Line = Mapping[str, Any]


class NotSeen(Exception):
  """A row does not hold: what was seen."""

  holds: bool | None = False


class DoesNotApply(NotSeen):
  """Why a row cannot be shown here."""

  holds = None


@dataclass(frozen=True)
class Launcher:
  """A way to start runs. command: before CONFIG.yml key=value. keys: of every run. helper: is started with each run.
  kill: a shell command that kills a slice. private: what no card may have."""

  name: str
  slices: int
  command: Sequence[str]
  keys: Sequence[str] = ()
  helper: Sequence[str] = ()
  kill: str = ""
  private: Sequence[str] = ()

  @property
  def has_worlds(self) -> bool:
    """Whether each slice is a process, so that bits do not depend on which slices are alive."""
    return self.name != "pathways"

  @property
  def restarts_all(self) -> bool:
    """Whether the launcher starts all slices again when one is lost."""
    return self.name == "torchrun"


def of_options(options: argparse.Namespace) -> Launcher:
  """Raises ConfigError if the launcher cannot be used here."""
  name, slices, environment = options.launcher, options.slices, cluster.inherited_environment()
  of_agents, module = name in ("agents", "slurm"), {"torchrun": "torch", "ray": "ray"}.get(name)
  in_slurm = shutil.which("srun") and environment.get("SLURM_JOB_ID")
  rules = (
    (slices >= 2, f"--slices {slices}: a lost slice needs another one that goes on.\nGive at least 2."),
    (of_agents == bool(options.listen), "--listen: only agents and slurm need it.\nGive HOST:PORT, or remove it."),
    ((name == "command") == bool(options.command), "--command: belongs to --launcher command.\nGive both, or neither."),
    (not of_agents or environment.get("TRAINER_TOKEN"), "TRAINER_TOKEN: agents need it.\nSet it here and for them."),
    (not module or importlib.util.find_spec(module), f"--launcher {name}: this Python lacks {module}.\nInstall it."),
    (name != "slurm" or in_slurm, "--launcher slurm: this is no Slurm job.\nStart accept inside salloc or sbatch."),
  )
  for holds, rule in rules:
    if not holds:
      raise ConfigError(rule)
  is_real = environment.get("JAX_PLATFORMS") == "proxy"
  values = {
    "python": shlex.quote(sys.executable),
    "controller": "enable_single_controller=true" if is_real else f"cluster_standin={slices}x1",
    **vars(options),
  }
  before, _, after = _COMMANDS[name].partition(" CONFIG ")
  command, keys, helper = (shlex.split(text.format(**values)) for text in (before, after, _SRUN * (name == "slurm")))
  return Launcher(name, slices, command, keys, helper, options.kill, (options.listen, options.command))


@dataclass
class Job:
  """A run that accept starts, perhaps several times. started: the processes that run, of whichever job. seconds_left:
  raises NotSeen if no time is left."""

  launcher: Launcher
  name: str
  arguments: Sequence[str]
  folder: Path
  started: list[subprocess.Popen[bytes]]
  seconds_left: Callable[[], float]

  @property
  def directory(self) -> str:
    return f"{self.folder}/{self.name}"

  def command(self, *keys: str) -> list[str]:
    return [*self.launcher.command, *self.arguments, *self.launcher.keys, *keys]

  def start(self, *keys: str) -> None:
    """Starts the command of the run, with further keys."""
    self.seconds_left()
    kill_all(self.started)
    with Path(f"{self.directory}.txt").open("ab") as file:
      for command in filter(None, (self.command(*keys), self.launcher.helper)):
        null = subprocess.DEVNULL
        self.started.append(subprocess.Popen(command, stdin=null, stdout=file, stderr=file, start_new_session=True))

  def output(self) -> list[str]:
    """The lines that all starts have printed."""
    return Path(f"{self.directory}.txt").read_text(errors="replace").splitlines()

  def tail(self) -> str:
    return " / ".join(line for line in self.output()[-4:] if line.strip())[-400:]

  def read(self, file: str) -> list[Line]:
    """The records of a file of the run so far."""
    with contextlib.suppress(OSError):
      return list(files.read_json_lines(self.directory, file))
    return []

  def events(self, kind: str) -> list[Line]:
    return [line for line in self.read("events.jsonl") if line.get("kind") == kind]

  def steps(self) -> list[Line]:
    """The records of all completed steps, in the order in which they were written."""
    return [line for line in self.read(METRICS_FILE) if "loss" in line]

  def wait(self, what: str, is_done: Callable[[], Any]) -> None:
    """Returns once `is_done` returns something true. Raises NotSeen if the run ends before, or the time is over."""
    while True:
      code = self.started[0].poll()
      if is_done():
        return
      if code is not None:
        raise NotSeen(f"{what}: the run has ended with exit code {code} before: {self.tail()}")
      try:
        self.seconds_left()
      except NotSeen as late:
        raise NotSeen(f"{what}: not seen after {len(self.steps())} steps, and {late}") from None
      time.sleep(_POLL_SECONDS)

  def end(self) -> int:
    """The exit code of the run. Raises NotSeen if the run does not end in time."""
    process = self.started[0]
    self.wait("its end", lambda: process.poll() is not None)
    ends = self.events("run_end")  # other launchers have exit codes of their own
    is_own = self.launcher.name not in ("torchrun", "command")
    return process.returncode if is_own or not ends else int(ends[-1]["exit"])

  def victim(self) -> int | None:
    """The process of a slice, if the command of the run has started the slices: of the first one, which writes the
    records, or under torchrun of the second one, because all end with the first."""
    members = {int(found[1]): int(found[2]) for line in self.output() if (found := _MEMBER.search(line))}
    if self.launcher.restarts_all:
      return child.descendants(self.started[0].pid)[1]
    return members[min(members)] if members else None


def kill_all(started: list[subprocess.Popen[bytes]]) -> None:
  """SIGKILL to all processes of the runs on this machine."""
  for helper in started[1:]:
    helper.terminate()  # srun passes it on to other hosts
    with contextlib.suppress(subprocess.TimeoutExpired):
      helper.wait(_END_SECONDS)
  child.kill_descendants(_END_SECONDS)
  for process in started:  # not on Linux: the slices end by themselves
    process.kill()
    process.wait()
  started.clear()
