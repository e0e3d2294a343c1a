"""One sum over all shares: reduce-scatter and all-gather by buckets.

A bucket has one part per member. A member receives the pieces of its part from all shares, sums them, and sends the
total to all. Buckets follow each other in the order in which their values become known, so that the computation, the
copy from the device, both directions of the network and the sums overlap. No member starts a bucket more than WINDOW
buckets after its oldest unfinished one, so a fast member does not fill the memory of a slow one: at most 2 * WINDOW
pieces per share wait for the pieces before them.

The caller's thread reads the shares of this member. `ExchangeThreads` receive, sum, convert and send; a sum of few
values needs no other thread than the caller's.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from worlds.exchange.exchange_errors import MismatchedCall
from worlds.exchange.layout import HostCopy
from worlds.exchange.link import Frame, Kind, Link, Poll, Stop, Stopped, checksum
from worlds.exchange.plan import Piece, Plan
from worlds.exchange.plan import Wire as Wire
from worlds.exchange.thread_pool import BufferPool, ExchangeThreads

WINDOW = 8  # buckets
ALONE = 1 << 20  # values: one thread is faster for a sum of at most so many
_BATCH_BYTES = 1 << 18  # posted to a link before the next link has its turn


class _Outgoing(NamedTuple):
  """A frame to send. values: float32, or of the type on the wire, to which the sending thread converts them."""

  kind: Kind
  share: int
  bucket: int
  values: np.ndarray
  dtype: np.dtype
  checksum: int | None = None  # None: the sending thread computes it


class _PartSum:
  """The sum of this member's part of one bucket: adds each piece as soon as all pieces before it are added."""

  def __init__(self, plan: Plan, out: np.ndarray) -> None:
    """out: float32, to be filled."""
    self.waiting: dict[int, np.ndarray] = {}  # first share -> values
    self.is_busy = False  # a thread adds
    self._plan, self._out = plan, out
    self._added = 0  # pieces
    self._total: np.ndarray | None = None  # of the complete groups
    self._group = out  # the sum of the present group so far
    self._used: list[np.ndarray] = []  # added pieces whose memory may still be `_total` or `_group`
    self._scratch: np.ndarray | None = None

  @property
  def next(self) -> int | None:
    """The first share of the piece that comes next; None: the sum is complete."""
    return self._plan.ordered[self._added].first if self._added < len(self._plan.ordered) else None

  def add(self, values: np.ndarray) -> list[np.ndarray]:
    """Adds the next piece, which is read and not modified. Returns the pieces that are not needed any more."""
    first, stop = self._plan.ordered[self._added]
    self._added += 1
    self._group = values if first % self._plan.group == 0 else _add(self._group, values, self._space())
    if stop % self._plan.group == 0:
      if stop - first < self._plan.group:
        self._group = _to_wire(self._group, self._plan.dtype)
      self._total = self._group if self._total is None else _add(self._total, self._group, self._out)
    self._used.append(values)
    if self.next is None:
      if self._total is not self._out:
        self._out[:] = self._total
      self._total = self._group = self._out
      self._scratch = None
    is_needed = [piece is self._total or piece is self._group for piece in self._used]
    done = [piece for piece, needed in zip(self._used, is_needed) if not needed]
    self._used = [piece for piece, needed in zip(self._used, is_needed) if needed]
    return done

  def _space(self) -> np.ndarray:
    """Where the sum of the present group is computed: not where the total of the groups before it is."""
    if self._total is None and self._plan.dtype == np.float32:
      return self._out
    if self._scratch is None:
      self._scratch = np.empty_like(self._out)
    return self._scratch


