"""`python -m trainer.tools.watch RUN_DIR [RUN_DIR ...]`: shows a run in the browser while it goes on.

The page is the report of the run, and refreshes itself. Several folders, or a local folder of runs, get a list of the
runs with links. A folder that does not exist yet is waited for. Folders may be copies, and may be on gs:// or s3://.
Only this machine can open the page; forward the port to see it elsewhere: `ssh -L 8642:127.0.0.1:8642 HOST`. Behind a
proxy with a name of its own, give --allow-host NAME. Prometheus can read /metrics there (extra prometheus).
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import http.server
import json
import os
import re
import sys
import urllib.parse
from collections.abc import Sequence
from typing import Any

from trainer import commands
from trainer.config.errors import ConfigError, how_to_install
from trainer.config.option_types import positive, whole
from trainer.observe import files, screen
from trainer.report import live
from trainer.report.exporter import Exporter
from trainer.report.live import LivePage

_HOST, _PORT = "127.0.0.1", 8642
_LOCAL_NAMES = {"127.0.0.1", "localhost", "[::1]"}


class Server(http.server.ThreadingHTTPServer):
  """Serves a LivePage, and the runs that it lists, to browsers on this machine. OSError if the port is in use."""

  daemon_threads = True
  allow_reuse_address = True

  def __init__(self, page: LivePage, port: int, hosts: Sequence[str] = ()) -> None:
    """port: 0: any free one. hosts: names besides localhost by which browsers reach this server."""
    self.page, self.hosts = page, _LOCAL_NAMES | {host.lower() for host in hosts}
    self.exporter = Exporter(page.runs)
    self._runs: dict[str, LivePage] = {}
    super().__init__((_HOST, port), _Handler)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Nothing for a browser that has closed its connection."""
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)

  def page_of(self, path: str) -> LivePage | None:
    """The page of an address without its last part: / is the first page, and /NAME/ the run NAME of its list."""
    name = urllib.parse.unquote(path).strip("/")
    if not name:
      return self.page
    with contextlib.suppress(ConfigError):
      if folder := self.page.runs().get(name):
        return self._runs.setdefault(folder, LivePage([folder], self.page.period))
    return None

  @property
  def url(self) -> str:
    return urllib.parse.urlunsplit(("http", f"{_HOST}:{self.server_port}", "/", "", ""))


class _Handler(http.server.BaseHTTPRequestHandler):
  """`/` is the page, `/state?version=N` what is new since version N, `/metrics` the numbers for Prometheus. `/NAME/` is
  the page of a run that / lists."""

  server: Server
  timeout = 30  # a connection without a request must not hold a thread

  def do_GET(self) -> None:
    # A page of another site must not read the run through a host name that it points to this machine.
    host = re.sub(r":\d*$", "", self.headers.get("Host", "")).lower()
    if host not in self.server.hosts:
      text = f"This page was opened as {host!r}. Open it as localhost or 127.0.0.1, or start watch with --allow-host.\n"
      self._send(403, "text/plain", text)
      return
    try:
      address = urllib.parse.urlsplit(self.path)
    except ValueError as error:
      self._send(400, "text/plain", f"{error}: {self.path}\n")
      return
    folder, _, last = address.path.rpartition("/")
    if address.path == "/metrics":
      self._send_metrics()
      return
    page = self.server.page_of(folder)
    if page and not last:
      self._send(200, "text/html; charset=utf-8", live.shell())
    elif page and last == "state":
      state = page.state()
      known = urllib.parse.parse_qs(address.query).get("version") == [str(state.version)]
      answer = {"version": state.version, "notice": state.notice, "is_late": state.is_late}
      self._send(200, "application/json", json.dumps(answer | {"body": None if known else state.body}))
    else:
      self._send(404, "text/plain", "There are only the page at / and the runs that it lists.\n")

  def _send_metrics(self) -> None:
    try:
      data, kind = self.server.exporter.answer(self.headers.get("Accept", ""))
    except ModuleNotFoundError as error:
      self._send(501, "text/plain", f"/metrics needs prometheus_client: {error}. {how_to_install('prometheus')}.\n")
      return
    self._send(200, kind, data)

  def _send(self, code: int, kind: str, content: str | bytes) -> None:
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    self.send_response(code)
    self.send_header("Content-Type", kind)
    self.send_header("Content-Length", str(len(data)))
    self.send_header("Cache-Control", "no-store")
    self.end_headers()
    self.wfile.write(data)

  def log_message(self, format: str, *args: object) -> None:
    """Nothing: a line for every refresh would hide the others."""


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument(
    "run_directory",
    nargs="+",
    type=os.path.expanduser,
    help="{base_output_directory}/{run_name}, local, gs:// or s3://",
  )
  parser.add_argument("--port", type=whole(), help=f"port on {_HOST} (default {_PORT}, or a free one if it is in use)")
  parser.add_argument("--period", type=positive(1e6), default=5.0, help="least seconds between refreshes (default 5)")
  parser.add_argument(
    "--allow-host", metavar="NAME", action="append", default=[], help="a name by which a proxy shows the page"
  )
  return commands.main(parser, _watch, argv)


def _watch(options: argparse.Namespace) -> None:
  """Serves until Ctrl-C."""
  for directory in options.run_directory:
    if not directory.strip() or os.path.isfile(directory):
      raise ConfigError(f"{directory!r} is not a folder. Give {{base_output_directory}}/{{run_name}}.")
    files.check_address(directory)
  with open_server(LivePage(options.run_directory, options.period), options.port, options.allow_host) as server:
    for directory in options.run_directory:
      if not files.exists(directory):
        print(f"{directory} does not exist yet. Waiting for it", flush=True)
    print(f"Watching {', '.join(options.run_directory)} on {server.url} (Ctrl-C ends)", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      server.serve_forever()


def open_server(page: LivePage, port: int | None, hosts: Sequence[str] = ()) -> Server:
  """The server on `port`; None: on the usual port, or on a free one if that is in use. hosts: see Server."""
  try:
    return Server(page, _PORT if port is None else port, hosts)
  except OverflowError:
    raise ConfigError(f"--port {port}: a port is a number from 0 to 65535. Choose another number.") from None
  except OSError as error:
    if error.errno != errno.EADDRINUSE:
      raise
    if port is not None:
      raise ConfigError(f"--port {port} is in use on {_HOST}. Choose another port, or leave out --port.") from None
    return Server(page, 0, hosts)


if __name__ == "__main__":
  screen.command(main)
