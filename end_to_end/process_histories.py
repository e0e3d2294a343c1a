"""Runs a tiny model on real processes through random faults and compares each run with an undisturbed one.

  python -m end_to_end.process_histories [--world] [--count 300] [--first 0] [key=value ...]

Seed i determines history i: members killed (the first too), stopped or asked to end, two at once, again during a
recovery, and the supervisor or all processes killed, after which the same command starts again. The supervisor is also
stopped for longer than members may be silent, and continued. Stdout and stderr of all processes are a file, a pipe
whose reader goes away, or a full disk. In half of the histories the exchange begins during the backward pass, in half a
slice has two to eight shares, and in a third one member is slow.
Evaluations and checkpoints are so frequent that faults hit them too.

With --world, the histories are of what surrounds the run: a member dies several times in a row while it starts, SIGTERM
arrives during an evaluation, the folder of the run is moved before the next launch, and saves fail for a while.

Each run must complete; no member is lost that was not hit; no thread fails; every step and every evaluation must be
recorded once; losses and final state must be bit-identical to the undisturbed run; no file is left. After a loss of
all processes the run resumes from a checkpoint, so steps may be recorded twice, with the same numbers. After the first
history that breaks a rule, prints the command that repeats it and exits with 1.

The processes are forked from one that has imported everything, so that a start does not take seconds.
"""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.command import differences, is_running
from tests.support.forked_runs import SLOWED, Server
from tests.support.process_runs import ProcessRun, seeded_command

from trainer.services import receipt

STEPS = 150
KEYS = (f"steps={STEPS}", "checkpoint_period=20", "eval_interval=7", "eval_steps=2", "base_num_decoder_layers=2")
EVAL_INTERVAL = 25
WORLD = (f"eval_interval={EVAL_INTERVAL}", "eval_steps=200")  # evaluations that last long enough for SIGTERM
LIMIT_SECONDS = 300.0  # for one life of the supervisor
LIVES = 8  # of the supervisor, at most
PAUSE_SECONDS = 6.0  # longer than the 5 s for which a member may be silent
FAILURES = ("Traceback", "Exception in thread")  # of a thread or a process
# Faults that end the launch, and its exit code. A launch that is complete before ends with 0.
ENDS = {"supervisor": -signal.SIGKILL, "all": -signal.SIGKILL, "eval": 42, "move": 42}


@dataclass(frozen=True)
class Fault:
  """What happens once `step` is recorded: `kind` to `count` members, `delay` seconds later."""

  step: int
  # kill, stop, term: a signal to members; supervisor, all: SIGKILL to these; pause: of the supervisor; cut;
  # starts: a member dies, and again while it starts; eval: SIGTERM in an evaluation; move: of the folder; saves: fail
  kind: str
  count: int  # eval: 1: to the supervisor, 2: to all processes
  delay: float

  def __str__(self) -> str:
    return f"{self.kind}@{self.step}" + (f" x {self.count}" if self.count > 1 else "") + f" +{1000 * self.delay:.0f} ms"


@dataclass(frozen=True)
class Plan:
  """One history."""

  slices: int
  options: tuple[str, ...]
  keys: tuple[str, ...]
  output: str  # of all processes: file, pipe or full
  faults: tuple[Fault, ...]
  shares: int = 1  # of a slice
  slowed: str = ""  # a value of forked_runs.SLOWED

  @property
  def batch(self) -> tuple[str, ...]:
    """Keys that the undisturbed run has too."""
    return (f"per_device_batch_size={max(2, self.shares)}", f"shares_per_slice={self.shares}")


