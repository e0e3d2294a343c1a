"""Histories of one controller: simulated slices, or slices behind a stand-in for Pathways with the real proxy client.

A third of the runs has a fixed mesh and waits for replacements: then all numbers have the same bits. The others
continue with the slices that are left. A fault costs at most one completed step. Behind the stand-in, a quarter of the
losses in steps, evaluations, snapshots and saves are hangs, and in every fourth history a thread also kills and revives
slices at random times. There, a recovery compiles nothing, because every set of slices was compiled before the first
history; a recovery before the first snapshot makes a fresh state, and may compile."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import jax
from end_to_end.histories import oracle
from end_to_end.histories.__main__ import Play, Played
from tests.support.elastic_harness import NUM_SLICES, Harness, History

from trainer.cluster import Cluster, standin
from trainer.cluster.health import HealthChecks
from trainer.cluster.pathways import PathwaysCluster
from trainer.config.faults import Fault, RandomFaults, parse
from trainer.config.schema import ClusterSection
from trainer.elastic import wait
from trainer.elastic.fault_injector import draw
from trainer.run.session import Session

STEPS = 12
KEYS = (f"steps={STEPS}", "checkpoint_period=4", "snapshot_period=1", "eval_interval=3", "eval_steps=1")
RATES = (0.1, 0.25, 0.5)  # share of the steps with a fault, by seed
HANGS = 0.25  # share of the losses that can be hangs instead
CAN_HANG = ("step", "eval", "snapshot", "save")
WILD = 4  # one history in so many has a thread that kills and revives slices
CHECK_SECONDS, TIME_LIMIT, POLL_SECONDS = 1.0, 2.0, 0.05  # until slices are asked; of a health check; between polls


def plan(kind: str, seed: int) -> tuple[str, bool]:
  """(fault_injection, whether the mesh is fixed) of a history."""
  faults = ", ".join(map(str, draw(RandomFaults(seed, RATES[seed // 3 % 3]), NUM_SLICES, STEPS)))
  if kind == "pathways":
    chance = random.Random(seed)
    drawn = [fault for fault in parse(faults) if isinstance(fault, Fault)]
    faults = ", ".join(
      str(dataclasses.replace(fault, kind="hang"))
      if fault.kind == "slice_down" and fault.moment in CAN_HANG and chance.random() < HANGS
      else str(fault)
      for fault in drawn
    )
  return faults, seed % 3 == 0


def run(harness: Harness, name: str, faults: str, fixed_mesh: bool, keys: Sequence[str] = ()) -> History:
  """Runs with these faults and more `keys`."""
  own = [*KEYS, *keys, f"fault_injection={faults}", f"elastic_min_slice_count={-1 if fixed_mesh else 1}"]
  return harness.run(name, own, look=look)


def look(directory: Path) -> oracle.Left:
  return oracle.read(directory, STEPS)


def left(history: History) -> oracle.Left:
  """What the run has left. Its receipt is of the rows that its loader has read last for each step."""
  receipt = [{"step": step, "examples": rows} for step, rows in sorted(history.used.items())]
  return dataclasses.replace(history.seen, receipt=receipt, codes=[history.outcome.kind != "complete"])


def check(history: History, undisturbed: History, fixed_mesh: bool) -> list[str]:
  """The rules that a history breaks."""
  repeats = any(event["steps_lost"] for event in history.of_kind("recovery"))
  promise = oracle.Promise(STEPS, tolerance=0.0 if fixed_mesh else 1e-5, lost=1, repeats=repeats)
  return oracle.broken(left(history), left(undisturbed), promise)


class StandIn:
  """One stand-in for many runs of this process."""

  def __init__(self) -> None:
    cfg = ClusterSection(cluster="pathways", cluster_standin=f"{NUM_SLICES}x1", enable_single_controller=True)
    self._first = PathwaysCluster.start(cfg, os.environ)
    assert isinstance(self._first.fault_target, standin.Faults)
    self.faults: standin.Faults = self._first.fault_target

  def make_cluster(self) -> PathwaysCluster:
    """The stand-in's slices for the next run, all of them alive."""
    for slice_id in range(NUM_SLICES):
      self.faults.give_back(slice_id)
    health = functools.partial(HealthChecks, time_limit=TIME_LIMIT)
    cluster = PathwaysCluster(self._first.slices, POLL_SECONDS, health, faults=self.faults)
    assert cluster.wait_for(NUM_SLICES, timeout=60) == frozenset(range(NUM_SLICES))
    return cluster

  def close(self) -> None:
    self._first.stop()


