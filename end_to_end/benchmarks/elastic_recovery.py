"""Times recoveries, from a fault to the next completed step, and the cost of snapshots, on simulated slices of a CPU.

    JAX_PLATFORMS=cpu python -m end_to_end.benchmarks.elastic_recovery [--runs 10]

Measures three things. Recoveries of a tiny model in a warm process (every topology is compiled), from a snapshot and
from a checkpoint. A process that is killed during a save and started again, with and without a compilation cache. The
step time of a larger model with a snapshot after every fourth step. The wait for a replacement is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from end_to_end.benchmarks.common import positive
from tests.support.elastic_harness import NUM_SLICES, TINY, Harness

DOWN_AND_UP = "slice_down@10:1, slice_up@15:1, slice_down@20:2, slice_up@25:2"
REPLACED = "slice_down@10:1, slice_down@20:2"
STEPS = 30


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--runs", type=positive, default=10, help="runs per row of the table")
  runs = parser.parse_args().runs
  jax.config.update("jax_num_cpu_devices", NUM_SLICES)
  print("| recovery | median | least | most | compilations | completed steps lost | n |\n|---|---|---|---|---|---|---|")
  with tempfile.TemporaryDirectory(prefix="elastic-recovery-") as directory:
    in_process(Path(directory), runs)
    for cached in (True, False):
      name = f"process killed and started again, {'with' if cached else 'without'} a compilation cache"
      line(name, [restart(Path(directory), i, cached) for i in range(max(2, runs // 3))])
    snapshot_cost(Path(directory))


def in_process(directory: Path, runs: int) -> None:
  harness = Harness(directory)
  base = [f"steps={STEPS}", "checkpoint_period=9"]
  degrade, fixed = [*base, "elastic_min_slice_count=2"], [*base, "elastic_min_slice_count=-1"]
  harness.run("warm", [*degrade, "snapshot_period=1", f"fault_injection={DOWN_AND_UP}"])
  for backup, keys in (("snapshot", ["snapshot_period=1"]), ("checkpoint", ["snapshot_period=-1"])):
    found: list[dict[str, Any]] = []
    for i in range(runs):
      found += harness.run(f"a{i}", [*degrade, *keys, f"fault_injection={DOWN_AND_UP}"]).of_kind("recovery")
    line(f"slice down, 3 -> 2 slices, from a {backup}", [r for r in found if r["event"] == "slice_down"])
    line(f"slice up, 2 -> 3 slices, from a {backup}", [r for r in found if r["event"] == "slice_up"])
    replaced: list[dict[str, Any]] = []
    for i in range(runs):
      replaced += harness.run(f"b{i}", [*fixed, *keys, f"fault_injection={REPLACED}"]).of_kind("recovery")
    line(f"slice replaced, 3 -> 3 slices, from a {backup}", replaced)


def line(name: str, recoveries: Sequence[dict[str, Any]]) -> None:
  """Prints one row of the table."""
  seconds = [r["seconds"] - r["wait_seconds"] for r in recoveries]
  compilations, lost = sum(r["compilations"] for r in recoveries), sum(r["steps_lost"] for r in recoveries)
  median, least, most = statistics.median(seconds), min(seconds), max(seconds)
  print(
    f"| {name} | {median:.3f} s | {least:.3f} s | {most:.3f} s | {compilations} | {lost} | {len(seconds)} |", flush=True
  )


def restart(directory: Path, number: int, cached: bool) -> dict[str, Any]:
  """Returns a recovery record: from the kill of a process to the first step that the next process completes."""
  name = f"restart-{number}-{cached}"
  cache = directory / "cache" if cached else ""
  keys = [*TINY.split(), f"steps={STEPS}", "checkpoint_period=9", f"num_slices={NUM_SLICES}", "devices_per_slice=1"]
  keys += ["fault_injection=ckpt_kill@18", "enable_report=false", "services=", f"jax_cache_dir={cache}"]
  keys += [f"base_output_directory={directory}", f"run_name={name}"]
  for _ in range(2):
    subprocess.run([sys.executable, "-m", "trainer", "configs/base.yml", *keys], capture_output=True, timeout=1200)
  events, steps = (list(records(directory / name / f"{kind}.jsonl")) for kind in ("events", "metrics"))
  (killed,) = [event for event in events if event["kind"] == "fault_injected"]
  first = min((r for r in steps if r["wall"] > killed["wall"]), key=lambda r: r["wall"])
  before = max(r["step"] for r in steps if r["wall"] <= killed["wall"])
  return {
    "seconds": first["wall"] - killed["wall"],
    "wait_seconds": 0.0,
    "steps_lost": before - first["step"] + 1,
    "compilations": sum(
      e.get("compilations", 0) for e in events if e["kind"] == "compile" and killed["wall"] < e["wall"] < first["wall"]
    ),
  }


def snapshot_cost(directory: Path) -> None:
  """Prints the cost of a snapshot of the demo model: its step and the next step, compared with two other steps."""
  keys = ["steps=160", "snapshot_period=4", "fault_injection=", "enable_report=false", "checkpoint_period=1000"]
  keys += ["elastic_min_slice_count=-1"]  # so that nothing is compiled in the background
  keys += [f"base_output_directory={directory}", "run_name=cost"]
  command = [sys.executable, "-m", "trainer", "configs/elastic_demo.yml", *keys]
  subprocess.run(command, check=True, capture_output=True, timeout=3000)
  steps = [(r["step"], r["seconds"]) for r in records(directory / "cost" / "metrics.jsonl") if r.get("step", 0) > 20]
  own, following, third, fourth = (
    statistics.median(seconds for step, seconds in steps if step % 4 == place) for place in range(4)
  )
  usual = (third + fourth) / 2
  cost = own + following - 2 * usual
  taken = [e for e in records(directory / "cost" / "events.jsonl") if e["kind"] == "snapshot"]
  done = statistics.median(e["seconds"] for e in taken)
  print(
    f"\nA snapshot of {taken[-1]['bytes'] / 1e6:.1f} MB ({NUM_SLICES} copies) completes in {done * 1e3:.0f} ms. "
    f"With a snapshot per step it costs {cost * 1e3:.1f} ms, {cost / usual:.1%} of a step of {usual * 1e3:.1f} ms."
  )


def records(path: Path) -> Iterable[dict[str, Any]]:
  return (json.loads(text) for text in path.read_text().splitlines())


if __name__ == "__main__":
  main()