def plan(seed: int) -> Plan:
  """Returns history `seed`."""
  chance = random.Random(seed)
  slices = chance.choice([3, 3, 4])
  kinds = ["kill"] * 8 + ["term"] * 2 + ["stop", "supervisor", "all"]
  faults = [
    Fault(chance.randrange(1, STEPS - 5), chance.choice(kinds), chance.choice([1, 1, 2]), chance.random() * 0.05)
    for _ in range(chance.randrange(1, 5))
  ]
  if chance.random() < 0.3:  # a second loss while the first one is recovered from
    first = faults[0]
    faults.insert(1, Fault(first.step, "kill", 1, chance.random() * 0.02))
  output = chance.choice(["file", "pipe", "full"])
  late = ["cut"] * (output == "pipe") + ["pause"] * chance.randrange(2)
  faults += [Fault(chance.randrange(1, STEPS - 5), kind, 1, chance.random() * 0.05) for kind in late]
  least = chance.choice([1, 1, -1, 2])
  options = ("--spares", "1") if chance.random() < 0.2 else ()
  keys = (f"elastic_min_slice_count={least}", f"exchange_streams={chance.choice([1, 2])}")
  shares = chance.choice([1, 1, 1, 2, 4, 8])
  slowed = f"{chance.randrange(slices)}:0.03" if chance.random() < 1 / 3 else ""
  return Plan(slices, options, keys, output, tuple(sorted(faults, key=lambda fault: fault.step)), shares, slowed)


def plan_world(seed: int) -> Plan:
  """Returns history `seed` of what surrounds a run."""
  chance = random.Random(seed)
  kinds = ["starts", *chance.choices(["starts", "eval", "eval", "move", "saves", "saves", "kill"], k=2)]
  last = STEPS - 2 * EVAL_INTERVAL
  faults = [
    Fault(chance.randrange(last), kind, chance.choice([2, 3] if kind == "starts" else [1, 2]), chance.random() * 0.05)
    for kind in kinds
  ]
  keys = (f"elastic_min_slice_count={chance.choice([1, 1, -1, 2])}",)
  options = ("--spares", "1") if chance.random() < 0.2 else ()
  return Plan(3, options, keys, "file", tuple(sorted(faults, key=lambda fault: fault.step)))


def play(run: ProcessRun, output: str, faults: Sequence[Fault], seed: int, happened: Counter[str]) -> list[str]:
  """Runs to the end through the faults. Returns the rules that the exit codes and the losses of members break."""
  with run.piped() if output == "pipe" else contextlib.nullcontext(lambda: None) as cut:
    if output == "full":
      run.output = Path("/dev/full")
    hit: Counter[int] = Counter()
    broken = _play(run, cut, faults, seed, happened, hit)
  losses = [(member, event["error"]) for event in run.events("slice_down") for member in event["slice"]]
  for member, times in (Counter(member for member, _ in losses) - hit).items():
    reasons = [reason for one, reason in losses if one == member]
    broken.append(f"member {member} is lost {times} times too often: {reasons}")
  return broken


def _play(
  run: ProcessRun,
  cut: Callable[[], None],
  faults: Sequence[Fault],
  seed: int,
  happened: Counter[str],
  hit: Counter[int],
) -> list[str]:
  """Runs to the end through the faults; counts those that happen, and the members that are hit."""
  chance, left = random.Random(seed + 1), list(faults)
  for _ in range(LIVES):
    last = ""
    with run.launched() as supervisor:
      while left and supervisor.poll() is None:
        fault = left[0]
        deadline = time.monotonic() + LIMIT_SECONDS
        while run.last_step < fault.step and supervisor.poll() is None:
          if time.monotonic() > deadline:
            return [f"no step {fault.step} within {LIMIT_SECONDS:g} s"]
          time.sleep(0.01)
        if supervisor.poll() is not None:
          break
        time.sleep(fault.delay)
        left.pop(0)
        last = fault.kind
        if fault.kind == "cut":
          cut()
        happened[fault.kind] += _strike(run, fault, supervisor.pid, chance, hit)
        if fault.kind in ENDS:
          supervisor.wait(60)
          run.wait_for_processes(seconds=90)
        if fault.kind == "move":
          move(run)
      code = run.wait(supervisor, LIMIT_SECONDS)
    if code == 0:
      return []
    if code != ENDS.get(last, 42):
      return [f"ended with exit code {code}"]
  return [f"not complete after {LIVES} lives"]


