"""Does this machine compute the same bits twice? Compares two runs of one command, and the members of one run.

    .venv/bin/python -m end_to_end.same_bits [--steps 16] [--slices 3] [key=value ...]

First a run, twice, in processes without a compilation cache: with and without xla_gpu_deterministic_ops. Are the losses
and gradient norms of all steps the same? Then `trainer.launch.local` with AdamW and with Muon, where each member writes
a local copy of its whole state after every fourth step. Are the copies of a step the same bytes?

The model is qwen3-0.6b with 4 layers, on text of this Python's library. keys: for all runs, such as the sizes of a
model that suits a CPU. Members share the device. Exits with 1 if two members or two runs with the option differ.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from end_to_end.benchmarks.common import positive
from tests.support.command import ROOT

from trainer.observe.metrics import read_records

KEYS = (
  "model_name=qwen3-0.6b override_model_config=true base_num_decoder_layers=4 vocab_size=4096 max_target_length=2048 "
  "per_device_batch_size=4 dataset_type=text tokenizer_type=byte eval_steps=0 learning_rate=1e-3 jax_cache_dir= "
  "enable_report=false services="
).split()
WARMUP_STEPS = 5  # not timed
COPY_PERIOD = 4
OPTION = "compile_xla_flags=--xla_gpu_deterministic_ops=true"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=positive, default=16)
  parser.add_argument("--slices", type=positive, default=3)
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs")
  args = parser.parse_args()
  if args.steps <= WARMUP_STEPS:
    parser.error(f"--steps {args.steps}: must be more than {WARMUP_STEPS}, because the first steps are not timed")
  keys = [*KEYS, f"steps={args.steps}", *args.keys]
  with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
    folder = Path(name)
    _two_runs(folder / "default", keys)
    good = _two_runs(folder / "option", [*keys, OPTION])
    for optimizer in ("adamw", "muon"):
      good &= _members(folder / optimizer, [*keys, f"opt_type={optimizer}"], args.slices)
  return 0 if good else 1


def _two_runs(folder: Path, keys: Sequence[str]) -> bool:
  """Runs the command twice, prints what it took, and returns whether all steps have the same numbers."""
  runs: list[dict[int, tuple[float, float]]] = []
  for name in ("first", "second"):
    began = time.monotonic()
    _run(["trainer"], folder, [*keys, f"run_name={name}", "enable_checkpointing=false"], {})
    records = [record for record in read_records(str(folder / name)) if "loss" in record]
    step = statistics.mean(record["seconds"] for record in records if record["step"] > WARMUP_STEPS)
    print(f"{folder.name}, {name} run: {time.monotonic() - began:.1f} s, {step:.4f} s a step", flush=True)
    runs.append({record["step"]: (record["loss"], record["grad_norm"]) for record in records})
  first, second = runs
  differs = [step for step in first if first[step] != second.get(step)]
  print(f"{folder.name}: " + (f"differs from step {differs[0]} on" if differs else f"{len(first)} steps are the same"))
  return not differs and first.keys() == second.keys()


def _members(folder: Path, keys: Sequence[str], slices: int) -> bool:
  """Trains with `slices` members, and returns whether their states are the same bytes."""
  copies = (
    f"enable_emergency_checkpoint=true local_checkpoint_directory={folder}/ram local_checkpoint_period={COPY_PERIOD}"
  )
  elastic = f"elastic_enabled=true elastic_min_slice_count=1 checkpoint_period=1000000 {copies}"
  # Not all of the device's memory for the first process that asks.
  memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / slices:.2f}"}
  module = ["trainer.launch.local", "--slices", str(slices)]
  _run(module, folder, [*keys, *elastic.split(), "run_name=members"], memory)
  found: dict[int, set[str]] = defaultdict(set)
  count = 0
  for path in (folder / "ram").rglob("*.bin"):  # {step}.s{slice}.p{process}.bin
    count += 1
    found[int(path.name.split(".")[0])].add(hashlib.sha256(path.read_bytes()).hexdigest())
  differ = sorted(step for step, kinds in found.items() if len(kinds) > 1)
  ended = (folder / "printed").read_text().count("with other weights")
  result = f"the members differ after steps {differ}" if differ else f"{count} copies of steps {sorted(found)} agree"
  print(f"{folder.name}, {slices} members: {result}; {ended} times a member was ended for its weights", flush=True)
  assert count == len(found) * slices and count, f"{count} copies of {slices} members"
  return not differ and not ended


def _run(module: Sequence[str], folder: Path, keys: Sequence[str], changes: dict[str, str]) -> None:
  """Runs a command of the trainer. Ends this process if it fails."""
  folder.mkdir(exist_ok=True)
  command = [sys.executable, "-m", *module, "configs/base.yml", f"base_output_directory={folder}", *keys]
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | changes
  with (folder / "printed").open("ab") as printed:
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=printed, stderr=subprocess.STDOUT)
  if done.returncode:
    tail = (folder / "printed").read_text()[-4000:]
    sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}:\n{tail}")


if __name__ == "__main__":
  sys.exit(main())
