"""Commands for a running stand-in: its state, its faults, and faults at a certain dispatch.

A command is a list of words; `arguments.COMMANDS` has their forms. A dispatch is a program that a client has started;
they are counted from the start of the server.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
from typing import Any

from pathways_standin.arguments import COMMANDS
from pathways_standin.cpu_slices import Slices
from pathways_standin.grpc_wire import Service
from pathways_standin.status import CODES

_log = logging.getLogger(__name__)

_EXIT_CODE = 70  # of a server that was told to exit


class CommandError(ValueError):
  """A command that does not exist or has wrong arguments."""


class Commands:
  """Executes commands. All methods may be called from any thread."""

  def __init__(self, slices: Slices, service: Service) -> None:
    self._slices, self._service = slices, service
    self._planned: list[tuple[int, int, list[str]]] = []  # heap: dispatch, order, command
    self._order = itertools.count()
    self._lock = threading.Lock()
    slices.on_dispatch = self._on_dispatch

  def execute(self, words: list[str]) -> dict[str, Any]:
    """What the command reports. Raises CommandError."""
    verb, rest = (words[0], words[1:]) if words else ("", [])
    run = getattr(self, f"_do_{verb}", None) if verb.isalpha() else None
    if run is None:
      raise CommandError(f"{' '.join(words)!r} is no command. The commands are:\n{COMMANDS}")
    answer = run(rest)
    if verb != "status":
      _log.info("%s: %s", " ".join(words), answer)
    return answer

  def _do_status(self, words: list[str]) -> dict[str, Any]:
    _count(words, 0, 0, "status")
    clients = [session.describe() for session in self._service.sessions()]
    with self._lock:
      planned = [f"at {at} {' '.join(command)}" for at, _, command in sorted(self._planned)]
    return {
      "slices": self._slices.describe(),
      "dispatches": self._slices.dispatches,
      "planned": planned,
      "clients": clients,
    }

  def _do_kill(self, words: list[str]) -> dict[str, Any]:
    _count(words, 1, None, "kill SLICE [CODE [TEXT]]")
    slice_id, code = self._slice(words[0]), words[1] if len(words) > 1 else "DATA_LOSS"
    if code not in CODES:
      raise CommandError(f"{code!r} is no error code. Use one of {', '.join(CODES)}.")
    before = self._slices.lost_shards
    self._slices.kill(slice_id, code, " ".join(words[2:]))
    return {"lost_shards": self._slices.lost_shards - before}

  def _do_revive(self, words: list[str]) -> dict[str, Any]:
    _count(words, 1, 1, "revive SLICE")
    self._slices.revive(self._slice(words[0]))
    return {}

  def _do_hang(self, words: list[str]) -> dict[str, Any]:
    _count(words, 1, 2, "hang SLICE [SECONDS]")
    self._slices.hang(self._slice(words[0]), _seconds(words[1]) if len(words) > 1 else None)
    return {}

  def _do_release(self, words: list[str]) -> dict[str, Any]:
    _count(words, 1, 1, "release SLICE")
    self._slices.release(self._slice(words[0]))
    return {}

  def _do_slow(self, words: list[str]) -> dict[str, Any]:
    _count(words, 2, 2, "slow SLICE SECONDS")
    self._slices.slow(self._slice(words[0]), _seconds(words[1]))
    return {}

  def _do_reset(self, words: list[str]) -> dict[str, Any]:
    _count(words, 0, 0, "reset")
    with self._lock:
      self._planned.clear()
    for slice_id in range(self._slices.devices.slices):
      self._slices.revive(slice_id)
      self._slices.release(slice_id)
      self._slices.slow(slice_id, 0.0)
    return {}

  def _do_drop(self, words: list[str]) -> dict[str, Any]:
    _count(words, 0, 0, "drop")
    return {"clients": self._service.drop()}

  def _do_exit(self, words: list[str]) -> dict[str, Any]:
    _count(words, 0, 0, "exit")
    os._exit(_EXIT_CODE)

  def _do_at(self, words: list[str]) -> dict[str, Any]:
    _count(words, 2, None, "at DISPATCH COMMAND")
    number = words[0].removeprefix("+")
    if not _is_whole(number):
      raise CommandError(f"at {words[0]}: DISPATCH must be a whole number, or +N. Use it like: at 120 kill 1")
    if not hasattr(self, f"_do_{words[1]}"):
      raise CommandError(f"at {words[0]} {words[1]}: {words[1]!r} is no command. The commands are:\n{COMMANDS}")
    command, *arguments = words[1:]
    if command in ("kill", "revive", "hang", "release", "slow"):
      self._slice(arguments[0] if arguments else "")
    if command in ("hang", "slow") and arguments[1:]:
      _seconds(arguments[1])
    at = int(number) + (self._slices.dispatches if words[0].startswith("+") else 0)
    with self._lock:
      heapq.heappush(self._planned, (at, next(self._order), words[1:]))
    return {"at": at}

  def _on_dispatch(self, dispatches: int) -> None:
    """Executes what is planned for now. Called by the slices after each dispatch."""
    while self._planned:
      with self._lock:
        if not self._planned or self._planned[0][0] > dispatches:
          return
        command = heapq.heappop(self._planned)[2]
      try:
        self.execute(command)
      except CommandError as error:
        _log.error("a planned command failed: %s", error)

  def _slice(self, word: str) -> int:
    count = self._slices.devices.slices
    if not _is_whole(word) or int(word) >= count:
      raise CommandError(f"{word!r} is no slice. The slices are 0 to {count - 1}.")
    return int(word)


def _count(words: list[str], least: int, most: int | None, form: str) -> None:
  if len(words) < least or (most is not None and len(words) > most):
    raise CommandError(f"{len(words)} arguments for {form.split()[0]!r}. Use it like: {form}")


def _is_whole(word: str) -> bool:
  """Whether `word` is a whole number in the digits 0 to 9: Python's int reads the digits of every script."""
  return word.isascii() and word.isdecimal()


def _seconds(word: str) -> float:
  try:
    seconds = float(word) if word.isascii() else -1.0
  except ValueError:
    seconds = -1.0
  if not 0 <= seconds < float("inf"):
    raise CommandError(f"{word!r} is no time. Give a number of seconds, at least 0.")
  return seconds
