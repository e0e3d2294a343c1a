"""event_webhook_url: the JSON of each event of events.jsonl, sent by POST to an address when it is written.

The primary sends each event that it writes, once. An event that was not taken is not sent again: the receiver may have
seen it. A receiver that is slow or down costs events and a warning, and never a step.
"""

from __future__ import annotations

import http.client
import math
import queue
import threading
import time
import urllib.request
from typing import Any

from trainer.observe import files
from trainer.observe.events import EVENTS_FILE
from trainer.observe.log import Log
from trainer.services.background_writer import THREAD

MOST_WAITING = 1000  # events; those that follow are dropped
END_SECONDS = 5.0  # for the last events, at the end of a process
_ANSWER_SECONDS = 5.0  # that a receiver may send nothing
_EXIT_SECONDS = 1.5  # of a process that is about to be killed
_QUIET_SECONDS = 600.0  # between two warnings


class _NoRedirects(urllib.request.HTTPRedirectHandler):
  def redirect_request(self, *arguments: Any) -> None:
    """None: after a redirect, a GET without the event would follow."""


class Webhook:
  """Sends events in order, from a thread of its own that begins with the first event."""

  def __init__(self, url: str, log: Log) -> None:
    self._url, self._log = url, log
    self._opener = urllib.request.build_opener(_NoRedirects)
    self._events: queue.SimpleQueue[dict[str, Any] | threading.Event | None] = queue.SimpleQueue()
    self._given = self._taken = 0  # events that `put` got; that the receiver has taken
    self._warned = -math.inf  # the time of the last warning
    # A daemon: the interpreter's end does not wait for a receiver that does not answer.
    self._thread = threading.Thread(target=self._run, name=f"{THREAD}events", daemon=True)

  def put(self, record: dict[str, Any]) -> None:
    """Takes the record of an event; those of steps are left out. Returns at once. Only one thread calls at a time."""
    if "kind" not in record:
      return
    if self._thread.ident is None:
      self._thread.start()
    self._given += 1
    if self._events.qsize() < MOST_WAITING:
      self._events.put(record)
    else:
      self._warn(f"{MOST_WAITING} events wait")

  def flush(self) -> None:
    """Waits a moment for the events so far to be sent: the process may be about to be killed."""
    if self._thread.is_alive():
      done = threading.Event()
      self._events.put(done)
      done.wait(_EXIT_SECONDS)

  def close(self) -> None:
    """Waits for at most END_SECONDS for all events to be sent, and says how many were not."""
    if not self._thread.is_alive():
      return
    self._events.put(None)
    self._thread.join(END_SECONDS)
    self._warned = math.inf  # the number below is the last word
    if lost := self._given - self._taken:
      self._log.warning(f"event_webhook_url: {lost} events did not arrive. {EVENTS_FILE} has all events")

  def _run(self) -> None:
    for item in iter(self._events.get, None):
      if isinstance(item, threading.Event):
        item.set()
        continue
      try:
        self._send(item)
        self._taken += 1
      except (OSError, http.client.HTTPException, ValueError) as error:  # ValueError: of a host that cannot be encoded
        self._warn(str(error) or repr(error))

  def _send(self, record: dict[str, Any]) -> None:
    """Raises an error unless the receiver answers that it has taken the event."""
    data = files.dump_json(record).encode("utf-8", "backslashreplace")
    request = urllib.request.Request(self._url, data, {"Content-Type": "application/json"}, method="POST")
    with self._opener.open(request, timeout=_ANSWER_SECONDS):
      pass  # another status than 2xx is an HTTPError

  def _warn(self, reason: str) -> None:
    now = time.monotonic()
    if now - self._warned >= _QUIET_SECONDS:
      self._warned = now
      self._log.warning(f"event_webhook_url: an event did not arrive: {reason}. Training goes on; the next one is sent")
