"""Profiles of runs that lose a slice or get SIGTERM inside the profile's window, on each kind of cluster.

  JAX_PLATFORMS=cpu python -m end_to_end.profiles [--cluster simulated|multiprocess|pathways]

Each attempt records a window of its own. So an attempt that ends inside its window must leave a readable profile of the
steps so far, the attempt after it a whole one, and no attempt may fail because a profile is still open. JAX's reader
must find calls of training steps in each profile. Exits with 1 if a profile is missing or cannot be read.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support import command
from tests.support.command import Run
from tests.support.process_runs import ProcessRun

WINDOW = "profiler=xplane skip_first_n_steps_for_profiler=3 profiler_steps=8".split()
ELASTIC = (
  "elastic_enabled=true elastic_min_slice_count=1 elastic_min_resize_interval_seconds=0 snapshot_period=1".split()
)
DATA = "vocab_size=64 dataset_type=synthetic eval_steps=0".split()
CLUSTERS = {
  "simulated": ["num_slices=3"],
  "pathways": ["cluster=pathways", "cluster_standin=3x1", "num_slices=3", "enable_single_controller=true"],
}


def readable(run: Run) -> dict[str, int]:
  """{folder of an attempt: number of events of the step's dispatch in its profile}. Raises the reader's error for a
  damaged file."""
  from jax.profiler import ProfileData

  found = {}
  for path in sorted(run.directory.glob("profile/*/plugins/profile/*/*.xplane.pb")):
    planes = ProfileData.from_file(str(path)).planes
    names = [event.name for plane in planes for line in plane.lines for event in line.events]
    found[path.relative_to(run.directory / "profile").parts[0]] = sum("one_controller.py" in name for name in names)
  return found


def problems(run: Run, profiles: int) -> list[str]:
  """What is wrong with the profiles of a run that must have `profiles` of them, or more."""
  found = readable(run)
  wrong = [f"{folder}: no step in the profile" for folder, steps in found.items() if not steps]
  if len(found) < profiles:
    wrong.append(f"{len(found)} profiles instead of {profiles}")
  warnings = ("no profile of this attempt", "profile was lost")
  return wrong + [line for line in run.printed.splitlines() if any(text in line for text in warnings)]


def slice_lost(folder: Path, keys: Sequence[str]) -> list[str]:
  """Problems of a run that loses a slice in the first attempt's window, and gets it back in the second one's."""
  faults = "fault_injection=slice_down@7:1,slice_up@13:1"
  run = Run(folder, [*DATA, *ELASTIC, *WINDOW, *keys, "steps=40", faults, "checkpoint_period=20"])
  assert run.finish() == 0, run.printed[-4000:]
  return problems(run, 3)


def stopped(folder: Path, keys: Sequence[str]) -> list[str]:
  """Problems of a run that gets SIGTERM inside the window, and of the process that resumes it."""
  run = Run(folder, [*DATA, *WINDOW, *keys, "profiler_steps=100000", "steps=200000", "checkpoint_period=100000"])
  process = run.start()
  command.wait_until(process, lambda: run.last_step > 8)
  process.send_signal(signal.SIGTERM)
  assert command.wait_for_exit(process) == 42, run.printed[-4000:]
  code = run.finish(f"steps={run.last_step + 20}", "profiler_steps=8")
  assert code == 0, run.printed[-4000:]
  return problems(run, 2)


def member_lost(folder: Path) -> list[str]:
  """Problems of a run whose slices are processes: one is killed inside the window, and the survivors go on."""
  run = ProcessRun(folder, [*WINDOW, "profiler_steps=30", "steps=60", "checkpoint_period=30"])
  process = run.launch()
  command.wait_until(process, lambda: run.last_step > 8)
  killed = run.kill(2)
  assert killed and command.wait_for_exit(process) == 0, run.printed[-4000:]
  return problems(run, 2)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--cluster", choices=[*CLUSTERS, "multiprocess"], help="only this one")
  chosen = parser.parse_args().cluster
  failed = 0
  with tempfile.TemporaryDirectory(prefix="profiles-") as name:
    cases: dict[str, Callable[[Path], list[str]]] = {}
    for cluster, keys in CLUSTERS.items():
      cases[f"{cluster}: a slice is lost and returns"] = functools.partial(slice_lost, keys=keys)
      cases[f"{cluster}: SIGTERM"] = functools.partial(stopped, keys=keys)
    cases["multiprocess: a process is killed"] = member_lost
    for index, (case, check) in enumerate(cases.items()):
      if chosen is None or case.startswith(chosen):
        wrong = check(Path(name) / str(index))
        failed += bool(wrong)
        print(f"{case}: {'; '.join(wrong) or 'every profile is there and readable'}", flush=True)
  return int(failed > 0)


if __name__ == "__main__":
  sys.exit(main())
