"""The witness where one controller drives all slices.

The step is one program on all slices, which does not show what each of them adds to its sums. So slices that are drawn
compute one micro-batch of the step by a program of their own, from their own copies of the weights, before the step.
The bits of the state are compared too, of all slices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import jax
from jax import Device

from trainer.checkpoint.arrays.state_tree import flatten
from trainer.cluster import View
from trainer.elastic.classification import SliceWrong
from trainer.elastic.wait import Wait
from trainer.parallel.mesh import DATA
from trainer.program import program
from trainer.program.checks import Checks
from trainer.program.feed import Feed
from trainer.program.program import Program
from trainer.program.share_sums import ShareSums
from trainer.program.state import TrainState
from trainer.run.session import Session
from worlds.exchange import Part
from worlds.membership.witness import Sums, Witness, alarm_line, draw


class SliceWitness:
  """Compares the slices of one view."""

  def __init__(self, session: Session, view: View, full: Program, wait: Wait) -> None:
    """full: the program of the view."""
    self._session, self._view, self._full, self._wait = session, view, full, wait
    self.proof: dict[str, Any] = {}  # of the step, for the receipt: the share and the slices with equal sums, if any
    # {slice: its last comparison without a difference, in this attempt}. States are equal after wrong sums, too.
    self._equal_states: dict[int, str] = {}
    self._equal_sums: dict[int, str] = {}

  def before_step(self, state: TrainState, n: int) -> TrainState:
    """The state with the bits that a rehearsed fault flips. Compares the slices before step n, if that is due. Raises
    SliceWrong if one of them has wrong sums or a wrong state, and if it is not known which one of two."""
    self.proof = {}
    period, faults = self._session.config.elastic.witness_period, self._session.elastic.faults
    for slice_id, devices in zip(self._view.slices, self._view.devices):
      params = faults.flips("flip_weight", slice_id, flatten, devices)(state.params)
      opt_state = faults.flips("flip_optimizer", slice_id, flatten, devices)(state.opt_state)
      state = dataclasses.replace(state, params=params, opt_state=opt_state)
    if period and n % period == 0 and self._view.num_alive > 1:
      with self._session.watchdog.during("witness"):
        self._wait.call(functools.partial(jax.block_until_ready, state), f"step {n - 1}")  # may end a recovery
        with self._session.elastic.recovery.paused():
          self._wait.call(functools.partial(self._compare, state, n), f"the witness of step {n}")
    return state

  def _compare(self, state: TrainState, n: int) -> None:
    alive = self._view.slices
    states = dict(zip(alive, _by_slice(state, self._view.devices)))
    shares = self._session.cluster.num_slices * self._session.config.optimizer.gradient_accumulation_steps
    dealt = {slice_id: range(index, shares, len(alive)) for index, slice_id in enumerate(alive)}
    drawn = draw(self._session.config.data.data_shuffle_seed, n // self._session.config.elastic.witness_period, dealt)
    state_of = lambda slice_id: self._state(slice_id, states[slice_id])
    self._agree(self._equal_states, f"the state before step {n}", alive, state_of)
    flips = {slice_id: self._session.elastic.faults.flips("flip_gradient", slice_id, flatten) for slice_id in alive}

    def sums(slice_id: int) -> Sums:
      feed, share_sums, checks = self._of(slice_id)
      scalars, parts = share_sums(states[slice_id].params, feed.share(n - 1, drawn.share))
      trees = flips[slice_id]([part.tree for part in parts])
      return checks.read_share(checks.of_share(scalars, [Part(tree, part.first) for tree, part in zip(trees, parts)]))

    members = self._agree(self._equal_sums, f"step {n}", drawn.members, sums)
    self.proof = {"witness": {"share": drawn.share, "members": members}}

  def _of(self, slice_id: int) -> tuple[Feed, ShareSums, Checks]:
    """The programs of one slice. Its share is one micro-batch."""
    ((what, compile_now),) = self.programs([slice_id]).items()
    own, sums, checks = self._session.programs.kept(what, compile_now)
    return Feed(self._session.data.train, own), sums, checks

  def programs(self, slices: Iterable[int]) -> dict[str, Callable[[], tuple[Program, ShareSums, Checks]]]:
    """{name: compilation} of the programs with which these slices are compared; {} without a witness."""
    if not self._session.config.elastic.witness_period:
      return {}
    return {f"witness on slice {slice_id}": functools.partial(self._compile, slice_id) for slice_id in slices}

  def _compile(self, slice_id: int) -> tuple[Program, ShareSums, Checks]:
    config = self._session.config.with_values(dcn_data_parallelism=1, gradient_accumulation_steps=1)
    devices = self._session.cluster.slices[slice_id]
    own = program.build(config, (devices,), 1, self._full.user_optimizer)
    sums = own.compile_share(adds=False)
    return own, sums, own.compile_checks(sums)

  def _state(self, slice_id: int, state: TrainState) -> Sums:
    _, _, checks = self._of(slice_id)
    return checks.read_state(checks.of_state(state))

  def _agree(
    self, equal: dict[int, str], what: str, members: Collection[int], compute: Callable[[int], Sums]
  ) -> list[int]:
    """Compares what the slices `members` compute, and others if they differ. Returns the slices that agree. equal: the
    last comparisons."""
    witness, wanted, alive = Witness(), members, self._view.slices
    while True:
      for slice_id in wanted:
        witness.computed(slice_id, compute(slice_id))
      found = witness.verdict(0, alive)
      if found.kind == "equal":
        equal |= dict.fromkeys(members, what)
        return sorted(witness.sums)
      if found.kind not in ("ask", "again"):
        break
      wanted = found.members
      if found.kind == "again":
        witness.begin_epoch(alive)
    devices = dict(zip(alive, self._view.devices))
    where = {str(slice_id): ", ".join(map(str, devices[slice_id])) for slice_id in found.members}
    fields = {"outcome": found.kind, "round": what, "members": list(found.members), "arrays": dict(found.arrays)}
    agreed = {str(slice_id): equal[slice_id] for slice_id in found.members if slice_id in equal}
    record = self._session.events.emit("witness", where=where, agreed=agreed, **fields)
    self._session.log.line(alarm_line(record))
    if found.kind == "removed":
      self._session.cluster.bar(found.members)
    if found.kind != "transient":
      raise SliceWrong(alarm_line(record), found.members if found.kind == "removed" else ())
    return sorted(witness.sums)


def _by_slice(state: TrainState, devices: Sequence[Sequence[Device]]) -> list[TrainState]:
  """The copy of the state of each slice: arrays that share their memory with those of `state`."""
  from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis  # imports Orbax, which takes long

  leaves, structure = jax.tree.flatten(state)
  parts = {frozenset(part[0].sharding.device_set): part for part in split_by_mesh_axis(leaves, DATA, len(devices))}
  return [jax.tree.unflatten(structure, parts[frozenset(of_slice)]) for of_slice in devices]
