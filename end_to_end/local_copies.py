"""Random damage to the local copies of real processes on two hosts: a run goes on from the newest good state.

  python -m end_to_end.local_copies [--count 20] [--first 0]

Two slices of two processes each; each host has a home folder of its own, where each process copies its part of the
state. Seed i determines trial i: all processes are killed; then copies are deleted, cut, changed in one bit, emptied,
exchanged with another step's or another process's, or replaced by a folder; a host loses all of them, or the hosts
change places. Then the same command starts again. A step can be restored if each process's part of its state has an
undamaged copy on some host: the run must resume from the newest such step, or from a newer one, and complete. Every
step must be recorded, and losses and final state must be bit-identical to a run of one process without local copies.
After the first trial that breaks a rule, prints the command that repeats it and exits with 1.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from end_to_end.corrupt_entries import a_folder, missing, truncated
from tests.support.command import differences
from tests.support.forked_runs import Server
from tests.support.process_runs import seeded_command
from tests.support.torchrun_runs import OneWorker
from tests.support.two_hosts import KEYS, PERIOD, PROCESSES, STEPS, TwoHosts


def _flip(path: Path, chance: random.Random) -> None:
  """Changes any bit: each byte of a local copy counts, unlike those of the files in storage."""
  data = bytearray(path.read_bytes())
  data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
  path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path, random.Random], object]] = {
  "delete": missing,
  "flip a bit of": _flip,
  "cut": truncated,
  "empty": lambda path, chance: path.write_bytes(b""),
  "make a folder of": a_folder,
}


def damage(run: TwoHosts, chance: random.Random) -> tuple[list[str], int]:
  """Damages copies. Returns what was done, and the newest step that needs no damaged file (0: none)."""
  done: list[str] = []
  touched: set[Path] = set()
  name = lambda path: f"{path.relative_to(run.folder).parts[0]}/{path.name}"
  if chance.random() < 0.15:
    home = chance.choice(run.homes)
    done.append(f"wipe {home.name}")
    shutil.rmtree(home / "ram")
  files = run.copies(".bin", ".json")
  for _ in range(chance.randrange(1, 9)):
    path = chance.choice(files)
    if path in touched:
      continue
    if chance.random() < 0.25:  # content of another copy under this name
      other = chance.choice([file for file in files if file.suffix == path.suffix and file != path])
      if other not in touched:
        pairs = [(other, path)]
        if chance.random() < 0.5:  # both files of the copy
          pairs = [(other.with_suffix(suffix), path.with_suffix(suffix)) for suffix in (".bin", ".json")]
        if all(source.is_file() and target not in touched for source, target in pairs):
          done.append(f"copy {name(other)} over {' and '.join(name(target) for _, target in pairs)}")
          touched |= {target for _, target in pairs}
          for source, target in pairs:
            shutil.copy(source, target)
      continue
    what = chance.choice(list(DAMAGE))
    done.append(f"{what} {name(path)}")
    touched.add(path)
    DAMAGE[what](path, chance)
  if chance.random() < 0.2:
    done.append("the hosts change places")
    run.homes.reverse()
  return done, _newest(run, touched)


def _newest(run: TwoHosts, damaged: set[Path]) -> int:
  """The newest step of which each process's part has a copy without a damaged file; 0 if there is none."""
  parts: dict[int, set[str]] = {}
  for index in run.copies(".json"):
    data = index.with_suffix(".bin")
    if data.is_file() and not damaged & {index, data}:
      step, _, process, _ = index.name.split(".")
      parts.setdefault(int(step), set()).add(process)
  return max((step for step, processes in parts.items() if len(processes) == PROCESSES), default=0)


def trial(run: TwoHosts, undisturbed: OneWorker, seed: int) -> tuple[str, list[str]]:
  """Plays trial `seed`. Returns what happened, and the rules that the run breaks."""
  chance = random.Random(seed)
  reached = run.kill_after(chance.randrange(2 * PERIOD + 1, STEPS - PERIOD))
  done, good = damage(run, chance)
  code = run.finish()
  (resumed,) = {event["step"] for event in run.events("restore")[1:] if event["tier"] != "peer"}
  what = f"killed after step {reached}; {', '.join(done)}; {good} is undamaged, resumed from {resumed}"
  if code != 0:
    return what, [f"exit code {code}"]
  broken = differences(run, undisturbed, STEPS)
  if not good <= resumed <= reached:
    broken.append(f"step {good} could be restored")
  if sorted(run.losses()) != list(range(1, STEPS + 1)):
    broken.append("not every step is recorded")
  return what, broken


def run_all(folder: Path, first: int, count: int, server: Server) -> int:
  """Runs and checks the trials; returns the exit code."""
  compiled = f"jax_cache_dir={folder / 'compiled'}"
  undisturbed = OneWorker(folder / "undisturbed", [*KEYS, compiled], slices=2, server=server)
  with undisturbed.launched() as worker:
    assert undisturbed.wait(worker) == 0, undisturbed.tail()
  for seed in range(first, first + count):
    start = time.monotonic()
    run = TwoHosts(folder / f"trial-{seed}", [compiled], server=server)
    try:
      what, broken = trial(run, undisturbed, seed)
    except AssertionError as error:
      what, broken = "not finished", [str(error)]
    print(f"trial {seed}, {time.monotonic() - start:.0f} s: {what}", flush=True)
    if broken:
      print(*broken, run.tail(), sep="\n  ")
      print(f"repeat with: python -m end_to_end.local_copies --first {seed} --count 1")
      return 1
  return 0


if __name__ == "__main__":
  sys.exit(seeded_command(__doc__, "trials", 20, run_all))
