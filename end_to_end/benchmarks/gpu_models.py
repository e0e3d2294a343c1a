"""Compiles the training step for NVIDIA H100 GPUs, on a machine without a GPU.

    JAX_PLATFORMS=cpu python -m end_to_end.benchmarks.gpu_models [MODEL ...] [--gpus 8] [--keys key=value ...]

Needs the CUDA packages of JAX (bash setup.sh --gpu). Prints a Markdown table with one row per model: memory per GPU,
the time of the matmuls, of the HBM traffic and of the collectives at the peak rates, and the seconds to compile.
Attention counts twice: with a mask for packed rows and without one. A step computes one of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from end_to_end.benchmarks.common import model_config, positive

from trainer.config import ConfigError
from trainer.config.schema import Config

KEYS = ("per_device_batch_size=8", "max_target_length=2048", "attention=flash", "remat_policy=full")
COLUMNS = (
  "model",
  "GPUs",
  "arguments",
  "temporaries",
  "fits",
  "matmuls",
  "HBM",
  "HBM traffic",
  "collectives",
  "seconds",
)
# An H100 SXM with 80 GB, in the fields of XLA's GpuTargetConfigProto.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H100 80GB HBM3"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  memory_bandwidth: 3352320000000 device_memory_size: 84942979072 l2_cache_size: 52428800
  device_interconnect_info { active_links: 18 }
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}
"""


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("models", nargs="*", default=["qwen3-0.6b", "qwen3-1.7b"])
  parser.add_argument("--gpus", type=positive, default=1, help="of one slice, on one host")
  parser.add_argument("--keys", nargs="*", default=[], help="added to, or instead of, " + " ".join(KEYS))
  args = parser.parse_args()
  try:
    configs = [model_config(model, KEYS, args.keys) for model in args.models]
  except ConfigError as error:
    parser.error(str(error))

  from jax.experimental import topologies

  try:
    gpus = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology=f"1x1x{args.gpus}").devices
  except NotImplementedError:
    parser.error("JAX has no compiler for GPUs here. Run bash setup.sh --gpu")
  print(f"| {' | '.join(COLUMNS)} |")
  print("|---" * len(COLUMNS) + "|", flush=True)
  for model, config in zip(args.models, configs):
    print(_row(model, config, gpus), flush=True)


def _row(model: str, config: Config, gpus: Sequence[Any]) -> str:
  """Returns one row of the table."""
  from stepcost import chips
  from stepcost.text import milliseconds, size
  from trainer.preflight import analysis

  chip = chips.find("H100")
  assert chip is not None
  found = analysis.analyse(config, [gpus], 1)
  if not isinstance(found, analysis.Analysis):
    raise SystemExit(f"{model} on {len(gpus)} GPUs: {found.reason}")
  memory, line = found.memory, analysis.roofline(found, chip)
  assert line.memory is not None
  cells = [
    *(model, str(len(gpus)), size(memory.arguments), size(memory.temporaries), "yes" if memory.fits(chip) else "no"),
    *(
      milliseconds(line.compute),
      milliseconds(line.memory),
      size(int(found.costs.device_bytes)),
      milliseconds(line.ici),
    ),
    f"{found.trace_seconds + found.compile_seconds:.0f}",
  ]
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  main()
