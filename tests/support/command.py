"""Starts `python -m trainer` with a tiny model, waits for it, reads its records, and compares runs bit by bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).parents[2]
TINY = (
  "configs/base.yml base_num_decoder_layers=1 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=1 "
  "base_mlp_dim=32 head_dim=8 dtype=float32 max_target_length=16 per_device_batch_size=2 num_slices=2 "
  "devices_per_slice=1 enable_report=false services= log_period=1000"
).split()

TAIL = 4096  # bytes that hold several records
_TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)
STEP = re.compile(rb'"step": (\d+), "seconds"')
PRINTED_STEP = re.compile(rb"completed step: (\d+)")


def without_times(log: str) -> str:
  """Returns the lines of a log without the time in front of each."""
  return _TIME.sub("", log)


class Process(Protocol):
  """The part of the interface of subprocess.Popen that runs need."""

  pid: int

  def poll(self) -> int | None: ...

  def wait(self, timeout: float) -> int: ...

  def send_signal(self, number: int) -> None: ...


Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]


def cpu_environment(changes: Mapping[str, str]) -> dict[str, str]:
  """Returns the environment of a run on the CPU from this clone, with `changes`."""
  return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"} | dict(changes)


def standin_environment(address: str, platforms: str = "proxy") -> dict[str, str]:
  """Returns the environment of a program of this clone that is a client of the Pathways stand-in at `address`."""
  return os.environ | {
    "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
    "JAX_PLATFORMS": platforms,
    "JAX_BACKEND_TARGET": address,
    "PYTHONPATH": os.pathsep.join(["src", "."]),
  }


def is_running(pid: int) -> bool:
  """Whether the process exists and has not ended. A process that has ended and was not waited for counts as ended."""
  try:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
  except OSError:
    return False


def start(argv: Sequence[str], changes: Mapping[str, str], log: Path) -> Process:
  """Starts `python -m trainer *argv` in this clone. Its output is appended to the file `log`."""
  command = [sys.executable, "-m", "trainer", *argv]
  with log.open("ab") as file:
    return subprocess.Popen(
      command, env=cpu_environment(changes), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
    )


def last_of_each(keys: Sequence[str]) -> list[str]:
  """Returns key=value arguments without those that a later one with the same key replaces."""
  return list({key.partition("=")[0]: key for key in keys}.values())


class Run:
  """The folder of a run and the processes that work on it: one after the other, or several of one JAX world at once."""

  def __init__(self, folder: Path, keys: Sequence[str], start: Start = start) -> None:
    """The run uses folder/out/run, and folder/ram/* for its emergency tier. `keys` add to TINY and override it."""
    self.folder, self.directory, self.ram = folder, folder / "out" / "run", folder / "ram"
    self.keys = [*TINY, f"base_output_directory={folder / 'out'}", "run_name=run", *keys]
    self._start, self.log = start, folder / "printed.txt"
    folder.mkdir(parents=True, exist_ok=True)

  def start(self, *keys: str, **changes: str) -> Process:
    """Starts the command with additional `keys` and with `changes` to the environment."""
    return self._start(self.argv(*keys), changes, self.log)

  def argv(self, *keys: str) -> list[str]:
    """Returns the arguments of the command. If a key is given twice, the last one counts."""
    return last_of_each([*self.keys, *keys])

  def finish(self, *keys: str, timeout: float = 600) -> int:
    """Runs the command and returns its exit code. Kills it after `timeout` seconds."""
    return wait_for_exit(self.start(*keys), timeout)

  @property
  def printed(self) -> str:
    """What the processes have printed, without the time of each line."""
    return without_times(self.log.read_text(errors="replace")) if self.log.exists() else ""

  def records(self, name: str) -> list[dict[str, Any]]:
    """Returns the records of metrics.jsonl or events.jsonl, without a line that a kill has truncated."""
    path = self.directory / f"{name}.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
      try:
        found.append(json.loads(line))
      except json.JSONDecodeError:
        continue
    return found

  def events(self, kind: str) -> list[dict[str, Any]]:
    return [event for event in self.records("events") if event["kind"] == kind]

  @property
  def last_step(self) -> int:
    """The step of the last record, written by any process; 0 before the first record."""
    path = self.directory / "metrics.jsonl"
    if not path.exists():
      return 0
    with path.open("rb") as file:
      file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
      steps = STEP.findall(file.read())
    return int(steps[-1]) if steps else 0

  def losses(self) -> dict[int, tuple[float, float]]:
    """Returns {step: (loss, gradient norm)}. Raises AssertionError if a repeated step had another result."""
    found: dict[int, tuple[float, float]] = {}
    for record in self.records("metrics"):
      if "loss" in record:
        value = record["loss"], record["grad_norm"]
        first = found.setdefault(record["step"], value)
        assert first == value, (
          f"step {record['step']} had loss and gradient norm {first}, and {value} when it was repeated"
        )
    return found

  def committed_steps(self) -> list[int]:
    """Returns the steps with a committed persistent checkpoint."""
    root = self.directory / "checkpoints"
    names = [path.parent.name for path in root.glob("*/commit_success.txt")] if root.is_dir() else []
    return sorted(int(name) for name in names if name.isdigit())

  def arrays(self, step: int) -> dict[str, np.ndarray]:
    """Returns all arrays in the persistent checkpoint of `step` (weights, optimizer state, counters), read by Orbax."""
    import jax
    import orbax.checkpoint as ocp
    from etils import epath

    path = epath.Path(self.directory / "checkpoints" / str(step) / "state")
    reader = ocp.PyTreeCheckpointHandler()  # a Checkpointer would warn: the folder of one item has no metadata file
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).tree)
    found: dict[str, np.ndarray] = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=plain))
    return found


