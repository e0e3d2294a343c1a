"""Slices that take several steps alone before they exchange (docs/local_steps.md): a round in the place of a step.

A replica is a share: the slice that has it computes its steps of the round from the state that all slices have, and the
exchange sums what the replicas add. So a replica has the same bits whichever slice computes it, and a lost slice costs
the others its replicas of one round. The state of the round stays on the host until the round is committed, so the
devices hold one state.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
from typing import Any

import jax
import numpy as np

from input_pipeline.batch import Batch
from input_pipeline.tally import Tally
from trainer.checkpoint.snapshot import HOST
from trainer.drivers.many_worlds import ManyWorlds
from trainer.drivers.rounds import Contribution, Share
from trainer.process.stop import StopRequested
from trainer.program.local_steps import RoundPrograms
from trainer.program.state import TrainState
from trainer.program.step import METRICS
from trainer.run.driver import Metrics
from worlds.membership.client import SupervisorLost
from worlds.peers import Change

_LOSS, _Z_LOSS, _NORM, _RATE, _WEIGHTS, _SKIPPED = range(len(METRICS))


class LocalRounds(ManyWorlds):
  """Implements Driver for one slice among several. `step` computes a whole round."""

  def _prepare(self, compiled: RoundPrograms) -> None:
    self._compiled = compiled
    self._open_rounds(compiled.abstract, compiled.sums)
    self._small_sizes = [math.prod(leaf.shape) for leaf in compiled.small]
    self._ahead: dict[int, dict[Share, tuple[Batch, Tally]]] = {}  # batches of this round that are read and not used
    self._begun = self._step  # the last step that has begun on this process

  def _changed(self, change: Change) -> None:
    super()._changed(change)
    replicas, slices = self._compiled.averages.replicas, len(change.members)
    fewest = -(-replicas // self._session.cluster.num_slices)
    if (most := -(-replicas // slices)) > fewest and (change.lost or change.joined) and not change.holds:
      self._session.log.line(
        f"{replicas} replicas on {slices} slices: a slice computes up to {most}, one after the other, so a round takes "
        f"up to {most / fewest:.1f} times as long as with all slices."
      )

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    """The state after the round that ends with step n, and the metrics of its steps, [steps, metrics]."""
    first, count, compiled, averages = self._step, n - self._step, self._compiled, self._compiled.averages
    weights, skipped = self._checksum(state.params), int(state.skipped)
    held, self._ahead, self.data_wait_seconds = _moved(state, HOST), {}, 0.0
    self._state = held
    for leaf in jax.tree.leaves(state):
      leaf.delete()

    def compute(share: Share) -> Contribution:
      replica, rows, tallies = _moved(dataclasses.replace(held, outer=None)), list[Any](), list[Any]()
      for index in range(first, n):
        self._stop_if_interrupted()
        batch, tally = self._batch(index, share)
        if index == self._begun:
          self._begun += 1
          self._session.elastic.begin_step(index + 1)
          self._session.progress.under_way(index)
        replica, metrics = compiled.step(replica, (batch,), self._schedule_values)
        rows.append(metrics)
        tallies.append(self._train.over_processes(tally.numbers))
        jax.block_until_ready(rows[-2:-1])  # so that few batches need memory at a time
        self._session.watchdog.part_done()
      (squares, small), parts = compiled.sums(_moved(averages.kept(held)), replica)
      numbers = _weighted(np.stack(jax.device_get(rows)), is_first=share == 0)
      return Contribution((numbers, *tallies, squares, *small), parts)

    settled = functools.partial(self._settled, functools.partial(int, weights))
    name, sent = f"step {n}", self._peers.exchange.sent_bytes
    try:
      with self._interruptible(name):
        scalars, self.slice_seconds = self._rounds.agree(name, settled, compute, self._total)
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

  def _batch(self, index: int, share: Share) -> tuple[Batch, Tally]:
    """The batch of a replica at the step after `index`, with its tally."""
    while index not in self._ahead:
      found, ahead = next(self._batches)
      self.data_wait_seconds += self._batches.waited_seconds
      self._ahead[found] = ahead
    return self._ahead[index].pop(share, None) or self._share(index, share)  # None: it was another slice's replica

  def _divided(self, scalars: np.ndarray, count: int) -> list[np.ndarray]:
    """The parts of the sums over the replicas: metrics [count, metrics], tallies [count, Tally.SIZE], the squared norm
    of the outer gradients [1], and each small array, flat."""
    rest = [Tally.SIZE * count, 1, *self._small_sizes]
    metrics, tallies, *others = np.split(scalars, np.cumsum([scalars.size - sum(rest), *rest[:-1]]))
    return [metrics.reshape(count, -1), tallies.reshape(count, Tally.SIZE), *others]


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
