"""Times losses and returns of slices that are real processes, from SIGKILL to the next completed step.

    python -m end_to_end.benchmarks.process_recovery [--kills 20] [--restarts 3] [--torchrun 5] [--ray 10]
    python -m end_to_end.benchmarks.process_recovery --restarts 0 local_steps=32 checkpoint_period=64

Kills a random slice of three, waits until it is back, and kills again, in one run. Then the same model without this
protocol: all processes are killed and the command is started again, as a launcher does that restarts everybody.
--ray does the same on a Ray cluster of four nodes (needs the package ray): Ray replaces the lost worker, or it restarts
all workers; then the longest time without a completed step is measured.
A loss lasts from the call of kill() to the time in the record of the next step, which fewer slices computed. A return
costs the time between the two steps around it, less the median step; so does a loss, if the step would else have ended
at the usual time. With local steps, each of these times is that of a round. Compilations are those of the survivors.
With --torchrun (needs torch), torchrun starts the slices. It restarts all of them when one is killed: measured from the
call of kill() to the first step of the new group.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from end_to_end.benchmarks.common import positive
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import TorchrunRun

if TYPE_CHECKING:
  from tests.support.ray_runs import RayRun

ENDLESS = 10**6  # steps
MODEL = (
  "base_num_decoder_layers=2 base_emb_dim=128 base_num_query_heads=4 base_num_kv_heads=2 head_dim=32 base_mlp_dim=384 "
  "vocab_size=2048 max_target_length=128"
).split()
CALM_STEPS = 20  # between a return and the next loss


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--kills", type=positive, default=20, help="losses of one slice")
  parser.add_argument("--restarts", type=int, default=3, help="losses of everything; 0: none")
  parser.add_argument("--ray", type=positive, help="losses of one slice under Ray, for each of its two ways")
  parser.add_argument("--torchrun", type=positive, help="losses of one slice that torchrun has started")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs")
  options = parser.parse_args()
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process is left
  with tempfile.TemporaryDirectory(prefix="process-recovery-") as directory:
    folder = Path(directory)
    keys = [*MODEL, f"steps={ENDLESS}", "checkpoint_period=50", f"jax_cache_dir={folder / 'compiled'}", *options.keys]
    print("| event | n | p50 | p95 | p99 | most | compilations | steps lost |\n|---|---|---|---|---|---|---|---|")
    if options.ray:
      from tests.support.ray_runs import RayRun

      replaced = RayRun(folder / "replaced", keys, replace_lost=True)
      with replaced.cluster():
        lose_slices(replaced, options.ray, "Ray replaces the worker: ")
      restarted = RayRun(folder / "restarted", keys)
      with restarted.cluster():
        restart_by_ray(restarted, options.ray)
      return
    lose_slices(ProcessRun(folder / "slices", keys), options.kills)
    if options.torchrun:
      restart_group(TorchrunRun(folder / "torchrun", keys, restarts=options.torchrun), options.torchrun)
    if options.restarts:
      restart_all(ProcessRun(folder / "all", keys), options.restarts)


def lose_slices(run: ProcessRun, kills: int, title: str = "") -> None:
  chance = random.Random(0)
  losses, longer, returns = list[float](), list[float](), list[float]()
  with run.launched() as supervisor:
    for kill in range(kills):
      calm = run.last_step + CALM_STEPS
      run.wait_for(lambda calm=calm: len(run.active()) == 3 and run.last_step >= calm, supervisor, 300)
      victim = chance.choice(run.active())
      began = time.time()
      assert run.kill(victim)
      run.wait_for(lambda kill=kill: run.count("slice_up") > kill, supervisor, 300)
      run.wait_for(lambda: len(run.active()) == 3 and steps(run)[-1]["slices"] == 3, supervisor, 300)
      records = steps(run)
      losses.append(next(r["wall"] for r in records if r["wall"] > began and r["slices"] == 2) - began)
      gaps = [(b["wall"] - a["wall"], a["slices"], b["slices"]) for a, b in itertools.pairwise(records)]
      usual = statistics.median(gap for gap, _, _ in gaps)
      longer.append([gap for gap, before, after in gaps if (before, after) == (3, 2)][-1] - usual)
      returns.append([gap for gap, before, after in gaps if (before, after) == (2, 3)][-1] - usual)
    found = run.events("recovery")
  line(f"{title}slice killed", losses, found, "slice_down")
  line(f"{title}this step, less the median step", longer, found, "slice_down")
  line(f"{title}slice returned", returns, found, "slice_up")
  print(f"\nMedian step or round: {1000 * usual:.0f} ms\n")


def restart_group(run: TorchrunRun, kills: int) -> None:
  chance = random.Random(0)
  losses, repeated = list[float](), 0
  with run.nodes(3) as agents:
    for _ in range(kills):
      calm = run.last_step + CALM_STEPS
      run.wait_for(lambda calm=calm: run.last_step >= calm, agents[0], 300)
      reached, began = run.last_step, time.time()
      assert run.kill(chance.randrange(3))
      run.wait_for(lambda began=began: first_of_group(run, began) > 0, agents[0], 300)
      losses.append(first_of_group(run, began) - began)
      repeated += sum(1 for r in steps(run) if r["wall"] > began and r["step"] <= reached)
  line("slice killed, torchrun restarts all", losses, [], "", steps_lost=repeated)


def first_of_group(run: TorchrunRun, began: float) -> float:
  """The time of the first step of a group that was ready after `began`; 0: there is none."""
  ready = [event["wall"] for event in run.events("init_done") if event["wall"] > began]
  return next((r["wall"] for r in steps(run) if ready and r["wall"] > ready[0]), 0.0)


def restart_all(run: ProcessRun, restarts: int) -> None:
  losses, repeated = list[float](), 0
  for _ in range(restarts):
    with run.launched() as supervisor:
      first = run.last_step
      run.wait_for(lambda first=first: run.last_step >= first + 2 * CALM_STEPS + 50, supervisor, 300)
      began = time.time()
      run.end_processes()
      reached = run.last_step
    with run.launched() as supervisor:
      run.wait_for(lambda began=began, reached=reached: new_step(run, began, reached) > 0, supervisor, 300)
      losses.append(new_step(run, began, reached) - began)
      repeated += sum(1 for r in steps(run) if r["wall"] > began and r["step"] <= reached)
  line("everything killed and started again", losses, [], "", steps_lost=repeated)


def restart_by_ray(run: RayRun, kills: int) -> None:
  """Kills one worker at a time; Ray restarts all of them. Prints the longest times without a completed step."""
  chance = random.Random(0)
  pauses = list[float]()
  with run.launched() as job:
    for _ in range(kills):
      calm = run.last_step + CALM_STEPS
      run.wait_for(lambda calm=calm: len(run.active()) == 3 and run.last_step >= calm, job, 300)
      before, began = set(run.workers().values()), time.time()
      assert run.kill(chance.choice(run.active()))
      run.wait_for(lambda before=before: not before & set(run.workers().values()), job, 300)
      new_group = time.time()
      run.wait_for(lambda new_group=new_group: steps(run)[-1]["wall"] > new_group, job, 300)
      walls = [began, *(record["wall"] for record in steps(run) if record["wall"] > began)]
      pauses.append(max(b - a for a, b in itertools.pairwise(walls)))
  done = run.steps()
  line("Ray restarts all workers: longest pause", pauses, [], "", steps_lost=len(done) - len(set(done)))


def steps(run: ProcessRun) -> list[dict[str, Any]]:
  """The records of all steps; of local steps, the last one of each round."""
  found = [record for record in run.records("metrics") if "loss" in record]
  return [record for record in found if "bytes_sent" in record] or found


def new_step(run: ProcessRun, began: float, reached: int) -> float:
  """The time of the first record of a step after `reached`, since `began`; 0: there is none."""
  return next((r["wall"] for r in steps(run) if r["wall"] > began and r["step"] > reached), 0.0)


def line(
  name: str, seconds: list[float], recoveries: list[dict[str, Any]], event: str, steps_lost: int | None = None
) -> None:
  """Prints one row."""
  ordered = sorted(seconds)
  at = [ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))] for share in (0.5, 0.95, 0.99, 1.0)]
  of_event = [recovery for recovery in recoveries if recovery["event"] == event]
  compilations = sum(recovery["compilations"] for recovery in of_event) if of_event else "-"
  lost = sum(recovery["steps_lost"] for recovery in of_event) if steps_lost is None else steps_lost
  print(f"| {name} | {len(seconds)} | {' | '.join(f'{value:.3f} s' for value in at)} | {compilations} | {lost} |")


if __name__ == "__main__":
  main()
