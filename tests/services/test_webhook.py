"""event_webhook_url against real receivers: one that takes events, and others that do everything else."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
import time
import urllib.parse

import pytest
from tests.support.command import without_times

from trainer.observe import events, log
from trainer.services import webhook
from trainer.services.webhook import Webhook


class Receiver(http.server.ThreadingHTTPServer):
  """Takes events, or answers with another status."""

  daemon_threads = True

  def __init__(self, status: int = 204):
    class Handler(http.server.BaseHTTPRequestHandler):
      def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.headers["Content-Type"], json.loads(body)))
        self.send_response(status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

      def do_GET(self):
        raise AssertionError("a redirect was followed")

      def log_message(self, *arguments):
        pass

    self.taken: list = []
    super().__init__(("127.0.0.1", 0), Handler)
    threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

  @property
  def url(self) -> str:
    return urllib.parse.urlunsplit(("http", f"127.0.0.1:{self.server_port}", "/events", "", ""))


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
  for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
    monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fast(monkeypatch):
  """Short limits, for receivers that answer nothing: a busy machine may need longer for an answer."""
  monkeypatch.setattr(webhook, "_ANSWER_SECONDS", 0.3)
  monkeypatch.setattr(webhook, "END_SECONDS", 0.5)


def emit(path, url: str, kinds: list[str], is_primary: bool = True) -> float:
  """A process whose events go to `url`. Returns the seconds that the events and the end have cost."""
  record = events.EventLog(str(path), "r", is_primary=is_primary)
  hook = Webhook(url, log.get(None))
  record.subscribe(hook.put, hook.flush)
  began = time.monotonic()
  for kind in kinds:
    record.emit(kind, step=3, loss=float("nan"))
    record.tell({"step": 3, "loss": 2.0})  # the record of a step is no event
  emitted = time.monotonic() - began
  hook.close()
  record.close()
  assert emitted < 0.25
  return time.monotonic() - began


def test_each_event_is_sent_once_as_it_is_in_the_file(tmp_path, capsys):
  with Receiver() as receiver:
    emit(tmp_path, receiver.url, ["run_start", "slice_down", "recovery", "run_end"])
    emit(tmp_path, receiver.url, ["run_start"], is_primary=False)
    receiver.shutdown()
  kinds, taken = zip(*receiver.taken)
  assert set(kinds) == {"application/json"}
  assert list(taken) == list(map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines()))
  assert [event["kind"] for event in taken] == ["run_start", "slice_down", "recovery", "run_end"]
  assert capsys.readouterr().out == ""


@pytest.mark.parametrize("status", [500, 404, 302])
def test_an_event_that_is_refused_is_not_sent_again(tmp_path, capsys, status):
  with Receiver(status) as receiver:
    emit(tmp_path, receiver.url, ["run_start", "run_end"])
    receiver.shutdown()
  assert len(receiver.taken) == 2
  first, last = without_times(capsys.readouterr().out).splitlines()
  assert first.startswith(f"warning: event_webhook_url: an event did not arrive: HTTP Error {status}")
  assert last == "warning: event_webhook_url: 2 events did not arrive. events.jsonl has all events"


@contextlib.contextmanager
def bad_receiver(kind: str):
  """The URL of a receiver that does not speak HTTP as it should."""
  stop = threading.Event()

  def answer(listener):
    kept = []
    with contextlib.suppress(OSError):
      while not stop.is_set():
        connection, _ = listener.accept()
        kept.append(connection)
        if kind == "nonsense":
          connection.sendall(b"\x00\xff no HTTP\r\n\r\n")
          connection.close()
        while kind == "slow" and not stop.wait(0.1):
          connection.sendall(b"H")

  with socket.create_server(("127.0.0.1", 0)) as listener:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=answer, args=(listener,), daemon=True)
    if kind == "closed":
      listener.close()
    else:
      thread.start()
    yield f"{'https' if kind == 'tls' else 'http'}://{address}"
    stop.set()
    if kind != "closed":
      listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`, which a close does not
      thread.join(timeout=10)
      assert not thread.is_alive()


@pytest.mark.parametrize("kind", ["closed", "hangs", "slow", "nonsense", "tls"])
def test_a_bad_receiver_costs_events_and_a_short_time_at_the_end(tmp_path, capsys, kind, fast):
  with bad_receiver(kind) as url:
    assert emit(tmp_path, url, ["run_start", "eval", "run_end"]) < 1.5
  out = without_times(capsys.readouterr().out)
  assert out.splitlines()[-1].endswith("3 events did not arrive. events.jsonl has all events")
  assert (tmp_path / "events.jsonl").read_text().count("\n") == 3


def test_events_that_wait_too_long_are_dropped_and_counted(tmp_path, capsys, monkeypatch, fast):
  monkeypatch.setattr(webhook, "MOST_WAITING", 5)
  monkeypatch.setattr(webhook, "_ANSWER_SECONDS", 60)
  with bad_receiver("hangs") as url:
    emit(tmp_path, url, ["snapshot"] * 40)
  out = without_times(capsys.readouterr().out)
  assert "an event did not arrive: 5 events wait" in out and "40 events did not arrive" in out


def test_a_process_that_is_about_to_be_killed_waits_a_moment_for_its_last_event(tmp_path):
  with Receiver() as receiver:
    record = events.EventLog(str(tmp_path), "r")
    hook = Webhook(receiver.url, log.get(None))
    record.subscribe(hook.put, hook.flush)
    record.emit("hang", step=3)
    record.flush()  # the watchdog kills the process now
    assert [event["kind"] for _, event in receiver.taken] == ["hang"]
    receiver.shutdown()
