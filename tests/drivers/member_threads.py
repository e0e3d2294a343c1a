"""Runs whose members are threads of this process, with the real supervisor, exchange, programs and drivers."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer.checkpoint.arrays import state_tree
from trainer.cluster import View
from trainer.config import load
from trainer.config.faults import Fault
from trainer.config.schema import Config
from trainer.drivers.local_rounds import LocalRounds
from trainer.drivers.many_worlds import ManyWorlds
from trainer.elastic.fault_injector import FaultInjector
from trainer.program import program, state
from trainer.program.local_steps import RoundPrograms, end_of_round
from trainer.program.program import Halves, Program
from trainer.run import run_data
from trainer.run.driver import Start
from trainer.world import SINGLE_WORLD
from worlds.exchange import PeerLost
from worlds.join import join
from worlds.membership.client import SupervisorLost
from worlds.membership.coordinator import Coordinator
from worlds.membership.run_rules import RunRules
from worlds.membership.server import Server
from worlds.peers import RunEnded
from worlds.place import Place

TOKEN = bytes(32)
STEPS = 9


class Runs:
  """Runs of the same tiny model, which share their programs."""

  def __init__(self, folder: Path, keys: Sequence[str]) -> None:
    """keys: of the model."""
    self._folder, self._keys = folder, keys
    self._compiled: dict[int, tuple[Program, Halves | RoundPrograms]] = {}  # by the shares of a slice
    self._programs: dict[tuple[int, int], tuple[Config, Program, Any, Any]] = {}
    self._right: dict[tuple[int, int], np.ndarray] = {}  # digests of the final state

  def of(self, slices: int, group: int) -> tuple[Config, Program, Any, Any]:
    """(config, program of a share, its compiled halves, data)."""
    if (slices, group) not in self._programs:
      keys = [
        *self._keys,
        f"num_slices={slices}",
        f"shares_per_slice={group}",
        f"steps={STEPS}",
        "learning_rate_schedule_steps=99",
      ]
      keys += [f"base_output_directory={self._folder}", "eval_steps=0", "cluster=multiprocess"]
      config = load(["configs/base.yml", *keys])
      witnesses = not config.optimizer.has_local_steps
      if group not in self._compiled:  # a share is the same, however many slices there are
        prog = program.of_view(config, View((0,), ((jax.devices()[0],),), 1, (0,)))
        if witnesses:
          compiled = prog.compile_halves(evaluates=False, adds=group > 1, witnesses=True)
        else:
          compiled = prog.compile_round(slices * group, evaluates=False, adds=group > 1)
        self._compiled[group] = prog, compiled
      batch = program.global_batch_size(config, slices, 1)
      data = contextlib.ExitStack().enter_context(run_data.open_data(config, batch, lambda line: None, None))
      self._programs[slices, group] = config, *self._compiled[group], data
    return self._programs[slices, group]

  def names(self, kind: str) -> list[str]:
    """The names of the arrays that a flip of this kind may hit."""
    _, prog, _, _ = self.of(3, 1)
    return list(state_tree.flatten(prog.state.opt_state if kind == "flip_optimizer" else prog.state.params))

  def play(
    self,
    slices: int,
    group: int,
    period: int = 1,
    fault: Fault | None = None,
    steps: int = STEPS,
    members: int | None = None,
  ) -> Played:
    """One run to its end. members: that it has, instead of one for each slice."""
    config, prog, halves, data = self.of(slices, group)
    members = members or slices
    config = config.with_values(witness_period=0 if config.optimizer.has_local_steps else period, steps=steps)
    rules = RunRules(members, 1, slices * group, timeout=60.0, local_steps=config.optimizer.local_steps)
    coordinator = Coordinator(rules, hang_seconds=60.0)
    played = Played()
    with contextlib.closing(
      Server(coordinator, TOKEN, kill=lambda member, reason: None, log=played.log.append)
    ) as server:
      for member in range(members):
        injector = FaultInjector([fault] if fault else [], acts=lambda: False)
        run = Member(config, prog, halves, data, server.address, member, injector, played)
        played.members.append(run)
        run.start()
        while member not in server.connected and run.is_alive():
          time.sleep(0.001)  # so that member 0 is the first primary
      for run in played.members:
        run.join(120 + steps)
      played.code = coordinator.code
      played.excluded = dict(coordinator.failures.excluded)
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
    self.excluded: dict[int, str] = {}

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
    halves: Any,
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
    watchdog = types.SimpleNamespace(during=lambda what: contextlib.nullcontext(), part_done=nothing)
    metrics = types.SimpleNamespace(remembered=list, remember=nothing, flush_pending=nothing)
    cluster = types.SimpleNamespace(num_slices=config.cluster.num_slices, world=SINGLE_WORLD)
    self._session: Any = types.SimpleNamespace(
      config=config,
      data=data,
      log=log,
      events=events,
      watchdog=watchdog,
      metrics=metrics,
      cluster=cluster,
      progress=types.SimpleNamespace(under_way=nothing),
    )
    recovery = types.SimpleNamespace(under_way=False, restored=nothing)
    self._session.elastic = types.SimpleNamespace(
      faults=faults,
      compiled_step=lambda view: halves,
      begin_step=lambda n: (faults.at("step", n), self.began.append(time.monotonic())),
      recovery=recovery,
      join=nothing,
      down_events=0,
      members_changed=self._members_changed,
    )

  def _emit(self, played: Played, kind: str, fields: dict[str, Any]) -> None:
    if kind == "witness":
      played.events.append(fields)

  def _members_changed(self, change: Any, step: int) -> None:
    self.lost_at |= dict.fromkeys(change.lost, step)

  def run(self) -> None:
    try:
      peers = join(self.place)
    except RunEnded:
      return
    driver = None
    try:
      tiers: Any = types.SimpleNamespace(newest=lambda: 0)
      takes_part = LocalRounds if self._config.optimizer.has_local_steps else ManyWorlds
      driver = takes_part(self._session, self._view(), self._program, peers, tiers)
      start = driver.start(self._restore, lambda start: None)
      trained, step = start.state, start.step
      while step < self._config.run.steps:
        step = end_of_round(self._config.optimizer, step, self._config.run.steps)
        trained, _ = driver.step(trained, step)
      self.final = np.asarray(state.digest(trained))
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
