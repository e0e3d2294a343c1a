"""Each slice is a JAX world of its own: the members exchange the sums of a step outside XLA, and apply the total.

An attempt of a member begins with others (`joining.py`), takes part in rounds (`rounds.py`), and lasts as long as the
process: members that are lost or join change who computes which shares, and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from input_pipeline.batch import Batch, DataError
from input_pipeline.prefetch import Prefetcher
from input_pipeline.tally import Tally
from trainer.checkpoint import state_transfer
from trainer.checkpoint.arrays.state_tree import flatten
from trainer.checkpoint.backups import Backups
from trainer.cluster import View, multiprocess
from trainer.drivers import joining
from trainer.drivers.compared_share import ComparedShare
from trainer.drivers.rounds import Contribution, Rounds, Share, Summed
from trainer.models import experts
from trainer.models.decoder import Params
from trainer.observe import environment
from trainer.process.stop import StopRequested
from trainer.program.feed import Feed
from trainer.program.program import Halves, Program
from trainer.program.state import TrainState
from trainer.program.step import Sums
from trainer.run.driver import LossSums, Metrics, Start
from trainer.run.session import Session
from worlds.exchange import Part
from worlds.membership.client import SupervisorLost
from worlds.membership.messages import Message, failing_line, slow_line, to_ranges
from worlds.membership.witness import alarm_line
from worlds.peers import Change, Peers


class ManyWorlds:
  """Implements Driver for one slice among several."""

  # A committed step is recorded before the next one: a member that joins then must never write a record that it missed.
  runs_ahead = False
  coordination_errors: tuple[type[Exception], ...] = (SupervisorLost,)

  def __init__(self, session: Session, view: View, program: Program, peers: Peers, backups: Backups) -> None:
    """view, program: of this process's slice, for one share of the batch."""
    config = session.config
    self._session, self._view, self._program, self._peers, self._backups = session, view, program, peers, backups
    self._train = Feed(session.data.train, program)
    self._evaluations = [Feed(loader, program) for loader in session.data.evaluations.values()]
    self._period = config.elastic.witness_period
    self.slice_seconds: dict[str, float] | None = None
    self.data_wait_seconds = 0.0
    self.tally: Any = Tally().numbers
    self.proof: dict[str, Any] = {}
    self.of_round: dict[str, float] = {}
    self._hashes = config.observe.receipt_state_period > 0
    self._counted_ahead: tuple[int, Tally] | None = None  # (index, of the whole batch), for the balance loss of experts
    self._threads = contextlib.ExitStack()  # empty if the attempt ends before it has a state

  @property
  def alive(self) -> int:
    return len(self._peers.members)

  def start(self, restore: Callable[[], Start], resume: Callable[[Start], None]) -> Start:
    # First the compilation: a member joins the others when it can compute.
    compiled = self._session.elastic.compiled_step(self._view)
    self._evaluation_step, self._checksum = compiled.evaluate, compiled.checksum
    if self._period:
      devices = self._program.mesh.devices.flat
      numerics = f"{multiprocess.numerics(devices[0])}, {dict(self._program.compiler_options)}"
      hosts = dict.fromkeys(self._session.cluster.world.gather(environment.host()))
      where = f"host {', '.join([*hosts, *map(str, devices)])}"
      self._peers.membership.send("device", where=where, numerics=numerics)
    start = joining.join(self._session, self._peers, self._program.state, self._backups, restore)
    resume(start)
    self._state, self._step, self._evaluated = start.state, start.step, start.evaluated
    self._schedule_values = self._program.schedule.placed(self._program.mesh)
    self._prepare(compiled)
    self._batches = Prefetcher(self._prepared, self._step, self._session.config.run.steps)
    self._threads.callback(self._batches.close)
    self._peers.train(
      completed=lambda: self._step,
      changed=self._changed,
      noticed=lambda notice: _record_notice(self._session, notice),
    )
    return start

  def _changed(self, change: Change) -> None:
    self._session.elastic.members_changed(change, self._step)

  def _prepare(self, compiled: Any) -> None:
    """Takes the compiled programs of the step."""
    self._halves: Halves = compiled
    self._open_rounds(self._halves.abstract.grads, self._halves.sums)
    # Counts of tokens travel with the scalars if gradients travel in a type that rounds.
    wire = self._session.config.optimizer.grad_reduce_dtype
    self._counts = experts.only_loads if wire != "float32" else lambda tree: {}
    counted = [Part(self._counts(part.tree), part.first) for part in self._halves.sums.parts]
    self._count_ranges = self._rounds.layout.ranges(counted)
    sizes = [stop - start for start, stop in self._count_ranges]
    assert sizes == [leaf.size for leaf in jax.tree.leaves([part.tree for part in counted])], "loads are replicated"
    self._count_ends = np.cumsum([3, *sizes, Tally.SIZE])  # after loss, z_loss and weight

  def _open_rounds(self, abstract: Any, sums: Summed) -> None:
    """abstract, sums: see `Rounds`."""
    wire, group = self._session.config.optimizer.grad_reduce_dtype, self._session.config.elastic.shares_per_slice
    states = self._send_state, self._receive_state
    self._rounds = Rounds(self._peers, abstract, sums, wire, group, *states, self._session.cluster.world.gather)
    self._threads.callback(self._rounds.close)
    self._total = self._rounds.layout.empty()

  def step(self, state: TrainState, n: int) -> tuple[TrainState, Metrics]:
    index, ahead = next(self._batches)
    assert index == n - 1 == self._step, f"step {n} after {self._step} steps got the batch of step {index + 1}"
    self.data_wait_seconds = self._batches.waited_seconds
    self._session.elastic.begin_step(n)
    state = self._state = self._damaged(state)
    mean_weight = self._mean_weight(index)
    params = state.params if mean_weight == 1 else experts.scale_loads(state.params, np.float32(mean_weight))
    flips = self._session.elastic.faults.flips("flip_gradient", self._peers.member, flatten)

    def compute(share: Share) -> Contribution:
      batch, tally = ahead.pop(share) if share in ahead else self._share(index, share)
      scalars, parts = self._halves.sums(params, batch)
      trees = flips([part.tree for part in parts], share)
      tallies = [
        self._train.over_processes(numbers) for numbers in (tally.numbers, *self._numbers_ahead(index + 1, share))
      ]
      counts = jax.tree.leaves([self._counts(tree) for tree in trees])
      return Contribution((*scalars, *counts, *tallies), [Part(tree, part.first) for tree, part in zip(trees, parts)])

    weights = self._checksum(state.params)
    compared, checksum, checks = None, functools.partial(int, weights), self._halves.checks
    if checks is not None and n % self._period == 0:
      seed, check = self._session.config.data.data_shuffle_seed, n // self._period
      compared = ComparedShare(self._peers, checks, seed, check, compute)
      checksum = functools.partial(checks.number, checks.of_state(state))
    settled = functools.partial(self._settled, checksum)
    scalars, self.slice_seconds = self._rounds.agree(
      f"step {n}", settled, compute, self._total, compared, self.data_wait_seconds
    )
    self.proof = self._proof(weights)
    self.proof |= {"witness": compared.record()} if compared else {}
    losses, *counts, self.tally, ahead_numbers = np.split(scalars, self._count_ends)
    for (start, stop), count in zip(self._count_ranges, counts, strict=True):
      self._total[start:stop] = count
    self._counted_ahead = None
    if ahead_numbers.size and np.isfinite(ahead_numbers).all():
      self._counted_ahead = index + 1, Tally.of_sum(ahead_numbers)
    sums = Sums(self._rounds.layout.to_device(self._total), *losses)
    self._state, metrics = self._halves.apply(state, sums, self._schedule_values)
    self._step, self._evaluated = n, False
    if self._session.elastic.recovery.under_way:
      jax.block_until_ready(metrics)
      self._session.elastic.recovered(self.alive)
    return self._state, metrics

  def _proof(self, weights: Any) -> dict[str, Any]:
    """Who has computed which shares, and the checksum of the weights before, for the receipt."""
    computed = {str(member): to_ranges(shares) for member, shares in sorted(self._peers.dealt.items())}
    return {"computed": computed, "weights": f"{int(weights):08x}"}

  def evaluate(self, params: Params, batches: Sequence[int]) -> list[list[LossSums]]:
    assert self._evaluations and self._evaluation_step is not None, "no evaluation data"
    compiled = self._evaluation_step

    def compute(share: Share) -> Contribution:
      sums: list[list[LossSums]] = []
      for feed, count in zip(self._evaluations, batches, strict=True):
        sums.append([])
        for index in range(count):
          self._stop_if_interrupted()
          sums[-1].append(compiled(params, (feed.share(index, share),)))
          jax.block_until_ready(sums[-1][-2:-1])
      whole = (np.asarray(jax.device_get(of_set), np.float32).sum(axis=0, dtype=np.float32) for of_set in sums)
      return Contribution(np.concatenate(list(whole)))

    name = f"eval {self._step}"
    with self._interruptible():  # one round, so that all sets are evaluated or none
      checksum = functools.partial(int, self._checksum(params))
      scalars, _ = self._rounds.agree(name, checksum, compute, None)
    self._evaluated = True
    return [[(loss, weight)] for loss, weight in scalars.reshape(-1, 2)]

  def _stop_if_interrupted(self) -> None:
    """Raises StopRequested if the round under way is interrupted. The processes of a slice compute each batch together,
    so they must stop before the same one: all of them call."""
    if any(self._session.cluster.world.gather(self._peers.membership.interrupted)):
      raise StopRequested

  @contextlib.contextmanager
  def _interruptible(self) -> Iterator[None]:
    """In the block, the supervisor knows that it may interrupt the round."""
    self._session.metrics.flush_pending()
    self._peers.membership.send("interruptible")
    try:
      yield
    except StopRequested:
      self._peers.await_interruption()
      raise

  def resize_due(self, n: int) -> bool:
    return False  # members join between two steps of the same attempt

  def leaves(self) -> bool:
    return self._peers.left

  def must_save(self) -> bool:
    """A member that is not the primary waits until the primary has ended the run, or is lost before its last save."""
    return not self._peers.left and not self._peers.saves_in_storage and self._peers.wait_for_end()

  def last_state(self) -> tuple[int, TrainState | None]:
    """One member saves: the primary, or if the primary dies, the next one. The members have the same state, but the
    last commit may not have reached all of them."""
    session, peers, step = self._session, self._peers, self._step
    local_steps = self._session.config.optimizer.local_steps

    def goes_on() -> bool:
      """Whether the others train on, and save. If no supervisor is reached, the records in storage tell: members that
      have stopped here too are ahead by one step, or one round of local steps, at most. The processes of a slice may
      see different things, but must save together or not at all: so one that sees the others go on decides for all."""
      ahead = peers.supervisor_lives() or session.metrics.recorded_step() > step + local_steps
      return any(session.cluster.world.gather(ahead))

    if not goes_on():
      session.log.warning(f"The supervisor is lost. Saving the state of step {step}, and ending.")
      with session.watchdog.during("save"):
        peers.await_turn(self._session.config.checkpoint.autocheckpoint_grace_seconds)
        if not goes_on():
          return step, self._state
    peers.give_up()  # this process writes no records any more
    session.log.warning(f"The supervisor has given this process up after step {step}. The run goes on without it.")
    return step, None

  def close(self) -> None:
    self._session.events.emit("network", links=self._peers.exchange.speeds())
    self._threads.close()

  def _damaged(self, state: TrainState) -> TrainState:
    """The state with the bits that a rehearsed fault flips."""
    faults, member = self._session.elastic.faults, self._peers.member
    params = faults.flips("flip_weight", member, flatten)(state.params)
    opt_state = faults.flips("flip_optimizer", member, flatten)(state.opt_state)
    return dataclasses.replace(state, params=params, opt_state=opt_state)

  def _share(self, index: int, share: Share) -> tuple[Batch, Tally]:
    return self._train.tallied_share(index, share, hashes=self._hashes)

  def _prepared(self, index: int) -> dict[Share, tuple[Batch, Tally]]:
    """The shares that this member computes now. The dealing may have changed when they are used."""
    return {share: self._share(index, share) for share in self._peers.shares}

  def _numbers_ahead(self, index: int, share: Share) -> list[np.ndarray]:
    """What a share of the next batch adds to its tally, which the balance loss of experts needs before the step begins.
    [] if it is not needed. Not numbers if the share cannot be read: then the step reads the whole batch, and fails."""
    if not self._session.config.model.has_balance_loss or index >= self._session.config.run.steps:
      return []
    try:
      prepared = self._batches.peek()
      of_share = prepared[share][1] if share in prepared else self._share(index, share)[1]
    except DataError:
      return [np.full(Tally.SIZE, np.nan, np.float32)]
    return [of_share.numbers]

  def _mean_weight(self, index: int) -> float:
    """The mean weight of the tokens of the whole batch, if the balance loss of experts needs it, else 1."""
    if not self._session.config.model.has_balance_loss:
      return 1.0
    if self._counted_ahead is None or self._counted_ahead[0] != index:  # the first step of this process
      self._counted_ahead = index, self._session.data.train.tally(index, hashes=False)
    return self._counted_ahead[1].mean_weight

  def _settled(self, checksum: Callable[[], int]) -> int:
    """The checksum that this member reports of a step, once it has written the records of the steps before: after the
    report, another member may be the primary."""
    self._session.metrics.flush_pending()
    return checksum()

  def _send_state(self, member: int) -> None:
    header = joining.header(self._session, self._step, self._evaluated)
    arrays = state_transfer.local_parts(self._state)
    with self._session.watchdog.during("state for another slice"):
      self._peers.exchange.send_state(member, header, arrays)

  def _receive_state(self, member: int) -> None:
    with self._session.watchdog.during("state from another slice"):
      allocate = lambda header: state_transfer.empty_parts(self._state)
      header, _ = self._peers.exchange.receive_state(member, allocate)
    assert header["step"] == self._step, f"member {member} sends step {header['step']}, and this one has {self._step}"


def _record_notice(session: Session, notice: Message) -> None:
  """Records that a member fails repeatedly while the others go on, or is slow or no longer slow, or an alarm."""
  kind, fields = notice["kind"], {name: value for name, value in notice.items() if name not in ("kind", "primary")}
  session.events.emit("witness" if kind == "alarm" else f"member_{kind}", **fields)
  session.log.line({"failing": failing_line, "slow": slow_line, "alarm": alarm_line}[kind](notice))
