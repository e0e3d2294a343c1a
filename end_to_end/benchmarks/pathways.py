"""Counts the requests and bytes of steps, saves and recoveries behind a stand-in for Pathways, and times recoveries.

    python -m end_to_end.benchmarks.pathways [--runs 10]

Uses the model and the slices of tests.support.elastic_harness: three slices of one CPU device, every set of slices
compiled before. Requests and bytes are differences of the stand-in's own counters, between two runs or between two
moments of a recovery. Recoveries are timed behind the stand-in and on simulated slices, in turn; the wait for a
replacement is not counted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from end_to_end.benchmarks.common import positive
from end_to_end.benchmarks.elastic_recovery import DOWN_AND_UP, REPLACED
from end_to_end.pathways_histories import StandIn
from tests.support.elastic_harness import NUM_SLICES, Harness

from trainer.elastic.elastic_run import ElasticRun

NEVER = 1000  # as a period, in steps


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--runs", type=positive, default=10, help="runs per kind of recovery")
  parser.add_argument("--recoveries", choices=("simulated", "pathways"), help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.recoveries:
    print(json.dumps(recoveries(options.recoveries, options.runs)), flush=True)
    os._exit(0)
  with tempfile.TemporaryDirectory(prefix="pathways-") as directory:
    count(Path(directory))
  unwanted = Counter(compilations=0, steps_lost=0)
  print("\n| fault to next completed step | cluster | p50 | p95 | until detected | restore | first step | n |")
  print("|---|---|---|---|---|---|---|---|", flush=True)
  for kind in ("pathways", "simulated"):
    command = [
      sys.executable,
      "-m",
      "end_to_end.benchmarks.pathways",
      "--recoveries",
      kind,
      "--runs",
      str(options.runs),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=3000, check=True)
    for name, found in json.loads(done.stdout.splitlines()[-1]).items():
      for key in unwanted:
        unwanted[key] += sum(record[key] for record in found)
      p50, p95 = np.percentile([r["seconds"] - r["wait_seconds"] for r in found], [50, 95])
      parts = (np.median([r[f"{part}_seconds"] for r in found]) for part in ("detect", "restore", "first_step"))
      of_parts = " | ".join(f"{seconds:.3f} s" for seconds in parts)
      print(f"| {name} | {kind} | {p50:.3f} s | {p95:.3f} s | {of_parts} | {len(found)} |", flush=True)
  print(f"\nAll of them: {unwanted['compilations']} compilations, {unwanted['steps_lost']} completed steps lost.")
  sys.stdout.flush()
  os._exit(0)


def count(directory: Path) -> None:
  """Prints the requests and bytes of a step, of a step with a snapshot, and of saves."""
  stand_in = StandIn()
  harness = Harness(directory, stand_in.make_cluster)

  def run(steps: int, *keys: str) -> Counter[str]:
    before = totals(stand_in)
    harness.run("counted", [f"steps={steps}", "eval_steps=0", *keys])
    return totals(stand_in) - before

  def ten_steps(save: int, snapshot: int, *keys: str) -> Counter[str]:
    """What ten steps cost more: both runs end with the same save."""
    periods = (f"checkpoint_period={save}", f"snapshot_period={snapshot}")
    run(10, *periods, *keys)  # compiles
    gc.collect()  # else executables of earlier runs are dropped while requests are counted
    few, many = run(10, *periods, *keys), run(20, *periods, *keys)
    many.subtract(few)
    return many

  local = ("enable_emergency_checkpoint=true", f"local_checkpoint_directory={directory / 'ram'}")
  plain, snapshot = ten_steps(NEVER, NEVER), ten_steps(NEVER, 1)
  saved = ten_steps(5, NEVER)
  copied = ten_steps(NEVER, NEVER, *local, "local_checkpoint_period=5")
  for row in (saved, copied):
    row.subtract(plain)
  print("| of | requests | bytes to the slices | bytes from the slices | requests by kind |\n|---|---|---|---|---|")
  line("a step", plain, 10)
  line("a step with a snapshot", snapshot, 10)
  line("a persistent save", saved, 2)
  line("an emergency save", copied, 2)
  for part, row in of_a_recovery(harness, stand_in).items():
    line(part, row, 1)
  sizes: list[int] = []
  harness.run("size", ["steps=1"], prepare=lambda session, cluster: sizes.append(session.state_bytes))
  print(f"\nThe state has {sizes[0]:,} bytes.")


def of_a_recovery(harness: Harness, stand_in: StandIn) -> dict[str, Counter[str]]:
  """What the parts of a recovery cost, from a lost slice to the next completed step, which two slices compute."""
  parts: dict[str, Counter[str]] = {}
  last = Counter[str]()

  def note(elastic: ElasticRun, part: str) -> None:
    nonlocal last
    if elastic.recovery.under_way or part == "":
      now = totals(stand_in)
      parts[part], last = now - last, now

  def noting(elastic: ElasticRun, call: Callable[..., Any], part: str, *, before: bool = False) -> Callable[..., Any]:
    """The call, with a note of the part before or after it."""

    def noted(*arguments: Any, **keywords: Any) -> Any:
      if before:
        note(elastic, part)
      result = call(*arguments, **keywords)
      if not before:
        note(elastic, part)
      return result

    return noted

  def watch(elastic: ElasticRun) -> None:
    if not elastic.faults.fired:  # the first attempt
      faults, recovery = elastic.faults, elastic.recovery
      faults.record = noting(elastic, faults.record, "")
      for method, part in (("begin", "finding a loss"), ("waited", "waiting"), ("restored", "a restore")):
        setattr(recovery, method, noting(elastic, getattr(recovery, method), part))
      recovery.finish = noting(elastic, recovery.finish, "the step after it", before=True)  # type: ignore[method-assign]

  keys = ["steps=20", "eval_steps=0", f"checkpoint_period={NEVER}", "snapshot_period=1"]
  for name in ("compiles", "counted"):
    gc.collect()
    harness.run(name, [*keys, "elastic_min_slice_count=2", "fault_injection=slice_down@10:1"], watch=watch)
  del parts[""]
  return parts


def totals(stand_in: StandIn) -> Counter[str]:
  """What the stand-in has counted of this client."""
  (client,) = stand_in.faults.server.control("status")["clients"]
  found = Counter({kind.removesuffix("_request"): number for kind, number in client["requests"].items()})
  return found + Counter(bytes_received=client["bytes_received"], bytes_sent=client["bytes_sent"])


def line(name: str, row: Counter[str], count: int) -> None:
  """Prints one row of the table, divided by `count`."""
  requests = {kind: row[kind] / count for kind in row if not kind.startswith("bytes") and row[kind]}
  by_kind = ", ".join(f"{number:g} {kind}" for kind, number in sorted(requests.items(), key=lambda x: -x[1]))
  sent, received = row["bytes_sent"] / count, row["bytes_received"] / count
  print(f"| {name} | {sum(requests.values()):g} | {received:,.0f} | {sent:,.0f} | {by_kind} |", flush=True)


def recoveries(kind: str, runs: int) -> dict[str, list[dict[str, Any]]]:
  """The recovery records of `runs` runs of each kind, by name."""
  if kind == "simulated":
    jax.config.update("jax_num_cpu_devices", NUM_SLICES)
  with tempfile.TemporaryDirectory(prefix="pathways-") as directory:
    harness = Harness(Path(directory)) if kind == "simulated" else Harness(Path(directory), StandIn().make_cluster)
    base = ["steps=30", "snapshot_period=1", f"checkpoint_period={NEVER}"]
    degrade = [*base, "elastic_min_slice_count=2", f"fault_injection={DOWN_AND_UP}"]
    fixed = [*base, "elastic_min_slice_count=-1", f"fault_injection={REPLACED}"]
    harness.run("warm", degrade)
    down = [record for i in range(runs) for record in harness.run(f"a{i}", degrade).of_kind("recovery")]
    replaced = [record for i in range(runs) for record in harness.run(f"b{i}", fixed).of_kind("recovery")]
  return {
    "slice down, 3 -> 2 slices": [record for record in down if record["event"] == "slice_down"],
    "slice up, 2 -> 3 slices": [record for record in down if record["event"] == "slice_up"],
    "slice replaced, 3 -> 3 slices": replaced,
  }


if __name__ == "__main__":
  main()
