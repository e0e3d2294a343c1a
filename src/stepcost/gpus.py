"""NVIDIA GPUs to compile for without having one: XLA needs a description of the card, and no driver."""

from __future__ import annotations

import dataclasses
import os
from types import MappingProxyType

PER_HOST = 8  # GPUs that NVLink connects in a DGX or HGX machine
SHARE = 0.75  # of a GPU's memory that JAX takes by default
SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX refuses both together


@dataclasses.dataclass(frozen=True)
class Card:
  """What the compiler asks about a card: data sheets, and the table of compute capabilities in CUDA's guide."""

  kind: str  # jax.Device.device_kind
  capability: int  # the first number of its compute capability
  multiprocessors: int
  fpus: int  # float32 units of a multiprocessor
  clock_ghz: float
  shared_bytes: int  # shared memory of a multiprocessor
  l2_bytes: int
  bandwidth: int  # of its memory, bytes/s
  memory_bytes: int  # as the driver reports it
  links: int  # NVLink


CARDS = MappingProxyType(
  {
    "a100": Card("NVIDIA A100-SXM4-80GB", 8, 108, 64, 1.41, 164 << 10, 40 << 20, 2_039_040_000_000, 85_100_068_864, 12),
    "h100": Card(
      "NVIDIA H100 80GB HBM3", 9, 132, 128, 1.98, 228 << 10, 50 << 20, 3_352_320_000_000, 84_942_979_072, 18
    ),
    "h200": Card("NVIDIA H200", 9, 132, 128, 1.98, 228 << 10, 50 << 20, 4_800_000_000_000, 150_754_820_096, 18),
    "b200": Card("NVIDIA B200", 10, 148, 128, 1.965, 228 << 10, 132_644_864, 7_672_320_000_000, 191_514_411_008, 18),
  }
)


def target_config(card: Card) -> str:
  """Returns the description of `card`, with CUDA 13 and cuDNN 9.10, in the fields of XLA's GpuTargetConfigProto."""
  features = "feature_extension: ACCELERATED_FEATURES" if card.capability >= 9 else ""
  return f"""
platform_name: "CUDA"
device_description_str: "{card.kind}"
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  name: "{card.kind}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ major: {card.capability} {features} }}
  core_count: {card.multiprocessors} fpus_per_core: {card.fpus} clock_rate_ghz: {card.clock_ghz}
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: {48 << 10} shared_memory_per_block_optin: {card.shared_bytes - 1024}
  shared_memory_per_core: {card.shared_bytes} l2_cache_size: {card.l2_bytes}
  memory_bandwidth: {card.bandwidth} device_memory_size: {card.memory_bytes}
  device_interconnect_info {{ active_links: {card.links} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
}}
"""


def share_of_jax() -> float:
  """Returns the share of a GPU's memory that JAX takes in a process with this environment."""
  return float(next(filter(None, map(os.environ.get, SHARE_VARIABLES)), SHARE))
