"""Trains the same small model with MaxText and with this project on the CPU, in turns, and prints the ratios.

    python -m end_to_end.benchmarks.cpu_vs_maxtext MAXTEXT_PYTHON [--steps 10] [--rounds 2] [--devices 2]

MAXTEXT_PYTHON is the Python of an environment with MaxText (pip install maxtext). Both programs use the same keys and
compute in float32. A round runs every configuration of both programs once, so that a busy machine slows both. The
result of a configuration is the least step time, without the first two steps of each run. Ratios are relative to the
faster configuration of MaxText with the same remat_policy. The share of the peak is the FLOP/s of the step's matmuls (6
FLOPs per parameter and token, plus attention) divided by the best FLOP/s of a matmul on this machine. The bound is the
time of the step's matmuls alone: each matmul with a weight as a program of its own, and attention (which computes its
scores twice) at the best FLOP/s.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile

from end_to_end.benchmarks.common import run_and_time_lines
from tests.support.command import ROOT, cpu_environment

KEYS = (
  "model_name=qwen3-0.6b override_model_config=true base_num_decoder_layers=4 base_emb_dim=256 base_num_query_heads=4 "
  "base_num_kv_heads=2 base_mlp_dim=1024 head_dim=64 vocab_size=4096 dataset_type=synthetic max_target_length=512 "
  "enable_checkpointing=false dtype=float32 run_name=t"
).split()
MAXTEXT_KEYS = (
  "hardware=cpu log_config=false enable_goodput_recording=false skip_jax_distributed_system=true attention=dot_product"
).split()
ROWS = 8  # of the global batch: 4,096 tokens
LAYERS = 4
# Prints the best FLOP/s of float32 matmuls of 1024 to 2048 rows, and the seconds of a step's matmuls with its weights.
MATMULS = """
import time, jax, jax.numpy as jnp
def seconds(f, *arrays):
  f, best = jax.jit(f), float("inf")
  for _ in range(12):
    t = time.perf_counter(); f(*arrays).block_until_ready(); best = min(best, time.perf_counter() - t)
  return best
squares = [(n, jnp.ones((n, n))) for n in (1024, 1536, 2048)]
print(max(2 * n**3 / seconds(jnp.matmul, a, a) for n, a in squares))
total = 0
for rows, columns, number in ((256, 512, 4), (256, 256, 4), (256, 2048, 4), (1024, 256, 4), (256, 4096, 1)):
  x, w, y = (jnp.ones(shape) for shape in ((4096, rows), (rows, columns), (4096, columns)))
  output = seconds(lambda a, b: a @ b, x, w)
  gradients = seconds(lambda a, b: a @ b.T, y, w) + seconds(lambda a, b: a.T @ b, x, y)
  total += number * (output + gradients)
print(total)
"""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("maxtext_python")
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument("--rounds", type=int, default=2)
  parser.add_argument("--devices", type=int, default=2, help="number of CPU devices of MaxText; this project uses one")
  args = parser.parse_args()
  if args.steps < 3:
    parser.error(f"--steps {args.steps}: must be at least 3, because the first two steps of a run do not count")
  if not shutil.which(args.maxtext_python):
    parser.error(f"{args.maxtext_python}: no such interpreter. Give the Python of an environment with MaxText")
  has_maxtext = "import importlib.util, sys; sys.exit(importlib.util.find_spec('maxtext') is None)"
  if subprocess.run([args.maxtext_python, "-c", has_maxtext]).returncode:
    parser.error(f"{args.maxtext_python}: has no MaxText. Run pip install maxtext in its environment")
  seconds: dict[tuple[str, str], list[float]] = {}
  starts: dict[tuple[str, str], list[float]] = {}
  for _ in range(args.rounds):
    for remat in ("none", "full"):
      keys = [*KEYS, f"remat_policy={remat}", f"steps={args.steps}"]
      commands = {}
      for scan in ("true", "false"):
        commands[f"maxtext, scan_layers={scan}"] = _maxtext(
          args.maxtext_python, [*keys, f"scan_layers={scan}"], args.devices
        )
      for attention, scan in (("dot_product", "true"), ("flash", "true"), ("flash", "false")):
        commands[f"trainer, {attention}, scan_layers={scan}"] = _trainer(
          [*keys, f"attention={attention}", f"scan_layers={scan}"]
        )
      for name, (command, environment) in commands.items():
        first, steps = _run(command, environment)
        seconds.setdefault((remat, name), []).extend(steps)
        starts.setdefault((remat, name), []).append(first)
  peak, weights = map(float, _output([sys.executable, "-c", MATMULS], {}).split())
  bound = weights + 7 * LAYERS * _attention_flops() / peak
  print(f"matmul peak {peak / 1e9:.0f} GFLOP/s; bound: matmuls alone {bound:.3f} s a step")
  for (remat, name), steps in seconds.items():
    theirs = min(min(seconds[remat, f"maxtext, scan_layers={scan}"]) for scan in ("true", "false"))
    tokens = ROWS * 512 / min(steps)
    print(
      f"remat {remat:4} {name:38} {min(steps):.3f} s a step, {tokens:.0f} tokens/s, {theirs / min(steps):.2f} x, "
      f"{_flops() / min(steps) / peak:.0%} of the peak; first step after {min(starts[remat, name]):.1f} s"
    )


def _flops() -> float:
  """Returns the FLOPs of the matmuls of one step: 4 layers and the tied head, half of the attention (causal).

  Recomputation is not counted.
  """
  layer = 256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 1024
  return 6 * (ROWS * 512 * (LAYERS * layer + 256 * 4096) + LAYERS * _attention_flops())


def _attention_flops() -> float:
  """Returns the FLOPs of one of the matmuls of one layer's attention, half of the full one (causal)."""
  return ROWS * 4 * 512 * 512 * 64


def _maxtext(python: str, keys: list[str], devices: int) -> tuple[list[str], dict[str, str]]:
  base = _output([python, "-c", "import maxtext; print(maxtext.__path__[0])"], {}).strip().splitlines()[-1]
  command = [python, "-m", "maxtext.trainers.pre_train.train", f"{base}/configs/base.yml", *keys, *MAXTEXT_KEYS]
  xla = f"--xla_force_host_platform_device_count={devices}"
  return [*command, f"per_device_batch_size={ROWS // devices}"], {"DECOUPLE_GCLOUD": "TRUE", "XLA_FLAGS": xla}


def _trainer(keys: list[str]) -> tuple[list[str], dict[str, str]]:
  command = [sys.executable, "-m", "trainer", "configs/base.yml", *keys, f"per_device_batch_size={ROWS}"]
  return command, {"PYTHONPATH": str(ROOT / "src")}


def _run(command: list[str], environment: dict[str, str]) -> tuple[float, list[float]]:
  """Returns seconds from the start to the first completed step, and the seconds of each step from the third on."""
  with tempfile.TemporaryDirectory() as folder:
    lines = run_and_time_lines([*command, f"base_output_directory={folder}"], environment)
  found = [(seconds, re.search(r"completed step: \d+, seconds: ([\d.]+)", line)) for seconds, line in lines]
  steps = [(seconds, float(step.group(1))) for seconds, step in found if step]
  return steps[0][0], [duration for _, duration in steps[2:]]


def _output(command: list[str], environment: dict[str, str]) -> str:
  return subprocess.run(command, env=cpu_environment(environment), check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
  main()
