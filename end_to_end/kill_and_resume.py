"""kill -9 at random moments of a real run, resumed by the same command each time: is anything lost or changed?

  JAX_PLATFORMS=cpu python -m end_to_end.kill_and_resume [--kills 30] [--per-run 10] [--seed 0]

A tiny model trains on text with a local (emergency) checkpoint after every step and a persistent one after every
third. Each process is killed at a moment drawn from the seed: in its start, in a step, in a save, before the commit, in
a deletion, in a local save, between the tiers. Once a run has had its share of kills it is left
to finish. Then all its records together must be the undisturbed run's: each step's loss and gradient norm, those of
steps that were done again included, and weights and optimizer state bit by bit. Exits with 1 where they are not.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from end_to_end import command
from end_to_end.command import Run

STEPS, PERIOD = 180, 3
PATIENCE = 8  # steps for which a moment of microseconds is waited for
KEYS = (
  f"checkpoint_period={PERIOD} max_num_checkpoints_to_keep=2 enable_emergency_checkpoint=true "
  "local_checkpoint_period=1 dataset_type=text"
).split()
Moment = Callable[[], bool]


def write_text(folder: Path) -> None:
  """A corpus that every clone has: this project's sources."""
  folder.mkdir()
  for path in sorted((command.ROOT / "src" / "trainer").glob("*.py")):
    (folder / f"{path.stem}.txt").write_text(path.read_text())


def make_run(folder: Path, name: str, start: command.Start = command.start, steps: int = STEPS) -> Run:
  """A run of KEYS in folder/name; all runs of `folder` share text, tokens and compiled programs."""
  if not (folder / "text").exists():
    write_text(folder / "text")
  shared = [
    f"dataset_path={folder / 'text'}",
    f"dataset_cache_directory={folder / 'tokens'}",
    f"jax_cache_dir={folder / 'compiled'}",
    f"local_checkpoint_directory={folder / name / 'ram'}",
  ]
  return Run(folder / name, [*KEYS, *shared, f"steps={steps}"], start)


def file_matches(root: Path, pattern: str) -> Moment:
  """Some file matches."""

  def moment() -> bool:
    try:
      return any(root.glob(pattern))
    except OSError:  # a folder was renamed or deleted while it was listed
      return False

  return moment


def between_tiers(run: Run) -> bool:
  """The local copies of a step are whole that the persistent tier is still to commit."""
  local = {int(path.name.split(".")[0]) for path in run.ram.glob("*/*.json")}
  saved = run.committed_steps()
  return any(step % PERIOD == 0 and step > max(saved, default=0) for step in local)


def soon_after(run: Run, step: int, seconds: float) -> Moment:
  """`seconds` after the record of `step` is there."""
  seen: list[float] = []

  def moment() -> bool:
    if not seen and run.last_step >= step:
      seen.append(time.monotonic() + seconds)
    return bool(seen) and time.monotonic() >= seen[0]

  return moment


def moments(run: Run, rng: random.Random, startup: float) -> Iterator[tuple[str, Moment]]:
  """Endless (name, moment) of kills; startup: seconds that a process needs to its first step."""
  checkpoints = run.directory / "checkpoints"
  aimed: dict[str, Moment] = {
    "in a save": file_matches(checkpoints, "*.orbax-checkpoint-tmp/state"),
    "before the commit": file_matches(checkpoints, "*.orbax-checkpoint-tmp/manifest.json"),
    "in a deletion": file_matches(checkpoints, "*/DELETED"),
    "in a local save": file_matches(run.ram, "*/*.bin"),
    "between local parts": file_matches(run.ram, "*/*.json.tmp"),
    "between the tiers": lambda: between_tiers(run),
  }
  while True:
    # Some steps on: what a process does first is not all there is to see, and the run must get somewhere.
    step, seconds = run.last_step + rng.randint(1, 6), rng.uniform(0, 0.05)
    yield "in a step", soon_after(run, step, seconds)
    name = rng.choice(sorted(aimed))
    step = run.last_step + rng.randint(1, 6)
    yield (
      name,
      lambda name=name, step=step: run.last_step >= step and (aimed[name]() or run.last_step >= step + PATIENCE),
    )
    if rng.random() < 0.4:
      until = time.monotonic() + rng.uniform(0.3, 1.2) * startup
      yield "in its start", lambda until=until: time.monotonic() > until


def kill_then_finish(run: Run, kills: int, rng: random.Random, startup: float) -> Counter[str]:
  """Kills the run up to `kills` times (fewer where it is complete before), then lets it finish; what it was hit in."""
  hit: Counter[str] = Counter()
  for _, (name, moment) in zip(range(kills), moments(run, rng, startup)):
    process = run.start()
    if not command.wait_until(process, moment, pause=0.001):
      assert process.poll() == 0, f"the command ended with {process.poll()}:\n{run.printed[-4000:]}"
      break
    process.send_signal(signal.SIGKILL)
    if process.wait(60) == -signal.SIGKILL:
      hit[name] += 1
  code = run.finish()
  assert code == 0, f"the command ended with {code}:\n{run.printed[-4000:]}"
  return hit


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--kills", type=int, default=30, help="in all")
  parser.add_argument("--per-run", type=int, default=10, help="before a run is left to finish")
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax on reading a part of a checkpoint
  failed, total = False, Counter[str]()
  with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
    folder = Path(name)
    assert make_run(folder, "warm").finish() == 0  # tokens and compiled programs
    undisturbed = make_run(folder, "undisturbed")
    begin = time.monotonic()
    process = undisturbed.start()
    command.wait_until(process, lambda: undisturbed.last_step >= 1)
    startup = time.monotonic() - begin
    assert command.wait_for_exit(process) == 0, undisturbed.printed[-4000:]
    number = 0
    while (left := arguments.kills - total.total()) > 0:
      rng = random.Random(f"{arguments.seed}/{number}")
      run = make_run(folder, f"killed-{number}")
      hit = kill_then_finish(run, min(left, arguments.per_run), rng, startup)
      total += hit
      wrong = command.differences(run, undisturbed, STEPS)
      again = sum("loss" in record for record in run.records("metrics")) - STEPS
      restored = Counter(event["tier"] for event in run.events("checkpoint_restored"))
      told = ", ".join(f"{count} {what}" for what, count in sorted(hit.items()))
      print(f"run {number}: killed {told}; restored {dict(restored)}; {again} steps done again: ", end="")
      print("; ".join(wrong) or "equal to the undisturbed run bit by bit", flush=True)
      failed |= bool(wrong)
      number += 1
  print(f"{total.total()} kills: {'FAILED' if failed else 'all losses, gradient norms and final states are equal'}")
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
