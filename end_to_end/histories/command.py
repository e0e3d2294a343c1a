"""SIGTERM and kill -9 at random moments of the real command, which is started again until the run is complete.

A tiny model trains on text; of the killed runs every third one on conversations.

sigterm: a third of the signals come between 0.3 s after the start of a process and the time that an undisturbed run
takes, a third after a random step, and a third around the last step. A process ends with 42 and everything committed,
or with 0 and the run complete.
kill: with a local checkpoint after every step and a persistent one after every third. Half of the kills come in a step,
the others at a moment of MOMENTS or in the start.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from end_to_end.histories import oracle
from end_to_end.histories.__main__ import Play, Played
from tests.support import chats, command
from tests.support.command import Process, Run

STEPS, SIGNALS, KILLS = 60, 3, 6  # signals, kills: in a history, at most
EARLIEST_SECONDS = 0.3  # after the start of the process
KEYS = {
  "sigterm": "checkpoint_period=5 max_num_checkpoints_to_keep=2 eval_interval=3 eval_steps=1".split(),
  "kill": "checkpoint_period=3 max_num_checkpoints_to_keep=2 enable_emergency_checkpoint=true "
  "local_checkpoint_period=1".split(),
}
AIMS = ("at any moment", "after a step", "around the end")
PATIENCE = 8  # steps to wait for a moment that lasts only microseconds
MOMENTS = {  # files whose existence says where the process is
  "in a save": "out/run/checkpoints/*.orbax-checkpoint-tmp/state",
  "before the commit": "out/run/checkpoints/*.orbax-checkpoint-tmp/manifest.json",
  "in a deletion": "out/run/checkpoints/*/DELETED",
  "in a local save": "ram/*/*/*.bin",
  "between local parts": "ram/*/*/*.json.tmp",
}


def cpu_seconds(process: Process) -> float:
  """User and system time of the process so far."""
  fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
  return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def handles_sigterm(process: Process) -> bool:
  """Whether the process has a handler for SIGTERM."""
  lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
  caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
  return bool(caught >> (signal.SIGTERM - 1) & 1)


def wait_for_handler(process: Process) -> None:
  """Waits until the process is EARLIEST_SECONDS old and has a handler.

  Raises AssertionError if the process needs more than EARLIEST_SECONDS of CPU time. Wall time may be longer.
  """
  time.sleep(EARLIEST_SECONDS)
  while process.poll() is None and not handles_sigterm(process):
    assert cpu_seconds(process) < EARLIEST_SECONDS, f"no handler for SIGTERM after {cpu_seconds(process)} s of CPU time"
    time.sleep(0.005)


def terminate(run: Run, aim: str, chance: random.Random, duration: float, steps: int) -> int:
  """Starts the run, sends SIGTERM, and returns the exit code. Raises AssertionError if it leaves what it may not."""
  first, began = run.last_step, time.monotonic()
  process = run.start()
  wait_for_handler(process)
  until = began + chance.uniform(EARLIEST_SECONDS, duration)
  step = chance.randint(min(first + 1, steps), steps) if aim == "after a step" else steps
  moment = (lambda: time.monotonic() >= until) if aim == "at any moment" else (lambda: run.last_step >= step)
  command.wait_until(process, moment, pause=0.002)
  if aim == "around the end":
    time.sleep(chance.uniform(0, 0.8))
  process.send_signal(signal.SIGTERM)
  code = command.wait_for_exit(process)
  if wrong := mistake(code, run.last_step, max(run.committed_steps(), default=0), steps):
    raise AssertionError(f"SIGTERM {aim}, after {time.monotonic() - began:.2f} s: {wrong}\n{run.printed[-4000:]}")
  return code


def mistake(code: int, last: int, committed: int, steps: int) -> str:
  """What is wrong with a process that ended with `code` after step `last`; "" if nothing is."""
  if code not in (0, 42):
    return f"exit code {code}"
  if committed != last:
    return f"step {last} is not committed"
  return "exit code 0, but the run is not complete" if code == 0 and last != steps else ""


def kill(run: Run, chance: random.Random, duration: float) -> str:
  """Starts the run and kills it at a random moment. Returns the moment; "" if the run was complete before."""
  process, began = run.start(), time.monotonic()
  step = run.last_step + chance.randint(1, 6)  # so that the run makes progress
  aim = chance.choice(["in a step", "in a step", "in the start", *MOMENTS])
  until = began + chance.uniform(0.1, 0.6) * duration
  moments = {"in a step": lambda: run.last_step >= step, "in the start": lambda: time.monotonic() > until}
  moment = moments.get(aim, lambda: run.last_step >= step and (exists(run, aim) or run.last_step >= step + PATIENCE))
  if command.wait_until(process, moment, pause=0.001):
    time.sleep(chance.uniform(0, 0.05) * (aim == "in a step"))
    process.send_signal(signal.SIGKILL)
  if process.wait(60) == -signal.SIGKILL:
    return aim
  assert process.poll() == 0, f"the command ended with {process.poll()}:\n{run.printed[-4000:]}"
  return ""


def exists(run: Run, aim: str) -> bool:
  """Whether the process is at this moment of MOMENTS."""
  try:
    return any(run.folder.glob(MOMENTS[aim]))
  except OSError:  # a folder was renamed or deleted during the listing
    return False


def chat_keys(folder: Path) -> list[str]:
  """Keys of runs that train on conversations; all in `folder` share them."""
  path = folder / "chats.jsonl"
  if not path.exists():
    chats.write_jsonl(path, chats.conversations(400))
    chats.write_tokenizer(folder / "tokenizer", chats.TEMPLATES["qwen3"])
  own = f"dataset_type=grain grain_file_type=jsonl grain_train_files={path} train_data_columns=messages vocab_size=300"
  own += f" max_target_length=96 tokenizer_type=bpe tokenizer_path={folder / 'tokenizer'}"
  own += f" dataset_cache_directory={folder / 'tokens'}"
  return own.split()


def chat_run(folder: Path, name: str, keys: Sequence[str], start: command.Start) -> Run:
  """A run that trains on conversations."""
  return Run(folder / name, [*chat_keys(folder), f"jax_cache_dir={folder / 'compiled'}", *keys], start)


def check(run: Run, undisturbed: Run, promise: oracle.Promise) -> list[str]:
  """The rules that a complete run breaks."""
  ours, theirs = (oracle.read(each.directory, STEPS, printed=each.printed) for each in (run, undisturbed))
  return oracle.broken(ours, theirs, promise)


class Command:
  """Histories of one kind. make: makes a run in a folder. They share tokens, programs and the undisturbed run."""

  def __init__(self, folder: Path, kind: str, keys: Sequence[str], make: Callable[..., Run]) -> None:
    self._folder, self._kind, self._make = folder, kind, make
    folder.mkdir()
    self._keys = [*KEYS[kind], f"steps={STEPS}", *keys]
    assert self._run("warm").finish() == 0  # makes tokens and compiled programs
    self._undisturbed, began = self._run("undisturbed"), time.monotonic()
    assert self._undisturbed.finish() == 0, self._undisturbed.printed[-4000:]
    self._duration = time.monotonic() - began

  def _run(self, name: str) -> Run:
    local = f"local_checkpoint_directory={self._folder / name / 'ram'}"
    return self._make(self._folder, name, [*self._keys, *[local] * (self._kind == "kill")], command.start)

  def play(self, seed: int) -> Played:
    chance, counts, run = random.Random(seed), Counter[str](), self._run(f"history-{seed}")
    try:
      self._disturb(run, chance, counts)
      code = run.finish()
      promise = oracle.Promise(STEPS, repeats=self._kind == "kill")
      broken = [f"exit code {code}"] if code else check(run, self._undisturbed, promise)
    except AssertionError as error:
      broken = [str(error)]
    return Played(", ".join(counts), broken, counts, run.printed[-3000:] if broken else "")

  def _disturb(self, run: Run, chance: random.Random, counts: Counter[str]) -> None:
    if self._kind == "kill":
      for _ in range(chance.randint(1, KILLS)):
        if not (aim := kill(run, chance, self._duration)):
          return
        counts[f"kill {aim}"] += 1
      return
    for aim in chance.choices(AIMS, k=chance.randint(1, SIGNALS)):
      counts[f"SIGTERM {aim}"] += 1
      if terminate(run, aim, chance, self._duration, STEPS) == 0:
        return


@contextlib.contextmanager
def opened(folder: Path, kind: str, seeds: range, keys: Sequence[str]) -> Iterator[Play]:
  """Yields what plays a history."""
  made: dict[str, Command] = {}

  def play(seed: int) -> Played:
    what = "chats" if kind == "kill" and seed % 3 == 2 else "text"
    if what not in made:
      make = chat_run if what == "chats" else command.text_run
      made[what] = Command(folder / what, kind, keys, make)
    return made[what].play(seed)

  yield play
