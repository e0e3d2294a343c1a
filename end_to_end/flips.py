"""Flips bits in runs of a tiny model, and checks that the witness finds each flip within its reach.

  python -m end_to_end.flips [--count 1000 | --seeds 282 516]

Seed i determines flip i: 2 to 4 slices of 1 or 2 shares, what flips (gradients, weights, optimizer state), in which
array, slice and step, and whether it is sticky. Each run has the real supervisor, exchange, programs and drivers; the
members are threads of this process. A flip must be found in the promised step, before its commit; the right slice must
be named, with the array and the bits; and the final state must have the bits of the undisturbed run. Every eighth flip
is out of reach: a transient one in a share that is not compared. Nothing may be said then.

Last, sums that are equal are compared 100,000 times, with members that are lost meanwhile: there must be no alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tests.support.elastic_harness import TINY

from trainer.checkpoint.arrays import state_tree
from trainer.cluster import View
from trainer.config import load
from trainer.config.faults import Fault
from trainer.config.schema import Config
from trainer.drivers.many_worlds import ManyWorlds
from trainer.elastic.faults import FaultInjector
from trainer.program import program
from trainer.program.program import Halves, Program
from trainer.run import run_data
from trainer.run.driver import Start
from trainer.world import SINGLE_WORLD
from worlds.exchange import PeerLost
from worlds.join import join
from worlds.membership.client import SupervisorLost
from worlds.membership.coordinator import Coordinator
from worlds.membership.dealing import deal
from worlds.membership.rules import RunRules
from worlds.membership.server import Server
from worlds.membership.witness import draw
from worlds.peers import RunEnded
from worlds.place import Place

TOKEN = bytes(32)
STEPS = 9
ALL = (*TINY.split(), "num_experts=2", "num_experts_per_tok=1", "base_moe_mlp_dim=16", "use_qk_norm=true")


@dataclasses.dataclass(frozen=True)
class Flip:
  """One run. found: the steps in one of which the flip must be found; 0: it need not be found."""

  slices: int
  group: int
  period: int
  fault: Fault
  found: tuple[int, ...]


class Runs:
  """Runs of the same tiny model, which share their programs."""

  def __init__(self, folder: Path, keys: Sequence[str] = ALL) -> None:
    """keys: of the model."""
    self._folder, self._keys = folder, keys
    self._compiled: dict[int, tuple[Program, Halves]] = {}  # by the shares of a slice
    self._programs: dict[tuple[int, int], tuple[Config, Program, Halves, Any]] = {}
    self._right: dict[tuple[int, int], np.ndarray] = {}  # digests of the final state

  def of(self, slices: int, group: int) -> tuple[Config, Program, Halves, Any]:
    """(config, program of a share, its compiled halves, data)."""
    if (slices, group) not in self._programs:
      keys = [
        *self._keys,
        f"num_slices={slices}",
        f"shares_per_slice={group}",
        f"steps={STEPS}",
        "learning_rate_schedule_steps=99",
      ]
      keys += [f"base_output_directory={self._folder}", "eval_steps=0", "cluster=multiprocess", "witness_period=1"]
      config = load(["configs/base.yml", *keys])
      if group not in self._compiled:  # a share is the same, however many slices there are
        prog = program.of_view(config, View((0,), ((jax.devices()[0],),), 1, (0,)))
        self._compiled[group] = prog, prog.compile_halves(evaluates=False, adds=group > 1, witnesses=True)
      batch = program.global_batch_size(config, slices, 1)
      data = contextlib.ExitStack().enter_context(run_data.open_data(config, batch, lambda line: None, None))
      self._programs[slices, group] = config, *self._compiled[group], data
    return self._programs[slices, group]

  def names(self, kind: str) -> list[str]:
    """The names of the arrays that a flip of this kind may hit."""
    _, prog, _, _ = self.of(3, 1)
    return list(state_tree.flatten(prog.state.opt_state if kind == "flip_optimizer" else prog.state.params))

  def play(self, slices: int, group: int, period: int = 1, fault: Fault | None = None, steps: int = STEPS) -> Played:
    """One run to its end."""
    config, prog, halves, data = self.of(slices, group)
    config = config.with_values(witness_period=period, steps=steps)
    coordinator = Coordinator(RunRules(slices, 1, slices * group, timeout=60.0), hang_seconds=60.0)
    played = Played()
    with contextlib.closing(
      Server(coordinator, TOKEN, kill=lambda member, reason: None, log=played.log.append)
    ) as server:
      for member in range(slices):
        injector = FaultInjector([fault] if fault else [], acts=lambda: False)
        run = Member(config, prog, halves, data, server.address, member, injector, played)
        played.members.append(run)
        run.start()
        while member not in server.connected and run.is_alive():
          time.sleep(0.001)  # so that member 0 is the first primary
      for run in played.members:
        run.join(120 + steps)
      played.code = coordinator.code
      played.barred = dict(coordinator.failures.barred)
    if errors := [run.error for run in played.members if run.error is not None]:
      raise errors[0]
    return played

  def right(self, slices: int, group: int) -> np.ndarray:
    """The digests of the final state of the undisturbed run."""
    if (slices, group) not in self._right:
      (self._right[slices, group],) = {
        digest.tobytes(): digest for digest in self.play(slices, group).states()
      }.values()
    return self._right[slices, group]


class Played:
  """What has happened in a run."""

  def __init__(self) -> None:
    self.members: list[Member] = []
    self.log: list[str] = []  # of the supervisor
    self.events: list[dict[str, Any]] = []  # of all members: those of the primary are among them
    self.code: int | None = None
    self.barred: dict[int, str] = {}

  def states(self) -> list[np.ndarray]:
    """The digests of the final states of the members that have done all steps."""
    return [run.final for run in self.members if run.final is not None]

  def alarms(self) -> list[dict[str, Any]]:
    """Each alarm once."""
    return list({str(sorted(event.items(), key=str)): event for event in self.events}.values())


class Member(threading.Thread):
  """One member, as `trainer.train` runs it, without records and checkpoints."""

  def __init__(
    self,
    config: Config,
    prog: Program,
    halves: Halves,
    data: Any,
    address: str,
    member: int,
    faults: FaultInjector,
    played: Played,
  ) -> None:
    super().__init__(name=f"member {member}", daemon=True)
    self.final: np.ndarray | None = None
    self.error: Exception | None = None
    self.began: list[float] = []  # time.monotonic() at the beginning of each step
    self.lost_at: dict[int, int] = {}  # member -> the step after which it was lost, as this member saw it
    self._config, self._program, self._halves = config, prog, halves
    self.place = Place((address,), TOKEN, member)
    nothing = lambda *args, **kwargs: None
    log = types.SimpleNamespace(line=nothing, warning=nothing)
    events = types.SimpleNamespace(begin_epoch=nothing, emit=lambda kind, **fields: self._emit(played, kind, fields))
    watchdog = types.SimpleNamespace(during=lambda what: contextlib.nullcontext())
    metrics = types.SimpleNamespace(remembered=list, remember=nothing, settle=nothing)
    cluster = types.SimpleNamespace(num_slices=config.cluster.num_slices, world=SINGLE_WORLD)
    self._session: Any = types.SimpleNamespace(
      data=data, log=log, events=events, watchdog=watchdog, metrics=metrics, cluster=cluster
    )
    recovery = types.SimpleNamespace(under_way=False, restored=nothing)
    self._elastic: Any = types.SimpleNamespace(
      faults=faults,
      compiled_step=lambda view: halves,
      begin_step=lambda n: (faults.at("step", n), self.began.append(time.monotonic())),
      recovery=recovery,
      join=nothing,
      down_events=0,
      clock=time.monotonic,
      lose=self._lose,
      grow=nothing,
      begin_wait=nothing,
      end_wait=nothing,
      cfg=config.elastic,
      session=self._session,
    )

  def _emit(self, played: Played, kind: str, fields: dict[str, Any]) -> None:
    if kind == "witness":
      played.events.append(fields)

  def _lose(self, event: Any, alive: Any, began: float, *, before: int, step: int) -> None:
    self.lost_at |= dict.fromkeys(event.lost, step)

  def run(self) -> None:
    try:
      peers = join(self.place)
    except RunEnded:
      return
    driver = None
    try:
      tiers: Any = types.SimpleNamespace(newest=lambda: 0)
      driver = ManyWorlds(self._config, self._session, self._elastic, self._view(), self._program, peers, tiers)
      start = driver.start(self._restore, lambda start: None)
      trained = start.state
      for n in range(start.step + 1, self._config.run.steps + 1):
        trained, _ = driver.step(trained, n)
      assert self._halves.checks is not None
      self.final = np.asarray(self._halves.checks.of_state(trained))
      if peers.saves_in_storage:
        peers.membership.send("finished", code=0)
      peers.wait_for_end()
    except (RunEnded, SupervisorLost, PeerLost):
      pass  # it is killed, or the run has ended
    except Exception as error:  # noqa: BLE001 -- the main thread raises it
      self.error = error
    finally:
      if driver is not None:
        driver.close()
      peers.membership.close()
      peers.exchange.close()

  def _view(self) -> View:
    return View((self.place.member,), ((jax.devices()[0],),), 1, (0,))

  def _restore(self) -> Start:
    return Start(self._program.init(jax.random.key(0)), 0, "none", 0.0, False)


def plan(seed: int, runs: Runs) -> Flip:
  """Returns flip `seed`."""
  chance = random.Random(seed)
  kind = chance.choice(["flip_gradient"] * 4 + ["flip_weight"] * 2 + ["flip_optimizer"])
  slices, group, period = chance.choice([2, 3, 3, 4]), chance.choice([1, 2]), chance.choice([1, 1, 2, 3])
  if kind != "flip_gradient":
    slices = max(slices, 3)  # of two kinds of weights that are as many, those of the primary stay
  while True:
    array, sticky = chance.choice(runs.names(kind)), chance.random() < 0.5
    # In the first step, members get the state of the first one, with what flips in it.
    first, last = (1, STEPS) if kind == "flip_gradient" else (2, STEPS - period)
    fault = Fault(kind, chance.randint(first, last), chance.randrange(slices), sticky=sticky, array=array)
    found = promised(fault, slices, group, period)
    if bool(found) != (seed % 8 == 7 and kind == "flip_gradient" and not sticky):
      return Flip(slices, group, period, fault, found or (0,))


def promised(fault: Fault, slices: int, group: int, period: int) -> tuple[int, ...]:
  """The steps in one of which the fault must be found. 0 among them: rounding may hide it. None: it is out of reach."""
  step = fault.step
  if fault.kind == "flip_weight" or (fault.kind == "flip_optimizer" and step % period == 0):
    return (step,)
  if fault.kind == "flip_optimizer":  # by the weights that follow from it, at the latest by the next witness
    witness = step + -step % period
    return (*range(step + 1, witness + 1), 0)
  dealt = deal(slices * group, range(slices), group)
  compared = (n for n in range(step, STEPS + 1 if fault.sticky else step + 1) if n % period == 0)
  return next(((n,) for n in compared if fault.slice in draw(0, n // period, dealt).members), ())


def broken(flip: Flip, played: Played, right: np.ndarray) -> list[str]:
  """The rules that a run of members breaks."""
  fault, alarms, states = flip.fault, played.alarms(), played.states()
  others = [run for run in played.members if run.place.member != fault.slice]
  lost = {member: step + 1 for run in others for member, step in run.lost_at.items()}
  gradient, within, undecided = fault.kind == "flip_gradient", any(flip.found), flip.slices == 2 and fault.sticky
  removes = within and not (gradient and flip.slices == 2)
  expected = [{fault.slice: n} if n and removes else {} for n in flip.found]
  clean = within and (not gradient or flip.found == (fault.step,))
  # A second flip of the same bit may undo the first one where the state is compared, and a third one comes after that.
  undone = fault.kind == "flip_optimizer" and fault.sticky and not lost
  rules = {
    "lost": lost in expected,
    "code": played.code == int(gradient and within and undecided),
    "alarms": len(alarms) == int(gradient and within),
    # Wrong sums that were committed before they were found stay in the state, which is equal on all members.
    "states": undone or all((found == (right if clean else states[0])).all() for found in states),
    "survivors": len(states) == (0 if played.code else flip.slices - len(lost)),
  }
  for alarm in alarms:
    outcome = "removed" if flip.slices > 2 else "undecided" if fault.sticky else "transient"
    named = [0, 1] if outcome == "undecided" else [fault.slice]
    rules |= {
      "outcome": (alarm["outcome"], alarm["members"]) == (outcome, named),
      "step": alarm["round"] == f"step {flip.found[0]}",
      "array": list(alarm["arrays"].values()) == [1] and fault.array in next(iter(alarm["arrays"])),
      "barred": set(played.barred) == ({fault.slice} if outcome == "removed" else set()),
    }
  return [name for name, holds in rules.items() if not holds]


def false_alarms(comparisons: int) -> int:
  """The supervisor compares equal sums so many times, while members are lost and return. Returns the alarms."""
  run, chance, alarms = Coordinator(RunRules(4, 1, 8), clock=lambda: 0.0), random.Random(0), 0

  def joins(member: int) -> None:
    run.hello(member, 0, 1, f"address-{member}")
    run.device(member, "host", "chip")
    run.ready(member, 0, 0)

  for member in range(4):
    joins(member)
  run.restored(0, 0, run.epoch, 0)
  for step in range(1, comparisons + 1):
    if chance.random() < 0.01 and len(run.active) == 4:
      run.lost(gone := chance.randrange(4), "killed")
      joins(gone)
    dealt = deal(8, sorted(run.active), 2)
    sums = {f"array {index}": [chance.getrandbits(32), chance.getrandbits(32)] for index in range(3)}
    for member in draw(0, step, dealt).members:
      run.witnessed(member, run.epoch, json.loads(json.dumps(sums)))
    for member in sorted(run.active):
      effects = run.done(member, 0, run.epoch, f"step {step}", 7)
      alarms += any("alarm" in str(effect) or "differ" in str(effect) for effect in effects)
    assert run.committed == f"step {step}", step
  return alarms


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--count", type=int, default=1000)
  parser.add_argument("--seeds", type=int, nargs="+", help="of the flips, instead of 0 to count - 1")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  bad, kinds = 0, Counter[str]()
  with tempfile.TemporaryDirectory(prefix="flips-") as name:
    runs = Runs(Path(name))
    for number, seed in enumerate(args.seeds or range(args.count), start=1):
      flip = plan(seed, runs)
      played = runs.play(flip.slices, flip.group, flip.period, flip.fault)
      kinds[f"{flip.fault.kind}{' out of reach' * (not any(flip.found))}"] += 1
      if rules := broken(flip, played, runs.right(flip.slices, flip.group)):
        bad += 1
        print(f"flip {seed} ({flip}) breaks {rules}: {played.log}", flush=True)
      if number % 100 == 0:
        print(f"{number} flips, {bad} of them break a rule", flush=True)
  alarms = false_alarms(100_000)
  print(f"{kinds.total()} flips ({dict(sorted(kinds.items()))}), {bad} of them break a rule.")
  print(f"100,000 comparisons of equal sums: {alarms} alarms.")
  return int(bad > 0 or alarms > 0)


if __name__ == "__main__":
  sys.exit(main())
