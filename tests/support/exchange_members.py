"""Members of an exchange as threads of this process, with real sockets between them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import threading
import time

import ml_dtypes
import numpy as np

from worlds.exchange import Exchange
from worlds.exchange.plan import pieces

TOKEN = b"a token of tests"


class Members:
  """`count` members, 0 to count - 1. Each call runs on all members at once."""

  def __init__(self, count, **options):
    self.refused = []
    self.all = [Exchange(member, TOKEN, self.refused.append, **options) for member in range(count)]
    self.epoch = 0

  def connect(self, addresses=None, late=None):
    """Joins all members in a new epoch. addresses: {(caller, listener): address} that replace the real addresses. late:
    seconds, of each member."""
    self.epoch += 1

    def connect(exchange, member):
      time.sleep(late[member] if late else 0)
      peers = {other: self.all[other].address for other in range(len(self.all))}
      peers |= {listener: where for (caller, listener), where in (addresses or {}).items() if caller == member}
      exchange.connect(self.epoch, peers)

    self.call(connect)

  def reduce(self, shares, dealt, wire="float32", tag="step 1", group=1, added=0):
    """Returns the result of each member. added: most shares that a member has added already to the first of a piece."""
    size = next(iter(shares.values())).size

    def reduce(exchange, member):
      out, own = np.full(size, 7, np.float32), {share: shares[share] for share in dealt[member]}
      for first, stop in pieces(dealt[member], group):
        for share in range(first + 1, min(stop, first + 1 + added)):
          own[first] = own[first] + own.pop(share)
      exchange.reduce(tag, own, dealt, out, wire, group=group)
      return out

    return self.call(reduce)

  def call(self, function, seconds=20):
    """Returns [function(exchange, member)] of all members, or raises the first error after interrupting the others."""
    results, errors = {}, []

    def guarded(member):
      try:
        results[member] = function(self.all[member], member)
      except Exception as error:  # noqa: BLE001 -- raised below
        errors.append(error)
        for exchange in self.all:
          exchange.interrupt(self.epoch + 1)

    threads = [threading.Thread(target=guarded, args=(member,)) for member in range(len(self.all))]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join(seconds)
      assert not thread.is_alive(), "a member does not return"
    if errors:
      raise errors[0]
    return [results[member] for member in range(len(self.all))]

  def close(self):
    for exchange in self.all:
      exchange.close()


@contextlib.contextmanager
def members(count, **options):
  """Connected members, closed at the end."""
  group = Members(count, **options)
  try:
    group.connect()
    yield group
  finally:
    group.close()


class Relay:
  """A listener that forwards bytes to `address` and back, and may damage them.

  damage: function(data, offset) -> data for the bytes of the caller; offset is the number of earlier bytes. An empty
  result cuts the connection.
  """

  def __init__(self, address, damage):
    self._damage = damage
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
    self._sockets = []
    self._threads = [threading.Thread(target=self._accept, args=(address,))]
    self._threads[0].start()

  def _accept(self, address):
    caller, _ = self._listener.accept()
    host, port = address.split(":")
    target = socket.create_connection((host, int(port)))
    self._sockets += [caller, target]
    for source, sink, damage in ((caller, target, self._damage), (target, caller, lambda data, _: data)):
      self._threads.append(threading.Thread(target=self._forward, args=(source, sink, damage)))
      self._threads[-1].start()

  def _forward(self, source, sink, damage):
    offset = 0
    with contextlib.suppress(OSError):
      while (data := source.recv(1 << 16)) and (sent := damage(data, offset)):
        sink.sendall(sent)
        offset += len(data)
    for sock in (source, sink):
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)

  def close(self):
    for sock in self._sockets:
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    for thread in self._threads:
      thread.join(10)
      assert not thread.is_alive()
    for sock in [self._listener, *self._sockets]:
      sock.close()


def flip(where):
  """The damage of a Relay that changes one bit of byte `where`."""

  def damage(data, offset):
    if offset <= where < offset + len(data):
      data = bytearray(data)
      data[where - offset] ^= 16
    return bytes(data)

  return damage


def random_shares(count, size, seed=0):
  """{share: float32 [size]} whose sum depends on the order of the additions."""
  random = np.random.default_rng(seed)
  scale = 10.0 ** random.uniform(-6, 6, (count, size))
  return {share: (random.standard_normal(size) * scale[share]).astype(np.float32) for share in range(count)}


def sum_in_order(shares, group=1, wire="float32"):
  """The oracle: float32 sums from left to right, of each group and then of the groups."""
  rounded = lambda values: values.astype(ml_dtypes.bfloat16 if wire == "bfloat16" else np.float32).astype(np.float32)
  groups = itertools.groupby(sorted(shares), lambda share: share // group)
  sums = [rounded(functools.reduce(np.add, [shares[share] for share in own])) for _, own in groups]
  return rounded(functools.reduce(np.add, sums))


def same_bits(a, b):
  return a.dtype == b.dtype and a.tobytes() == b.tobytes()
