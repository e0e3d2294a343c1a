"""Connections from one epoch to the next: members that stay keep them, and no byte is read in a later epoch."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import socket
import struct
import threading
import time
import zlib

import numpy as np
import pytest
from tests.support.exchange_members import TOKEN, members, random_shares, same_bits, sum_in_order

from worlds import handshake
from worlds.exchange import Exchange, PeerLost, reduction
from worlds.exchange.link import _FIELDS, Kind, Link, Stop
from worlds.exchange.listener import Call, dial

NOTHING = memoryview(b"")
SIZE = 300_000


@pytest.fixture(params=[1, 2], ids=["one stream", "two streams"])
def streams(request, monkeypatch):
  monkeypatch.setattr(reduction, "ALONE", 0 if request.param == 2 else SIZE)
  return request.param


def connections(those):
  """{(member, peer): its connections, by the port of the caller}"""
  ports = lambda link: {link._sock.getsockname()[1], link._sock.getpeername()[1]}
  listening = {int(exchange.address.split(":")[1]) for exchange in those.all}
  return {
    (member, peer): set().union(*(ports(link) - listening for link in links))
    for member, exchange in enumerate(those.all)
    for peer, links in exchange._links.items()
  }


def slow_down(exchange):
  """The connections hold few bytes, so that most interrupts come in the middle of a frame."""
  for link in itertools.chain(*exchange._links.values()):
    link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)


def reduced(those, seed, dealt=None):
  shares = random_shares(len(those.all), SIZE, seed)
  results = those.reduce(shares, dealt or {member: [member] for member in range(len(those.all))})
  return all(same_bits(result, sum_in_order(shares)) for result in results)


@pytest.mark.parametrize("sender", [0, 1])
def test_a_frame_that_is_cut_in_the_middle_leaves_nothing_for_the_next_epoch(sender, streams):
  """The sender is interrupted in a frame, and then the receiver in the same frame. Both change their arrays."""
  receiver, dealt = 1 - sender, {0: [0], 1: [1]}
  with members(2, streams=streams) as those:
    before = connections(those)
    for exchange in those.all:
      slow_down(exchange)
    kept = {}
    in_a_frame = {sender: lambda link: len(link._waiting) % 2, receiver: lambda link: link._frame}
    for member in (sender, receiver):
      exchange, own, out = those.all[member], np.full(SIZE, 7, np.float32), np.full(SIZE, 8, np.float32)
      threading.Thread(target=_interrupt, args=[exchange, in_a_frame[member]]).start()
      assert _lost(exchange.reduce, "step 1", {member: own}, dealt, out).members == ()
      own[:] = np.nan
      kept[member] = out, out.copy()
    assert any(link.unsent for link in those.all[sender]._links[receiver])
    assert any(link._discarded for link in those.all[receiver]._links[sender])
    for seed in range(3):
      those.connect()
      assert reduced(those, seed)
    assert connections(those) == before
    assert all(same_bits(*outs) for outs in kept.values()), "an epoch that is over has written into its arrays"


def _interrupt(exchange, when):
  while not any(when(link) for link in itertools.chain(*exchange._links.values())):
    time.sleep(0.001)
  exchange.interrupt(2)


def test_only_new_members_make_connections(monkeypatch, streams):
  made = []
  check = handshake.check_answer
  monkeypatch.setattr(handshake, "check_answer", lambda *args: made.append(0) or check(*args))
  with members(4, streams=streams) as those:
    assert len(made) == 6 * streams
    before = connections(those)
    those.connect()
    assert len(made) == 6 * streams and reduced(those, 1)
    those.all[2].close()
    those.all[2] = Exchange(2, TOKEN, those.refused.append, streams=streams)
    those.connect()
    assert len(made) == 9 * streams and reduced(those, 2)
    after = connections(those)
    assert {pair for pair in before if before[pair] != after[pair]} == {pair for pair in before if 2 in pair}
    assert those.refused == []


@pytest.mark.parametrize("closes", [0, 1, 2])
@pytest.mark.parametrize("how", ["closed", "broken"])
def test_a_connection_that_ends_between_epochs_is_replaced_with_all_its_streams(closes, how, streams):
  with members(3, streams=streams) as those:
    before = connections(those)
    link = those.all[closes]._links[(closes + 1) % 3][-1]
    if how == "closed":
      link._sock.shutdown(socket.SHUT_RDWR)
    else:  # only one side knows
      link.is_broken = True
    those.connect()
    assert reduced(those, 1)
    after = connections(those)
    pair = {closes, (closes + 1) % 3}
    assert {key for key in before if before[key] != after[key]} == {key for key in before if set(key) == pair}
    assert all(before[key].isdisjoint(after[key]) for key in before if set(key) == pair)


def _lost(function, *args):
  with pytest.raises(PeerLost) as error:
    function(*args)
  return error.value


# ---- peers that do not follow the protocol


@contextlib.contextmanager
def impostor(seconds=5.0):
  """(member 0 after epoch 1, the connection of a member 1 that does what the test wants)."""
  exchange = Exchange(0, TOKEN, print, connect_seconds=seconds)
  sock = None
  try:
    sock = call(exchange, 1)
    exchange.connect(1, {0: "unused", 1: "unused"})
    yield exchange, Link(0, sock, Stop(), 1)
  finally:
    exchange.close()
    if sock:
      sock.close()


def call(exchange, epoch):
  calls = {Call(epoch, 1, 0): exchange.address}
  return dial(TOKEN, calls, Stop(), time.monotonic() + 5).popitem()[1]


def mark(link, epoch):
  link.send(Kind.EPOCH, epoch, 0, 0, NOTHING, 0)


def connect(exchange, epoch):
  exchange.connect(epoch, {0: "unused", 1: "unused"})


def test_a_newer_mark_ends_the_epoch_and_is_remembered():
  with impostor() as (exchange, peer):
    mark(peer, 4)
    for epoch in (2, 3):
      error = _lost(connect, exchange, epoch)
      assert error.members == (1,) and "the peer has begun epoch 4" in str(error)
    connect(exchange, 4)
    peer.send(Kind.STATE_HEADER, 4, 0, 0, memoryview(b"4"))
    assert exchange.receive_state(1, lambda header: []) == (4, [])


@pytest.mark.parametrize("garbage", ["random bytes", "a damaged mark", "the end in a mark", "the end"])
def test_a_connection_with_garbage_is_closed_and_another_one_is_accepted(garbage):
  with impostor() as (exchange, peer):
    damaged = bytearray(b"xchg" + bytes(36))
    sent = {"random bytes": os.urandom(100), "a damaged mark": damaged, "the end in a mark": b"xchg"}.get(garbage, b"")
    peer._sock.sendall(sent)
    if garbage.startswith("the end"):
      peer._sock.shutdown(socket.SHUT_WR)
    thread = threading.Thread(target=connect, args=[exchange, 2])
    thread.start()
    peer._sock.setblocking(True)
    peer._sock.settimeout(5)
    with contextlib.suppress(ConnectionResetError):
      while peer._sock.recv(100):  # the mark of member 0
        pass
    with call(exchange, 2) as sock:
      thread.join(5)
      assert not thread.is_alive()
      Link(0, sock, Stop(), 2).send(Kind.STATE_HEADER, 2, 0, 0, memoryview(b"2"))
      assert exchange.receive_state(1, lambda header: []) == (2, [])


@pytest.mark.parametrize("sends", ["nothing", "frames without end", "a payload without end"])
def test_a_peer_that_never_begins_the_epoch_is_named_in_time(sends):
  with impostor(seconds=0.4) as (exchange, peer):
    over = threading.Event()

    def send():
      fields = _FIELDS.pack(b"xchg", Kind.PIECE, 0, 0, 1, 1 << (62 if sends == "a payload without end" else 10), 0)
      header = fields + struct.pack("<I", zlib.crc32(fields))
      peer._sock.setblocking(True)
      with contextlib.suppress(OSError):
        peer._sock.sendall(header)
        while not over.is_set():
          peer._sock.sendall(bytes(1 << 20) if sends == "a payload without end" else bytes(1 << 10) + header)

    thread = threading.Thread(target=send if sends != "nothing" else over.wait)
    thread.start()
    start = time.monotonic()
    error = _lost(connect, exchange, 2)
    assert error.members == (1,) and "time limit" in str(error) and time.monotonic() - start < 3
    over.set()
    exchange._drop(1)
    thread.join(5)
    assert not thread.is_alive()


# ---- random histories


class _Fleet:
  """Members as threads, which follow the epochs that a supervisor gives them, are interrupted, and die and return."""

  def __init__(self, count, streams, seed):
    self._random = random.Random(seed)
    self._streams = streams
    self.exchanges = {member: self._exchange(member) for member in range(count)}
    self.inboxes = {member: queue.SimpleQueue() for member in range(count)}
    self.done = queue.SimpleQueue()
    self.errors = []
    self._threads = [threading.Thread(target=self._member, args=[member]) for member in range(count)]
    for thread in self._threads:
      thread.start()

  def _exchange(self, member):
    return Exchange(member, TOKEN, lambda line: None, streams=self._streams)

  def _member(self, member):
    try:
      while (what := self.inboxes[member].get()) is not None:
        if what == "die":
          self.exchanges[member].close()
          self.exchanges[member] = self._exchange(member)
          self.done.put((member, "returned"))
          continue
        epoch, peers, seconds = what
        exchange = self.exchanges[member]
        exchange._connect_seconds = seconds
        with contextlib.suppress(PeerLost):
          (exchange.begin if (epoch + member) % 3 else exchange.connect)(epoch, peers)
          slow_down(exchange)
          for turn in range(2):
            values = lambda share, turn=turn: np.full(40_000, 1000 * epoch + 10 * share + turn, np.float32)  # noqa: B023
            out = np.zeros(40_000, np.float32)
            exchange.reduce(f"{turn}", {member: values(member)}, {other: [other] for other in peers}, out)
            assert same_bits(out, sum_in_order({share: values(share) for share in peers})), (epoch, member)
          self.done.put((member, epoch))
    except BaseException as error:  # noqa: BLE001 -- raised by `run`
      self.errors.append(error)
      self.done.put((member, "failed"))

  def _await(self, expected):
    while expected:
      found = self.done.get(timeout=20)
      assert not self.errors, self.errors
      expected.discard(found)

  def run(self, epochs):
    everyone = sorted(self.exchanges)
    for epoch in range(1, epochs + 1):
      if self._random.random() < 0.15:
        victim = self._random.choice(everyone)
        self.exchanges[victim].interrupt(epoch)
        self.inboxes[victim].put("die")
        self._await({(victim, "returned")})
      present = sorted(self._random.sample(everyone, self._random.randint(2, len(everyone))))
      peers = {member: self.exchanges[member].address for member in present}
      completes = epoch % 20 == 0 or epoch == epochs
      for member in self._random.sample(present, len(present)):
        self.exchanges[member].interrupt(epoch)
        if completes or self._random.random() < 0.95:  # otherwise it hears of the next epoch first
          seconds = 20 if completes else self._random.choice([0.01, 20])
          self.inboxes[member].put((epoch, peers, seconds))
      if completes:
        self._await({(member, epoch) for member in present})
      time.sleep(self._random.choice([0, 0.0005, 0.002, 0.006]))

  def close(self):
    for member, exchange in self.exchanges.items():
      exchange.interrupt(1 << 40)
      self.inboxes[member].put(None)
    for thread in self._threads:
      thread.join(10)
      assert not thread.is_alive()
    for exchange in self.exchanges.values():
      exchange.close()


@pytest.mark.parametrize("seed", range(2))
def test_random_epochs_interrupts_losses_and_returns(seed, streams):
  fleet = _Fleet(5, streams, seed)
  try:
    fleet.run(300)
    assert not fleet.errors
  finally:
    fleet.close()