def spared(seed: int) -> int:
  """The slice that history `seed` spares: as elastic.faults.draw chooses it."""
  return random.Random(seed).randrange(NUM_SLICES)


@contextlib.contextmanager
def wild_kills(faults: standin.Faults, seed: int) -> Iterator[Counter[str]]:
  """While the context is open, kills and revives the slices that `seed` does not spare, at random times."""
  generator, stopped, done = random.Random(~seed), threading.Event(), Counter[str]()
  moments = generator.randrange(4, 12)  # on a slow machine endless kills would use up all attempts
  victims = sorted(set(range(NUM_SLICES)) - {spared(seed)})

  def strike() -> None:
    while done.total() < moments and not stopped.wait(generator.uniform(0.0, 1.5)):
      slice_id, kill = generator.choice(victims), generator.random() < 0.6
      faults.lose(slice_id) if kill else faults.give_back(slice_id)
      done["slice_down at a random time" if kill else "slice_up at a random time"] += 1

  thread = threading.Thread(target=strike, name="wild kills")
  thread.start()
  try:
    yield done
  finally:
    stopped.set()
    thread.join()


def warm(harness: Harness, seeds: range, keys: Sequence[str]) -> None:
  """Compiles for every set of slices that the histories can come to, so that no recovery has a reason to compile."""
  never_lost = set(map(spared, seeds))

  def compile_all(session: Session, cluster: Cluster) -> None:
    for count in range(1, NUM_SLICES + 1):
      for slices in itertools.combinations(range(NUM_SLICES), count):
        if never_lost & set(slices):
          session.programs.step(cluster.view(slices))

  harness.run("warm", [*KEYS, *keys], prepare=compile_all)


@contextlib.contextmanager
def opened(folder: Path, kind: str, seeds: range, keys: Sequence[str]) -> Iterator[Play]:
  """Yields what plays a history."""
  stand_in = StandIn() if kind == "pathways" else None
  if stand_in is None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_SLICES)
  harness = Harness(folder, **({"make_cluster": stand_in.make_cluster} if stand_in else {}))
  with mock.patch.object(wait, "CHECK_SECONDS", CHECK_SECONDS):
    if stand_in:
      warm(harness, seeds, keys)
    undisturbed = run(harness, "undisturbed", "", fixed_mesh=True, keys=keys)

    def play(seed: int) -> Played:
      faults, fixed_mesh = plan(kind, seed)
      is_wild = stand_in is not None and seed % WILD == WILD - 1
      with wild_kills(stand_in.faults, seed) if stand_in and is_wild else contextlib.nullcontext(Counter()) as counts:
        history = run(harness, f"history-{seed}", faults, fixed_mesh, keys)
      wrong = check(history, undisturbed, fixed_mesh)
      for event in history.of_kind("recovery"):
        counts.update({"recoveries": 1, "completed steps lost": event["steps_lost"]})
        if stand_in and event["compilations"] and event["tier"] != "none":
          wrong.append(
            f"{event['compilations']} compilations in the recovery from {event['event']} of {event['slice']}"
          )
      faults_seen = [event["fault"] for event in history.of_kind("fault_injected")]
      counts.update([*map(what, faults_seen), *["faults"] * len(faults_seen)])
      return Played(f"fault_injection='{faults}', fixed mesh: {fixed_mesh}", wrong, counts, history.log[-3000:])

    yield play
  if stand_in:
    stand_in.close()


def what(fault: str) -> str:
  """Returns "slice_down in a save" for slice_down@3:1:save."""
  name, _, rest = fault.partition("@")
  moment = rest.split("/")[0].split(":")[2:] or ["step"]
  return f"{name} in a {moment[0]}"
