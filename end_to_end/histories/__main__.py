"""Plays random histories of a tiny run, and compares each with an undisturbed run.

  python -m end_to_end.histories KIND [--first 0] [--count N] [key=value ...]

KIND is one of:

  elastic     one controller, simulated slices: lost, returned and flapping in steps, saves, evaluations, recoveries
  pathways    the same behind a stand-in for Pathways, with the real proxy client; hangs and kills at random times too
  processes   a process for each slice: kill, stop, SIGTERM, two at once, a lost supervisor, output that is cut or full,
              members that fail at each start, folders that move, saves that fail
  local       processes whose replicas take several steps alone, hit in their rounds
  lanes       slices of two processes, one of which is hit
  storage     processes whose bucket fails for 1 to 90 s, with kills
  partition   three network namespaces whose links are cut (Linux, `unshare`)
  flips       a flipped bit in gradients, weights or optimizer state, with one controller and with processes
  sigterm     SIGTERM at random moments of the real command
  kill        kill -9 at random moments of the real command, which trains on text or conversations
  data        resumes that change batch size, weights, sources, packing, length and seed; 25 for each seed; no training

Seed i determines history i. Every run must complete with the promised exit codes. Every line of metrics and the final
state must be equal to the undisturbed run's, each example must be used once, and nothing may be left. With fewer slices
than in the undisturbed run, one controller adds in another order: then sums may differ by 1e-5. After a history that
breaks a rule, prints the command that repeats it and exits with 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

DEFAULTS = {
  "elastic": 100, "pathways": 20, "processes": 20, "local": 20, "lanes": 20, "storage": 10, "partition": 1, "flips": 50,
  "sigterm": 10, "kill": 10, "data": 40,
}  # fmt: skip
MODULES = {
  "pathways": "elastic",
  "local": "processes",
  "lanes": "processes",
  "storage": "processes",
  "sigterm": "command",
  "kill": "command",
}  # other kinds have a module of their name

_TELL_SECONDS = 10.0  # between two lines of what was played so far


@dataclasses.dataclass
class Played:
  """One history. what: its faults. counts: of what has happened. printed: the end of its log, if a rule is broken."""

  what: str
  broken: list[str]
  counts: Counter[str]
  printed: str = ""


Play = Callable[[int], Played]
Open = Callable[[Path, str, range, Sequence[str]], AbstractContextManager[Play]]


def run(kind: str, folder: Path, seeds: range, keys: Sequence[str] = (), **options: Any) -> int:
  """Plays the histories, prints what has happened, and returns the exit code. options: of the kind."""
  opened: Open = importlib.import_module(f"end_to_end.histories.{MODULES.get(kind, kind)}").opened
  counts, began, told = Counter[str](), time.monotonic(), 0.0
  with opened(folder, kind, seeds, keys, **options) as play:
    for number, seed in enumerate(seeds, 1):
      played = play(seed)
      counts.update(played.counts)
      if played.broken:
        print(f"{kind} {seed} ({played.what}):", *played.broken, sep="\n  ")
        print(played.printed)
        print(f"repeat with: python -m end_to_end.histories {kind} --first {seed} --count 1 {' '.join(keys)}")
        return 1
      seconds = time.monotonic() - began
      if seconds > told + _TELL_SECONDS or number == len(seeds):
        told = seconds
        found = ", ".join(f"{count:,} {what}" for what, count in sorted(counts.items()))
        print(f"{number} histories of {kind} in {seconds:.0f} s, all correct: {found}", flush=True)
  return 0


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("kind", choices=DEFAULTS)
  parser.add_argument("--first", type=int, default=0, help="the first seed")
  parser.add_argument("--count", type=int, help="number of histories")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs, such as num_experts=4")
  given = parser.parse_args()
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns when a part of a checkpoint is read
  seeds = range(given.first, given.first + (given.count or DEFAULTS[given.kind]))
  with tempfile.TemporaryDirectory(prefix=f"histories-{given.kind}-") as folder:
    return run(given.kind, Path(folder), seeds, given.keys)


if __name__ == "__main__":
  code = main()
  sys.stdout.flush()
  os._exit(code)  # threads may still wait for slices that hung; the interpreter's end would abort under them
