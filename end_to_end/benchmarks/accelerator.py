"""Trains published models on the accelerator at hand: tokens/s, MFU, and what attention, remat and snapshots cost.

    python -m end_to_end.benchmarks.accelerator [--models qwen3-0.6b,qwen3-1.7b] [--lengths 2048,8192]
      [--tokens 16384] [--remat full,minimal_with_context] [--steps 30] [key=value ...]

Every line is a run of its own with synthetic data: seconds are the mean over its steps from the sixth on, so that
steps which wait for a snapshot count; the ratio is to the first line of the same model and length, flash attention with
the first remat policy. --tokens is the size of a device's batch. What does not fit says so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from end_to_end.benchmarks.arguments import positive, positives

from trainer.observe.metrics import read_records

ROOT = Path(__file__).parents[2]
WARM = 5  # steps at the start that do not count
SNAPSHOT_PERIOD = 5


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--models", default="qwen3-0.6b,qwen3-1.7b")
  parser.add_argument("--lengths", type=positives, default="2048,8192")
  parser.add_argument("--remat", default="full,minimal_with_context")
  parser.add_argument("--tokens", type=positive, default=16384)
  parser.add_argument("--steps", type=int, default=30)
  parser.add_argument("keys", nargs="*", help="key=value for all runs")
  args = parser.parse_args()
  if args.steps <= WARM:
    parser.error(f"--steps {args.steps}: the first {WARM} of a run do not count; give {WARM + 1} or more")
  # In a process of its own: one that has asked for the devices holds them, and the runs would find none.
  ask = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
  backend = subprocess.run(ask, capture_output=True, text=True)
  if backend.returncode:
    parser.error(
      f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX finds no such device. Unset it or run bash setup.sh "
      f"--tpu or --gpu. JAX says:\n{backend.stderr.strip()[-3000:]}"
    )
  if backend.stdout.split() == ["cpu"]:
    parser.error(
      "JAX's default backend here is cpu: this benchmark needs an accelerator. Run it where there is one, with "
      "bash setup.sh --tpu or --gpu, and JAX_PLATFORMS unset or naming it"
    )
  policies = args.remat.split(",")
  variants = [f"attention=flash remat_policy={policy}" for policy in policies]
  variants.append(f"attention=dot_product remat_policy={policies[0]}")
  variants.append(f"{variants[0]} elastic_enabled=true snapshot_period={SNAPSHOT_PERIOD}")
  for model in args.models.split(","):
    for length in args.lengths:
      sizes = f"model_name={model} max_target_length={length} per_device_batch_size={args.tokens / length:g}"
      first = None
      for variant in variants:
        records = _run([*sizes.split(), *variant.split(), f"steps={args.steps}", *args.keys])
        if not records:
          print(f"{sizes} {variant}: does not fit", flush=True)
          continue
        seconds = statistics.mean(record["seconds"] for record in records)
        first = first or seconds
        tokens, mfu = records[-1]["tokens"] / records[-1]["step"] / seconds, _mean_mfu(records, seconds)
        print(f"{sizes} {variant}: {seconds:.3f} s a step, {tokens:,.0f} tokens/s, MFU {mfu}, {first / seconds:.2f} x")


def _mean_mfu(records: list[dict[str, Any]], seconds: float) -> str:
  """That of a step of `seconds`, from one record's own; n/a where the chip's peak is not known."""
  mfu, own = records[-1]["mfu"], records[-1]["seconds"]
  return "n/a" if mfu is None else f"{mfu * own / seconds:.1%}"


def _run(keys: list[str]) -> list[dict[str, Any]]:
  """The records of a run's steps that count; none where it ran out of memory."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "trainer", "configs/base.yml", "dataset_type=synthetic", "run_name=t"]
    command += [f"base_output_directory={folder}", "enable_checkpointing=false", *keys]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode and "RESOURCE_EXHAUSTED" in done.stdout + done.stderr:
      return []
    if done.returncode:
      sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    records = read_records(f"{folder}/t")
  return [record for record in records if "loss" in record and record["step"] > WARM]


if __name__ == "__main__":
  main()
