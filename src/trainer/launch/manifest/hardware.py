"""TPU slices as GKE and Pathways name them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from stepcost import chips, topologies
from trainer.config import ConfigError

CHIPS_PER_HOST = 4

# Version, as in topologies.Topology.jax_name -> (GKE machine type, GKE accelerator, Pathways instance, Ray's version,
# GB of the machine's memory).
_NAMES = {
  "v4": ("ct4p-hightpu-4t", "tpu-v4-podslice", "tpuv4", "TPU-V4", 407),
  "v5e": ("ct5lp-hightpu-4t", "tpu-v5-lite-podslice", "tpuv5e", "TPU-V5LITEPOD", 192),
  "v5p": ("ct5p-hightpu-4t", "tpu-v5p-slice", "tpuv5", "TPU-V5P", 448),
  "v6e": ("ct6e-standard-4t", "tpu-v6e-slice", "tpuv6e", "TPU-V6E", 720),
  "tpu7x": ("tpu7x-standard-4t", "tpu7x", "tpu7x", "TPU-V7X", 960),
}
# Of these versions Ray expects up to so many chips on one host (machine types ending in 8t); of others four.
_LARGE_HOSTS = {"TPU-V5LITEPOD": 8, "TPU-V6E": 8}


@dataclass(frozen=True)
class Slice:
  """One TPU slice."""

  machine_type: str
  accelerator: str
  instance: str  # "tpuv5e:4x4"
  ray_version: str
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
  machine, accelerator, instance, ray_version, gigabytes = _NAMES[version]
  chip = chips.find(version.removeprefix("tpu"))
  assert chip is not None, version
  hbm = chip.hbm_bytes * chip.devices_per_chip
  hosts = found.chips // CHIPS_PER_HOST
  return Slice(machine, accelerator, f"{instance}:{shape}", ray_version, shape, hosts, hbm, gigabytes * 10**9)


def on_hosts_of_ray(piece: Slice) -> Slice:
  """The same slice on the hosts that Ray expects: a slice of 8 chips of v5e or v6e has one host."""
  count = piece.hosts * piece.chips_per_host
  if not CHIPS_PER_HOST < count <= _LARGE_HOSTS.get(piece.ray_version, CHIPS_PER_HOST):
    return piece
  memory = piece.host_bytes * count // CHIPS_PER_HOST
  machine = piece.machine_type.replace(f"-{CHIPS_PER_HOST}t", f"-{count}t")
  return dataclasses.replace(piece, machine_type=machine, hosts=1, chips_per_host=count, host_bytes=memory)
