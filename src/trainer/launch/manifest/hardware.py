"""TPU slices as GKE and Pathways name them."""

from __future__ import annotations

from dataclasses import dataclass

from stepcost import chips, topologies
from trainer.config import ConfigError

CHIPS_PER_HOST = 4

# Version, as in topologies.Topology.jax_name -> (GKE machine type, GKE accelerator, Pathways instance, GB of the
# machine's memory).
_NAMES = {
  "v4": ("ct4p-hightpu-4t", "tpu-v4-podslice", "tpuv4", 407),
  "v5e": ("ct5lp-hightpu-4t", "tpu-v5-lite-podslice", "tpuv5e", 192),
  "v5p": ("ct5p-hightpu-4t", "tpu-v5p-slice", "tpuv5", 448),
  "v6e": ("ct6e-standard-4t", "tpu-v6e-slice", "tpuv6e", 720),
  "tpu7x": ("tpu7x-standard-4t", "tpu7x", "tpu7x", 960),
}


@dataclass(frozen=True)
class Slice:
  machine_type: str
  accelerator: str
  instance: str  # "tpuv5e:4x4"
  topology: str  # "4x4"
  hosts: int
  hbm_bytes: int  # of a chip
  host_bytes: int  # memory of a host
  chips_per_host: int = CHIPS_PER_HOST


def resolve(tpu_type: str) -> Slice:
  """The slice with Google Cloud's name `tpu_type`. Raises ConfigError if there is none with whole hosts of 4 chips."""
  try:
    found = topologies.resolve(tpu_type)
  except topologies.TopologyError as error:
    raise ConfigError(f"--tpu-type {error}\nGive Google Cloud's name, such as v5litepod-16 or v5p-64.") from None
  if found.platform != "tpu":
    raise ConfigError(f"--tpu-type {tpu_type}: is no TPU.\nGive Google Cloud's name, such as v5litepod-16 or v5p-64.")
  version, _, shape = found.jax_name.partition(":")
  if found.chips < CHIPS_PER_HOST:
    raise ConfigError(
      f"--tpu-type {tpu_type}: has {found.chips} chip, and hosts here have {CHIPS_PER_HOST}.\n"
      f"Choose a slice of at least {CHIPS_PER_HOST} chips."
    )
  machine, accelerator, instance, gigabytes = _NAMES[version]
  chip = chips.find(version.removeprefix("tpu"))
  assert chip is not None, version
  hbm = chip.hbm_bytes * chip.devices_per_chip
  hosts = found.chips // CHIPS_PER_HOST
  return Slice(machine, accelerator, f"{instance}:{shape}", shape, hosts, hbm, gigabytes * 10**9)