def _strike(run: ProcessRun, fault: Fault, supervisor: int, chance: random.Random, hit: Counter[int]) -> int:
  """Makes the fault happen. Returns how many processes it hit."""
  numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
  if fault.kind == "cut":
    return 1
  if fault.kind == "saves":
    return _fail_saves(run, supervisor)
  if fault.kind == "move":
    _wait(lambda: bool(run.workers()), run, supervisor)
    return run.send(supervisor, signal.SIGTERM)
  if fault.kind == "eval":
    owed = lambda: run.last_step % EVAL_INTERVAL == 0 < run.last_step not in run.evaluations()
    # Owed by an earlier launch, perhaps: a launcher without members has no handler yet.
    _wait(lambda: bool(run.workers()) and owed(), run, supervisor)
    asked = [supervisor, *run.workers().values()] if fault.count > 1 else [supervisor]
    return sum(run.send(pid, signal.SIGTERM) for pid in asked)
  if fault.kind == "supervisor":
    return run.send(supervisor, signal.SIGKILL)
  if fault.kind == "pause":
    run.send(supervisor, signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    return run.send(supervisor, signal.SIGCONT)
  workers = run.workers()
  if fault.kind == "starts":
    return _fail_at_start(run, supervisor, fault.count, chance, hit)
  if fault.kind == "all":
    return sum(run.send(pid, signal.SIGKILL) for pid in [supervisor, *workers.values()])
  victims = chance.sample(sorted(workers), min(fault.count, len(workers)))
  hit.update(victims)
  return sum(run.send(workers[member], numbers[fault.kind]) for member in victims)


def _wait(condition: Callable[[], bool], run: ProcessRun, supervisor: int, seconds: float = 30.0) -> bool:
  """Waits for the condition. False: the run has ended, or the time is over."""
  deadline = time.monotonic() + seconds
  while not (met := condition()) and time.monotonic() < deadline and is_running(supervisor):
    time.sleep(0.005)
  return met


def _fail_at_start(run: ProcessRun, supervisor: int, deaths: int, chance: random.Random, hit: Counter[int]) -> int:
  """A member dies, and so many times again while it starts. Returns how often it has died."""
  _wait(lambda: bool(run.workers()), run, supervisor)
  victim = chance.choice(sorted(run.workers()) or [0])
  pid = done = 0
  for _ in range(1 + deaths):
    new = lambda pid=pid: run.workers().get(victim, pid)
    if not _wait(lambda new=new, pid=pid: new() != pid, run, supervisor):
      break
    pid = new()
    time.sleep(chance.random() * 0.5 * bool(done))
    hit[victim] += 1
    done += run.send(pid, chance.choice([signal.SIGKILL, signal.SIGABRT]))
  return done


def _fail_saves(run: ProcessRun, supervisor: int) -> int:
  """For a while a file is in the place of the folder of the checkpoints. A start would rightly end with 2."""
  folder, before = run.directory / "checkpoints", run.last_step
  if not _wait(lambda: run.last_step > before, run, supervisor) or not folder.is_dir():
    return 0
  failed, aside = run.count("checkpoint_failed"), folder.with_name("aside")
  folder.rename(aside)
  folder.touch()
  deadline = time.monotonic() + 3
  # The last save must not fail: then the run rightly ends with 1.
  safe = lambda: time.monotonic() < deadline and run.last_step < STEPS - EVAL_INTERVAL
  while run.count("checkpoint_failed") == failed and safe():
    time.sleep(0.05)
  folder.unlink()
  aside.rename(folder)
  return 1


def move(run: ProcessRun) -> None:
  """Moves the run to another place, where its next launch finds it."""
  folder = run.folder.with_name(f"{run.folder.name}-moved")
  run.folder.rename(folder)
  run.keys = [key.replace(str(run.folder), str(folder)) for key in run.keys]
  run.folder, run.directory, run.log = folder, folder / "out" / "run", folder / run.log.name


def files_left(run: ProcessRun, undisturbed: ProcessRun) -> list[str]:
  """Names in the folder of the run that an undisturbed run does not have, other than steps."""
  names = lambda folder: {path.name for path in (*folder.iterdir(), *(folder / "checkpoints").iterdir())}
  left = names(run.directory) - names(undisturbed.directory)
  outside = run.folder.parent / run.folder.name.removesuffix("-moved")
  again = [str(outside)] if outside != run.folder and outside.exists() else []
  return sorted(name for name in left if not name.isdigit()) + again


def check(run: ProcessRun, undisturbed: ProcessRun, faults: Sequence[Fault]) -> list[str]:
  """Returns the rules that the run breaks; [] if it breaks none."""
  broken = [f"{failure!r} was printed" for failure in FAILURES if failure in run.printed]
  # Two kills may hit the only two members that have the state. The protocol's model tests that nothing else leads here.
  restarted = any(fault.kind in ("all", "supervisor") for fault in faults) or run.count("checkpoint_restored") > 0
  restarted = restarted or sum(event["tier"] == "none" for event in run.events("restore")) > 1
  steps = run.steps()
  if sorted(set(steps)) != list(range(1, STEPS + 1)):
    broken.append(f"steps {sorted(set(range(1, STEPS + 1)) - set(steps))} are not recorded")
  if not restarted and steps != list(range(1, STEPS + 1)):
    again = sorted(step for step, times in Counter(steps).items() if times > 1)
    broken.append(f"steps {again} are recorded more than once, or not in order")
  ours, theirs = run.evaluations(), undisturbed.evaluations()
  if ours.keys() != theirs.keys():
    broken.append(f"evaluations at {sorted(ours.keys() ^ theirs.keys())} are in only one run")
  for step, losses in ours.items():
    if set(losses) != set(theirs.get(step, ())) or (len(losses) > 1 and not restarted):
      broken.append(f"the evaluation at step {step} gave {losses}, undisturbed {theirs.get(step)}")
  for record in run.events("recovery"):
    if record["steps_lost"] != 0:
      broken.append(f"{record['steps_lost']} steps lost by {record['event']} of slices {record['slice']}")
  if left := files_left(run, undisturbed):
    moved = [line for line in run.printed.splitlines() if "Moved checkpoint" in line]
    broken.append(f"these files are left: {left} {moved or ''}")
  lines, wrong = receipt.check(receipt.read(str(run.directory)))
  if (attested := [line["step"] for line in lines if "step" in line]) != list(range(1, STEPS + 1)):
    broken.append(f"the receipt has not each step once: {wrong or attested}")
  return broken + differences(run, undisturbed, STEPS)


def run_all(
  folder: Path, first: int, count: int, server: Server, keys: Sequence[str] = (), *, world: bool = False
) -> int:
  """Runs and checks the histories; returns the exit code."""
  keys = (*keys, *WORLD) if world else keys
  compiled, references = f"jax_cache_dir={folder / 'compiled'}", dict[tuple[int, int], ProcessRun]()
  happened: Counter[str] = Counter()
  recoveries, start = 0, time.monotonic()
  for done, seed in enumerate(range(first, first + count), 1):
    history = plan_world(seed) if world else plan(seed)
    kind = history.slices, history.shares
    if kind not in references:
      name = f"undisturbed-{history.slices}-{history.shares}"
      own = [*KEYS, *keys, compiled, *history.batch]
      reference = ProcessRun(folder / name, own, slices=history.slices, server=server)
      broken = play(reference, "file", (), 0, happened)
      assert not broken, (broken, reference.tail())
      references[kind] = reference
    own = [*KEYS, *keys, compiled, *history.batch, *history.keys]
    options = {"options": history.options, "environment": {SLOWED: history.slowed} if history.slowed else {}}
    run = ProcessRun(folder / f"history-{seed}", own, slices=history.slices, server=server, **options)
    try:
      broken = play(run, history.output, history.faults, seed, happened)
      broken = broken or check(run, references[kind], history.faults)
    except AssertionError as error:
      broken = [str(error)]
    if broken:
      print(f"history {seed} ({', '.join(map(str, history.faults))}; {history}):", *broken, sep="\n  ")
      print(run.tail())
      print(f"repeat with: python -m end_to_end.process_histories {'--world ' * world}--first {seed} --count 1")
      return 1
    recoveries += run.count("recovery")
    happened["slow member named"] += sum(event["factor"] > 1 for event in run.events("member_slow"))
    if done % 10 == 0 or done == count:
      seconds = time.monotonic() - start
      print(
        f"{done} histories in {seconds:.0f} s, all correct: {recoveries} recoveries; processes hit: "
        f"{', '.join(f'{hits} {kind}' for kind, hits in sorted(happened.items()))}",
        flush=True,
      )
  return 0


if __name__ == "__main__":
  flags = {"world": "faults around the run"}
  sys.exit(seeded_command(__doc__, "histories", 300, run_all, takes_keys=True, flags=flags))
