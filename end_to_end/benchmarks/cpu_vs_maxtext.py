"""Trains the same small model with MaxText and with this project on the CPU, turn by turn, and prints the ratios.

    python -m end_to_end.benchmarks.cpu_vs_maxtext MAXTEXT_PYTHON [--steps 10] [--rounds 2] [--devices 2]

MAXTEXT_PYTHON is the interpreter of an environment with MaxText in it (pip install maxtext). Both get the same keys;
both compute in float32. A round runs every configuration of both once, so that a busy machine slows both; a
configuration's figure is the least seconds of all its steps but each run's first two. The share of the peak is that of
the step's matmuls (6 FLOPs a parameter and token, and attention's) in what the machine's own matmuls reach.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEYS = (
  "model_name=qwen3-0.6b override_model_config=true base_num_decoder_layers=4 base_emb_dim=256 base_num_query_heads=4 "
  "base_num_kv_heads=2 base_mlp_dim=1024 head_dim=64 vocab_size=4096 dataset_type=synthetic max_target_length=512 "
  "enable_checkpointing=false dtype=float32 run_name=t"
).split()
MAXTEXT_KEYS = (
  "hardware=cpu scan_layers=true log_config=false enable_goodput_recording=false skip_jax_distributed_system=true "
  "attention=dot_product"
).split()
ROWS = 8  # of the global batch: 4,096 tokens
# Times float32 matmuls of 1024 to 2048, the best of which is the machine's peak.
PEAK = """
import time, jax, jax.numpy as jnp
best = 0
for n in (1024, 1536, 2048):
  a = jnp.ones((n, n)); f = jax.jit(jnp.matmul); f(a, a).block_until_ready()
  for _ in range(8):
    t = time.perf_counter(); f(a, a).block_until_ready(); best = max(best, 2 * n**3 / (time.perf_counter() - t))
print(best)
"""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("maxtext_python")
  parser.add_argument("--steps", type=int, default=10)
  parser.add_argument("--rounds", type=int, default=2)
  parser.add_argument("--devices", type=int, default=2, help="that MaxText's CPU is split into; one of ours has it all")
  args = parser.parse_args()
  if args.steps < 3:
    parser.error(f"--steps {args.steps}: the first two of a run do not count; give 3 or more")
  if not shutil.which(args.maxtext_python):
    parser.error(f"{args.maxtext_python}: there is no such interpreter")
  has_maxtext = "import importlib.util, sys; sys.exit(importlib.util.find_spec('maxtext') is None)"
  if subprocess.run([args.maxtext_python, "-c", has_maxtext]).returncode:
    parser.error(f"{args.maxtext_python} has no MaxText: pip install maxtext in its environment")
  seconds: dict[tuple[str, str], list[float]] = {}
  starts: dict[tuple[str, str], list[float]] = {}
  for _ in range(args.rounds):
    for remat in ("none", "full"):
      keys = [*KEYS, f"remat_policy={remat}", f"steps={args.steps}"]
      commands = {"maxtext": _maxtext(args.maxtext_python, keys, args.devices)}
      for attention in ("dot_product", "flash"):
        commands[f"trainer, {attention}"] = _trainer([*keys, f"attention={attention}"])
      for name, (command, environment) in commands.items():
        first, steps = _run(command, environment)
        seconds.setdefault((remat, name), []).extend(steps)
        starts.setdefault((remat, name), []).append(first)
  peak = float(_output([sys.executable, "-c", PEAK], {}))
  print(f"matmul peak {peak / 1e9:.0f} GFLOP/s")
  for (remat, name), steps in seconds.items():
    theirs = min(seconds[remat, "maxtext"])
    tokens = ROWS * 512 / min(steps)
    print(
      f"remat {remat:4} {name:20} {min(steps):.3f} s a step, {tokens:.0f} tokens/s, {theirs / min(steps):.2f} x, "
      f"{_flops() / min(steps) / peak:.0%} of the peak; first step after {min(starts[remat, name]):.1f} s"
    )


def _flops() -> float:
  """Of one step's matmuls, without recomputation: 4 layers' weights and the tied head, causal attention halved."""
  layer = 256 * 64 * (4 + 2 + 2 + 4) + 3 * 256 * 1024
  attention = 2 * 512 * 4 * 64 // 2
  return 6 * ROWS * 512 * (4 * (layer + attention) + 256 * 4096)


def _maxtext(python: str, keys: list[str], devices: int) -> tuple[list[str], dict[str, str]]:
  base = _output([python, "-c", "import maxtext; print(maxtext.__path__[0])"], {}).strip().splitlines()[-1]
  command = [python, "-m", "maxtext.trainers.pre_train.train", f"{base}/configs/base.yml", *keys, *MAXTEXT_KEYS]
  xla = f"--xla_force_host_platform_device_count={devices}"
  return [*command, f"per_device_batch_size={ROWS // devices}"], {"DECOUPLE_GCLOUD": "TRUE", "XLA_FLAGS": xla}


def _trainer(keys: list[str]) -> tuple[list[str], dict[str, str]]:
  command = [sys.executable, "-m", "trainer", "configs/base.yml", *keys, f"per_device_batch_size={ROWS}"]
  return command, {"PYTHONPATH": str(ROOT / "src")}


def _run(command: list[str], environment: dict[str, str]) -> tuple[float, list[float]]:
  """Returns the seconds from the start to the first completed step, and each step's from the third on."""
  with tempfile.TemporaryDirectory() as folder:
    started, first, steps = time.monotonic(), 0.0, []
    process = subprocess.Popen(
      [*command, f"base_output_directory={folder}"],
      env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment,
      cwd=ROOT,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    printed = []
    assert process.stdout is not None
    for line in process.stdout:
      printed.append(line)
      if found := re.search(r"completed step: \d+, seconds: ([\d.]+)", line):
        first = first or time.monotonic() - started
        steps.append(float(found.group(1)))
    if process.wait() or len(steps) < 3:
      sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(printed[-30:])}")
  return first, steps[2:]


def _output(command: list[str], environment: dict[str, str]) -> str:
  return subprocess.run(
    command, env=os.environ | {"JAX_PLATFORMS": "cpu"} | environment, check=True, capture_output=True, text=True
  ).stdout


if __name__ == "__main__":
  main()
