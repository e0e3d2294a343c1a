"""Slices that take several steps alone before they exchange (docs/local_steps.md): a round in the place of a step.

A replica is a share: the slice that has it computes its steps of the round from the state that all slices have, and the
exchange sums what the replicas add. So a replica has the same bits whichever slice computes it, and a lost slice costs
the others its replicas of one round. The state of the round stays on the host until the round is committed, so the
devices hold one state. If a slice is lost or slow, slices take turns (`dealing.turns`): a slice takes the first
steps of a replica, and sends it to the slice that takes the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from input_pipeline.batch import Batch
from input_pipeline.tally import Tally
from trainer.checkpoint import state_transfer
from trainer.checkpoint.snapshot import HOST
from trainer.drivers.many_worlds import ManyWorlds
from trainer.drivers.rounds import Contribution, Share
from trainer.elastic.batch_plan import relative_throughput
from trainer.process.stop import StopRequested
from trainer.program.local_steps import RoundPrograms, end_of_round
from trainer.program.state import TrainState
from trainer.program.step import METRICS
from trainer.run.driver import Metrics
from worlds.exchange import PeerLost
from worlds.membership.client import SupervisorLost
from worlds.membership.dealing import Turn, turns
from worlds.peers import Change

_LOSS, _Z_LOSS, _NORM, _RATE, _WEIGHTS, _SKIPPED = range(len(METRICS))
_Begun = dict[Share, tuple[Turn, Future[list[np.ndarray]]]]  # replicas whose first steps another slice takes


@dataclasses.dataclass(frozen=True)
class _Replica:
  """A replica after some steps of a round: its state, and the metrics and the tally of each of these steps."""

  state: TrainState
  rows: Sequence[Any] = ()
  tallies: Sequence[np.ndarray] = ()


class LocalRounds(ManyWorlds):
  """Implements Driver for one slice among several. `step` computes a whole round."""

  def _prepare(self, compiled: RoundPrograms) -> None:
    self._compiled = compiled
    self._open_rounds(compiled.abstract, compiled.sums)
    self._small_sizes = [math.prod(leaf.shape) for leaf in compiled.small]
    self._ahead: dict[int, dict[Share, tuple[Batch, Tally]]] = {}  # batches of this round that are read and not used
    self._prepare_seconds: dict[int, float] = {}  # of what the prefetching thread has read and `_read` has not taken
    self._reads = 0.0  # seconds of what `_read` has taken since a replica of this slice was last waited for
    self._begun = self._step  # the last step that has begun on this process
    self._busy = 0.0  # seconds of this round in which this process has taken steps
    self._receiver = ThreadPoolExecutor(1, "replica from another slice")
    self._threads.callback(self._receiver.shutdown, wait=False)  # it ends with the exchange

  def _changed(self, change: Change) -> None:
    super()._changed(change)
    replicas, slices, total = self._compiled.averages.replicas, len(change.members), self._session.cluster.num_slices
    if (change.lost or change.joined) and not change.holds and slices < total:
      times = [
        1 / relative_throughput(total, slices, replicas // total * steps)
        for steps in (1, self._session.config.optimizer.local_steps)
      ]
      turned = f", and each later one, in which slices take turns, {times[1]:.2f} times" if times[1] < times[0] else ""
      self._session.log.line(
        f"{replicas} replicas on {slices} slice{'s' * (slices > 1)}: the next round takes up to {times[0]:.2f} times "
        f"as long as with all slices{turned}."
      )

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    """The state after the round that ends with step n, and the metrics of its steps, [steps, metrics]."""
    count, compiled, averages = n - self._step, self._compiled, self._compiled.averages
    weights, skipped = self._checksum(state.params), int(state.skipped)
    held, self._ahead, self.data_wait_seconds, self._busy = _moved(state, HOST), {}, 0.0, 0.0
    self._state = held
    for leaf in jax.tree.leaves(state):
      leaf.delete()

    begun: _Begun | None = None

    def compute(share: Share) -> Contribution:
      nonlocal begun
      if begun is None:
        begun = self._take_turns(held, n)
      arrived = self._arrived(held, *begun.pop(share)) if share in begun else None
      replica = self._advanced(arrived or _Replica(_moved(_inner(held))), share, n)
      (squares, small), parts = compiled.sums(_moved(averages.kept(held)), replica.state)
      numbers = _weighted(np.stack(replica.rows), is_first=share == 0)
      return Contribution((numbers, *replica.tallies, squares, *small), parts)

    settled = functools.partial(self._settled, functools.partial(int, weights))
    name, sent = f"step {n}", self._peers.exchange.sent_bytes
    try:
      with self._interruptible():
        scalars, self.slice_seconds = self._rounds.agree(name, settled, compute, self._total, busy=lambda: self._busy)
    except (StopRequested, SupervisorLost) as error:
      traceback.clear_frames(error.__traceback__)  # frees the replicas: the devices may not hold them and the state
      self._state = _moved(held)
      raise (StopRequested(self._state) if isinstance(error, StopRequested) else error) from None
    self.proof = self._proof(weights)
    numbers, tallies, squares, *small = self._divided(scalars, count)
    self.tally = tallies
    rows, skipped = _means(numbers, averages.replicas, skipped)
    small = [array.reshape(leaf.shape) for array, leaf in zip(small, compiled.small, strict=True)]
    sums = self._rounds.layout.to_device(self._total)
    self._state, mean_squares = compiled.outer_step(
      _moved(averages.kept(held)), sums, small, np.int32(count), np.int32(skipped)
    )
    self._step, self._evaluated = n, False
    moved = float(mean_squares)  # waits: the next round writes to the memory of `sums`
    spread = float(squares[0]) / averages.replicas - moved
    self.of_round = {
      "replica_distance": math.sqrt(max(spread, 0.0)),
      "outer_grad_norm": math.sqrt(moved),
      "bytes_sent": self._peers.exchange.sent_bytes - sent,
    }
    if self._session.elastic.recovery.under_way:
      self._session.elastic.recovered(self.alive)
    return self._state, rows

  def _advanced(self, replica: _Replica, share: Share, end: int) -> _Replica:
    """The replica after its steps up to `end`."""
    jax.block_until_ready(replica.state)  # so that its way to the devices does not count as time of the steps
    began = time.monotonic()
    state, rows, tallies = replica.state, [*replica.rows], [*replica.tallies]
    for index in range(self._step + len(rows), end):
      self._stop_if_interrupted()
      batch, tally = self._batch(index, share)
      if index >= self._begun:
        self._begun = index + 1
        self._session.elastic.begin_step(index + 1)
        self._session.progress.under_way(index)
      state, metrics = self._compiled.step(state, (batch,), self._schedule_values)
      rows.append(metrics)
      tallies.append(self._train.over_processes(tally.numbers))
      jax.block_until_ready(rows[-2:-1])  # so that few batches need memory at a time
      self._session.watchdog.part_done()
    rows = jax.device_get(rows)  # waits for the steps
    # While this slice waited for the replica, data were read. If its reads take longer than its steps, it is slow.
    self._busy += max(time.monotonic() - began, self._reads if replica.rows else 0.0)
    return _Replica(state, rows, tallies)

  # ---- replicas that two slices compute in turns ----

  def _take_turns(self, held: TrainState, n: int) -> _Begun:
    """Takes the first steps of another slice's replica, if it is this slice's turn, and sends it. Returns the replicas
    of this slice whose first steps another slice takes."""
    peers, begun = self._peers, _Begun()
    taken = self._turns(n - self._step)
    for turn in taken:
      if turn.member == peers.member:
        begun[turn.share] = turn, self._receiver.submit(self._receive_replica, held, turn)
    for turn in taken:
      if turn.helper == peers.member:
        replica = self._advanced(_Replica(_moved(_inner(held))), turn.share, self._step + turn.steps)
        try:
          self._send_replica(replica, turn)
        except PeerLost as error:  # the epoch is over: the exchange of the sums says so too
          peers.report(error, peers.epoch)
    return begun

  def _turns(self, steps: int) -> list[Turn]:
    """The turns of a round of so many steps, the same on all members: all know whether a round was committed with this
    dealing. In the first round after a change there are none, because a member may learn of it in the round."""
    peers = self._peers
    return turns(peers.dealt, steps, peers.slow_steps) if peers.committed_epoch == peers.epoch else []

  def _send_replica(self, replica: _Replica, turn: Turn) -> None:
    rows, tallies = np.stack(replica.rows), np.stack(replica.tallies)
    header = {"share": turn.share, "step": self._step + turn.steps, "rows": rows.shape}
    arrays = [*state_transfer.local_parts(replica.state), rows, tallies]
    with self._session.watchdog.during("replica for another slice"):
      self._peers.exchange.send_state(turn.member, header, arrays)

  def _receive_replica(self, held: TrainState, turn: Turn) -> list[np.ndarray]:
    """Thread: the arrays that `_send_replica` sends, on the host. Raises PeerLost."""
    wanted = {"share": turn.share, "step": self._step + turn.steps}

    def allocate(header: dict[str, Any]) -> list[np.ndarray]:
      shape = header.pop("rows")
      assert header == wanted, f"member {turn.helper} sends {header}, and {wanted} is expected"
      rows, tallies = np.empty(shape, np.float32), np.empty((turn.steps, Tally.SIZE), np.float32)
      return [*state_transfer.empty_parts(_inner(held)), rows, tallies]

    return [*self._peers.exchange.receive_state(turn.helper, allocate)[1]]

  def _arrived(self, held: TrainState, turn: Turn, begun: Future[list[np.ndarray]]) -> _Replica | None:
    """The replica that another slice has begun; None: it is lost, so this slice must take all steps. The processes of
    a slice decide together."""
    self._reads = 0.0
    self._read(self._step + turn.steps)  # while the replica is on its way: a slice that waits for data seems slow
    arrays = []
    try:
      with self._session.watchdog.during("replica from another slice"):
        arrays = begun.result()
    except PeerLost as error:
      self._peers.report(error, self._peers.epoch)
    if not all(self._session.cluster.world.gather(bool(arrays))):
      return None
    *parts, rows, tallies = arrays
    on_device = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(None))
    return _Replica(state_transfer.assemble(jax.tree.map(on_device, _inner(held)), parts), [*rows], [*tallies])

  def _prepared(self, index: int) -> dict[Share, tuple[Batch, Tally]]:
    """The batches of the replicas of which this member takes the step after `index`, as far as it knows now."""
    optimizer, shares = self._session.config.optimizer, {*self._peers.shares}
    first = index - index % optimizer.local_steps
    for turn in self._turns(end_of_round(optimizer, index, self._session.config.run.steps) - first):
      if index < first + turn.steps:
        shares -= {turn.share} if turn.member == self._peers.member else set()
        shares |= {turn.share} if turn.helper == self._peers.member else set()
    began = time.monotonic()
    prepared = {share: self._share(index, share) for share in sorted(shares)}
    self._prepare_seconds[index] = time.monotonic() - began
    return prepared

  def _read(self, index: int) -> None:
    """Takes the prepared batches up to the one of the step after `index`."""
    while index not in self._ahead:
      found, ahead = next(self._batches)
      self.data_wait_seconds += self._batches.waited_seconds
      self._ahead[found] = ahead
      self._reads += self._prepare_seconds.pop(found)

  def _batch(self, index: int, share: Share) -> tuple[Batch, Tally]:
    """The batch of a replica at the step after `index`, with its tally."""
    self._read(index)
    return self._ahead[index].pop(share, None) or self._share(index, share)  # None: it was another slice's replica

  def _divided(self, scalars: np.ndarray, count: int) -> list[np.ndarray]:
    """The parts of the sums over the replicas: metrics [count, metrics], tallies [count, Tally.SIZE], the squared norm
    of the outer gradients [1], and each small array, flat."""
    rest = [Tally.SIZE * count, 1, *self._small_sizes]
    metrics, tallies, *others = np.split(scalars, np.cumsum([scalars.size - sum(rest), *rest[:-1]]))
    return [metrics.reshape(count, -1), tallies.reshape(count, Tally.SIZE), *others]


def _inner(held: TrainState) -> TrainState:
  """What the steps of a replica change."""
  return dataclasses.replace(held, outer=None)


def _moved(state: TrainState, kind: str | None = None) -> TrainState:
  """The state in the memory of this kind; None: of the devices."""

  def move(array: jax.Array) -> jax.Array:
    parts = [jax.device_put(part.data, part.data.sharding.with_memory_kind(kind)) for part in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding.with_memory_kind(kind), parts)

  return jax.tree.map(move, state)


def _weighted(rows: np.ndarray, *, is_first: bool) -> np.ndarray:
  """What the metrics [steps, metrics] of one replica add to the sums over replicas."""
  rows = rows.copy()
  rows[:, (_LOSS, _Z_LOSS)] *= rows[:, [_WEIGHTS]]
  rows[:, _RATE] *= is_first  # all replicas have the same one
  rows[:, _SKIPPED] = rows[:, _SKIPPED] > 0
  return rows


def _means(sums: np.ndarray, replicas: int, skipped: int) -> tuple[np.ndarray, int]:
  """The metrics [steps, metrics] of the steps from the sums of `_weighted`, and how many steps in a row, up to the last
  one, some replica has skipped. Losses are means over the tokens of all replicas, norms and loads over the replicas.
  skipped: up to the step before."""
  rows = sums / np.float32(replicas)
  weights = sums[:, [_WEIGHTS]]
  rows[:, (_LOSS, _Z_LOSS)] = sums[:, (_LOSS, _Z_LOSS)] / np.where(weights > 0, weights, np.inf)
  rows[:, (_RATE, _WEIGHTS)] = sums[:, (_RATE, _WEIGHTS)]
  for row, some in zip(rows, sums[:, _SKIPPED]):
    skipped = skipped + 1 if some else 0
    row[_SKIPPED] = skipped
  return rows, skipped
