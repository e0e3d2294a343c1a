"""Trains published models on the accelerator of this machine: tokens/s, MFU, cost of attention, remat and snapshots.

    python -m end_to_end.benchmarks.accelerator [--models qwen3-0.6b,qwen3-1.7b] [--lengths 2048,8192]
      [--tokens 16384] [--remat full,minimal_with_context] [--steps 30] [key=value ...]

Each line is a separate run with synthetic data. The seconds are the mean over all steps from the sixth on, which
includes steps that wait for a snapshot. The ratio is to the first line of the same model and length: flash attention
with the first remat policy. --tokens is the number of tokens in the batch of a device. A run that does not fit into
memory prints that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

from end_to_end.benchmarks.common import positive, positives
from tests.support.command import ROOT

from trainer.observe.metrics import read_records

WARMUP_STEPS = 5  # not counted
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
  if args.steps <= WARMUP_STEPS:
    parser.error(f"--steps {args.steps}: must be more than {WARMUP_STEPS}, because the first steps do not count")
  # In another process, because a process that asks for the devices holds them, and the runs would find none.
  query = [sys.executable, "-c", "import jax; print(jax.default_backend())"]
  backend = subprocess.run(query, capture_output=True, text=True)
  if backend.returncode:
    parser.error(
      f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}: JAX finds no such device. Unset it, or run bash setup.sh "
      f"--tpu or --gpu. The error of JAX:\n{backend.stderr.strip()[-3000:]}"
    )
  if backend.stdout.split() == ["cpu"]:
    parser.error(
      "The default backend of JAX is cpu, but this benchmark needs an accelerator. On a machine that has one, run "
      "bash setup.sh --tpu or --gpu, and unset JAX_PLATFORMS or set it to the accelerator"
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
  """Returns the MFU of a step of `seconds`, scaled from the last record; n/a if the peak of the chip is unknown."""
  mfu, own = records[-1]["mfu"], records[-1]["seconds"]
  return "n/a" if mfu is None else f"{mfu * own / seconds:.1%}"


def _run(keys: list[str]) -> list[dict[str, Any]]:
  """Returns the records of the steps that count; [] if the run was out of memory."""
  with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, "-m", "trainer", "configs/base.yml", "dataset_type=synthetic", "run_name=t"]
    command += [f"base_output_directory={folder}", "enable_checkpointing=false", *keys]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode and "RESOURCE_EXHAUSTED" in done.stdout + done.stderr:
      return []
    if done.returncode:
      sys.exit(
        f"{' '.join(command)} ended with exit code {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
      )
    records = read_records(f"{folder}/t")
  return [record for record in records if "loss" in record and record["step"] > WARMUP_STEPS]


if __name__ == "__main__":
  main()
