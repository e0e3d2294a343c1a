"""Processes of the trainer, forked from one that has imported everything: a start costs a third of the CPU time.

`python -m tests.support.forked_runs` reads requests as lines of JSON. For {"module", "argv", "environment", "log"} it
forks a process in which runpy runs the module as `python -m` does, and answers with its id. {"wait": id} is answered by
the wait status or null. JAX is imported before the fork and used only after it.

A launcher (`trainer.launch.local` or `agent`) has a forking process of its own, so that its workers are forked too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = Path(__file__).parents[2]
TRAINER, LAUNCHERS = "trainer", ("trainer.launch.local", "trainer.launch.agent")
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends, however the parent ended
PR_SET_CHILD_SUBREAPER = 36  # Linux: processes below this one whose parent has ended become its children
# A variable of the server. A forked process writes its own variables over this one, where /proc/PID/environ shows them.
SHOWN, SHOWN_BYTES = "TRAINER_FORKED_AS", 2000
ENDLESS = "steps=999999"  # of a test whose run trains until the test has seen enough; such runs are slowed down
SLOWED = "TRAINER_TEST_SLOWED"  # MEMBER:SECONDS: each of the member's shares takes so much longer
LATE_LANES = "TRAINER_TEST_LATE_LANES"  # SECONDS: so much later the first process of a slice begins each round
SLOW = {"TRAINER_TEST_SLOW": "1"}  # environment of a run of few steps that is slowed down, so that faults fall into it


class Server:
  """Asks a forking process to start commands. `Server.start` is a command.Start."""

  def __init__(self, requests: IO[str], answers: IO[str]) -> None:
    self._requests, self._answers = requests, answers
    self._lock = threading.Lock()

  def ask(self, **request: Any) -> Any:
    with self._lock:
      self._requests.write(json.dumps(request) + "\n")
      self._requests.flush()
      return json.loads(self._answers.readline())

  def start(self, argv: Sequence[str], changes: Mapping[str, str], log: Path) -> Forked:
    return self.run(TRAINER, argv, changes, log)

  def run(self, module: str, argv: Sequence[str], changes: Mapping[str, str], log: Path) -> Forked:
    """Starts `python -m module *argv`, with `changes` to the environment. Its output is appended to the file `log`."""
    return Forked(self, self.ask(module=module, argv=list(argv), environment=dict(changes), log=str(log)))


class StandaloneServer(Server):
  """A server with a process of its own. When it is closed, all processes that it has forked are killed."""

  def __init__(self) -> None:
    from tests.support import command

    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.support.forked_runs"],
      env=command.cpu_environment({SHOWN: " " * SHOWN_BYTES}),
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      bufsize=1,
    )
    assert self._process.stdin is not None and self._process.stdout is not None
    super().__init__(self._process.stdin, self._process.stdout)

  def close(self) -> None:
    self._process.kill()
    self._process.communicate(timeout=60)


class Forked:
  """A process that a server has forked. Implements command.Process, and what launchers use of subprocess.Popen."""

  def __init__(self, server: Server, pid: int) -> None:
    self.pid, self._server = pid, server
    self._code: int | None = None
    self._lock = threading.Lock()  # a process can be waited for once

  def poll(self) -> int | None:
    with self._lock:
      if self._code is None and (status := self._server.ask(wait=self.pid)) is not None:
        self._code = os.waitstatus_to_exitcode(status)
      return self._code

  def wait(self, timeout: float = float("inf")) -> int:
    deadline = time.monotonic() + timeout
    while (code := self.poll()) is None:
      if time.monotonic() > deadline:
        raise subprocess.TimeoutExpired("trainer", timeout)
      time.sleep(0.01)
    return code

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


def serve(requests: IO[str], answers: IO[str], *, orphans: bool) -> None:
  """Answers requests until their end. orphans: whether the forked processes may outlive this one."""
  ended: dict[int, int] = {}  # process id -> wait status
  for line in requests:
    request = json.loads(line)
    with contextlib.suppress(ChildProcessError):
      while (found := os.waitpid(-1, os.WNOHANG))[0]:
        ended[found[0]] = found[1]
    if "wait" in request:
      answers.write(json.dumps(ended.pop(request["wait"], None)) + "\n")
    elif pid := os.fork():
      ended.pop(pid, None)  # of an earlier process with this id
      answers.write(f"{pid}\n")
    else:
      child(request, orphans)
    answers.flush()


def slow_down() -> None:
  """Every batch of this process takes a moment: an endless run takes all cores from what its test waits for."""
  from trainer.program.feed import Feed

  read = Feed._placed

  def read_slowly(*arguments: Any) -> Any:
    time.sleep(0.1)
    return read(*arguments)

  Feed._placed = read_slowly  # type: ignore[method-assign]


def late_lanes(seconds: float, environment: Mapping[str, str]) -> None:
  """The first process of a slice begins each round late, so it knows of changes; the others learn of them later."""
  from trainer.drivers.rounds import Rounds
  from worlds import place
  from worlds.peers import Peers

  agree, read = Rounds.agree, Peers._read_waiting

  def agree_late(*arguments: Any, **keywords: Any) -> Any:
    time.sleep(seconds)
    return agree(*arguments, **keywords)

  def read_late(peers: Peers) -> None:
    if not peers._connected:
      read(peers)

  if environment.get(place.LANE, "0") == "0":
    Rounds.agree = agree_late  # type: ignore[method-assign]
  else:
    Peers._read_waiting = read_late  # type: ignore[method-assign]


def slow_member(member: str, seconds: str, environment: Mapping[str, str]) -> None:
  """Every share of this process takes longer if it is `member`, and every local step of a replica."""
  from trainer.drivers.local_rounds import LocalRounds
  from trainer.program.share_sums import ShareSums
  from worlds import place

  def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*arguments: Any) -> Any:
      time.sleep(float(seconds))
      return function(*arguments)

    return compute

  if environment.get(place.MEMBER) == member:
    ShareSums.__call__ = slowly(ShareSums.__call__)  # type: ignore[method-assign]
    LocalRounds._batch = slowly(LocalRounds._batch)  # type: ignore[method-assign]


def child(request: dict[str, Any], orphan: bool) -> NoReturn:
  """Becomes the command."""
  linux = sys.platform == "linux"
  if linux and not orphan:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  os.setsid()
  log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  null = os.open(os.devnull, os.O_RDONLY)
  for source, target in ((null, 0), (log, 1), (log, 2)):
    os.dup2(source, target)
  # closefd: a forked process that forks in turn replaces these objects, whose ends must not close the files.
  sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # As at a terminal. A background job of a shell ignores SIGINT, and its children would too.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  if request["module"] in LAUNCHERS:
    fork_workers(request["log"])
  elif orphan and (ENDLESS in request["argv"] or SLOW.items() <= request["environment"].items()):
    slow_down()
  if orphan and (late := request["environment"].get(LATE_LANES)):
    late_lanes(float(late), request["environment"])
  if orphan and (slowed := request["environment"].get(SLOWED)):
    slow_member(*slowed.split(":"), request["environment"])
  if linux:
    show(request["environment"])
  os.environ.update(request["environment"])
  sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
  sys.argv = [request["module"], *request["argv"]]
  sys.modules.pop(request["module"], None)  # it runs as __main__
  runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
  sys.exit(0)


def fork_workers(log: str) -> None:
  """From now on, subprocess.Popen forks the trainer's processes, from a copy of this process without threads."""
  (reads_requests, writes_requests), (reads_answers, writes_answers) = os.pipe(), os.pipe()
  if not os.fork():
    os.close(writes_requests)
    os.setsid()  # Ctrl-C reaches the launcher only
    # A worker finds out from the end of its parent that the launcher is lost. Then it saves.
    serve(os.fdopen(reads_requests), os.fdopen(writes_answers, "w"), orphans=True)
    os._exit(0)
  os.close(reads_requests)
  os.close(writes_answers)
  server, popen = Server(os.fdopen(writes_requests, "w"), os.fdopen(reads_answers)), subprocess.Popen
  environment = dict(os.environ)  # of the forking process
  start_worker = [sys.executable, "-m", TRAINER]

  def start(command: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
    if list(command[:3]) != start_worker:
      return popen(command, env=env, **options)
    changes = {name: value for name, value in env.items() if environment.get(name) != value}
    return server.run(TRAINER, command[3:], changes, Path(log))

  subprocess.Popen = start  # type: ignore[assignment, misc]


def show(environment: Mapping[str, str]) -> None:
  """Makes /proc/PID/environ show these variables of this process."""
  block = Path("/proc/self/environ").read_bytes()
  offset = block.find(f"\0{SHOWN}=".encode()) + 1
  text = "\0".join(f"{name}={value}" for name, value in environment.items()).encode()
  assert offset and len(text) < SHOWN_BYTES
  start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])  # env_start of proc_pid_stat(5)
  ctypes.memmove(start + offset, text.ljust(SHOWN_BYTES, b"\0"), SHOWN_BYTES)


if __name__ == "__main__":
  import gc
  import importlib

  import orbax.checkpoint  # noqa: F401 -- these imports take the time
  import pathwaysutils  # noqa: F401 -- every run imports it before its first step

  import trainer.cluster.multiprocess
  import trainer.elastic.retry
  import trainer.train

  for launcher in LAUNCHERS:
    with contextlib.suppress(ModuleNotFoundError):  # a fork may have deleted them
      importlib.import_module(launcher)
  trainer.cluster.check_environment()  # tries XLA_FLAGS in another process; the forked ones need not do it again
  if sys.platform == "linux":  # the workers of a launcher that has ended are waited for, and count, here
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
  gc.freeze()  # otherwise each forked process looks for garbage among all that is imported, and copies its pages
  serve(sys.stdin, sys.stdout, orphans=False)
