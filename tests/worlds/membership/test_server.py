"""Strangers, garbage and liars at the supervisor's port: nothing changes, a line is logged, and nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time

import pytest

from worlds import handshake
from worlds.membership import server as server_lib
from worlds.membership import wire
from worlds.membership.client import Membership, SupervisorLost
from worlds.membership.coordinator import Coordinator
from worlds.membership.messages import message
from worlds.membership.run_rules import RunRules
from worlds.membership.server import Server
from worlds.place import Place

TOKEN = b"t" * 32
SECONDS = 5.0


class Run:
  """A server with two members, which train in epoch 2."""

  def __init__(self, shares: int = 2) -> None:
    self.lines: list[str] = []
    self.worlds: list[dict[str, object]] = []  # by member: the first one
    self.faults: list[tuple[str, int, float | None]] = []
    self.coordinator = Coordinator(RunRules(2, 1, shares), clock=time.monotonic)
    self.server = Server(
      self.coordinator,
      TOKEN,
      kill=lambda member, reason: None,
      fault=lambda *fault: self.faults.append(fault),
      log=self.lines.append,
    )
    self.members = [self.welcomed(0), self.welcomed(1)]  # one after the other: the first one is the primary
    for member in self.members:
      member.send("ready", newest=0, holds=False)
    for member in self.members:
      expect(member, "lead")
    self.members[0].send("restored", epoch=1, step=0)
    for member in self.members:
      self.worlds.append(expect(member, "world"))

  def join(self, member: int) -> Membership:
    channel, place = wire.connect(self.server.address, TOKEN), Place((self.server.address,), TOKEN, member)
    return Membership(channel, place, f"127.0.0.1:{member}", lambda epoch: None, self.lines.append)

  def welcomed(self, member: int) -> Membership:
    joined = self.join(member)
    expect(joined, "welcome")
    return joined

  def connect(self) -> socket.socket:
    host, _, port = self.server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=SECONDS)

  def state(self) -> tuple[object, ...]:
    run = self.coordinator
    return run.phase, run.epoch, run.active, run.live, run.primary, run.committed, run.code, run.stopping

  def logged(self, text: str) -> None:
    """Returns when a line with `text` was logged."""
    wait_until(lambda: any(text in line for line in self.lines), f"{text!r} in {self.lines}")

  def commits(self, round_name: str) -> None:
    """The members commit a round: they and the server work."""
    for member in self.members:
      member.send("done", epoch=self.coordinator.epoch, round=round_name, checksum=0)
    for member in self.members:
      assert expect(member, "commit")["round"] == round_name


def expect(member: Membership, kind: str) -> dict[str, object]:
  """The next message, which has this kind."""
  received = member.next(timeout=SECONDS)
  assert received is not None and received["kind"] == kind, received
  return received


def wait_until(condition, what: str, seconds: float = SECONDS) -> None:
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, what
    time.sleep(0.01)


def ends(sock: socket.socket) -> bool:
  """Whether the other side closes the connection."""
  sock.settimeout(SECONDS)
  with contextlib.suppress(ConnectionError):
    while sock.recv(4096):
      pass
  return True


def descriptors() -> int:
  return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def run():
  threads, files = set(threading.enumerate()), descriptors()
  run = Run()
  yield run
  for member in run.members:
    member.close()
  run.server.close()
  wait_until(lambda: set(threading.enumerate()) <= threads, f"{threading.enumerate()} are left")
  wait_until(lambda: descriptors() <= files, f"{descriptors()} descriptors are left of {files}")


GARBAGE = {
  "bytes": (b"GET / HTTP/1.1\r\n" + b"x" * 64, "does not have the token"),
  "nothing": (b"", "did not finish the handshake"),
}


@pytest.mark.parametrize("sent, reason", GARBAGE.values(), ids=GARBAGE)
def test_a_stranger_is_refused_and_changes_nothing(run, sent, reason):
  before = run.state()
  with run.connect() as sock:
    with contextlib.suppress(OSError):  # the server has closed the connection already
      sock.sendall(sent)
      sock.shutdown(socket.SHUT_WR)
    assert ends(sock)
  run.logged(reason)
  assert run.state() == before
  run.commits("step 1")


def test_the_wrong_token_is_refused_on_both_sides(run):
  before = run.state()
  with pytest.raises((OSError, wire.WireError)):
    wire.connect(run.server.address, b"w" * 32)
  run.logged("does not have the token")
  assert run.state() == before
  with socket.create_server(("127.0.0.1", 0)) as listener:

    def claim() -> None:
      sock, _ = listener.accept()
      with sock, contextlib.suppress(OSError):
        sock.sendall(handshake.make_challenge())
        sock.recv(4096)
        sock.sendall(bytes(handshake.PROOF_BYTES))

    thread = threading.Thread(target=claim)
    thread.start()
    with pytest.raises(wire.WireError, match="does not have the token"):
      wire.connect(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN)
    thread.join()


@pytest.mark.parametrize("knows_token", [False, True])
def test_a_connection_that_never_says_hello_is_closed_in_time(run, monkeypatch, knows_token):
  monkeypatch.setattr(server_lib, "HANDSHAKE_SECONDS", 0.5)
  before, closed = run.state(), threading.Event()
  with run.connect() as sock:
    if knows_token:
      sock.sendall(handshake.make_answer(TOKEN, sock.recv(handshake.CHALLENGE_BYTES, socket.MSG_WAITALL)).answer)

    def drip() -> None:  # each byte would begin another time limit of a read
      with contextlib.suppress(OSError):
        while not closed.wait(0.1):
          sock.sendall(b"\0")

    thread = threading.Thread(target=drip)
    began = time.monotonic()
    thread.start()
    assert ends(sock) and time.monotonic() - began < 2.0
    closed.set()
    thread.join()
  run.logged("was refused")
  assert run.state() == before


class Recorder:
  """Forwards one connection to the server, and records what the member sends."""

  def __init__(self, run: Run) -> None:
    self.recorded = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
      address = f"127.0.0.1:{listener.getsockname()[1]}"
      accepts = threading.Thread(target=lambda: setattr(self, "near", listener.accept()[0]))
      accepts.start()
      self.far = run.connect()
      self.threads = [threading.Thread(target=self._forward, args=(side,)) for side in (0, 1)]
      dials = threading.Thread(target=lambda: setattr(self, "channel", wire.connect(address, TOKEN)))
      dials.start()
      accepts.join()
      for thread in self.threads:
        thread.start()
      dials.join()

  def _forward(self, side: int) -> None:
    source, target = (self.near, self.far) if side == 0 else (self.far, self.near)
    with contextlib.suppress(OSError):
      while data := source.recv(4096):
        if side == 0:
          self.recorded += data
        target.sendall(data)
    with contextlib.suppress(OSError):
      target.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    self.channel.close()
    for thread in self.threads:
      thread.join()
    self.near.close()
    self.far.close()


def test_a_recorded_conversation_and_a_repeated_message_are_worth_nothing(run):
  recorder = Recorder(run)
  recorder.channel.send(message("hello", member=2, lane=0, lanes=1, address="127.0.0.1:2"))
  wait_until(lambda: 2 in run.server.connected, "the member joins")
  hello = len(recorder.recorded)
  recorder.channel.send(message("beat", busy=""))
  wait_until(lambda: len(recorder.recorded) > hello, "the beat is forwarded")
  recorder.far.sendall(recorder.recorded[hello:])  # the beat again
  run.logged("wrong authentication code")
  wait_until(lambda: 2 not in run.server.connected, "the member that repeats itself is dropped")
  recorder.close()
  before = run.state()
  with run.connect() as sock:
    sock.sendall(recorder.recorded)
    assert ends(sock)
  run.logged("does not have the token")
  assert run.state() == before
  run.commits("step 1")


def raw(channel: wire.Channel, body: bytes, *, change: int = 0, size: int | None = None) -> None:
  """Sends a message with a valid code, but a changed last byte or a wrong length."""
  code = wire._code(channel._key, channel._out, channel._sent, body)
  channel._sent += 1
  sent = body[:-1] + bytes([body[-1] ^ change])
  channel._socket.sendall(struct.pack("!I", len(body) if size is None else size) + code + sent)


BROKEN_FRAMES = {
  "changed byte": ({"change": 1}, "wrong authentication code"),
  "oversized": ({"size": wire.MAX_MESSAGE_BYTES + 1}, "announced a message of"),
}
BAD_BODIES = {
  "not JSON": (b"not JSON", "not JSON"),
  "no kind": (b"{}", "unknown kind None"),
  "unknown kind": (b'{"kind": "promote"}', "unknown kind 'promote'"),
  "second hello": (b'{"kind": "hello", "member": 0, "lane": 0, "lanes": 1, "address": ""}', "a second 'hello'"),
  "missing field": (b'{"kind": "ready"}', "newest=None"),
  "infinity": (b'{"kind": "ready", "newest": Infinity}', "newest=inf"),
  "no round": (b'{"kind": "done", "epoch": 1, "round": "step x", "checksum": 0}', "invalid literal"),
}


@pytest.mark.parametrize("name", [*BROKEN_FRAMES, *BAD_BODIES])
def test_a_member_that_breaks_the_protocol_is_dropped_and_the_others_go_on(run, name):
  before = run.state()
  channel = wire.connect(run.server.address, TOKEN)
  channel.send(message("hello", member=2, lane=0, lanes=1, address="127.0.0.1:2"))
  assert channel.receive() == message("welcome", primary=0, run_id="")
  if name in BROKEN_FRAMES:
    options, _ = BROKEN_FRAMES[name]
    raw(channel, json.dumps(message("beat", busy="")).encode(), **options)
  else:
    raw(channel, BAD_BODIES[name][0])
  assert ends(channel._socket)
  channel.close()
  wait_until(lambda: 2 not in run.server.connected, "the member is dropped")
  assert run.state() == before
  run.logged((BROKEN_FRAMES | BAD_BODIES)[name][1])
  run.commits("step 1")


BAD_HELLOS = {
  "no hello": (message("ready", newest=0, holds=False), "did not say hello"),
  "lane": (message("hello", member=2, lane=1, lanes=1, address=""), "lane 1 of 1"),
  "second process": (message("hello", member=1, lane=0, lanes=1, address="elsewhere"), "has a connection already"),
  "other lanes": (message("hello", member=1, lane=1, lanes=2, address="elsewhere"), "has 2 lanes"),
}


@pytest.mark.parametrize("hello, reason", BAD_HELLOS.values(), ids=BAD_HELLOS)
def test_a_bad_first_message_is_refused(run, hello, reason):
  before, epoch = run.state(), dict(run.coordinator._members[1].addresses)
  channel = wire.connect(run.server.address, TOKEN)
  channel.send(hello)
  answer = channel.receive()
  if reason == "has a connection already":  # it may be true of a process that was restarted too early
    assert answer is not None and answer["kind"] == "end" and answer["code"] == 42 and reason in answer["reason"]
    answer = channel.receive()
  assert answer is None
  channel.close()
  run.logged(reason)
  assert run.state() == before and run.coordinator._members[1].addresses == epoch
  run.commits("step 1")


@pytest.mark.parametrize("body", [b"garbage", b'{"kind": "world", "epoch": "1"}'])
def test_a_supervisor_that_sends_garbage_counts_as_lost(run, body):
  member, lost = run.members[0], []
  member.watch(busy=str, noticed=bool, lost=lambda: lost.append("noticed"))
  channel = run.server._channels[0][0]
  raw(channel, body)
  with pytest.raises(SupervisorLost):
    member.next(timeout=SECONDS)
  assert not member.connected
  wait_until(lambda: lost == ["noticed"], "the loss is told")
  member.watch(busy=str, noticed=bool, lost=lambda: lost.append("late"))
  assert lost == ["noticed", "late"]
  run.logged("The supervisor sent")
  wait_until(lambda: 0 not in run.server.connected, "the supervisor sees the end of the connection")


def connect_narrowly(address: tuple[str, int], timeout: float) -> socket.socket:
  """A connection whose buffer is soon full."""
  sock = socket.socket()
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
  sock.settimeout(timeout)
  sock.connect(address)
  return sock


def test_a_member_that_never_reads_holds_up_nobody(run, monkeypatch):
  """It reports every round, so that the others train, until its connection is full. Then it is dropped."""
  monkeypatch.setattr(wire, "_SEND_BUFFER_BYTES", 4096)
  run.members.pop().close()  # its place is free
  expect(run.members[0], "world")
  with monkeypatch.context() as patch:
    patch.setattr(socket, "create_connection", connect_narrowly)
    deaf = wire.connect(run.server.address, TOKEN)
  for hello in (
    message("hello", member=2, lane=0, lanes=1, address="127.0.0.1:2"),
    message("ready", newest=0, holds=False),
  ):
    deaf.send(hello)
  first = run.members[0]
  wait_until(lambda: run.coordinator._members.get(2) is not None and run.coordinator._members[2].ready, "member 2")
  longest, number = 0.0, 0
  while run.coordinator.epoch < 5:  # epoch 4: member 2 computes; epoch 5: it is dropped
    number += 1
    assert number < 10_000
    began = time.monotonic()
    epoch = run.coordinator.epoch
    first.send("done", epoch=epoch, round=f"step {number}", checksum=0)
    if 2 in run.coordinator.active:
      deaf.send(message("done", epoch=epoch, round=f"step {number}", checksum=0))
    while (received := first.next(timeout=SECONDS))["kind"] != "commit":
      first.send("done", epoch=received["epoch"], round=f"step {number}", checksum=0)
    longest = max(longest, time.monotonic() - began)
    if number == 1:
      expect(first, "world")
  assert number > 10 and longest < 1.0
  run.logged("Member 2 does not read its messages")
  deaf.close()


def test_a_side_that_asks_thousands_of_times_is_no_error():
  ours, theirs = socket.socketpair()
  receiver, sender = wire.Channel(ours, b"key", serves=False), wire.Channel(theirs, b"key", serves=True)
  theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
  for _ in range(5000):
    with contextlib.suppress(BlockingIOError):
      sender.send(wire.encode(wire._QUESTION))
  theirs.close()
  assert receiver.receive() is None
  ours.close()
