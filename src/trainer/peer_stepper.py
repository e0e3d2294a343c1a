"""Steps of a slice that is a JAX world of its own: the sums of all slices are exchanged outside XLA.

The global batch is cut into shares of constant shape, once for the life of the run. The members that are alive compute
them, exchange the sums, and apply the total when the supervisor has committed the step. If a member is lost before the
commit, the others keep the sums that they have, compute its shares, and exchange again: no step is lost.

If the sums of a share are several programs (`share_sums.py`), the exchange begins with the first gradients, while the
device computes the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from trainer.checkpoint import state_transfer
from trainer.cluster.peers import Change, MembershipChanged, Peers
from trainer.config.schema import Config
from trainer.data import Batch, Prefetcher
from trainer.elastic.attempt import ElasticRun
from trainer.elastic.peer_changes import PeerChanges
from trainer.exchange import FlatLayout, HostCopy, Part, PeerLost
from trainer.exchange.reduction import Wire
from trainer.models.decoder import Params
from trainer.program import Feed, Halves
from trainer.start import Start
from trainer.state import TrainState
from trainer.step import Sums
from trainer.stepper import LossSums, Metrics

Share = int


@dataclasses.dataclass(frozen=True)
class _Own:
  """What one share of this member, or several together, add to a round. scalars: float32; known before all gradients.

  grads: what is exchanged; None in an evaluation. parts: what is added to other shares first, with balanced sums only.
  """

  scalars: Any
  grads: HostCopy | None = None
  parts: Sequence[Part] = ()

  def host_scalars(self) -> np.ndarray:
    """The scalars [n], float32."""
    return np.asarray(jax.device_get(self.scalars), np.float32)


class PeerStepper:
  """Implements Stepper for one slice among several."""

  # A committed step is recorded before the next one: a member that joins then must never write a record that it missed.
  runs_ahead = False

  def __init__(
    self,
    elastic: ElasticRun,
    peers: Peers,
    halves: Halves,
    train: Feed,
    evaluations: Sequence[Feed],
    header: Callable[[int], dict[str, Any]],
    start: Start,
    config: Config,
    during: Callable[[str], contextlib.AbstractContextManager[object]],
  ) -> None:
    """train, and evaluations of each set: give the batch of a share. header(step): what a member that joins must know
    besides the state, as JSON. during(what): this process does something else than steps inside the block."""
    self._elastic, self._peers, self._halves = elastic, peers, halves
    self._train, self._evaluations, self._header, self._during = train, evaluations, header, during
    self._changes = PeerChanges(elastic)
    self._state, self._step, self._evaluated = start.state, start.step, start.evaluated
    self._layout = FlatLayout(halves.abstract.grads)
    self._known = self._layout.ranges(halves.sums.parts)
    self._total = self._layout.empty()
    self._reports = ThreadPoolExecutor(1, "report of the computation")
    self._wire: Wire = config.optimizer.grad_reduce_dtype
    self._balanced = config.elastic.elastic_numerics == "balanced"
    self._batches = Prefetcher(self._shares_of_batch, self._step, config.run.steps)
    self.slice_seconds: dict[str, float] | None = None
    self.data_wait_seconds = 0.0
    peers.on_change = self._changed
    peers.completed = lambda: self._step

  @property
  def peers(self) -> Peers:
    """The members of the run."""
    return self._peers

  @property
  def state(self) -> TrainState:
    """The state after `completed` steps."""
    return self._state

  @property
  def completed(self) -> int:
    """Committed steps."""
    return self._step

  @property
  def alive(self) -> int:
    return len(self._peers.members)

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    index, ahead = next(self._batches)
    assert index == n - 1 == self._step, f"step {n} after {self._step} steps got the batch of step {index + 1}"
    self.data_wait_seconds = self._batches.waited_seconds
    self._elastic.steps.current_step = n
    self._elastic.reached("step", n)
    self._state = state

    def compute(share: Share) -> _Own:
      batch = ahead.pop(share) if share in ahead else self._train.share(index, share)
      scalars, parts = self._halves.sums(state.params, batch)
      # Balanced: only the sum of all shares goes to the host. Otherwise the device's memory is free after the copy.
      return _Own(scalars, parts=parts) if self._balanced else _Own(scalars, self._layout.to_host(parts))

    scalars, self.slice_seconds = self._agree(f"step {n}", compute, self._total)
    sums = Sums(self._layout.to_device(self._total), *scalars)
    self._state, metrics = self._halves.apply(state, sums)
    self._step, self._evaluated = n, False
    if self._elastic.recovery.under_way:
      jax.block_until_ready(metrics)
      self._elastic.recovered(self.alive)
    return self._state, metrics

  def evaluate(self, params: Params, batches: Sequence[int]) -> list[list[LossSums]]:
    assert self._evaluations and self._halves.evaluate is not None, "no evaluation data"
    compiled = self._halves.evaluate

    def compute(share: Share) -> _Own:
      sums = [
        jax.device_get([compiled(params, feed.share(index, share)) for index in range(count)])
        for feed, count in zip(self._evaluations, batches, strict=True)
      ]
      return _Own(np.concatenate([np.asarray(one, np.float32).sum(axis=0, dtype=np.float32) for one in sums]))

    scalars, _ = self._agree(f"eval {self._step}", compute, None)  # one round, so that all sets are evaluated or none
    self._evaluated = True
    return [[(loss, weight)] for loss, weight in scalars.reshape(-1, 2)]

  def wait(self, arrays: Any, what: str) -> None:
    jax.block_until_ready(arrays)

  def read(self, arrays: Any, what: str) -> Any:
    return jax.device_get(arrays)

  def call(self, work: Callable[[], None], what: str) -> None:
    work()

  def resize_due(self, n: int) -> bool:
    return False  # members join between two steps of the same attempt

  def close(self) -> None:
    """Ends the threads that read data ahead and that report computations."""
    self._batches.close()
    self._reports.shutdown()

  def _shares_of_batch(self, index: int) -> dict[Share, Batch]:
    """The batches of the shares that this member computes now; the dealing may have changed when they are used."""
    return {share: self._train.share(index, share) for share in self._peers.shares}

  def _agree(
    self, round_name: str, compute: Callable[[Share], _Own], total: np.ndarray | None
  ) -> tuple[np.ndarray, dict[str, float]]:
    """(sums of the scalars over all shares, the members' seconds) once the round is committed; fills `total`.

    compute(share): called for the shares that this member computes, once for each.
    """
    peers, held, seconds = self._peers, dict[Share, _Own](), 0.0
    while True:
      peers.connect(self._send_state, self._receive_state)
      began = time.monotonic()
      for share in peers.shares:
        if share not in held:
          held[share] = compute(share)
      parts, dealt = self._parts({share: held[share] for share in peers.shares})
      scalars = {number: part.host_scalars() for number, part in parts.items()}  # waits for them only
      # In a thread of its own: the exchange begins before the gradients are computed, and stands still while another
      # member computes. The supervisor must know which member it waits for.
      report = self._reports.submit(self._report, round_name, peers.epoch, list(parts.values()), began - seconds)
      try:
        if total is not None:
          grads = {number: part.grads for number, part in parts.items() if part.grads is not None}
          peers.exchange.reduce(f"{round_name} gradients", grads, dealt, total, self._wire, self._known)
        total_scalars = np.empty_like(next(iter(scalars.values())))
        peers.exchange.reduce(round_name, scalars, dealt, total_scalars)
        report.result()
        committed = peers.commit(round_name)
      except PeerLost as error:
        peers.exchange_failed(error)
      except MembershipChanged:
        pass  # before the commit: the sums in hand stay valid
      else:
        return total_scalars, committed.seconds
      finally:
        seconds = report.result()

  def _report(self, round_name: str, epoch: int, parts: Sequence[_Own], began: float) -> float:
    """Tells the supervisor when `parts` are computed, and returns the seconds since `began`."""
    for part in parts:
      if part.grads is not None:
        part.grads.wait()
    seconds = time.monotonic() - began
    self._peers.membership.send("computed", epoch=epoch, round=round_name, seconds=seconds)
    return seconds

  def _parts(self, own: dict[Share, _Own]) -> tuple[dict[int, _Own], Mapping[int, Sequence[int]]]:
    """(what this member exchanges, by number; {member: the numbers of its parts}).

    bitwise: its shares. balanced: their sum; the number is the member's position.
    """
    peers = self._peers
    if not self._balanced:
      return own, peers.dealt
    dealt = {member: [position] for position, member in enumerate(sorted(peers.dealt))}
    shares = [own[share] for share in sorted(own)]
    parts = [share.parts for share in shares if share.parts]
    grads = self._layout.to_host(self._halves.sums.add(parts)) if parts else None  # none in an evaluation
    whole = _Own(np.sum([share.host_scalars() for share in shares], axis=0, dtype=np.float32), grads)
    return {dealt[peers.member][0]: whole}, dealt

  def _send_state(self, member: int) -> None:
    header = self._header(self._step) | {"step": self._step, "evaluated": self._evaluated}
    arrays = state_transfer.local_parts(self._state)
    with self._during("state for another slice"):
      self._peers.exchange.send_state(member, header, arrays)

  def _receive_state(self, member: int) -> None:
    arrays = functools.partial(state_transfer.empty_parts, self._state)
    with self._during("state from another slice"):
      header, _ = self._peers.exchange.receive_state(member, lambda header: arrays())
    assert header["step"] == self._step, f"member {member} sends step {header['step']}, and this one has {self._step}"

  def _changed(self, change: Change) -> None:
    self._changes.record(change, self._step)
