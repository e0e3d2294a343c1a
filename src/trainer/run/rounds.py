"""One round of the members of a run: each computes its shares, all exchange the sums, and the supervisor commits.

The global batch is cut into shares of constant shape, once for the life of the run. If a member is lost before the
commit, the others keep the sums that they have, compute its shares, and exchange again: no step is lost.

If the sums of a share are several programs (`share_sums.py`), the exchange begins with the first gradients, while the
device computes the others.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from trainer.process.signals import StopRequested
from trainer.program.program import Halves
from worlds.exchange import FlatLayout, HostCopy, Part, PeerLost
from worlds.exchange.reduction import Wire
from worlds.peers import MembershipChanged, Peers

Share = int


@dataclasses.dataclass(frozen=True)
class Own:
  """What one share of this member, or several together, add to a round. scalars: float32; known before all gradients.
  grads: what is exchanged; None in an evaluation. parts: what is added to other shares first, if sums are balanced."""

  scalars: Any
  grads: HostCopy | None = None
  parts: Sequence[Part] = ()

  def host_scalars(self) -> np.ndarray:
    """The scalars [n], float32."""
    return np.asarray(jax.device_get(self.scalars), np.float32)


class Rounds:
  """The rounds of one member: steps, which sum gradients and scalars, and evaluations, which sum scalars."""

  def __init__(
    self,
    peers: Peers,
    halves: Halves,
    wire: Wire,
    balanced: bool,
    send_state: Callable[[int], None],
    receive_state: Callable[[int], None],
  ) -> None:
    """wire: the type of gradients on their way. balanced: a member exchanges one sum, not the sums of its shares.
    send_state, receive_state: see `Peers.connect`."""
    self._peers, self._halves, self._wire, self._balanced = peers, halves, wire, balanced
    self._send_state, self._receive_state = send_state, receive_state
    self.layout = FlatLayout(halves.abstract.grads)
    self._known = self.layout.ranges(halves.sums.parts)
    self._reports = ThreadPoolExecutor(1, "report of the computation")

  def sums(self, params: Any, batch: Any) -> Own:
    """What the share with the rows of `batch` adds to a step."""
    scalars, parts = self._halves.sums(params, batch)
    # Balanced: only the sum of all shares goes to the host. Otherwise the device's memory is free after the copy.
    return Own(scalars, parts=parts) if self._balanced else Own(scalars, self.layout.to_host(parts))

  def agree(
    self, round_name: str, checksum: jax.Array, compute: Callable[[Share], Own], total: np.ndarray | None
  ) -> tuple[np.ndarray, dict[str, float]]:
    """(sums of the scalars over all shares, the members' seconds) once the round is committed; fills `total`. Calls
    compute(share) once for each share of this member. checksum: of this member's weights. The round is committed only
    if all members have the same checksum. Raises StopRequested if the round, an evaluation, is interrupted."""
    peers, held, seconds = self._peers, dict[Share, Own](), 0.0
    while True:
      peers.connect(self._send_state, self._receive_state)
      began = time.monotonic()
      for share in peers.shares:
        if share not in held:
          held[share] = compute(share)
      if peers.interrupted:
        raise StopRequested
      parts, dealt = self._parts({share: held[share] for share in peers.shares})
      scalars = {number: part.host_scalars() for number, part in parts.items()}  # waits for them only
      # A thread reports when this member has computed its gradients, because this thread is in the exchange by then.
      # The exchange stands still while any member computes, and the report tells the supervisor which members do not.
      report = self._reports.submit(self._report, round_name, peers.epoch, list(parts.values()), began - seconds)
      try:
        if total is not None:
          grads = {number: part.grads for number, part in parts.items() if part.grads is not None}
          peers.exchange.reduce(f"{round_name} gradients", grads, dealt, total, self._wire, self._known)
        total_scalars = np.empty_like(next(iter(scalars.values())))
        peers.exchange.reduce(round_name, scalars, dealt, total_scalars)
        report.result()
        member_seconds = peers.commit(round_name, int(checksum))
      except PeerLost as error:
        peers.exchange_failed(error)
      except MembershipChanged:
        pass  # the round was not committed: it is repeated, and `held` keeps the sums that are computed
      else:
        return total_scalars, member_seconds
      finally:
        seconds = report.result()

  def _report(self, round_name: str, epoch: int, parts: Sequence[Own], began: float) -> float:
    """Tells the supervisor when `parts` are computed, and returns the seconds since `began`."""
    for part in parts:
      if part.grads is not None:
        part.grads.wait()
    seconds = time.monotonic() - began
    self._peers.membership.send("computed", epoch=epoch, round=round_name, seconds=seconds)
    return seconds

  def _parts(self, own: dict[Share, Own]) -> tuple[dict[int, Own], Mapping[int, Sequence[int]]]:
    """(what this member exchanges, by number; {member: the numbers of its parts}): its shares or, if balanced, their
    sum with the member's position as number."""
    peers = self._peers
    if not self._balanced:
      return own, peers.dealt
    dealt = {member: [position] for position, member in enumerate(sorted(peers.dealt))}
    shares = [own[share] for share in sorted(own)]
    parts = [share.parts for share in shares if share.parts]
    grads = self.layout.to_host(self._halves.sums.add(parts)) if parts else None  # none in an evaluation
    whole = Own(np.sum([share.host_scalars() for share in shares], axis=0, dtype=np.float32), grads)
    return {dealt[peers.member][0]: whole}, dealt

  def close(self) -> None:
    """Ends the thread that reports computations."""
    self._reports.shutdown()
