"""Computes steps of a run again, in a folder that is deleted afterwards, for `comparison.py`."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from trainer.checkpoint import checksums, run_folder
from trainer.checkpoint.step_folders import StepFolders
from trainer.config.errors import ConfigError
from trainer.config.load import load
from trainer.config.resume import CHANGES_DATA_ORDER, CHANGES_MODEL, CHANGES_STATE, FREE
from trainer.process.child import run_child
from trainer.trust import receipt
from trainer.trust.receipt_lines import Line, check
from trainer.weights import stored_arrays
from trainer.world import SINGLE_WORLD

_REPLAY_KEYS = (
  "run_name=replay receipt_state_period=1 enable_checkpointing=true checkpoint_period=2000000000 "
  "max_num_checkpoints_to_keep=1000000 checkpoint_keep_best=0 enable_emergency_checkpoint=false "
  "local_checkpoint_period=0 local_checkpoint_directory= eval_steps=0 eval_interval=-1 "
  "eval_sets= target_eval_loss=0 witness_period=0 services= "
  "enable_report=false profiler= sample_prompt= fault_injection="
).split()
_OF_WORLDS = "shares_per_slice=-1 exchange_network= elastic_slow_factor=0 cluster_standin=".split()
# How the same numbers are computed, up to the order of sums: a replay may change these keys, and its bits are others.
_HOW = {"attention", "scan_layers", "remat_policy", "custom_remat", "per_device_batch_size"}
_HOW |= {"gradient_accumulation_steps", "compile_xla_flags"}
_NUMERIC = (CHANGES_STATE | CHANGES_MODEL | CHANGES_DATA_ORDER | FREE) - {"dataset_cache_directory", "eval_sets"}


@dataclass(frozen=True)
class Replay:
  """Steps that were computed again from the checkpoint of step `base`; 0: from the start of the run.

  tolerance, state_tolerance: of a loss, and of the distance of an array of the last state relative to its norm, where
  no bits are promised. unlike: why no bits are promised here; "": they are wherever the same slices compute the same
  rows. folders: of the run and of the replay.
  """

  base: int
  lines: dict[int, Line]
  tolerance: float
  state_tolerance: float
  unlike: str
  folders: tuple[str, str]

  def is_exact(self, line: Line) -> bool:
    """Whether the step of this line must have the same bits as in the run."""
    return not self.unlike and ("weights" in line or line.get("computed") == self.lines[line["step"]].get("computed"))

  def distance(self) -> tuple[str, float] | None:
    """The array of the last state that differs most from the run's checkpoint, and its distance relative to its norm;
    None if the run has no checkpoint there."""
    step = max(self.lines)
    if step not in _checkpoints(self.folders[0]):
      return None
    ours, theirs = (stored_arrays.entries(f"{folder}@{step}") for folder in self.folders)
    return max(((name, _distance(ours[name].read(), theirs[name].read())) for name in theirs), key=lambda one: one[1])


def _distance(a: np.ndarray, b: np.ndarray) -> float:
  """The norm of the difference, relative to the larger norm; infinite if a value is not finite in one of them."""
  x, y = (one.astype(np.float64).reshape(-1) for one in (a, b))
  if np.array_equal(x, y, equal_nan=True):
    return 0.0
  found = np.linalg.norm(x - y) / max(np.linalg.norm(x), np.linalg.norm(y))
  return float(found) if np.isfinite(found) else np.inf


def interval(text: str, lines: Mapping[int, Line]) -> tuple[int, int]:
  """FROM:TO as numbers. Raises ConfigError unless these steps are in the receipt."""
  match = re.fullmatch("([0-9]{1,18}):([0-9]{1,18})", text)
  first, last = map(int, match.groups()) if match else (0, 0)
  if not 1 <= first <= last:
    raise ConfigError(f"--replay {text}: is not FROM:TO, the first and the last step.\nWrite --replay 101:200.")
  if missing := [step for step in (first, last) if step not in lines]:
    there = f"{min(lines)} to {max(lines)}" if lines else "no step at all"
    raise ConfigError(f"--replay {text}: the receipt has no step {missing[0]}, but {there}.\nChoose among them.")
  return first, last


@contextlib.contextmanager
def replay(run: str, lines: Sequence[Line], first: int, last: int, keys: Sequence[str]) -> Iterator[Replay]:
  """Computes the steps from `first` to `last` again; the block can read the folder of the replay. keys: key=value that
  replace the keys of the run. Raises ConfigError if a checkpoint is missing, the keys do not fit, or the program that
  computes fails."""
  base = _base(run, first)
  start = _start(lines, base, last)
  with tempfile.TemporaryDirectory(prefix="replay-") as folder:
    target = Path(folder) / "replay"
    file, (program, changes) = Path(folder) / "config.yml", _plan(start, last, folder, keys)
    file.write_text(yaml.safe_dump(start["config"]))
    config = load([str(file), *changes])
    if base:
      _lend(f"{run}/checkpoints/{base}", target / "checkpoints" / str(base))
    print(f"Computing steps {base + 1} to {last} again ...", flush=True)
    _run([sys.executable, "-m", *program, str(file), *changes], Path(folder) / "log")
    found, wrong = check(receipt.read(str(target)))
    assert not wrong, wrong
    if found[0]["data"] != start["data"]:
      raise ConfigError(f"--replay: the data or the batch is another one: {found[0]['data']}, not {start['data']}.")
    tolerances = (1e-5, 1e-2) if config.model.dtype == "float32" else (1e-3, 0.3)
    computed = {line["step"]: line for line in found if "step" in line}
    yield Replay(base, computed, *tolerances, _unlike(start, found[0]), (run, str(target)))


def _checkpoints(run: str) -> list[int]:
  return StepFolders(f"{run}/checkpoints", SINGLE_WORLD, lambda line: None).steps()


def _base(run: str, first: int) -> int:
  steps = _checkpoints(run)
  before = [step for step in steps if step < first]
  if not before and first > 1:
    raise ConfigError(
      f"--replay {first}:...: needs a committed checkpoint of step {first - 1} or before, and {run} has "
      f"{steps or 'none'}.\nBegin after one of them, or with step 1, which needs none."
    )
  return max(before, default=0)


def _start(lines: Sequence[Line], base: int, last: int) -> Line:
  """The line about the process that computed the step after `base`. Raises ConfigError if keys changed meanwhile."""
  starts = [line for line in lines if "after" in line and line["after"] < last]
  first = [line for line in starts if line["after"] <= base][-1:] or starts[:1]
  for line in starts:
    if line["after"] > base:
      ours, theirs = _compared(line), _compared(first[0])
      changed = sorted(key for key in ours if ours[key] != theirs.get(key))
      if changed:
        raise ConfigError(
          f"--replay ...:{last}: {', '.join(changed)} changed after step {line['after']}.\nReplay the steps up to "
          f"{line['after']} and those after it one after the other."
        )
  return first[0]


def _compared(start: Line) -> dict[str, Any]:
  """What must not change within a replay: keys, and the identity of the data."""
  return {key: start["config"].get(key) for key in _NUMERIC} | start["data"]


def _plan(start: Line, last: int, folder: str, keys: Sequence[str]) -> tuple[list[str], list[str]]:
  """(the program with its options, key=value) that compute only these steps, with the same batches."""
  config, devices = start["config"], start["devices"]
  given = _pairs(keys)
  schedule = config["learning_rate_schedule_steps"]
  changes = _pairs(_REPLAY_KEYS) | {"base_output_directory": folder, "steps": str(last)}
  changes["learning_rate_schedule_steps"] = str(config["steps"] if schedule == -1 else schedule)
  if refused := given.keys() & ((changes.keys() | _NUMERIC) - _HOW):
    raise ConfigError(
      f"--replay {min(refused)}=...: this key belongs to what is computed.\nA replay may change only where and how "
      "steps are computed, for example num_slices."
    )
  if start["computes"] == "shares" and given.get("cluster", "multiprocess") == "multiprocess":
    changes |= {"elastic_enabled": "true", "elastic_min_slice_count": "1"}
    slices = str(devices["slices"])
    program = ["trainer.launch.local", "--slices", slices, "--local-slices", given.pop("num_slices", slices)]
    return program, [f"{name}={value}" for name, value in (changes | given).items()]
  if devices["platform"] == "cpu" and not config["cluster_standin"]:
    changes |= {"num_slices": str(devices["slices"]), "devices_per_slice": str(devices["devices_per_slice"])}
  if start["computes"] == "shares" or "cluster" in given:
    changes |= _pairs(_OF_WORLDS)
  before, now = devices["slices"] * devices["devices_per_slice"], 1
  for name, of_run in (("num_slices", "slices"), ("devices_per_slice", "devices_per_slice")):
    number = given.get(name, str(devices[of_run]))
    now *= int(number) if re.fullmatch("[0-9]{1,9}", number) else 0
  if now not in (0, before):  # the global batch never changes. 0: a number that the configuration refuses
    changes |= {"per_device_batch_size": f"{config['per_device_batch_size'] * before / now:.17g}"}
    changes |= {"elastic_min_slice_count": "-1"}
  return ["trainer"], [f"{name}={value}" for name, value in (changes | given).items()]


def _pairs(keys: Sequence[str]) -> dict[str, str]:
  return {name: value for name, _, value in (key.partition("=") for key in keys)}


def _lend(source: str, target: Path) -> None:
  """Makes a checkpoint of the run one of the replay, which only reads it."""
  target.parent.mkdir(parents=True)
  if "://" not in source:
    target.symlink_to(os.path.abspath(source))
    return
  folder = run_folder.folder(source)
  for name in checksums.walk(folder):
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    (target / name).write_bytes((folder / name).read_bytes())


def _run(command: Sequence[str], log: Path) -> None:
  with log.open("wb") as output:
    code = run_child(command, output)
  if code:
    lines = log.read_text(errors="replace").splitlines()
    last = max((number for number, line in enumerate(lines) if line.startswith("error: ")), default=len(lines) - 20)
    tail = "\n".join(lines[max(0, last) :][:20])  # a runtime may print a stack after the error
    raise ConfigError(f"{tail}\nThe replay has ended with exit code {code}; its error is above.")


def _unlike(start: Line, here: Line) -> str:
  """What is different on this machine, so that the bits may be others."""
  names = ["platform", "kind", "devices_per_slice", *(["slices"] if start["computes"] == "rows" else [])]
  ours, theirs = ({name: line["devices"][name] for name in names} for line in (here, start))
  ours["sums"], theirs["sums"] = here["computes"], start["computes"]
  packages = ("jax", "jaxlib", "libtpu")
  ours |= {name: here["versions"].get(name) for name in packages}
  theirs |= {name: start["versions"].get(name) for name in packages}
  ours |= {name: here["config"].get(name) for name in _HOW - {"per_device_batch_size"}}
  theirs |= {name: start["config"].get(name) for name in _HOW - {"per_device_batch_size"}}
  return ", ".join(f"{name} {theirs[name]} and now {ours[name]}" for name in ours if ours[name] != theirs[name])
