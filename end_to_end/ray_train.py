"""Checks runs under a real Ray cluster of several nodes on this machine: `python -m end_to_end.ray_train`.

Needs the package ray (the extra `ray`) in the environment that runs it. Oracle: the same run under
`trainer.launch.local`. Every run must do every step once, in order, with the same losses and last state, bit by bit.

  all    Ray restarts all workers (JaxTrainer): a worker is killed, a host dies (one slice is left), a host comes
  lost   Ray replaces only lost workers: each worker is killed, one is stopped, a host dies and comes back, and dies
         again before the end of the run; the other worker is never restarted
  hosts  slices of two hosts: one process is killed, a host dies (its slice is lost as a whole), a slice comes
  stop   SIGTERM to the job ends it with exit code 42 and a checkpoint; the same command completes it
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.support.command import differences
from tests.support.process_runs import ProcessRun
from tests.support.ray_runs import RayRun

SLICES = 2
SECONDS = 300  # for one event, on a busy machine
MODEL = "base_emb_dim=64 base_mlp_dim=128 head_dim=16 max_target_length=64 checkpoint_period=1000".split()


def main() -> int:
  """Runs the checks that are named in the arguments, or all. Returns 0; a failed check raises AssertionError."""
  chosen = sys.argv[1:] or ["all", "lost", "hosts", "stop"]
  with tempfile.TemporaryDirectory(prefix="ray-train-") as directory:
    folder = Path(directory)
    keys = [*MODEL, f"jax_cache_dir={folder / 'compiled'}"]
    for name in chosen:
      began = time.monotonic()
      print(f"{name}: {globals()[f'check_{name}'](folder, keys)}; {time.monotonic() - began:.0f} s", flush=True)
  return 0


def check_all(folder: Path, keys: list[str]) -> str:
  """A worker is killed, a host dies, a host comes: whole slices train on each time."""
  run = RayRun(folder / "all", [*keys, "steps=1000000"], slices=SLICES)
  with run.cluster(), run.launched() as job:
    first = wait_for_slices(run, job, SLICES)
    run.kill(1)
    second = wait_for_new_workers(run, job, first, SLICES)
    run.change_cluster("remove")
    third = wait_for_new_workers(run, job, second, SLICES - 1)
    run.change_cluster("add")
    wait_for_new_workers(run, job, third, SLICES)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 42, run.tail()
  compare(folder, keys, run)
  return f"{SLICES} slices, a worker killed, a host dead (1 slice), a host back (2): {len(run.steps())} steps"


def check_lost(folder: Path, keys: list[str]) -> str:
  """Each worker is killed, one is stopped, and a host dies. The other worker is never restarted."""
  run = RayRun(folder / "lost", [*keys, "steps=1000000"], slices=SLICES, replace_lost=True)
  with run.cluster(), run.launched() as job:
    before = wait_for_slices(run, job, SLICES)
    for fault, (victim, number) in enumerate([(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGSTOP)]):
      run.kill(victim, number)
      run.wait_for(lambda fault=fault: run.count("slice_up") == fault + 1, job, SECONDS)
      before = check_replaced(before, victim, wait_for_slices(run, job, SLICES))
    for back in (True, False):
      run.change_cluster("remove")
      # The process of the dead host ends some time after its slice is given up.
      run.wait_for(lambda: len(run.active()) == len(run.workers()) == SLICES - 1, job, SECONDS)
      (stayed,) = wait_for_slices(run, job, SLICES - 1).items()
      if back:
        run.change_cluster("add")
        after = wait_for_slices(run, job, SLICES)
        assert stayed in after.items() and stayed in before.items(), (before, stayed, after)
        before = after
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 42, run.tail()
  compare(folder, keys, run)
  return f"{SLICES} slices, 2 workers killed, 1 stopped, 2 hosts dead, the other one kept: {len(run.steps())} steps"


def check_replaced(before: dict[int, int], victim: int, after: dict[int, int]) -> dict[int, int]:
  """Returns `after`, where only the victim has another process."""
  assert {rank for rank, pid in after.items() if before[rank] != pid} == {victim}, (before, victim, after)
  return after


def check_hosts(folder: Path, keys: list[str]) -> str:
  """A process of a slice of two hosts is killed, a host of it dies, a slice comes: whole slices train on each time."""
  keys = [*keys, "devices_per_slice=2"]
  run = RayRun(folder / "hosts", [*keys, "steps=1000000"], slices=SLICES, hosts=2)
  with run.cluster(), run.launched() as job:
    run.wait_for(lambda: len(run.workers()) == 2 * SLICES, job, SECONDS)
    before = wait_for_slices(run, job, SLICES)
    run.kill(3)
    second = wait_for_new_workers(run, job, before, SLICES, workers=2 * SLICES)
    run.change_cluster("remove")
    third = wait_for_new_workers(run, job, second, SLICES - 1, workers=2 * (SLICES - 1))
    run.change_cluster("add")
    wait_for_new_workers(run, job, third, SLICES, workers=2 * SLICES)
    job.send_signal(signal.SIGTERM)
    assert job.wait(SECONDS) == 42, run.tail()
  compare(folder, keys, run)
  return f"{SLICES} slices of 2 hosts, a process killed, a host dead (1 slice), a slice back: {len(run.steps())} steps"


def check_stop(folder: Path, keys: list[str]) -> str:
  """SIGTERM saves and ends the job with 42; the same command goes on."""
  steps = 400
  run = RayRun(folder / "stop", [*keys, f"steps={steps}"], slices=SLICES, minimum=SLICES)
  with run.cluster():
    with run.launched() as job:
      run.wait_for(lambda: run.last_step >= 20, job, SECONDS)
      job.send_signal(signal.SIGTERM)
      assert job.wait(SECONDS) == 42, run.tail()
    stopped = run.last_step
    assert 20 <= stopped < steps
    with run.launched() as job:
      assert job.wait(SECONDS) == 0, run.tail()
  assert run.steps() == list(range(1, steps + 1))
  compare(folder, keys, run)
  return f"stopped with 42 after step {stopped}, completed with 0"


def wait_for_slices(run: RayRun, job, slices: int) -> dict[int, int]:
  """{rank: process id} of the workers, when the newest recorded steps were done by `slices` slices."""
  step = run.last_step + 10
  run.wait_for(lambda: len(run.active()) == slices and run.last_step >= step, job, SECONDS)
  return run.workers()


def wait_for_new_workers(run: RayRun, job, before: dict[int, int], slices: int, workers: int = 0) -> dict[int, int]:
  """As wait_for_slices, after all workers were restarted. workers: of all slices (default: one each)."""
  run.wait_for(
    lambda: len(run.workers()) == (workers or slices) and not set(run.workers().values()) & set(before.values()),
    job,
    SECONDS,
  )
  return wait_for_slices(run, job, slices)


def compare(folder: Path, keys: list[str], run: RayRun) -> None:
  """Asserts that every step was done once, in order, with the losses and the last state of an undisturbed local run."""
  last = run.steps()[-1]
  assert run.steps() == list(range(1, last + 1)), "a step was lost or repeated"
  assert run.printed.count("completed step: 1,") == 1, "Ray prints each line of a worker twice"
  oracle = ProcessRun(folder / f"oracle-{run.folder.name}", [*keys, f"steps={last}"], slices=SLICES)
  with oracle.launched() as supervisor:
    assert supervisor.wait(SECONDS) == 0, oracle.tail()
  assert not (broken := differences(run, oracle, last)), broken


if __name__ == "__main__":
  sys.exit(main())
