"""SIGTERM to PID 1 of a container, as Kubernetes sends it, at random moments of a run inside the launchers' shells.

  JAX_PLATFORMS=cpu python -m end_to_end.wrapped_sigterm [--signals 50] [--seed 0] [--wrapper xpk|gcluster]

gcluster starts the program with `bash -c COMMAND`, where COMMAND is an exec: the program is PID 1. xpk starts a shell
that starts the program, and looks every 5 s whether it has got a signal or the program has ended. Both texts are those
of the launchers. Each process runs in a PID namespace of its own (`unshare`, which needs root): its PID 1 gets no
signal for which it has no handler, and when it ends, all others are killed.

A tiny model trains on text, with checkpoints and evaluations. Each container gets SIGTERM at a moment drawn from the
seed: in its first half second (perhaps before there is a handler), at any moment (imports, compilation, steps), or
right after a step that is saved or evaluated; after the grace period of the pod it gets SIGKILL. It must end within
this period, with exit code 42 and the last step committed. Other ends are right too: 0 if the run was complete before
the signal came to the program; 143 if the program had no handler yet, and so no step; and 137, after SIGKILL, if PID 1
had no handler yet, because Linux then discards the signal. Such a run starts again from step 0. When a run is complete,
its records and final state must be those of the undisturbed run, each step and each evaluation once. Exits with 1 if
anything differs.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import logging
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from end_to_end import sigterm
from tests.support import command
from tests.support.command import Run

STEPS = 600
KEYS = "checkpoint_period=60 max_num_checkpoints_to_keep=2 eval_interval=40 eval_steps=1".split()
NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
AIMS = ("the start", "any moment", "any moment", "any moment", "a save", "an evaluation")

# Of xpk 1.16.0, core/docker_container.py; COMMAND stands for the command that the user gives.
XPK = """\
echo XPK Start: $(date);
_sigterm() (kill -SIGTERM $! 2>/dev/null;);
trap _sigterm SIGTERM;

(export TPU_STDERR_LOG_LEVEL=0 && export TPU_MIN_LOG_LEVEL=0 && export TF_CPP_MIN_LOG_LEVEL=0 && \
export TPU_VMODULE=real_program_continuator=1 && COMMAND) & PID=$!;
while kill -0 $PID 2>/dev/null;
    do sleep 5;
done;
wait $PID;
EXIT_CODE=$?;

echo XPK End: $(date);
echo EXIT_CODE=$EXIT_CODE;


