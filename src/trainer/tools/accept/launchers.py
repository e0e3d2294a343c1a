"""How each launcher starts the runs of accept, and how accept watches and ends them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer import cluster
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.observe.metrics import METRICS_FILE

_LOCAL = "PYTHON -m trainer.launch.local --slices N"
_COMMANDS = {
  "local": _LOCAL,
  "torchrun": "PYTHON -m torch.distributed.run --standalone --nproc-per-node N --max-restarts=3 -m trainer",
  "agents": f"{_LOCAL} --local-slices 0 --listen ADDRESS",
  "slurm": f"{_LOCAL} --local-slices 0 --listen ADDRESS",
  "ray": "PYTHON -m trainer.launch.ray --min-slices 1 --max-slices N --replace-lost",
  "pathways": "PYTHON -m trainer",
  "command": "",
}
NAMES = tuple(_COMMANDS)
_SRUN = "srun --kill-on-bad-exit=0 PYTHON -m trainer.launch.agent --supervisor ADDRESS"
_MEMBER = re.compile(r"Member (\d+) is process (\d+)")
_POLL_SECONDS = 0.05
_END_SECONDS = 30.0  # until killed processes have ended
Line = Mapping[str, Any]


class NotSeen(Exception):
  """A row does not hold: what was seen."""


@dataclass(frozen=True)
class Launcher:
  """A way to start runs. command: before CONFIG.yml key=value. keys: of every run. helper: is started beside each run.
  kill: a shell command that kills a slice. has_worlds: whether each slice is a process, so that bits do not depend on
  which slices are alive. restarts_all: whether the launcher starts all slices again when one is lost."""

  name: str
  slices: int
  command: Sequence[str]
  keys: Sequence[str] = ()
  helper: Sequence[str] = ()
  kill: str = ""

  @property
  def has_worlds(self) -> bool:
    return self.name != "pathways"

  @property
  def restarts_all(self) -> bool:
    return self.name == "torchrun"


def of_options(options: argparse.Namespace) -> Launcher:
  """Raises ConfigError if the launcher cannot be used here."""
  name, slices, environment = options.launcher, options.slices, cluster.inherited_environment()
  of_agents = name in ("agents", "slurm")
  module = {"torchrun": "torch", "ray": "ray"}.get(name)
  in_slurm = shutil.which("srun") and environment.get("SLURM_JOB_ID")
  rules = (
    (slices >= 2, f"--slices {slices}: a lost slice needs another one that goes on.\nGive at least 2."),
    (
      of_agents == bool(options.listen),
      "--listen: only agents and slurm need it.\nGive HOST:PORT, or remove it.",
    ),
    ((name == "command") == bool(options.command), "--command: belongs to --launcher command.\nGive both, or neither."),
    (
      not of_agents or environment.get("TRAINER_TOKEN"),
      "TRAINER_TOKEN: agents need it.\nSet it here and for them.",
    ),
    (not module or importlib.util.find_spec(module), f"--launcher {name}: this Python lacks {module}.\nInstall it."),
    (name != "slurm" or in_slurm, "--launcher slurm: this is no Slurm job.\nStart accept inside salloc or sbatch."),
  )
  for holds, rule in rules:
    if not holds:
      raise ConfigError(rule)
  words = {"PYTHON": sys.executable, "N": str(slices), "ADDRESS": options.listen}
  command, helper = ([words.get(word, word) for word in text.split()] for text in (_COMMANDS[name], _SRUN))
  keys = [f"num_slices={slices}"] if name in ("torchrun", "command") else []
  if name == "pathways":
    is_real = environment.get("JAX_PLATFORMS") == "proxy"
    keys = ["cluster=pathways", "enable_single_controller=true" if is_real else f"cluster_standin={slices}x1"]
  command = command or shlex.split(options.command)
  return Launcher(name, slices, command, keys, helper if name == "slurm" else (), options.kill)


@dataclass
class Job:
  """A run that accept starts, perhaps several times. delays: the seconds nearest to 0 from the time in a record until
  accept has read it, for each process that writes records."""

  launcher: Launcher
  name: str
  arguments: Sequence[str]
  folder: Path
  directory: str
  delays: dict[str, float] = field(default_factory=dict)
  _started: list[subprocess.Popen[bytes]] = field(default_factory=list)
  _read: dict[str, int] = field(default_factory=dict)
  _lines: dict[str, list[Line]] = field(default_factory=dict)
  _output_start: int = 0

  def command(self, *keys: str) -> list[str]:
    return [*self.launcher.command, *self.arguments, *self.launcher.keys, *keys]

  def start(self, *keys: str) -> None:
    """Starts the command of the run, with further keys."""
    self.kill_all()
    with (self.folder / f"{self.name}.txt").open("ab") as file:
      self._output_start = file.tell()
      for command in filter(None, (self.command(*keys), self.launcher.helper)):
        null = subprocess.DEVNULL
        self._started.append(subprocess.Popen(command, stdin=null, stdout=file, stderr=file, start_new_session=True))

  def output(self) -> str:
    """What the newest start has printed."""
    with (self.folder / f"{self.name}.txt").open("rb") as file:
      file.seek(self._output_start)
      return file.read().decode(errors="replace")

  def tail(self) -> str:
    return " / ".join(line for line in self.output().splitlines()[-4:] if line.strip())[-400:]

  def read(self, file: str) -> list[Line]:
    """All records of events.jsonl or metrics.jsonl so far."""
    known = self._lines.setdefault(file, [])
    with contextlib.suppress(OSError):
      lines, self._read[file] = files.read_json_lines_from(self.directory, file, self._read.get(file, 0))
      for line in lines:
        process, delay = str(line.get("process")), time.time() - float(line["wall"])
        self.delays[process] = min(self.delays.get(process, delay), delay, key=abs)
      known += lines
    return known

  def events(self, kind: str) -> list[Line]:
    return [line for line in self.read("events.jsonl") if line.get("kind") == kind]

  def steps(self) -> list[Line]:
    """The records of all completed steps, in the order in which they were written."""
    return [line for line in self.read(METRICS_FILE) if "loss" in line]

  def wait(self, what: str, is_done: Callable[[], Any], seconds: float) -> None:
    """Returns once `is_done` returns something true. Raises NotSeen after `seconds`, or if the run ends before."""
    deadline = time.monotonic() + seconds
    while True:
      code = self._started[0].poll()
      if is_done():
        return
      if code is not None:
        raise NotSeen(f"{what}: the run has ended with exit code {code} before: {self.tail()}")
      if time.monotonic() > deadline:
        raise NotSeen(f"{what}: not within {seconds:.0f} s, after {len(self.steps())} steps")
      time.sleep(_POLL_SECONDS)

  def end(self, seconds: float) -> int:
    """The exit code of the run. Raises NotSeen if the run does not end in time."""
    process, deadline = self._started[0], time.monotonic() + seconds
    while process.poll() is None:
      if time.monotonic() > deadline:
        raise NotSeen(f"the run does not end within {seconds:.0f} s: {self.tail()}")
      self.steps()  # reads new records at once: `delays` compares clocks
      time.sleep(_POLL_SECONDS)
    ends = self.events("run_end")  # other launchers have exit codes of their own
    return int(ends[-1]["exit"]) if ends and self.launcher.name in ("torchrun", "command") else process.returncode

  def slices(self) -> list[int]:
    """A process of each slice that the command of the run has started, slice 0 first."""
    if named := {int(found[1]): int(found[2]) for found in _MEMBER.finditer(self.output())}:
      return [named[number] for number in sorted(named)]
    ours = _descendants(self._started[0].pid) if self.launcher.restarts_all else []
    worker = f" -m trainer {self.arguments[0]}"
    return sorted(pid for pid, _, command in _processes() if pid in ours and worker in command)[1:]

  def terminate(self) -> None:
    self._started[0].send_signal(signal.SIGTERM)

  def kill_all(self) -> None:
    """SIGKILL to all processes of the run on this machine."""
    for process in self._started:
      if process.poll() is None:
        for pid in [process.pid, *_descendants(process.pid)]:
          _kill(pid)
      process.wait(_END_SECONDS)
    self._started = []
    for pid, _, command in _processes():  # of a launcher that had died before: they would leave, in a while
      if all(argument in command for argument in self.arguments):
        _kill(pid)


def _kill(pid: int) -> None:
  with contextlib.suppress(ProcessLookupError):
    os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
  """The processes that the process has started, and theirs."""
  found, parents = [pid], [(number, parent) for number, parent, _ in _processes()]
  for one in found:
    found += [number for number, parent in parents if parent == one]
  return found[1:]


def _processes() -> Iterator[tuple[int, int, str]]:
  """(process, its parent, its command) of this machine."""
  if sys.platform == "linux":  # small images have no ps
    for folder in Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):
        parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        yield int(folder.name), parent, (folder / "cmdline").read_text(errors="replace").replace("\0", " ")
    return
  listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
  for line in listed.stdout.splitlines():
    number, parent, *command = line.split(None, 2)
    yield int(number), int(parent), " ".join(command)
