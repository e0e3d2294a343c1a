"""Kills a real run at random moments (kill -9), resumes it with the same command, and checks that nothing changes.

  JAX_PLATFORMS=cpu python -m end_to_end.kill_and_resume [--kills 30] [--per-run 10] [--seed 0] [--chats]

A tiny model trains on text, or on conversations, with a local (emergency) checkpoint after every step and a persistent
one after every third step. The seed decides when each process is killed: during the start, a step, a save, a deletion
or a local save, before a commit, or between the two tiers. After its share of kills, a run may finish. Then the loss
and the gradient norm of every step, including repeated steps, and the final weights and optimizer state must be
bit-identical to an undisturbed run. Exits with 1 if they are not.
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

from tests.support import chats, command
from tests.support.command import Run

STEPS, PERIOD = 180, 3
PATIENCE = 8  # steps to wait for a moment that lasts only microseconds
KEYS = (
  f"checkpoint_period={PERIOD} max_num_checkpoints_to_keep=2 enable_emergency_checkpoint=true local_checkpoint_period=1"
).split()
Moment = Callable[[], bool]


def make_run(folder: Path, name: str, start: command.Start = command.start, steps: int = STEPS) -> Run:
  """Returns a run of KEYS in folder/name."""
  ram = f"local_checkpoint_directory={folder / name / 'ram'}"
  return command.text_run(folder, name, [*KEYS, ram, f"steps={steps}"], start)


def make_chat_run(folder: Path, name: str) -> Run:
  """Returns a run like that of `make_run` that trains on conversations."""
  path = folder / "chats.jsonl"
  if not path.exists():
    chats.write_jsonl(path, chats.conversations(400))
    chats.write_tokenizer(folder / "tokenizer", chats.TEMPLATES["qwen3"])
  keys = f"dataset_type=grain grain_file_type=jsonl grain_train_files={path} train_data_columns=messages vocab_size=300"
  keys += f" max_target_length=96 tokenizer_type=bpe tokenizer_path={folder / 'tokenizer'}"
  keys += f" dataset_cache_directory={folder / 'tokens'}"
  keys += f" jax_cache_dir={folder / 'compiled'} local_checkpoint_directory={folder / name / 'ram'} steps={STEPS}"
  return Run(folder / name, [*keys.split(), *KEYS], command.start)


def file_matches(root: Path, pattern: str) -> Moment:
  """Returns a condition: some file in `root` matches `pattern`."""

  def moment() -> bool:
    try:
      return any(root.glob(pattern))
    except OSError:  # a folder was renamed or deleted during the listing
      return False

  return moment


def between_tiers(run: Run) -> bool:
  """Returns whether the local copy of a step is complete, and its persistent checkpoint is not committed yet."""
  local = {int(path.name.split(".")[0]) for path in run.ram.glob("*/*/*.json")}
  saved = run.committed_steps()
  return any(step % PERIOD == 0 and step > max(saved, default=0) for step in local)


def soon_after(run: Run, step: int, seconds: float) -> Moment:
  """Returns a condition: `seconds` have passed since the record of `step` appeared."""
  seen: list[float] = []

  def moment() -> bool:
    if not seen and run.last_step >= step:
      seen.append(time.monotonic() + seconds)
    return bool(seen) and time.monotonic() >= seen[0]

  return moment


def moments(run: Run, rng: random.Random, startup: float) -> Iterator[tuple[str, Moment]]:
  """Yields (name, moment) of kills without end. `startup`: seconds from the start of a process to its first step."""
  checkpoints = run.directory / "checkpoints"
  aimed: dict[str, Moment] = {
    "in a save": file_matches(checkpoints, "*.orbax-checkpoint-tmp/state"),
    "before the commit": file_matches(checkpoints, "*.orbax-checkpoint-tmp/manifest.json"),
    "in a deletion": file_matches(checkpoints, "*/DELETED"),
    "in a local save": file_matches(run.ram, "*/*/*.bin"),
    "between local parts": file_matches(run.ram, "*/*/*.json.tmp"),
    "between the tiers": lambda: between_tiers(run),
  }
  while True:
    # Wait for some steps, so that the run makes progress and kills also happen late in a process.
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
      yield "in the start", lambda until=until: time.monotonic() > until


def kill_then_finish(run: Run, kills: int, rng: random.Random, startup: float) -> Counter[str]:
  """Kills the run up to `kills` times, then lets it finish. Returns how often each moment was hit.

  Stops early if the run is complete.
  """
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
  parser.add_argument("--kills", type=int, default=30, help="total number of kills")
  parser.add_argument("--per-run", type=int, default=10, help="kills per run, before it may finish")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--chats", action="store_true", help="train on conversations")
  arguments = parser.parse_args()
  new = make_chat_run if arguments.chats else make_run
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns when a part of a checkpoint is read
  failed, total = False, Counter[str]()
  with tempfile.TemporaryDirectory(prefix="kill-and-resume-") as name:
    folder = Path(name)
    assert new(folder, "warm").finish() == 0  # writes tokens and compiled programs
    undisturbed = new(folder, "undisturbed")
    begin = time.monotonic()
    process = undisturbed.start()
    command.wait_until(process, lambda: undisturbed.last_step >= 1)
    startup = time.monotonic() - begin
    assert command.wait_for_exit(process) == 0, undisturbed.printed[-4000:]
    number = 0
    while (left := arguments.kills - total.total()) > 0:
      rng = random.Random(f"{arguments.seed}/{number}")
      run = new(folder, f"killed-{number}")
      hit = kill_then_finish(run, min(left, arguments.per_run), rng, startup)
      total += hit
      wrong = command.differences(run, undisturbed, STEPS)
      again = sum("loss" in record for record in run.records("metrics")) - STEPS
      restored = Counter(event["tier"] for event in run.events("checkpoint_restored"))
      killed = ", ".join(f"{count} {what}" for what, count in sorted(hit.items()))
      print(f"run {number}: killed {killed}; restored {dict(restored)}; {again} steps repeated: ", end="")
      print("; ".join(wrong) or "bit-identical to the undisturbed run", flush=True)
      failed |= bool(wrong)
      number += 1
  print(f"{total.total()} kills: {'FAILED' if failed else 'all losses, gradient norms and final states are equal'}")
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
