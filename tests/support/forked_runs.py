"""`python -m trainer`, forked from a process that has imported everything: a third of the time.

`python -m tests.support.forked_runs` reads {"argv", "environment", "log"} as lines of JSON. For each it forks a process
in which runpy runs the module `trainer` as `python -m` does, and prints its id. {"wait": id} is answered by the wait
status or null. JAX is imported before the fork and used only after it.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends, however the parent ended


class Server:
  """Starts commands. `Server.start` is a command.Start."""

  def __init__(self) -> None:
    from end_to_end import command

    self._lock = threading.Lock()
    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.support.forked_runs"],
      env=command.cpu_environment({}),
      cwd=ROOT,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      bufsize=1,
    )

  def ask(self, **request: Any) -> Any:
    assert self._process.stdin is not None and self._process.stdout is not None
    with self._lock:
      self._process.stdin.write(json.dumps(request) + "\n")
      self._process.stdin.flush()
      return json.loads(self._process.stdout.readline())

  def start(self, argv: Sequence[str], changes: Mapping[str, str], log: Path) -> Forked:
    return Forked(self, self.ask(argv=list(argv), environment=dict(changes), log=str(log)))

  def close(self) -> None:
    self._process.kill()
    self._process.communicate(timeout=60)


class Forked:
  """A process that the server has forked. Implements command.Process."""

  def __init__(self, server: Server, pid: int) -> None:
    self.pid, self._server, self._code = pid, server, None

  def poll(self) -> int | None:
    if self._code is None and (status := self._server.ask(wait=self.pid)) is not None:
      self._code = os.waitstatus_to_exitcode(status)
    return self._code

  def wait(self, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while (code := self.poll()) is None:
      if time.monotonic() > deadline:
        raise subprocess.TimeoutExpired("trainer", timeout)
      time.sleep(0.02)
    return code

  def send_signal(self, number: int) -> None:
    if self.poll() is None:
      os.kill(self.pid, number)


def child(request: dict[str, Any]) -> NoReturn:
  """Becomes the command."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
  os.setsid()
  log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
  null = os.open(os.devnull, os.O_RDONLY)
  for source, target in ((null, 0), (log, 1), (log, 2)):
    os.dup2(source, target)
  sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # As at a terminal. A background job of a shell ignores SIGINT, and its children would too.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  os.environ.update(request["environment"])
  sys.argv = ["trainer", *request["argv"]]
  runpy.run_module("trainer", run_name="__main__", alter_sys=True)  # ends in sys.exit
  raise AssertionError


def serve() -> None:
  for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
      pid, status = os.waitpid(request["wait"], os.WNOHANG)
      print(json.dumps(status if pid else None), flush=True)
    elif pid := os.fork():
      print(pid, flush=True)
    else:
      child(request)


if __name__ == "__main__":
  import orbax.checkpoint  # noqa: F401 -- these three imports take the time

  import trainer.elastic.retry
  import trainer.train  # noqa: F401

  serve()