exit $EXIT_CODE
"""
# Of Cluster Toolkit, pkg/orchestrator/gke: /bin/bash -c COMMAND.
GCLUSTER = "COMMAND"


@dataclass(frozen=True)
class Wrapper:
  """How a launcher starts the program: the shell's text, and the pod's grace period in seconds."""

  text: str
  grace: float


WRAPPERS = {"xpk": Wrapper(XPK, 40.0), "gcluster": Wrapper(GCLUSTER, 30.0)}


class Container:
  """A process tree in its own PID namespace; a command.Process whose signals go to PID 1 of the namespace."""

  def __init__(self, words: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    with log.open("ab") as file:
      self._outer = subprocess.Popen(
        [*NAMESPACE, *words],
        env=dict(environment),
        cwd=command.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=file,
      )
    children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
    while not (found := children.read_text().split()):
      assert self._outer.poll() is None, f"unshare ended with {self._outer.returncode}: see {log}"
      time.sleep(0.001)
    self.pid = int(found[0])

  def poll(self) -> int | None:
    return self._outer.poll()

  def wait(self, timeout: float) -> int:
    return self._outer.wait(timeout)

  def send_signal(self, number: int) -> None:
    if self._outer.poll() is None:
      with contextlib.suppress(ProcessLookupError):  # it has ended at this moment
        os.kill(self.pid, number)


def has_namespaces() -> bool:
  """Whether this user may make PID namespaces here."""
  try:
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, timeout=60).returncode == 0
  except OSError:
    return False


def starter(wrapper: Wrapper, programs: Path = Path(sys.executable).parent) -> command.Start:
  """Returns a function that starts `python -m trainer` in a container, through the wrapper. programs: has `python`."""

  def start(argv: Sequence[str], changes: Mapping[str, str], log: Path) -> Container:
    environment = command.cpu_environment(changes)
    environment["PATH"] = f"{programs}:{environment['PATH']}"
    text = wrapper.text.replace("COMMAND", f"exec python -m trainer {shlex.join(argv)}")
    return Container(["/bin/bash", "-c", text], environment, log)

  return start


def moment(aim: str, run: Run, begin: float, duration: float, rng: random.Random) -> Callable[[], bool]:
  """Returns a function that is true from the moment on at which the signal is sent."""
  if aim in ("the start", "any moment"):
    until = begin + rng.uniform(0, 0.5 if aim == "the start" else duration)
    return lambda: time.monotonic() >= until
  every = 60 if aim == "a save" else 40
  target = (run.last_step // every + 1 + rng.randrange(2)) * every
  return lambda: run.last_step >= min(target, STEPS)


def terminate(run: Run, wrapper: Wrapper, rng: random.Random, duration: float) -> sigterm.Ended | None:
  """Starts the run, sends SIGTERM and, after the grace period, SIGKILL. None if the run was complete before."""
  first, begin = run.last_step, time.monotonic()
  process = run.start()
  aim = rng.choice(AIMS)
  if not command.wait_until(process, moment(aim, run, begin, duration, rng), pause=0.002):
    assert process.poll() == 0, f"the command ended with {process.poll()}:\n{run.printed[-4000:]}"
    return None
  seconds = time.monotonic() - begin
  heard = True
  with contextlib.suppress(OSError):  # it has ended at this moment
    heard = sigterm.handles_sigterm(process)
  process.send_signal(signal.SIGTERM)
  try:
    code = process.wait(wrapper.grace)
  except subprocess.TimeoutExpired:
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    code = 137
  last, committed = run.last_step, max(run.committed_steps(), default=0)
  wrong = ""
  if code == 137 and not heard:
    # The next process would repeat the steps after the last checkpoint, and here each step must be done once.
    shutil.rmtree(run.directory, ignore_errors=True)
  elif code == 143:  # no handler yet
    wrong = f"exit code 143 after step {last}" if last > first else ""
  elif code not in (0, 42):
    wrong = f"exit code {code} within {time.monotonic() - begin - seconds:.1f} s"
  else:
    wrong = sigterm.mistake(code, last, committed, STEPS)
  return sigterm.Ended(aim, seconds, code, first, last, committed, wrong)


def torment(folder: Path, name: str, signals: int, seed: int) -> Iterator[sigterm.Ended | str]:
  """Yields the end of each of `signals` containers, and for each complete run its differences ("" if none)."""
  keys, wrapper = [*KEYS, f"steps={STEPS}"], WRAPPERS[name]
  undisturbed = command.text_run(folder, "undisturbed", keys)
  if not undisturbed.committed_steps():
    assert command.text_run(folder, "warm", [*KEYS, "steps=3"]).finish() == 0  # makes tokens and compiled programs
    assert undisturbed.finish() == 0, undisturbed.printed[-4000:]
  events = undisturbed.records("events")
  duration = events[-1]["wall"] - events[0]["wall"] + 2  # the imports come before the first event
  rng = random.Random(seed)
  runs = (command.text_run(folder, f"{name}-{number}", keys, starter(wrapper)) for number in itertools.count())
  yield from sigterm.ends(runs, lambda run: terminate(run, wrapper, rng, duration), undisturbed, STEPS, signals)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--signals", type=int, default=50, help="in all")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--wrapper", choices=list(WRAPPERS), help="only this one (default: half of the signals for each)")
  arguments = parser.parse_args()
  if not has_namespaces():
    print("error: this user may not make PID namespaces. Run the command as root.", file=sys.stderr)
    return 2
  logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns when a part of a checkpoint is read
  names = [arguments.wrapper] if arguments.wrapper else list(WRAPPERS)
  failed = runs = 0
  codes: collections.Counter[tuple[str, int]] = collections.Counter()
  with tempfile.TemporaryDirectory(prefix="wrapped-") as folder:
    for index, name in enumerate(names):
      share = arguments.signals // len(names) + (index < arguments.signals % len(names))
      print(f"\n{name}, grace period {WRAPPERS[name].grace:g} s\n\n{sigterm.TABLE}")
      for found in torment(Path(folder), name, share, arguments.seed):
        if isinstance(found, sigterm.Ended):
          wrong = found.wrong
          codes[name, found.code] += 1
          print(found.row(), flush=True)
        else:
          runs, wrong = runs + 1, found
          print(f"run {runs}: {wrong or 'equal to the undisturbed run bit by bit'}", flush=True)
        failed += bool(wrong)
  ends = ", ".join(f"{name} {code}: {count}" for (name, code), count in sorted(codes.items()))
  result = f"{failed} FAILED" if failed else "nothing lost, repeated or changed"
  print(f"\n{sum(codes.values())} signals, {runs} runs: {result}. Exit codes: {ends}")
  return int(failed > 0)


if __name__ == "__main__":
  sys.exit(main())
