"""TPU slices and GPUs to compile for without having them, by the names of MaxText and of jax."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import re
from types import MappingProxyType
from typing import Any

from stepcost import gpus

# Chips of a slice -> its shape, as Google Cloud offers it (docs.cloud.google.com/tpu/docs, page of each version).
_FLAT = MappingProxyType(
  {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}  # v5e, v6e
)
_SMALL = MappingProxyType(
  {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}  # v4, v5p, 7x
)
CUBE = 4  # Larger ones are made of whole cubes of 4 x 4 x 4 chips.


@dataclasses.dataclass(frozen=True)
class Generation:
  """The names and limits of one TPU version."""

  jax_name: str
  sides: int
  largest: int  # chips of a slice
  counted: int  # of the number in a name such as v5p-64: 2 where it counts cores, 1 where it counts chips
  chip_config_name: str = "default"

  @property
  def longest(self) -> int:
    """The most chips along a side: the length of the longest slice, such as 4 x 4 x 576 of 7x, or 16 x 16 of v6e.

    On v4 and v5e, the compiler ends the process for a longer slice.
    """
    return self.largest // CUBE**2

  def shape(self, chips: int) -> tuple[int, ...] | None:
    """Returns the shape of a slice with `chips` chips, or None if no such slice exists.

    If cubes can be arranged in several ways, the shape is the most compact one, as in MaxText's table of names.
    """
    if self.sides == 2:
      return _FLAT.get(chips)
    cubes, rest = divmod(chips, CUBE**3)
    if rest or not 0 < chips <= self.largest:
      return _SMALL.get(chips)
    divisors = [d for d in range(1, cubes + 1) if cubes % d == 0]
    pairs = ((a, b) for a in divisors for b in divisors if a <= b and cubes % (a * b) == 0 and a * b * b <= cubes)
    found = min(((a, b, cubes // (a * b)) for a, b in pairs), key=sum)
    return tuple(CUBE * side for side in found)


# v4's two cores are one device in "megacore"; 7x has no such mode, so its chip is two devices.
GENERATIONS = MappingProxyType(
  {
    "v4": Generation("v4", 3, 4096, 2, "megacore"),
    "v5e": Generation("v5e", 2, 256, 1),
    "v5litepod": Generation("v5e", 2, 256, 1),
    "v5p": Generation("v5p", 3, 8960, 2),
    "v6e": Generation("v6e", 2, 256, 1),
    "7x": Generation("tpu7x", 3, 9216, 2),
    "tpu7x": Generation("tpu7x", 3, 9216, 2),
  }
)

TRIED_COMPILERS = ("0.0.50.1", "0.0.52")  # versions of libtpu whose programs stepcost was tried with

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
  """The compiler cannot compile for this topology. The message has its name, the rule and the remedy."""


class CompilerMissing(TopologyError):
  """The compiler for these devices is not installed. `platform`: "tpu" or "gpu"."""

  def __init__(self, topology: Topology, install: str) -> None:
    self.platform = topology.platform
    compiler = f"the {self.platform.upper()} compiler is not installed"
    needs = f"no {self.platform.upper()} and no driver, only Linux on x86-64"
    super().__init__(f"{topology.name}: {compiler}. Install {install}, which needs {needs}.")


@dataclasses.dataclass(frozen=True)
class Topology:
  """One slice, described as `jax.experimental.topologies` needs it."""

  name: str  # as given
  jax_name: str  # "v5e:4x4"; of GPUs a name of our own, "h100:8"
  chips: int
  chips_per_host: tuple[int, int, int]
  chip_config_name: str = "default"
  card: gpus.Card | None = None  # None: a TPU

  @property
  def platform(self) -> str:
    """jax.Device.platform: "tpu" or "gpu"."""
    return "tpu" if self.card is None else "gpu"

  @property
  def hosts(self) -> int:
    return max(1, self.chips // math.prod(self.chips_per_host))


def resolve(name: str) -> Topology:
  """Returns the topology of `v5e-16` (names of MaxText and Google Cloud), `v5e:4x4` (jax), or `h100-8` (GPUs).

  Names of v5e and v6e count chips. Names of v4, v5p and 7x count cores, two per chip: v5p-64 has 32 chips.

  Raises TopologyError.
  """
  found = re.fullmatch(r"(\w+)(?:-([0-9]+)|:([0-9]+(?:x[0-9]+)*))", name.strip().lower())
  if not found or found.group(1) not in GENERATIONS | gpus.CARDS:
    raise TopologyError(
      f"{name}: no such TPU slice, and no such GPUs. Give VERSION-NUMBER ({_examples()}), a jax topology name "
      f"(v5e:4x4, v5p:4x4x8), or GPUs of one host ({', '.join(f'{card}-8' for card in gpus.CARDS)})."
    )
  version, number, written = found.groups()
  if version in gpus.CARDS:
    return _gpus(name, version, number)
  generation = GENERATIONS[version]
  if number:
    chips, rest = divmod(int(number), generation.counted)
    shape = None if rest else generation.shape(chips)
    if shape is None:
      raise TopologyError(f"{name}: {_numbers(version, generation)}")
  else:
    shape = tuple(int(side) for side in written.split("x"))
    _check_shape(name, shape, generation)
  host = (1, 1, 1) if math.prod(shape) == 1 else (2, 2, 1)
  jax_name = f"{generation.jax_name}:{'x'.join(map(str, shape))}"
  return Topology(name, jax_name, math.prod(shape), host, generation.chip_config_name)


def _gpus(name: str, card: str, number: str | None) -> Topology:
  if not number or not 1 <= int(number) <= gpus.PER_HOST:
    raise TopologyError(
      f"{name}: a slice of GPUs has 1 to {gpus.PER_HOST} of one host, which NVLink connects, such as {card}-8. More "
      "hosts are more slices."
    )
  return Topology(name, f"{card}:{int(number)}", int(number), (gpus.PER_HOST, 1, 1), card=gpus.CARDS[card])


def _numbers(version: str, generation: Generation) -> str:
  """Returns the end of an error message: which numbers occur in the names of a version's slices."""
  if generation.sides == 2:
    return f"the number counts chips, and slices of {version} have {', '.join(map(str, _FLAT))}."
  small = ", ".join(str(chips * generation.counted) for chips in _SMALL)
  return (
    f"the number counts cores, two to a chip, and slices of {version} have {small}, or a multiple of "
    f"{CUBE**3 * generation.counted} up to {generation.largest * generation.counted}. Another shape can be given in "
    f"jax's way: {generation.jax_name}:AxBxC."
  )


