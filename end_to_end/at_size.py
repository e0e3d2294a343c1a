"""Runs a state of gigabytes through its whole life on this machine, and compares each part with its bound.

  python -m end_to_end.at_size [--gb 1.2] [--slices 3] [processes simulated tools]

Three slices, as processes (trainer.launch.local) and simulated (one controller): they train, save, lose a slice, get it
back, and resume; then the run is verified and exported. The model is one long embedding, so that a step is
cheap: the size of the state matters here, and the computation does not. Each row has the seconds, the largest peak of
memory of a process with what `of_cpu_process` predicts, the most threads of a process, and what the recoveries
have compiled. The exit code is 1 if a bound is broken; docs/benchmarks/checkpoint.md has the bounds. Run it before a
release, with 1.2 and with 4 GB, on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from trainer.observe.events import read_events
from trainer.observe.metrics import read_metrics

PROGRAM = 0.6e9  # bytes of Python, JAX and compiled programs, which do not depend on the state
MARGIN = 1.15  # of the predicted memory
THREADS = 200  # of a process
WAITS = 30.0  # seconds of a part that do not depend on the state: imports, compilation, elections
TIMES = 8.0  # how much longer than reading or writing its bytes once a part may take
EMBED, LENGTH = 2048, 8
ROOT = Path(__file__).parents[1]


@dataclasses.dataclass
class Used:
  """What the processes of a command have used: the most of any of them."""

  peak: int = 0  # bytes, VmHWM
  threads: int = 0
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Row:
  """One part, with its bounds. compiled: by recoveries; None: there are none."""

  what: str
  used: Used
  predicted: float
  moved: float  # bytes that the part reads or writes
  compiled: int | None = None

  def broken(self, bandwidth: float) -> list[str]:
    """The bounds that it breaks. bandwidth: of the disk, bytes per second."""
    most = WAITS + TIMES * self.moved / bandwidth
    rules = {
      f"peak above {MARGIN} x prediction": self.used.peak <= MARGIN * self.predicted,
      f"more than {most:.0f} s": self.used.seconds <= most,
      f"more than {THREADS} threads": self.used.threads <= THREADS,
      "a recovery compiled": not self.compiled,
    }
    return [name for name, holds in rules.items() if not holds]


def processes_of(session: int) -> Iterator[int]:
  """Yields the process ids of a session: a launcher and its members, which are in process groups of their own."""
  for folder in Path("/proc").glob("[0-9]*"):
    with contextlib.suppress(OSError):
      if os.getsid(int(folder.name)) == session:
        yield int(folder.name)


@contextlib.contextmanager
def watched(used: Used, session: int) -> Iterator[None]:
  """Fills `used` from the processes of a session while the block runs."""
  done = threading.Event()

  def watch() -> None:
    while not done.wait(0.1):
      for pid in processes_of(session):
        with contextlib.suppress(OSError, ValueError, KeyError):
          fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
          used.peak = max(used.peak, int(fields["VmHWM"].split()[0]) * 1024)
          used.threads = max(used.threads, int(fields["Threads"]))

  thread = threading.Thread(target=watch)
  thread.start()
  began = time.monotonic()
  try:
    yield
  finally:
    used.seconds = time.monotonic() - began
    done.set()
    thread.join()


def run(log: Path, *command: str) -> Used:
  """Runs `python -m command`. Raises RuntimeError with the end of its output unless it ends with 0."""
  used, environment = Used(), {**os.environ, "JAX_PLATFORMS": "cpu"}
  with log.open("ab") as output:
    process = subprocess.Popen(
      [sys.executable, "-m", *command],
      cwd=ROOT,
      env=environment,
      stdin=subprocess.DEVNULL,
      stdout=output,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
    try:
      with watched(used, process.pid):
        code = process.wait()
    except BaseException:
      for pid in processes_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      raise
  if code:
    end = log.read_text(errors="replace")[-3000:]
    raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{end}")
  return used


def keys(folder: Path, name: str, state_bytes: float, steps: int) -> list[str]:
  """key=value of the run."""
  vocab = round(state_bytes / 12 / EMBED / 64) * 64
  return (
    f"configs/base.yml base_output_directory={folder} run_name={name} vocab_size={vocab} base_emb_dim={EMBED} "
    "base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=1 base_mlp_dim=64 head_dim=8 dtype=float32 "
    "logits_via_embedding=true remat_policy=none dataset_type=synthetic per_device_batch_size=1 eval_steps=0 "
    f"max_target_length={LENGTH} steps={steps} learning_rate_schedule_steps=100 checkpoint_period=8 "
    "elastic_enabled=true elastic_min_slice_count=1 elastic_min_resize_interval_seconds=0 "
    "receipt_state_period=8 jax_cache_dir= elastic_timeout_seconds=600 enable_report=false services="
  ).split()


def of_cpu_process(state_bytes: float, gradient_bytes: float, simulated: int) -> float:
  """The memory of a process whose devices are CPUs, besides PROGRAM. simulated: slices that it simulates; 0: it is one
  slice of several, and exchanges sums: its own and the total. Both hold one more copy of the state while they save or
  receive it. A simulated slice has two snapshots while it writes one."""
  if simulated:
    return simulated * (state_bytes + gradient_bytes + 2 * state_bytes) + state_bytes
  return state_bytes + gradient_bytes + 2 * gradient_bytes + state_bytes


def life(kind: str, folder: Path, state_bytes: float, slices: int) -> list[Row]:
  """Trains, saves, loses a slice of several and gets it back; resumes; and what this took."""
  simulated = kind == "simulated"
  program = ["trainer"] if simulated else ["trainer.launch.local", "--slices", str(slices)]
  more = ["cluster=simulated", f"num_slices={slices}", "devices_per_slice=1"] if simulated else []
  predicted = PROGRAM + of_cpu_process(state_bytes, state_bytes / 3, slices if simulated else 0)
  fault = "fault_injection=slice_down@5:1:prepared, slice_up@9:1" if simulated else "fault_injection=slice_down@5:1"
  first = ("train, save, kill, join", 14, [fault]) if slices > 1 else ("train, save", 14, [])
  rows, log, directory = [], folder / f"{kind}.log", folder / kind
  for what, last, faults in (first, ("resume", 16, [])):
    begun = len(list(read_events(str(directory)))) if directory.exists() else 0
    known = steps_seconds(directory)
    used = run(log, *program, *keys(folder, kind, state_bytes, last), *more, *faults)
    events = list(read_events(str(directory)))[begun:]
    recoveries = [event for event in events if event["kind"] == "recovery"]
    assert bool(recoveries) == bool(faults), f"{kind}, {what}: {len(recoveries)} recoveries"
    computing = sum(event["seconds"] for event in events if event["kind"] in ("compile", "rehearsal_wait"))
    steps = sum(seconds for step, seconds in steps_seconds(directory).items() if step not in known)
    used.seconds = max(used.seconds - computing - steps, 0.0)
    compiled = sum(event["compilations"] for event in recoveries) if recoveries else None
    # Two saves and the fresh state; or a restore and a save. All slices share the disk and the memory.
    rows.append(Row(f"{kind}: {what}", used, predicted, slices * 4 * state_bytes, compiled))
    for event in recoveries:
      print(f"  {event['event']}: {event['seconds']:.1f} s, {event['steps_lost']} steps lost, from {event['tier']}")
  return rows


def steps_seconds(directory: Path) -> dict[int, float]:
  """{step: seconds} of all recorded steps."""
  return {int(record["step"]): record["seconds"] for record in read_metrics(str(directory)) if "loss" in record}


def tools(folder: Path, state_bytes: float, name: str) -> list[Row]:
  """Verifies and exports the run `name`."""
  log, params = folder / "tools.log", state_bytes / 3
  directory, exported = (str(folder / part) for part in (name, "exported"))
  return [
    Row("verify", run(log, "trainer.tools.verify", directory), PROGRAM + state_bytes, 4 * state_bytes),
    Row("export", run(log, "trainer.tools.export_hf", directory, exported), PROGRAM + 2 * params, 2 * params),
  ]


def disk_bandwidth(folder: Path) -> float:
  """Bytes per second that one file is written with, to the disk."""
  data, path = os.urandom(1 << 20) * 256, folder / "bandwidth"
  began = time.monotonic()
  with path.open("wb") as file:
    file.write(data)
    os.fsync(file.fileno())
  seconds = time.monotonic() - began
  path.unlink()
  return len(data) / seconds


def main() -> int:
  """Returns the exit code."""
  parser = argparse.ArgumentParser(
    prog="python -m end_to_end.at_size", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--gb", type=float, default=1.2, help="size of the state: weights and both moments, in float32")
  parser.add_argument("--slices", type=int, default=3, help="1: none is lost")
  parser.add_argument("parts", nargs="*", default=[], help="processes, simulated, tools (default: all)")
  options = parser.parse_args()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # `run` ends its processes
  parts = options.parts or ["processes", "simulated", "tools"]
  state_bytes, rows = options.gb * 1e9, list[Row]()
  with tempfile.TemporaryDirectory(prefix="at-size-") as directory:
    folder = Path(directory)
    bandwidth = disk_bandwidth(folder)
    print(f"State {options.gb:g} GB, {options.slices} slices; the disk writes {bandwidth / 1e9:.2f} GB/s")
    for kind in ("processes", "simulated"):
      if kind in parts:
        rows += life(kind, folder, state_bytes, options.slices)
    run_of = next(kind for kind in ("processes", "simulated") if kind in parts)
    if "tools" in parts:
      rows += tools(folder, state_bytes, run_of)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
  print("| part | s | peak GB | predicted GB | peak / predicted | threads | compiled in recoveries | broken |")
  print("|---|---|---|---|---|---|---|---|")
  failed = False
  for row in rows:
    broken = row.broken(bandwidth)
    failed |= bool(broken)
    used, ratio = row.used, row.used.peak / row.predicted
    compiled = "-" if row.compiled is None else row.compiled
    print(
      f"| {row.what} | {used.seconds:.0f} | {used.peak / 1e9:.2f} | {row.predicted / 1e9:.2f} | {ratio:.2f} | "
      f"{used.threads} | {compiled} | {'; '.join(broken) or '-'} |"
    )
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
