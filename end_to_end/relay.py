"""Passes HTTP requests on to an object store, and fails as it is told."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import json
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator

FAILURES = ("503", "429", "time-out", "reset", "short read", "refused", "slow", "hidden newest")
SLOW_SECONDS, SLOW_EACH = 4.0, 10  # for one answer in so many
_HOPS = ("connection", "transfer-encoding", "content-length", "keep-alive")  # headers of one connection


class Relay(http.server.ThreadingHTTPServer):
  """Fails as `mode` says, one of FAILURES; "": it passes everything on. failed: how many requests have failed."""

  daemon_threads, request_queue_size = True, 128

  def __init__(self, store: str) -> None:
    """store: the URL of the object store."""
    super().__init__(("127.0.0.1", 0), _Handler)
    self.store, self.mode, self.failed = store.removeprefix("http://"), "", 0
    self.url = "http://" + f"127.0.0.1:{self.server_address[1]}"

  @contextlib.contextmanager
  def running(self) -> Iterator[Relay]:
    threading.Thread(target=self.serve_forever, daemon=True).start()
    try:
      yield self
    finally:
      self.shutdown()
      self.server_close()

  def handle_error(self, *_: object) -> None:
    """Clients that are cut off are no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  disable_nagle_algorithm = True
  server: Relay

  def log_message(self, *_: object) -> None:
    pass

  def _body(self) -> bytes:
    if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
      return self.rfile.read(int(self.headers.get("Content-Length") or 0))
    parts = []
    while size := int(self.rfile.readline().split(b";")[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    while self.rfile.readline().strip():  # trailers
      pass
    return b"".join(parts)

  def _pass(self) -> None:
    body = self._body()
    mode = self.server.mode
    self.server.failed += bool(mode)
    if mode in ("503", "429", "refused"):
      self._answer(403 if mode == "refused" else int(mode), {}, b"{}")
      return
    if mode == "time-out":
      while self.server.mode == mode:
        time.sleep(0.1)
      self.close_connection = True
      return
    if mode == "slow" and self.server.failed % SLOW_EACH == 0:
      time.sleep(SLOW_SECONDS)
    upstream = http.client.HTTPConnection(self.server.store, timeout=60)
    headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOPS}
    upstream.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
    found = upstream.getresponse()
    data, told = found.read(), dict(found.getheaders())
    upstream.close()
    if place := told.get("Location"):  # of an upload in several parts: they must come here too
      told["Location"] = self.server.url + urllib.parse.urlsplit(place)._replace(scheme="", netloc="").geturl()
    if mode == "hidden newest":
      data = without_newest(data)
    self._answer(found.status, told, data, cut=mode if mode in ("reset", "short read") else "")

  def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: str = "") -> None:
    self.send_response_only(status)
    for name, value in headers.items():
      if name.lower() not in (*_HOPS, "content-length"):
        self.send_header(name, value)
    length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
    self.send_header("Content-Length", length)
    self.end_headers()
    if self.command == "HEAD":
      data = b""
    self.wfile.write(data[: len(data) // 2] if cut else data)
    if cut:
      self.close_connection = True
    if cut == "reset":
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
      self.connection.close()

  do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _pass


def without_newest(listing: bytes) -> bytes:
  """A listing in JSON or XML without everything of the newest checkpoint in it."""
  text = listing.decode("utf-8", "replace")
  steps = {int(step) for step in re.findall(r"/checkpoints/([0-9]+)/", text)}
  if len(steps) < 2 or not text.startswith(("{", "<?xml", "<List")):
    return listing
  of_newest = f"/checkpoints/{max(steps)}/"
  if text.startswith("{"):
    found = json.loads(text)
    found["items"] = [item for item in found.get("items", []) if of_newest not in item["name"]]
    found["prefixes"] = [name for name in found.get("prefixes", []) if of_newest not in name]
    return json.dumps(found).encode()
  for tag in ("Contents", "CommonPrefixes"):
    text = re.sub(rf"<{tag}>(?:(?!</{tag}>).)*{of_newest}(?:(?!</{tag}>).)*</{tag}>", "", text, flags=re.DOTALL)
  return text.encode()
