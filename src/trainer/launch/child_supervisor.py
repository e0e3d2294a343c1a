"""The supervisor of a run whose workers another launcher starts: `python -m trainer.launch.child_supervisor`.

The first worker starts it as a child process, and gives it a line of JSON on stdin: token, expected (workers that a
start waits for), rules (worlds.membership.run_rules.RunRules), listener (an open socket) and parent (its process id).
It ends with the run, or with its parent; the other workers then save the state and end.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from trainer.observe import screen
from trainer.process import file_limit
from worlds.exit_codes import FAILED
from worlds.interruptions import end_on_error, requests
from worlds.membership.coordinator import Coordinator
from worlds.membership.run_rules import RunRules
from worlds.membership.server import Server
from worlds.supervisor import log

_POLL_SECONDS = 0.1
_END_SECONDS = 10.0  # from the end of the run until the last worker has closed its connection


def main() -> int:
  """Supervises the run until it or the parent ends. Returns 0."""
  screen.protect()
  file_limit.raise_limit()  # each worker has a connection
  end_on_error(lambda: os._exit(FAILED))  # as if it had been killed: the workers save the state and end
  job = json.loads(sys.stdin.readline())
  coordinator = Coordinator(RunRules(**job["rules"]), run_id=secrets.token_hex(6), expected=job["expected"])
  listener = socket.socket(fileno=job["listener"])
  server = Server(coordinator, bytes.fromhex(job["token"]), listener=listener, kill=_leave_to_launcher, log=log)
  _on_request(server.stop)
  joined = False
  while os.getppid() == job["parent"] and not server.over.wait(_POLL_SECONDS):
    if joined and not server.connected:  # all workers have ended; the next group has a supervisor of its own
      break
    joined = joined or bool(server.connected)
  deadline = time.monotonic() + (_END_SECONDS if server.over.is_set() else 0.0)
  while server.connected and time.monotonic() < deadline:
    time.sleep(_POLL_SECONDS)
  server.close()
  return 0


def _leave_to_launcher(member: int, reason: str) -> None:
  """The process of a hung member may be on another host. The run goes on without it."""


def _on_request(stop: Callable[[], None]) -> None:
  """Calls `stop` at a request to end, in a thread: the handler may have interrupted a thread that holds a lock."""

  def handle(number: int, frame: FrameType | None) -> None:
    threading.Thread(target=stop, name="stop", daemon=True).start()

  for request in requests():
    signal.signal(request, handle)
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the workers


if __name__ == "__main__":
  sys.exit(main())
