"""Runs a tiny model through random fault histories behind a stand-in for Pathways, with the real proxy client.

  python -m end_to_end.pathways_histories [--count 200] [--first 0] [key=value ...]

Seed i determines history i. The faults of end_to_end.elastic_histories (slices lost during a step, a snapshot, a save,
an evaluation, a restore or a recovery, double faults, returns, flapping slices) happen in the stand-in, and a quarter
of those in steps, evaluations, snapshots and saves are hangs instead. In every fourth history a thread also kills and
revives slices at random times. The rules are those of elastic_histories. In addition no recovery may compile, except to
make a fresh state: every set of slices is compiled once, before the first history, and its executables outlive every
loss and return. After the first history that breaks a rule, prints the command that repeats it and exits with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from unittest import mock

from end_to_end import elastic_histories
from tests.support.elastic_harness import NUM_SLICES, Harness, History

from trainer.cluster import Cluster, standin
from trainer.cluster.health import HealthChecks
from trainer.cluster.pathways import PathwaysCluster
from trainer.config.faults import Fault, parse
from trainer.config.schema import ClusterSection
from trainer.elastic import hang
from trainer.run.session import Session

CHECK_SECONDS = 1.0  # without a result until the slices are asked
TIME_LIMIT = 2.0  # seconds of a health check: what a hang costs
POLL_SECONDS = 0.05
HANGS = 0.25  # share of the losses in steps, evaluations, snapshots and saves that are hangs instead
WILD = 4  # one history in so many has a thread that kills and revives slices at random times


class StandIn:
  """One stand-in for many runs of this process."""

  def __init__(self) -> None:
    cfg = ClusterSection(
      cluster="pathways",
      cluster_standin=f"{NUM_SLICES}x1",
      enable_single_controller=True,
    )
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


def histories(first: int, count: int) -> Iterator[tuple[str, bool]]:
  """Yields (fault_injection, fixed mesh) of the histories first .. first + count - 1."""
  for seed, (faults, fixed_mesh) in enumerate(elastic_histories.histories(first, count), first):
    generator = random.Random(seed)
    drawn = [_perhaps_a_hang(fault, generator) for fault in parse(faults) if isinstance(fault, Fault)]
    yield ", ".join(map(str, drawn)), fixed_mesh


def _perhaps_a_hang(fault: Fault, generator: random.Random) -> Fault:
  can_hang = fault.kind == "slice_down" and fault.moment in ("step", "eval", "snapshot", "save")
  return dataclasses.replace(fault, kind="hang") if can_hang and generator.random() < HANGS else fault


def spared(seed: int) -> int:
  """The slice that history `seed` spares: as elastic.faults.draw chooses it."""
  return random.Random(seed).randrange(NUM_SLICES)


@contextlib.contextmanager
def wild_kills(stand_in: StandIn, seed: int) -> Iterator[Counter[str]]:
  """While the context is open, kills and revives the slices that `seed` does not spare, at random times."""
  generator, stopped, done = random.Random(~seed), threading.Event(), Counter[str]()
  moments = generator.randrange(4, 12)  # on a slow machine endless kills would use up all attempts
  victims = sorted(set(range(NUM_SLICES)) - {spared(seed)})

  def run() -> None:
    while done.total() < moments and not stopped.wait(generator.uniform(0.0, 1.5)):
      slice_id, kill = generator.choice(victims), generator.random() < 0.6
      stand_in.faults.lose(slice_id) if kill else stand_in.faults.give_back(slice_id)
      done["slice_down at a random time" if kill else "slice_up at a random time"] += 1

  thread = threading.Thread(target=run, name="wild kills")
  thread.start()
  try:
    yield done
  finally:
    stopped.set()
    thread.join()


def warm(harness: Harness, seeds: Iterable[int], keys: Sequence[str] = ()) -> None:
  """Compiles for every set of slices that the histories can come to, so that no recovery has a reason to compile."""
  never_lost = set(map(spared, seeds))

  def compile_all(session: Session, cluster: Cluster) -> None:
    for count in range(1, NUM_SLICES + 1):
      for slices in itertools.combinations(range(NUM_SLICES), count):
        if never_lost & set(slices):
          session.programs.step(cluster.view(slices))

  harness.run("warm", [*elastic_histories.KEYS, *keys], prepare=compile_all)


def run(harness: Harness, name: str, faults: str, fixed_mesh: bool, keys: Sequence[str] = ()) -> History:
  """Runs with these faults and more `keys`, and returns the history."""
  with mock.patch.object(hang, "CHECK_SECONDS", CHECK_SECONDS):
    return elastic_histories.run(harness, name, faults, fixed_mesh, keys)


def check(history: History, undisturbed: History, fixed_mesh: bool) -> list[str]:
  """Returns the rules that the history breaks; [] if it breaks none.

  A recovery before the first snapshot may compile: it makes a fresh state.
  """
  broken = elastic_histories.check(history, undisturbed, fixed_mesh)
  for record in history.of_kind("recovery"):
    if record["compilations"] and record["tier"] != "none":
      broken.append(
        f"{record['compilations']} compilations in the recovery from {record['event']} of {record['slice']}"
      )
  return broken


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--count", type=int, default=200, help="number of histories")
  parser.add_argument("--first", type=int, default=0, help="seed of the first history")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs, such as num_experts=4")
  options = parser.parse_args()
  stand_in = StandIn()
  try:
    with tempfile.TemporaryDirectory(prefix="pathways-histories-") as directory:
      harness = Harness(Path(directory), stand_in.make_cluster)
      return run_all(harness, stand_in, options.first, options.count, options.keys)
  finally:
    stand_in.close()


def run_all(harness: Harness, stand_in: StandIn, first: int, count: int, keys: Sequence[str]) -> int:
  """Runs and checks the histories; returns the exit code."""
  warm(harness, range(first, first + count), keys)
  undisturbed = run(harness, "undisturbed", "", fixed_mesh=True, keys=keys)
  kinds: Counter[str] = Counter()  # faults that happened, by kind and moment
  recoveries: list[dict[str, object]] = []
  worst, start = 0.0, time.monotonic()
  for seed, (faults, fixed_mesh) in enumerate(histories(first, count), first):
    wild = wild_kills(stand_in, seed) if seed % WILD == WILD - 1 else contextlib.nullcontext(Counter[str]())
    with wild as at_random_times:
      history = run(harness, f"history-{seed}", faults, fixed_mesh, keys)
    if broken := check(history, undisturbed, fixed_mesh):
      print(f"history {seed} (fault_injection='{faults}', fixed mesh: {fixed_mesh}):", *broken, sep="\n  ")
      print(f"repeat with: python -m end_to_end.pathways_histories --first {seed} --count 1 {' '.join(keys)}")
      return 1
    kinds.update(elastic_histories.kind(record["fault"]) for record in history.of_kind("fault_injected"))
    kinds.update(at_random_times)
    recoveries += history.of_kind("recovery")
    worst = max(worst, *(abs(history.losses[step] / undisturbed.losses[step] - 1) for step in history.losses))
    done = seed - first + 1
    if done % 10 == 0 or done == count:
      print(
        f"{done} histories in {time.monotonic() - start:.0f} s, all correct: {kinds.total()} faults, "
        f"{len(recoveries)} recoveries, {sum(int(r['steps_lost']) for r in recoveries)} completed steps lost, "
        f"{sum(int(r['compilations']) for r in recoveries)} compilations; largest relative loss difference {worst:.1e}",
        flush=True,
      )
  print("Faults that happened:", ", ".join(f"{number} {kind}" for kind, number in kinds.most_common()))
  return 0


if __name__ == "__main__":
  exit_code = main()
  sys.stdout.flush()
  os._exit(exit_code)  # threads may still wait for slices that hung; the interpreter's end would abort under them