class Reduction:
  """One call of `Exchange.reduce` on one member. `run` is called once."""

  def __init__(
    self,
    plan: Plan,
    call: int,
    me: int,
    own: Mapping[int, np.ndarray | HostCopy],
    out: np.ndarray,
    links: Mapping[int, Sequence[Link]],
    stop: Stop,
  ) -> None:
    """links: {peer: its connections}; the buckets take turns with them."""
    self._plan = plan
    self._call = call
    self._me = me
    self._own = own
    self._out = out
    self._streams = links
    self._links = [link for own in links.values() for link in own]
    self._stop = stop
    self._changed = threading.Condition()  # of the next six
    self._sums: dict[int, _PartSum] = {}  # bucket -> its unfinished sum
    self._finished: set[int] = set()  # positions from `_oldest` on whose sum this member has computed
    self._oldest = 0  # the position of the first bucket whose sum is missing
    parts = [plan.part(bucket, me) for bucket in plan.order]
    self._advance({position for position, (start, stop) in enumerate(parts) if start == stop})
    self._active = 0  # threads that serve
    self._ended = 0  # those that have done so
    self._errors: list[Exception] = []
    self._missing: dict[Link, set[tuple[Kind, int, int]]] = {link: set() for link in self._links}
    self._unposted = dict.fromkeys(self._links, 0)
    for member in links:
      for frame in plan.frames(member, me):
        self._missing[self._link(member, frame[2])].add(frame)
      for _, _, bucket in plan.frames(me, member):
        self._unposted[self._link(member, bucket)] += 1
    self._outgoing: dict[Link, deque[_Outgoing]] = {link: deque() for link in self._links}
    self._posted: dict[Link, deque[Link]] = {}  # for the thread that sends to a link: the links with frames, in turn
    self._senders: dict[Link, Poll] = {}  # what wakes this thread
    self._incoming: dict[Link, np.ndarray] = {}  # the values that a link is receiving
    self._memory: BufferPool  # for `_incoming`

  def run(self, threads: ExchangeThreads) -> None:
    """Fills `out` with the sum. Raises the first error of any thread, or Stopped, after all threads have ended."""
    self._memory = threads.memory
    # With more buckets, `_offer` waits for what other threads receive.
    if self._plan.size <= ALONE and len(self._plan.order) <= WINDOW:
      posted = deque[Link]()
      self._posted = dict.fromkeys(self._links, posted)
      self._offer()
      with contextlib.closing(Poll(self._stop)) as poll:
        self._serve(poll, self._links, self._links)
      return
    count = min(len(self._links), threads.pairs)
    with contextlib.ExitStack() as stack:
      tasks = []
      for index in range(count):
        links, posted = self._links[index::count], deque[Link]()
        reads, writes = (stack.enter_context(contextlib.closing(Poll(self._stop))) for _ in range(2))
        self._senders |= dict.fromkeys(links, writes)
        self._posted |= dict.fromkeys(links, posted)
        tasks += [(reads, links, ()), (writes, (), links)]
      try:
        threads.start([functools.partial(self._task, *task) for task in tasks])
        self._guard(self._offer)
        self._wait(lambda: self._ended == len(tasks))
      except BaseException:  # a signal: no thread may use `own` or `out` after this call
        self._end()
        self._wait(lambda: self._active == 0)
        raise
    if self._errors:
      raise self._errors[0]
    if self._stop.is_set:
      raise Stopped

  def _guard(self, target: Callable[..., None], *args: Any) -> None:
    """Runs the work of one thread. Its error ends all other threads and is raised by `run`."""
    try:
      target(*args)
    except Stopped:
      self._end()
    except Exception as error:  # noqa: BLE001 -- `run` raises it in the caller's thread
      self._errors.append(error)
      self._end()

  def _task(self, poll: Poll, reads: Sequence[Link], writes: Sequence[Link]) -> None:
    """The work of one thread; nothing if the call is over before it begins."""
    with self._changed:
      begins = not self._stop.is_set
      self._active += begins
    if begins:
      self._guard(self._serve, poll, reads, writes)
    with self._changed:
      self._active -= begins
      self._ended += 1
      self._changed.notify_all()

  def _wait(self, is_over: Callable[[], bool]) -> None:
    with self._changed:
      self._changed.wait_for(is_over)

  def _end(self) -> None:
    """Wakes all threads of this call. The connections are in mid-frame, so the epoch is over for this member."""
    self._stop.set()
    with self._changed:
      self._changed.notify_all()

  # ---- the caller's thread ----

  def _offer(self) -> None:
    """Hands the pieces of this member to the senders and to the sum, bucket by bucket."""
    for position, bucket in enumerate(self._plan.order):
      self._wait(lambda: self._stop.is_set or self._oldest > position - WINDOW)  # noqa: B023 -- called at once
      if self._stop.is_set:
        raise Stopped
      for member in self._plan.members:
        start, stop = self._plan.part(bucket, member)
        for piece in self._plan.pieces[self._me] if start < stop else ():
          values, dtype = self._values(piece, start, stop), self._plan.types[piece.first]
          if member == self._me:
            self._arrive(bucket, piece.first, _to_wire(values, dtype))
          else:
            self._post(member, _Outgoing(Kind.PIECE, piece.first, bucket, values, dtype))

  def _values(self, piece: Piece, start: int, stop: int) -> np.ndarray:
    """The values [start, stop) of a piece of this member: adds those of its shares that are not added yet."""
    read = [
      own[start:stop] if isinstance(own, np.ndarray) else own.read(start, stop)
      for own in (self._own[share] for share in range(*piece) if share in self._own)
    ]
    total = read[0]
    for index, values in enumerate(read[1:]):
      total = _add(total, values, total if index else np.empty_like(total))
    return total

  # ---- the threads that serve the links ----

  def _serve(self, poll: Poll, reads: Sequence[Link], writes: Sequence[Link]) -> None:
    reading = {link for link in reads if self._missing[link]}
    writing = {link for link in writes if self._unposted[link]}
    posted = self._posted[writes[0]] if writes else deque()
    blocked: set[Link] = set()
    for link in reading:
      poll.watch(link, reads=True, writes=False)
    while reading or writing:
      while posted:
        if (link := posted.popleft()) in blocked:
          continue
        if not self._send(link):
          blocked.add(link)
          poll.watch(link, link in reading, writes=True)
        elif self._outgoing[link]:
          posted.append(link)
        elif not self._unposted[link]:
          writing.discard(link)
        if self._stop.is_set:
          raise Stopped
      if not reading and not writing:
        return
      readable, writable = poll.wait()
      for link in writable:
        blocked.remove(link)
        posted.append(link)
        poll.watch(link, link in reading, writes=False)
      for link in readable:
        if frame := link.read(functools.partial(self._begin, link)):
          self._take(link, frame)
          if not self._missing[link]:
            reading.remove(link)
            poll.watch(link, reads=False, writes=link in blocked)

  def _send(self, link: Link) -> bool:
    """Sends some of the frames that wait for this link. Returns whether the link has accepted them."""
    outgoing = self._outgoing[link]
    while outgoing and link.unsent < _BATCH_BYTES:
      item = outgoing.popleft()
      payload = _bytes(_to_wire(item.values, item.dtype))
      link.post(item.kind, self._call, item.share, item.bucket, payload, item.checksum)
      self._unposted[link] -= 1
    return link.flush()

  def _begin(self, link: Link, frame: Frame) -> memoryview:
    """The memory for the payload of a frame whose header has arrived."""
    key = (frame.kind, frame.share, frame.bucket)
    if frame.call != self._call or key not in self._missing[link]:
      raise MismatchedCall(
        f"Member {link.member} sent a frame of another call ({key}, call {frame.call:x}; this is {self._call:x}). "
        "Call reduce on all members of an epoch with the same tag, dealing, size, wire type and group."
      )
    self._missing[link].remove(key)  # type: ignore[arg-type]
    if frame.kind == Kind.PIECE:
      start, stop = self._plan.part(frame.bucket, self._me)
      values = self._memory.acquire(stop - start, self._plan.types[frame.share])
    else:
      values = self._out[slice(*self._plan.part(frame.bucket, link.member))]
      if self._plan.dtype != np.float32:
        values = self._memory.acquire(values.size, self._plan.dtype)
    self._incoming[link] = values
    return _bytes(values)

  def _take(self, link: Link, frame: Frame) -> None:
    values = self._incoming.pop(link)
    if frame.kind == Kind.PIECE:
      self._arrive(frame.bucket, frame.share, values)
    elif self._plan.dtype != np.float32:
      self._out[slice(*self._plan.part(frame.bucket, link.member))] = values
      self._memory.release(values)

  # ---- all threads ----

  def _link(self, member: int, bucket: int) -> Link:
    """The connection to `member` that carries this bucket, in both directions."""
    links = self._streams[member]
    return links[self._plan.position[bucket] % len(links)]

  def _post(self, member: int, item: _Outgoing) -> None:
    link = self._link(member, item.bucket)
    self._outgoing[link].append(item)
    self._posted[link].append(link)
    if sender := self._senders.get(link):
      sender.wake()

  def _arrive(self, bucket: int, share: int, values: np.ndarray) -> None:
    """Takes a piece of this member's part, and adds all pieces whose turn it is, unless another thread does."""
    with self._changed:
      part = self._sums.get(bucket)
      if part is None:
        part = self._sums[bucket] = _PartSum(self._plan, self._out[slice(*self._plan.part(bucket, self._me))])
      part.waiting[share] = values
      if part.is_busy:
        return
      part.is_busy = True
    while True:
      with self._changed:
        if part.next is None:
          del self._sums[bucket]
          break
        if part.next not in part.waiting:
          part.is_busy = False
          return
        values = part.waiting.pop(part.next)
      for piece in part.add(values):
        self._memory.release(piece)
    self._finish(bucket)

  def _finish(self, bucket: int) -> None:
    """Sends the total of this member's part to all."""
    total = self._out[slice(*self._plan.part(bucket, self._me))]
    sent = _to_wire(total, self._plan.dtype)
    if sent is not total:
      total[:] = sent
    known = checksum(_bytes(sent)) if self._links else 0
    for member in self._streams:
      self._post(member, _Outgoing(Kind.TOTAL, 0, bucket, sent, self._plan.dtype, known))
    with self._changed:
      self._advance({self._plan.position[bucket]})
      self._changed.notify_all()

  def _advance(self, finished: set[int]) -> None:
    """The buckets at these positions need nothing more from this member than its pieces."""
    self._finished |= finished
    while self._oldest in self._finished:
      self._finished.remove(self._oldest)
      self._oldest += 1


def _add(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
  """Fills `out`, float32, with the sum of two float32 or bfloat16 arrays, computed in float32, and returns it."""
  with np.errstate(over="ignore", invalid="ignore"):  # the optimizer step checks for infinities and NaNs
    return np.add(a, b, out=out, dtype=np.float32)


def _to_wire(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
  """Returns `values` itself if it has this dtype, else a rounded copy."""
  with np.errstate(over="ignore", invalid="ignore"):
    return values.astype(dtype, copy=False)


def _bytes(values: np.ndarray) -> memoryview:
  """Returns the memory of a contiguous array of one dim."""
  return memoryview(values.view(np.uint8))
