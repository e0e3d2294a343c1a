"""One sum over all shares: reduce-scatter and all-gather by buckets, with one reader and one writer thread per peer.

A bucket has one part per member. A member receives the pieces of its part from all shares, sums them, and sends the
total to all. Buckets follow each other in the order in which their values become known, so that the computation, the
copy from the device, both directions of the network and the sums overlap. No member starts a bucket more than WINDOW
buckets after its oldest unfinished one, so a fast member does not fill the memory of a slow one: at most 2 * WINDOW
pieces per share wait for the rest of their bucket.
"""

from __future__ import annotations

import hashlib
import json
import queue
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from worlds.exchange.errors import MismatchedCall
from worlds.exchange.layout import HostCopy
from worlds.exchange.link import Frame, Kind, Link, Stop, Stopped

PART = 1 << 18  # elements: 1 MiB of float32
WINDOW = 8  # buckets

Wire = Literal["float32", "bfloat16"]


class Plan:
  """Who sums what, and in which order. Equal on all members: {member: shares}, the number of values, their type on the
  wire, and `known`: ranges [start, stop) in the order in which their values become known; other values are known first.

  order: all buckets; a bucket comes when the last of its values is known. position: {bucket: its index in `order`}.
  """

  def __init__(
    self, dealt: Mapping[int, Sequence[int]], size: int, wire: Wire, known: Sequence[tuple[int, int]] = ()
  ) -> None:
    self.members = sorted(dealt)
    self.dealt = {member: sorted(dealt[member]) for member in self.members}
    self.shares = sorted(share for shares in dealt.values() for share in shares)
    self.size = size
    self.dtype = np.dtype(jnp.bfloat16 if wire == "bfloat16" else np.float32)
    self._bucket = len(self.members) * PART
    self._known = [list(part) for part in known]
    last = [0] * -(-size // self._bucket)  # of each bucket: the index of the range that is known last
    for index, (start, stop) in enumerate(known):
      for bucket in range(start // self._bucket, -(-stop // self._bucket)):
        last[bucket] = index
    self.order = sorted(range(len(last)), key=lambda bucket: last[bucket])
    self.position = {bucket: position for position, bucket in enumerate(self.order)}
    assert len(set(self.shares)) == len(self.shares) > 0, f"shares {self.shares}: each belongs to one member"

  def identify(self, epoch: int, tag: str) -> int:
    """Returns a number that differs between calls of different epochs, tags or plans."""
    text = json.dumps([epoch, tag, list(self.dealt.items()), self.size, str(self.dtype), self._known])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

  def bucket(self, bucket: int) -> tuple[int, int]:
    """Returns [start, stop) of a bucket."""
    return bucket * self._bucket, min(self.size, (bucket + 1) * self._bucket)

  def part(self, bucket: int, member: int) -> tuple[int, int]:
    """Returns [start, stop) of the part of a bucket that `member` sums; it may be empty."""
    start, stop = self.bucket(bucket)
    index, count = self.members.index(member), len(self.members)
    return start + (stop - start) * index // count, start + (stop - start) * (index + 1) // count

  def frames(self, sender: int, receiver: int) -> Iterator[tuple[Kind, int, int]]:
    """Yields (kind, share, bucket) of every frame from one member to another."""
    for bucket in self.order:
      start, stop = self.part(bucket, receiver)
      if start < stop:
        yield from ((Kind.PIECE, share, bucket) for share in self.dealt[sender])
      start, stop = self.part(bucket, sender)
      if start < stop:
        yield Kind.TOTAL, 0, bucket


class _Outgoing(NamedTuple):
  """A frame to send. values: of the wire's dtype, or float32, which the writer thread then converts."""

  kind: Kind
  share: int
  bucket: int
  values: np.ndarray
  checksum: int | None = None  # None: the writer thread computes it


class Reduction:
  """One call of `Exchange.reduce` on one member. `run` is called once."""

  def __init__(
    self,
    plan: Plan,
    call: int,
    me: int,
    own: Mapping[int, np.ndarray | HostCopy],
    out: np.ndarray,
    links: Sequence[Link],
    stop: Stop,
  ) -> None:
    self._plan = plan
    self._call = call
    self._me = me
    self._own = own
    self._out = out
    self._links = links
    self._stop = stop
    self._changed = threading.Condition()
    self._pieces: dict[int, dict[int, np.ndarray]] = {}  # bucket -> share -> this member's part, in the wire's dtype
    self._finished: set[int] = set()  # positions from `_oldest` on whose sum this member has computed
    self._oldest = 0  # the position of the first bucket whose sum is missing
    self._errors: list[Exception] = []
    self._outgoing: dict[int, queue.SimpleQueue[_Outgoing | None]] = {
      link.member: queue.SimpleQueue() for link in links
    }

  def run(self) -> None:
    """Fills `out` with the sum. Raises the first error of any thread, or Stopped, after all threads have ended."""
    threads = [
      threading.Thread(target=self._guard, args=(target, link), name=f"exchange-{name}-{link.member}", daemon=True)
      for link in self._links
      for name, target in (("read", self._read), ("write", self._write))
    ]
    for thread in threads:
      thread.start()
    try:
      self._guard(self._offer)
      for thread in threads:
        thread.join()
    except BaseException:  # a signal: no thread may use `own` or `out` after this call
      self._end()
      for thread in threads:
        thread.join()
      raise
    if self._errors:
      raise self._errors[0]
    if self._stop.is_set:
      raise Stopped

  def _guard(self, target: Callable[..., None], *args: Link) -> None:
    """Runs a thread's function. Its error ends all other threads and is raised by `run`."""
    try:
      target(*args)
    except Stopped:
      self._end()
    except Exception as error:  # noqa: BLE001 -- `run` raises it in the caller's thread
      self._errors.append(error)
      self._end()

  def _end(self) -> None:
    """Wakes all threads of this call. The connections are in mid-frame, so the epoch is over for this member."""
    self._stop.set()
    for outgoing in self._outgoing.values():
      outgoing.put(None)
    with self._changed:
      self._changed.notify_all()

  def _offer(self) -> None:
    """Hands the own shares to the writers and to the sum, bucket by bucket."""
    for position, bucket in enumerate(self._plan.order):
      with self._changed:
        while not self._stop.is_set and self._oldest <= position - WINDOW:
          self._changed.wait()
      if self._stop.is_set:
        raise Stopped
      for member in self._plan.members:
        start, stop = self._plan.part(bucket, member)
        for share in self._plan.dealt[self._me] if start < stop else ():
          own = self._own[share]
          piece = own[start:stop] if isinstance(own, np.ndarray) else own.read(start, stop)
          if member == self._me:
            self._arrive(bucket, share, _to_wire(piece, self._plan.dtype))
          else:
            self._outgoing[member].put(_Outgoing(Kind.PIECE, share, bucket, piece))

  def _arrive(self, bucket: int, share: int, piece: np.ndarray) -> None:
    """Takes a share's piece of this member's part. The thread that brings the last piece computes the sum."""
    with self._changed:
      pieces = self._pieces.setdefault(bucket, {})
      pieces[share] = piece
      if len(pieces) < len(self._plan.shares):
        return
      del self._pieces[bucket]
    total = self._out[slice(*self._plan.part(bucket, self._me))]
    _sum([pieces[share] for share in self._plan.shares], total)
    sent = _to_wire(total, self._plan.dtype)
    if sent is not total:
      total[:] = sent
    checksum = zlib.crc32(_bytes(sent)) if self._links else 0
    for outgoing in self._outgoing.values():
      outgoing.put(_Outgoing(Kind.TOTAL, 0, bucket, sent, checksum))
    with self._changed:
      self._finished.add(self._plan.position[bucket])
      while self._oldest in self._finished:
        self._finished.remove(self._oldest)
        self._oldest += 1
      self._changed.notify_all()

  def _write(self, link: Link) -> None:
    for _ in self._plan.frames(self._me, link.member):
      item = self._outgoing[link.member].get()
      if item is None:
        raise Stopped
      payload = _bytes(_to_wire(item.values, self._plan.dtype))
      checksum = zlib.crc32(payload) if item.checksum is None else item.checksum
      link.send(item.kind, self._call, item.share, item.bucket, payload, checksum)

  def _read(self, link: Link) -> None:
    missing = set(self._plan.frames(link.member, self._me))
    while missing:
      frame = link.receive()
      key = (frame.kind, frame.share, frame.bucket)
      if frame.call != self._call or key not in missing:
        raise MismatchedCall(
          f"Member {link.member} sent a frame of another call ({key}, call {frame.call:x}; this is {self._call:x}). "
          "Call reduce on all members of an epoch with the same tag, dealing, size and wire type."
        )
      missing.remove(key)  # type: ignore[arg-type]
      self._take(link, frame)

  def _take(self, link: Link, frame: Frame) -> None:
    """Receives one piece or total."""
    is_piece = frame.kind == Kind.PIECE
    start, stop = self._plan.part(frame.bucket, self._me if is_piece else link.member)
    in_place = not is_piece and self._plan.dtype == np.float32
    values = self._out[start:stop] if in_place else np.empty(stop - start, self._plan.dtype)
    link.receive_payload(frame, _bytes(values))
    if is_piece:
      self._arrive(frame.bucket, frame.share, values)
    elif not in_place:
      self._out[start:stop] = values


def _sum(pieces: Sequence[np.ndarray], out: np.ndarray) -> None:
  """Fills `out`, float32, with the sum of float32 or bfloat16 arrays, computed in float32 from left to right."""
  if len(pieces) == 1:
    out[:] = pieces[0]
    return
  with np.errstate(over="ignore", invalid="ignore"):  # the optimizer step checks for infinities and NaNs
    np.add(pieces[0], pieces[1], out=out, dtype=np.float32)
    for piece in pieces[2:]:
      np.add(out, piece, out=out, dtype=np.float32)


def _to_wire(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns `values` itself if it has the dtype of the wire, else a rounded copy."""
  with np.errstate(over="ignore", invalid="ignore"):
    return values.astype(dtype, copy=False)


def _bytes(values: np.ndarray) -> memoryview:
  """Returns the memory of a contiguous array of one dim."""
  return memoryview(values.view(np.uint8))