def text_run(folder: Path, name: str, keys: Sequence[str], start: Start = start) -> Run:
  """Returns a run in folder/name that trains on the sources of this project: a corpus that every clone has.

  All runs in `folder` share text, tokens and compiled programs.
  """
  text = folder / "text"
  if not text.exists():
    text.mkdir()
    for path in sorted((ROOT / "src" / "trainer").glob("*.py")):
      (text / f"{path.stem}.txt").write_text(path.read_text())
  shared = ["dataset_type=text", "vocab_size=258"]
  shared += [f"dataset_path={text}", f"dataset_cache_directory={folder / 'tokens'}"]
  return Run(folder / name, [*shared, f"jax_cache_dir={folder / 'compiled'}", *keys], start)


def wait_for_exit(process: Process, timeout: float = 600) -> int:
  """Waits and returns the exit code, or minus the number of the signal that ended the process."""
  try:
    return process.wait(timeout)
  except subprocess.TimeoutExpired:
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    raise


def wait_until(process: Process, condition: Callable[[], bool], timeout: float = 600, pause: float = 0.02) -> bool:
  """Waits until `condition()` is true and returns True. Returns False if the process ended first.

  Checks every `pause` seconds. After `timeout` seconds, kills the process and raises TimeoutError.
  """
  deadline = time.monotonic() + timeout
  while not condition():
    if process.poll() is not None:
      return False
    if time.monotonic() > deadline:
      process.send_signal(signal.SIGKILL)
      process.wait(60)
      raise TimeoutError(f"the condition was not true within {timeout:g} s")
    time.sleep(pause)
  return True


def differences(run: Run, undisturbed: Run, step: int) -> list[str]:
  """Returns the differences between a run that is complete at `step` and the undisturbed run; [] if bit-identical."""
  found = []
  ours, theirs = run.losses(), undisturbed.losses()
  if ours.keys() != theirs.keys():
    found.append(f"steps {sorted(ours.keys() ^ theirs.keys())} are in only one history")
  different = [s for s in sorted(ours.keys() & theirs.keys()) if ours[s] != theirs[s]]
  found += [f"step {s} has loss and gradient norm {ours[s]}, undisturbed {theirs[s]}" for s in different[:3]]
  got, want = run.arrays(step), undisturbed.arrays(step)
  if got.keys() != want.keys():
    found.append(f"the final states do not have the same arrays: {sorted(got.keys() ^ want.keys())}")
  wrong = [name for name in want if name in got and got[name].tobytes() != want[name].tobytes()]
  found += [f"{name} differs in the final state" for name in wrong]
  return found
