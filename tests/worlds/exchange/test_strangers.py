"""Connections without the job's token: closed after a short time, logged, and without effect on the members."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
from tests.support.exchange_members import TOKEN, members, random_shares, same_bits, sum_in_order

from worlds import handshake
from worlds.exchange import PeerLost, listener
from worlds.exchange.link import Stop, Stopped
from worlds.exchange.listener import Call


@pytest.fixture(autouse=True)
def short_limit(monkeypatch):
  monkeypatch.setattr(listener, "HANDSHAKE_SECONDS", 1.5)


@contextlib.contextmanager
def stranger(exchange):
  """A connection that has received the challenge, and the challenge."""
  host, port = exchange.address.split(":")
  with socket.create_connection((host, int(port)), timeout=5) as sock:
    yield sock, sock.recv(handshake.CHALLENGE_BYTES, socket.MSG_WAITALL)


def answer_of(token, challenge, call):
  return handshake.make_answer(token, challenge, listener._CALL.pack(*call))


def is_closed(sock, seconds=10):
  """Whether the other side closes the connection, after at most `seconds`, without another byte."""
  sock.settimeout(seconds)
  try:
    return sock.recv(1) == b""
  except ConnectionResetError:
    return True


def wait_for(line, lines, seconds=5):
  deadline = time.monotonic() + seconds
  while not any(line in text for text in lines):
    assert time.monotonic() < deadline, f"{line!r} is not among {lines}"
    time.sleep(0.01)


def check_members(those):
  """The members can still connect and reduce, at once."""
  shares = random_shares(2, 100)
  start = time.monotonic()
  those.connect()
  assert all(same_bits(result, sum_in_order(shares)) for result in those.reduce(shares, {0: [0], 1: [1]}))
  assert time.monotonic() - start < 1.2  # less than the limit of a handshake


def test_a_valid_answer_is_accepted_once_and_a_replay_is_not():
  with members(2) as those:
    call = Call(1, 1, 0)
    with stranger(those.all[0]) as (sock, challenge):
      answer, _, proof, _ = answer_of(TOKEN, challenge, call)
      sock.sendall(answer)
      assert sock.recv(handshake.PROOF_BYTES, socket.MSG_WAITALL) == proof
    with stranger(those.all[0]) as (sock, challenge):
      sock.sendall(answer)
      assert is_closed(sock)
    wait_for("wrong token", those.refused)
    check_members(those)


@pytest.mark.parametrize(
  "garbage", ["random bytes", "an HTTP request", "a wrong token", "an old epoch", "another member"]
)
def test_a_wrong_answer_is_refused_at_once(garbage):
  with members(2) as those:
    those.connect()
    with stranger(those.all[0]) as (sock, challenge):
      answers = {
        "random bytes": os.urandom(listener.ANSWER_BYTES),
        "an HTTP request": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: " + b"x" * 100 + b"\r\n\r\n",
        "a wrong token": answer_of(b"another token...", challenge, Call(3, 1, 0)).answer,
        "an old epoch": answer_of(TOKEN, challenge, Call(1, 1, 0)).answer,
        "another member": answer_of(TOKEN, challenge, Call(3, 1, 5)).answer,
      }
      sock.sendall(answers[garbage])
      start = time.monotonic()
      assert is_closed(sock)
      assert time.monotonic() - start < 1.2
    reasons = {"an old epoch": "epoch 1, which is over", "another member": "looks for member 5; this is member 0"}
    wait_for(reasons.get(garbage, "wrong token"), those.refused)
    check_members(those)


@pytest.mark.parametrize("sent", [b"", b"GET"])
def test_a_slow_stranger_is_closed_at_the_time_limit(sent):
  with members(2) as those, stranger(those.all[0]) as (sock, _):
    sock.sendall(sent)
    check_members(those)  # the stranger is still there
    assert those.refused == []
    assert is_closed(sock)
    wait_for("no valid handshake within 1.5 s", those.refused)


@pytest.mark.parametrize("behaviour", ["another protocol", "no token", "silence", "closes"])
def test_a_listener_that_is_not_a_member_is_left(behaviour):
  with socket.create_server(("127.0.0.1", 0)) as server, members(2, connect_seconds=0.3) as those:

    def serve():
      sock, _ = server.accept()
      with sock:
        if behaviour == "closes":
          return
        if behaviour != "silence":
          sock.sendall(handshake.make_challenge() if behaviour == "no token" else b"HTTP/1.1 400 Bad Request\r\n\r\n")
        if behaviour == "no token":
          sock.recv(listener.ANSWER_BYTES, socket.MSG_WAITALL)
          sock.sendall(os.urandom(handshake.PROOF_BYTES))
        time.sleep(0.5)

    thread = threading.Thread(target=serve)
    thread.start()
    port = server.getsockname()[1]
    with pytest.raises(PeerLost) as error:
      those.all[1].connect(2, {0: f"127.0.0.1:{port}", 1: those.all[1].address})
    thread.join()
    assert error.value.members == (0,)
    reasons = {
      "another protocol": "not a member",
      "no token": "another token",
      "silence": "time limit",
      "closes": "refused by the listener",
    }
    assert reasons[behaviour] in str(error.value)


def test_a_connection_of_the_next_epoch_is_not_taken_for_one_of_the_present_epoch():
  """Member 1 is told of the next epoch a moment before member 0, which has not claimed the first connection yet."""
  listens, stop, soon = listener.Listener(0, TOKEN, "127.0.0.1", lambda line: None), Stop(), time.monotonic() + 5
  try:
    listens.begin(1, [(1, 0)])
    first, second = (
      listener.dial(TOKEN, {Call(epoch, 1, 0): listens.address}, Stop(), soon).popitem()[1] for epoch in (1, 2)
    )
    assert is_closed(first)
    stop.set()
    with pytest.raises(Stopped):
      listens.claim(stop, soon)
    listens.begin(2, [(1, 0)])
    claimed = listens.claim(Stop(), soon)[1, 0]
    assert claimed.getpeername() == second.getsockname()
    for sock in (first, second, claimed):
      sock.close()
  finally:
    listens.close()
