"""One round of the members of a run: each computes its shares, all exchange the sums, and the supervisor commits.

The global batch is cut into shares of constant shape, once for the life of the run. If a member is lost before the
commit, the others keep the sums that they have, compute its shares, and exchange again: no step is lost.

If the sums of a share are several programs (`share_sums.py`), the exchange begins with the first gradients, while the
device computes the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np

from trainer.process.stop import StopRequested
from worlds.exchange import FlatLayout, HostCopy, Part, PeerLost
from worlds.exchange.plan import Wire, pieces
from worlds.membership.client import SupervisorLost
from worlds.peers import MembershipChanged, Peers, RunEnded

Share = int


@dataclasses.dataclass(frozen=True)
class Contribution:
  """What one share adds to a round. scalars: numbers and small arrays, float32, which never travel in another type.
  parts: large arrays, such as gradients; none in an evaluation."""

  scalars: Any
  parts: Sequence[Part] = ()


@dataclasses.dataclass(frozen=True)
class _Sum:
  """The sum of shares up to `stop`, from left to right. scalars: of each share. grads: None in an evaluation."""

  stop: Share
  scalars: Sequence[Any]
  grads: HostCopy | None

  def host_scalars(self) -> np.ndarray:
    """The sum of the scalars [n], float32."""
    flat = lambda one: np.concatenate([np.ravel(array) for array in one]).astype(np.float32)
    return functools.reduce(np.add, map(flat, jax.device_get(self.scalars)))


class Summed(Protocol):
  """The large arrays of a round. parts: those of a share as ShapeDtypeStructs, in the order of their computation."""

  @property
  def parts(self) -> Sequence[Part]: ...
  def add(self, shares: Sequence[Sequence[Part]], /) -> Sequence[Part]: ...


class Compared(Protocol):
  """A share of a step that other members compute too, so that all sums of it are compared before the commit.

  compute: the sums of a share of this member. must_recompute: whether this member computes all its shares again in this
  epoch. compute_if_drawn: computes the share if another member has it, and this one is drawn or asked. report: tells
  the supervisor the sums of the share, if this member has computed it.
  """

  def compute(self, share: Share) -> Contribution: ...
  def must_recompute(self) -> bool: ...
  def compute_if_drawn(self) -> None: ...
  def report(self, round_name: str) -> None: ...


class Rounds:
  """The rounds of one member: steps, which sum gradients and scalars, and evaluations, which sum scalars."""

  def __init__(
    self,
    peers: Peers,
    abstract: Any,
    sums: Summed,
    wire: Wire,
    group: int,
    send_state: Callable[[int], None],
    receive_state: Callable[[int], None],
    gather: Callable[[Any], list[Any]],
  ) -> None:
    """abstract: the tree of all parts of `sums`, float32. wire: the type of gradients on their way. group: shares of a
    slice, which are summed first (see `Exchange.reduce`). send_state, receive_state: see `Peers.connect`. gather: of
    the processes of this member."""
    self._peers, self._sums, self._wire, self._group = peers, sums, wire, group
    self._send_state, self._receive_state, self._gather = send_state, receive_state, gather
    self.layout = FlatLayout(abstract)
    self._known = self.layout.ranges(sums.parts)
    self._reports = ThreadPoolExecutor(1, "report of the computation")

  def agree(
    self,
    round_name: str,
    checksum: Callable[[], int],
    compute: Callable[[Share], Contribution],
    total: np.ndarray | None,
    compared: Compared | None = None,
    waited: float = 0.0,
    busy: Callable[[], float] | None = None,
  ) -> tuple[np.ndarray, dict[str, float]]:
    """(sums of the scalars over all shares, the members' seconds) once the round is committed; fills `total`. Calls
    compute(share) once for each share of this member. checksum(): of this member's weights. The round is committed only
    if all members have the same checksum. compared: computes in the place of `compute`. waited: seconds for the data of
    the round, which count as its computation. busy(): the seconds that this member has computed in the round, if it
    also waits between its shares. Raises StopRequested if the round is interrupted."""
    peers, held, seconds = self._peers, dict[Share, _Sum](), waited
    while True:
      self._connect()
      began = time.monotonic()
      if compared is not None and compared.must_recompute():
        held = {}
      held = self._compute(held, compute if compared is None else compared.compute)
      if compared is not None:
        compared.compute_if_drawn()
      grads = {share: of_share.grads for share, of_share in held.items() if of_share.grads is not None}
      # A thread reports when this member has computed its gradients, because this thread is in the exchange by then.
      # The exchange stands still while any member computes, and the report tells the supervisor which members do not.
      computed = busy or functools.partial(_since, began - seconds)
      report = self._reports.submit(self._report, round_name, peers.epoch, list(grads.values()), computed)
      try:
        if total is not None:
          peers.exchange.reduce(
            f"{round_name} gradients", grads, peers.dealt, total, self._wire, self._known, self._group
          )
        scalars = {share: of_share.host_scalars() for share, of_share in held.items()}
        total_scalars = np.empty_like(next(iter(scalars.values())))
        peers.exchange.reduce(round_name, scalars, peers.dealt, total_scalars, group=self._group)
        report.result()
        if compared is not None:
          compared.report(round_name)
        member_seconds = peers.commit(round_name, checksum())
      except PeerLost as error:
        peers.exchange_failed(error)
      except MembershipChanged:
        pass  # the round was not committed: it is repeated, and `held` keeps the sums that are computed
      else:
        return total_scalars, member_seconds
      finally:
        seconds = report.result()

  def _connect(self) -> None:
    """Makes the exchange ready. The processes of a member compute each share together, so all must know of the same
    shares: one hears of a change earlier than another, which waits for the same message here."""
    peers = self._peers
    while True:
      try:
        peers.connect(self._send_state, self._receive_state)
      except (RunEnded, SupervisorLost):
        self._gather([math.inf, False])
        raise
      epochs, interrupted = zip(*self._gather([peers.epoch, peers.interrupted]))
      if any(interrupted):
        peers.await_interruption()
        raise StopRequested
      if min(epochs) == max(epochs):
        return
      peers.await_epoch(max(epochs))

  def _compute(self, held: Mapping[Share, _Sum], compute: Callable[[Share], Contribution]) -> dict[Share, _Sum]:
    """{first share: sum} of all shares that this member computes in this epoch. held: the sums of the last epoch of
    this round, which are kept. The exchange adds what follows them."""
    sums: dict[Share, _Sum] = {}
    for first, stop in pieces(self._peers.shares, self._group):
      end = min((share for share in held if first < share < stop), default=stop)
      share = first
      while share < stop:
        known = held.get(share)
        sums[share] = known if known is not None and known.stop <= stop else self._sum(share, end, compute)
        share = sums[share].stop
        end = share + 1  # what follows the first shares is added to their sum one by one, from left to right
    return sums

  def _sum(self, first: Share, stop: Share, compute: Callable[[Share], Contribution]) -> _Sum:
    scalars: list[Any] = []
    total: Sequence[Part] = ()
    for share in range(first, stop):
      if len(scalars) > 1:
        jax.block_until_ready(scalars[-2])  # so that the gradients of two shares, not of all, need memory at a time
      of_share = compute(share)
      scalars.append(of_share.scalars)
      total = self._sums.add([total, of_share.parts]) if total else of_share.parts
    # The device's memory is free after the copy.
    return _Sum(stop, scalars, self.layout.to_host(total) if total else None)

  def _report(self, round_name: str, epoch: int, grads: list[HostCopy], busy: Callable[[], float]) -> float:
    """Tells the supervisor when `grads` are computed, and returns busy() of this moment."""
    for one in grads:
      one.wait()
    seconds = busy()
    self._peers.membership.send("computed", epoch=epoch, round=round_name, seconds=seconds)
    return seconds

  def close(self) -> None:
    """Ends the thread that reports computations."""
    self._reports.shutdown()


def _since(began: float) -> float:
  return time.monotonic() - began
