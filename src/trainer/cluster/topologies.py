"""TPU slices that the compiler knows without their being there, by MaxText's names and by jax's."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from types import MappingProxyType
from typing import Any

# Chips of a slice -> its shape, as Google Cloud offers it (docs.cloud.google.com/tpu/docs, page of each version).
_FLAT = MappingProxyType(
  {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # v5e, v6e
)
_CUBIC = MappingProxyType(
  {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
    768: "8x8x12", 1024: "8x8x16", 1536: "8x12x16", 2048: "8x16x16", 3072: "12x16x16", 4096: "16x16x16",
    6144: "16x16x24", 8960: "16x20x28",
  }  # v4, v5p, 7x
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Generation:
  """How one TPU version is named and described to jax."""

  jax_name: str
  shapes: MappingProxyType[int, str]
  counted: int  # of the number in a name such as v5p-64: 2 where it counts cores, 1 where it counts chips
  chip_config_name: str = "default"


# v4's two cores are one device in "megacore"; 7x has no such mode, so its chip is two devices.
GENERATIONS = MappingProxyType(
  {
    "v4": Generation("v4", _CUBIC, 2, "megacore"),
    "v5e": Generation("v5e", _FLAT, 1),
    "v5litepod": Generation("v5e", _FLAT, 1),
    "v5p": Generation("v5p", _CUBIC, 2),
    "v6e": Generation("v6e", _FLAT, 1),
    "7x": Generation("tpu7x", _CUBIC, 2),
    "tpu7x": Generation("tpu7x", _CUBIC, 2),
  }
)

COMPILER_ENVIRONMENT = MappingProxyType(
  {
    "TPU_SKIP_MDS_QUERY": "1",  # asks no metadata server what machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two may compile at once: there is no chip to share
    # It complains where these are not set. The topology comes from the call, whatever they say.
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
  }
)


class TopologyError(ValueError):
  """A topology that is not known, or a compiler that is not installed; the message says what to do."""


@dataclasses.dataclass(frozen=True)
class Topology:
  """One slice, as `jax.experimental.topologies` wants it described."""

  name: str  # as given
  jax_name: str  # "v5e:4x4"
  chip_config_name: str
  chips: int
  chips_per_host: tuple[int, int, int]

  @property
  def hosts(self) -> int:
    return max(1, self.chips // math.prod(self.chips_per_host))


def resolve(name: str) -> Topology:
  """The topology of `v5e-16` (MaxText's and Google Cloud's names) or `v5e:4x4` (jax's). Raises TopologyError.

  v5e and v6e count chips; v4, v5p and 7x count cores, two to a chip: v5p-64 is 32 chips.
  """
  found = re.fullmatch(r"(\w+)([-:])([\dx]+)", name.strip().lower())
  if not found or found.group(1) not in GENERATIONS:
    raise TopologyError(
      f"compile_topology={name}: no such TPU slice. Give VERSION-NUMBER ({_examples()}) or a jax topology name "
      "(v5e:4x4, v5p:4x4x8)."
    )
  generation = GENERATIONS[found.group(1)]
  if found.group(2) == ":":
    shape = found.group(3)
  else:
    number = int(found.group(3)) if found.group(3).isdigit() else 0
    known = {chips * generation.counted: shape for chips, shape in generation.shapes.items()}
    if number not in known:
      counted = "cores, two to a chip" if generation.counted == 2 else "chips"
      raise TopologyError(
        f"compile_topology={name}: the number counts {counted}, and slices of {found.group(1)} have "
        f"{', '.join(map(str, known))}. Another shape can be given in jax's way: {generation.jax_name}:AxBxC."
      )
    shape = known[number]
  sizes = [int(size) for size in shape.split("x")]
  host = (1, 1, 1) if math.prod(sizes) == 1 else (2, 2, 1)
  return Topology(name, f"{generation.jax_name}:{shape}", generation.chip_config_name, math.prod(sizes), host)


def devices(topology: Topology, num_slices: int) -> tuple[tuple[Any, ...], ...]:
  """The described (not attached) devices of `num_slices` such slices, slice by slice. Raises TopologyError."""
  _require_compiler()
  from jax.errors import JaxRuntimeError
  from jax.experimental import topologies as jax_topologies

  try:
    described = jax_topologies.get_topology_desc(
      platform="tpu",
      topology_name=topology.jax_name,
      chip_config_name=topology.chip_config_name,
      chips_per_host_bounds=topology.chips_per_host,
      num_slices=num_slices,
    )
  except JaxRuntimeError as error:
    raise TopologyError(
      f"compile_topology={topology.name}: the TPU compiler does not know {topology.jax_name}: "
      f"{str(error).splitlines()[0]}"
    ) from error
  slices: dict[int, list[Any]] = {}
  for device in described.devices:
    slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
  return tuple(tuple(slices[index]) for index in sorted(slices))


def prepare_environment() -> None:
  """Sets what the TPU compiler reads when it is loaded, so that it neither looks for a TPU nor waits for one.

  Called before jax is imported, and by nothing that trains.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  for name, value in COMPILER_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def _require_compiler() -> None:
  if importlib.util.find_spec("libtpu") is None:
    raise TopologyError(
      "The TPU compiler is not installed. It needs no TPU, only Linux on x86-64:\n"
      "  pip install 'jax[tpu]'    (or: bash setup.sh --tpu)\n"
      "Or leave out compile_topology to analyse the step for the devices of this machine."
    )


def _examples() -> str:
  return ", ".join(f"{name}-{16 * generation.counted}" for name, generation in GENERATIONS.items())
