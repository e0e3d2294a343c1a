"""A dead host is noticed soon, and a process that is stopped or does not read is none."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tests.support.command import ROOT
from tests.support.exchange_members import Members, random_shares

from worlds import addresses, liveness
from worlds.exchange import PeerLost
from worlds.liveness import CHECK_SECONDS, Liveness
from worlds.membership import wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.messages import message
from worlds.membership.run_rules import RunRules
from worlds.membership.server import Server

NETWORK = ["unshare", "--user", "--map-root-user", "--net"]
LIMIT = 1.5
TOKEN = b"a token of hosts"
HOST = "127.0.0.2"  # who connects there has the address 127.0.0.1, as if these were two hosts


class Connection:
  """A socket whose TCP_INFO is told, {index in worlds.liveness: value}."""

  def __init__(self) -> None:
    self.info: dict[int, int] = {}

  def getsockname(self) -> tuple[str, int]:
    return "10.0.0.1", 1

  def getpeername(self) -> tuple[str, int]:
    return "10.0.0.2", 1

  def getsockopt(self, level: int, option: int, size: int) -> bytes:
    return liveness._INFO.pack(*(self.info.get(index, 0) for index in range(43)))


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO")
def test_the_system_measures_connections_to_other_hosts():
  with socket.create_server((HOST, 0)) as listener, socket.create_connection(listener.getsockname()) as one:
    other, _ = listener.accept()
    with other:
      receiver = threading.Thread(target=lambda: [other.recv(1 << 20) for _ in range(64)], daemon=True)
      receiver.start()
      begun = time.monotonic()
      one.sendall(bytes(4 << 20))
      one.shutdown(socket.SHUT_WR)
      receiver.join(30)
      found = Liveness(one, lambda: None).speed()
      seconds = time.monotonic() - begun
      assert found is not None and 0 < found[0] < seconds and found[1] > (4 << 20) / seconds / 10
  with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as one:
    assert Liveness(one, lambda: None).speed() is None


@pytest.mark.parametrize(
  ("case", "retransmits", "sent", "heard", "checks", "seconds", "dead"),
  [
    ("repeated bytes are not answered", 2, 300, 1300, 10, 0.05, True),
    ("not for long enough", 2, 300, 1100, 10, 0.05, False),
    ("nothing was sent that must be answered", 0, 5000, 9000, 10, 0.05, False),
    ("a host without room answers each time, and the next time is far away", 4, 1500, 1500, 10, 0.05, False),
    ("this process was stopped", 2, 300, 3000, 1, 3.0, False),
    ("it is stopped again and again", 2, 300, 3000, 8, 2.0, False),
    ("this process gets little of its CPU, which delays answers too", 2, 300, 3000, 2, 0.5, False),
    ("it does so, and there is no answer", 2, 300, 3000, 4, 0.5, True),
  ],
)
def test_only_unanswered_bytes_show_a_dead_host(monkeypatch, case, retransmits, sent, heard, checks, seconds, dead):
  sock, now = Connection(), 100.0
  monkeypatch.setattr(liveness.time, "monotonic", lambda: now)
  watched = liveness.Liveness(sock, lambda: None)
  assert not watched.is_dead()
  sock.info = {
    liveness._RETRANSMITS: retransmits,
    liveness._LAST_SENT: sent,
    liveness._LAST_DATA: heard + 9000,
    liveness._LAST_ACK: heard,
  }
  found = []
  for _ in range(checks):
    now += seconds
    found.append(watched.is_dead())
  assert any(found) == dead, case


def test_a_peer_that_reads_nothing_lives():
  """Its buffer fills, and the system asks it again and again whether there is room."""
  with socket.create_server((HOST, 0)) as server, socket.create_connection(server.getsockname()) as sock:
    peer, _ = server.accept()
    with peer:
      ours, theirs = Liveness(sock, lambda: sock.send(b"?")), Liveness(peer, lambda: peer.send(b"?"))
      sock.setblocking(False)
      end = time.monotonic() + 2.5
      while time.monotonic() < end:
        with contextlib.suppress(BlockingIOError):
          sock.send(bytes(1 << 18))
        assert not ours.is_dead() and not theirs.is_dead()
        time.sleep(CHECK_SECONDS)


def test_a_dead_host_is_noticed_in_a_sum_and_between_sums():
  """In a network of its own, which is then shut down."""
  if subprocess.run([*NETWORK, "ip", "link", "set", "lo", "up"], check=False, capture_output=True).returncode:
    pytest.skip("this system lets the user make no networks")
  command = [*NETWORK, sys.executable, "-m", __spec__.name]
  found = subprocess.run(command, cwd=ROOT, env=os.environ, check=False, capture_output=True, text=True, timeout=60)
  assert found.returncode == 0, found.stderr


def die() -> float:
  """All hosts are dead for each other: packets vanish. Returns the time."""
  subprocess.run("ip link set lo down".split(), check=True)
  return time.monotonic()


def watched() -> None:
  """Two members wait for a third one in a sum, and a supervisor for a member that computes."""
  subprocess.run("ip link set lo up".split(), check=True)
  size, noticed, killed = 3000, {}, threading.Event()
  those, shares = Members(3, host=HOST), random_shares(3, 3000)
  those.connect()

  def reduce(member: int) -> None:
    try:
      those.all[member].reduce("s", {member: shares[member]}, {m: [m] for m in range(3)}, np.empty(size, np.float32))
    except PeerLost as error:
      noticed[member] = time.monotonic(), str(error)

  where, kill = addresses.listen(HOST, 0, 1), lambda *_: killed.set()
  with contextlib.closing(Server(Coordinator(RunRules(1, 1, 1)), TOKEN, listener=where, kill=kill)) as server:
    channel = wire.connect(server.address, TOKEN)
    channel.send(message("hello", member=0, lane=0, lanes=1, address="127.0.0.1:1"))
    threads = [threading.Thread(target=reduce, args=(member,)) for member in (0, 1)]
    for thread in threads:
      thread.start()
    time.sleep(2.5)  # no sign of life comes, as from a member that compiles
    assert not killed.is_set() and not noticed, noticed
    at = die()
    assert killed.wait(LIMIT)
    print(f"supervisor: {time.monotonic() - at:.2f} s")
  for thread in threads:
    thread.join(LIMIT)
  for member, (when, text) in noticed.items():
    print(f"member {member}: {when - at:.2f} s, {text}")
    assert when - at < LIMIT and "host does not answer" in text
  assert noticed.keys() == {0, 1}
  those.close()


if __name__ == "__main__":
  watched()