def _check_shape(name: str, shape: tuple[int, ...], generation: Generation) -> None:
  """Raises TopologyError for a shape that the compiler refuses. For some shapes the compiler would end the process."""
  wrong = None
  if len(shape) != generation.sides:
    wrong = f"it has {len(shape)} sides, and slices of {generation.jax_name} have {generation.sides}"
  elif math.prod(shape) > generation.largest or max(shape) > generation.longest:
    wrong = "it is too large"
  elif math.prod(shape) != 1 and (0 in shape or shape[0] % 2 or shape[1] % 2):
    wrong = "a host has 2 x 2 chips, which do not fill it"
  if wrong:
    form = f"{generation.jax_name}:{'x'.join('ABC'[: generation.sides])}"
    raise TopologyError(
      f"{name}: {wrong}. Give {form} with at most {generation.longest} chips along a side and "
      f"{generation.largest} in all, A and B even; one chip has 1 for each side."
    )


def devices(topology: Topology, num_slices: int) -> tuple[tuple[Any, ...], ...]:
  """Returns the described (not attached) devices of `num_slices` such slices, by slice. Raises TopologyError."""
  if topology.platform == "tpu" and importlib.util.find_spec("libtpu") is None:
    raise CompilerMissing(topology, "libtpu")
  from jax.errors import JaxRuntimeError
  from jax.experimental import topologies as jax_topologies

  try:
    described = jax_topologies.get_topology_desc(**_description(topology, num_slices))
  except NotImplementedError as error:
    raise CompilerMissing(topology, "jax[cuda13]") from error
  except JaxRuntimeError as error:
    raise TopologyError(
      f"{topology.name}: the compiler does not know {topology.jax_name}: {str(error).splitlines()[0]}"
    ) from error
  slices: dict[int, list[Any]] = {}
  # A slice of GPUs is a host, which is a process.
  index = "process_index" if topology.platform == "gpu" else "slice_index"
  for device in described.devices:
    slices.setdefault(getattr(device, index, 0) or 0, []).append(device)
  return tuple(tuple(slices[index]) for index in sorted(slices))


def _description(topology: Topology, num_slices: int) -> dict[str, Any]:
  """Returns the keyword arguments of `jax.experimental.topologies.get_topology_desc`."""
  if topology.card is not None:
    sizes = f"{num_slices}x{topology.hosts}x{topology.chips}"
    return {
      "platform": "cuda",
      "topology_name": topology.jax_name,
      "topology": sizes,
      "target_config": gpus.target_config(topology.card),
    }
  return {
    "platform": "tpu",
    "topology_name": topology.jax_name,
    "chip_config_name": topology.chip_config_name,
    "chips_per_host_bounds": topology.chips_per_host,
    "num_slices": num_slices,
  }


def untried_compiler(topology: Topology) -> str:
  """Returns the version of libtpu if it compiles for `topology` and stepcost was not tried with it, else ""."""
  if topology.platform != "tpu":
    return ""
  try:
    version = importlib.metadata.version("libtpu")
  except importlib.metadata.PackageNotFoundError:
    return ""
  return "" if version in TRIED_COMPILERS else version


def prepare_environment() -> None:
  """Sets the variables that stop the TPU compiler from looking for a TPU, or waiting for one, when it is loaded.

  To be called before jax is imported, only by programs that do not train.
  """
  os.environ["JAX_PLATFORMS"] = "cpu"
  for name, value in COMPILER_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def _examples() -> str:
  return ", ".join(f"{name}-{16 * generation.counted}" for name, generation in GENERATIONS.items())
