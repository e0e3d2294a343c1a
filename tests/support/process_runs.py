"""Runs of `python -m trainer.launch.local` with a tiny model: real processes, which a test kills, stops and watches."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.support.command import ROOT, Process, Run, cpu_environment, is_running
from tests.support.forked_runs import Server, StandaloneServer

from worlds.place import MEMBER, SUPERVISOR

KEYS = (
  "vocab_size=64 dataset_type=synthetic learning_rate=1e-2 warmup_steps_fraction=0 elastic_enabled=true "
  "elastic_min_slice_count=1 elastic_min_resize_interval_seconds=0 learning_rate_schedule_steps=1000"
).split()
MARK = "TRAINER_TEST_RUN"  # in the environment of every process of a run, so that leftovers are found


def seeded_command(
  doc: str,
  what: str,
  count: int,
  run_all: Callable[..., int],
  *,
  takes_keys: bool = False,
  flags: Mapping[str, str] = MappingProxyType({}),
) -> int:
  """Reads --count and --first from the command line, and returns run_all(folder, first, count, server).

  takes_keys: the command also takes key=value for all runs, and run_all their list, keys=. doc: of the module. what:
  the name of what a seed determines, in the plural. count: the default. flags: {option: its help}, each passed to
  run_all as a bool. folder: is deleted at the end. server: forks the processes.
  """
  parser = argparse.ArgumentParser(description=doc.split("\n")[0])
  parser.add_argument("--count", type=int, default=count, help=f"number of {what}")
  parser.add_argument("--first", type=int, default=0, help="the first seed")
  if takes_keys:
    parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs, such as num_experts=4")
  for flag, text in flags.items():
    parser.add_argument(f"--{flag}", action="store_true", help=text)
  options = parser.parse_args()
  server = StandaloneServer()
  try:
    with tempfile.TemporaryDirectory(prefix=f"{what}-") as directory:
      more: dict[str, Any] = {"keys": options.keys} if takes_keys else {}
      more |= {flag: getattr(options, flag) for flag in flags}
      return run_all(Path(directory), options.first, options.count, server, **more)
  finally:
    server.close()


class ProcessRun(Run):
  """A run of several slices as processes of this machine."""

  def __init__(
    self,
    folder: Path,
    keys: Sequence[str],
    *,
    slices: int = 3,
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    server: Server | None = None,
  ) -> None:
    """options: of trainer.launch.local, besides --slices. environment: changes to the environment. server: forks the
    processes of the run; None: each is an interpreter of its own, as for users."""
    super().__init__(folder, [*KEYS, *keys])
    self.keys = [key for key in self.keys if not key.startswith("num_slices=")]
    self.slices, self._environment = slices, environment or {}
    self._options, self._server = ["--slices", str(slices), *options], server
    self.mark = f"{folder}.{time.time_ns()}"
    self.output: Path | None = None  # stdout and stderr of all processes; None: the log

  def launch(self, *keys: str) -> Process:
    """Starts the supervisor, which starts the slices."""
    return self.run_module("trainer.launch.local", [*self._options, *self.argv(*keys)], self._environment)

  def run_module(self, module: str, argv: Sequence[str], changes: Mapping[str, str]) -> Process:
    """Starts `python -m module *argv` as a process of this run, with `changes` to the environment."""
    if self._server:
      return self._server.run(module, argv, {MARK: self.mark, **changes}, self.output or self.log)
    return self.spawn([sys.executable, "-m", module, *argv], changes)

  def spawn(self, command: Sequence[str], changes: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a command of this run, with `changes` to the environment."""
    with (self.output or self.log).open("ab") as file:
      return subprocess.Popen(
        command,
        cwd=ROOT,
        env=cpu_environment({MARK: self.mark, **changes}),
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )

  @contextlib.contextmanager
  def piped(self) -> Iterator[Callable[[], None]]:
    """The output of what is launched in the block goes to the log through a pipe. Yields what closes the pipe.

    Then the processes that live have a stdout and stderr without a reader, and later ones have a full disk.
    """
    pipe, closing = self.folder / f"pipe-{time.time_ns()}", threading.Event()
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def copy() -> None:
      with self.log.open("ab", buffering=0) as log:
        while not closing.wait(0.01):
          with contextlib.suppress(BlockingIOError):
            log.write(os.read(reader, 1 << 16))
      full = pipe.with_suffix(".full")
      full.symlink_to("/dev/full")
      full.replace(pipe)
      os.close(reader)

    thread = threading.Thread(target=copy)
    thread.start()

    def close() -> None:
      closing.set()
      thread.join()

    self.output = pipe
    try:
      yield close
    finally:
      close()
      self.output = None

  def processes(self) -> dict[int, dict[str, str]]:
    """{process id: its environment} of all living processes of the run."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError, ValueError):
        text = (path / "environ").read_bytes().decode(errors="replace")
        variables = dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
        if variables.get(MARK) == self.mark and is_running(int(path.name)):
          found[int(path.name)] = variables
    return found

  def workers(self) -> dict[int, int]:
    """{member: process id} of the living workers."""
    return {int(env[MEMBER]): pid for pid, env in self.processes().items() if SUPERVISOR in env}

  def kill(self, member: int, number: int = signal.SIGKILL) -> bool:
    """Sends the signal to the member's process. Whether it lived."""
    pid = self.workers().get(member)
    return pid is not None and self.send(pid, number)

  def send(self, pid: int, number: int) -> bool:
    """Sends the signal to a process of the run. Whether it lived."""
    with contextlib.suppress(ProcessLookupError):
      os.kill(pid, number)
      return True
    return False

  @contextlib.contextmanager
  def launched(self, *keys: str) -> Iterator[Process]:
    """Starts the run; at the end of the block no process of it is left."""
    supervisor = self.launch(*keys)
    try:
      yield supervisor
    finally:
      self.end_processes()
      supervisor.wait(30)

  def end_processes(self) -> None:
    """Kills all processes of the run."""
    deadline = time.monotonic() + 30
    while (left := self.processes()) and time.monotonic() < deadline:  # killed processes take a moment to end
      for pid in left:
        self.send(pid, signal.SIGKILL)
      time.sleep(0.05)

  def wait_for(self, condition: Callable[[], bool], supervisor: Process, seconds: float = 90) -> None:
    """Returns when the condition holds. Raises AssertionError after `seconds`, or if the run ends before."""
    deadline = time.monotonic() + seconds
    while not condition():
      code = supervisor.poll()
      assert code is None, f"the run has ended with {code}:\n{self.tail()}"
      assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.tail()}"
      time.sleep(0.02)

  def wait(self, supervisor: Process, seconds: float = 120) -> int:
    """The exit code of the run. Raises AssertionError if it does not end in time, or if a process is left."""
    try:
      code = supervisor.wait(seconds)
    except subprocess.TimeoutExpired:
      raise AssertionError(f"the run has not ended in {seconds} s:\n{self.tail()}") from None
    left = self.processes()
    assert not left, f"processes are left: {[env.get(MEMBER) for env in left.values()]}"
    return code

  def wait_for_processes(self, seconds: float) -> None:
    """Returns when no process of the run is left. Raises AssertionError after `seconds`."""
    self._wait_while(self.processes, seconds)

  def wait_for_workers(self, seconds: float) -> None:
    """Returns when no worker of the run is left. Raises AssertionError after `seconds`."""
    self._wait_while(self.workers, seconds)

  def _wait_while(self, processes: Callable[[], Mapping[int, object]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := processes():
      assert time.monotonic() < deadline, f"{len(left)} processes are left after {seconds} s:\n{self.tail()}"
      time.sleep(0.1)

  def tail(self) -> str:
    """The last lines that were printed, without the lines of steps."""
    lines = self.printed.splitlines()
    return "\n".join([line for line in lines if not line.startswith(("completed step", "step="))][-40:])

  def evaluations(self) -> dict[int, list[float]]:
    """{step: the losses of its evaluations}: one each if every evaluation was recorded once."""
    found: dict[int, list[float]] = {}
    for record in self.records("metrics"):
      if "eval_loss" in record:
        found.setdefault(record["step"], []).append(record["eval_loss"])
    return found

  def active(self) -> list[int]:
    """The members that computed the last recorded step."""
    records = [record for record in self.records("metrics") if "slice_seconds" in record]
    return [int(member) for member in records[-1]["slice_seconds"]] if records else []

  @property
  def first_primary(self) -> int:
    """The member that leads the first attempt and writes its records: the first that has reached the supervisor."""
    return self.events("attempt_start")[0]["slices"][0]

  def count(self, kind: str) -> int:
    """How many events of this kind are recorded."""
    return len(self.events(kind))

  def steps(self) -> list[int]:
    """The recorded steps, in the order of their records."""
    return [record["step"] for record in self.records("metrics") if "loss" in record]
