"""Compiles the training step for one set of slices and reads memory, costs and communication from the result."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

from jax import Device
from jax.sharding import Mesh

from stepcost import chips, collectives, costs, hlo, prices, simulation
from stepcost.collectives import Collective
from stepcost.costs import Costs
from stepcost.hlo import Module
from stepcost.simulation import Timeline
from trainer.config import compiler_flags, counts
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.program import program
from trainer.program.program import Program


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device, as planned by the compiler."""

  arguments: int  # state and batch
  temporaries: int
  outputs: int  # results that do not reuse the buffer of an argument
  aliased: int  # results that reuse the buffer of a donated argument
  code: int  # the program; with several TPU slices also the buffers of what they exchange
  host: int  # pinned host memory

  @property
  def total(self) -> int:
    return self.arguments + self.temporaries + self.outputs + self.code

  def fits(self, chip: chips.Chip) -> bool:
    return self.total <= chip.hbm_bytes


@dataclasses.dataclass(frozen=True)
class Analysis:
  """What is known about the step on `slices` of `num_slices_total` slices. All numbers are per device."""

  slices: int
  num_slices_total: int
  devices_per_slice: int
  devices_per_host: int
  device_kind: str
  mesh: dict[str, int]
  attention: str
  micro_batches: int
  memory: Memory
  costs: Costs
  unknown_loops: tuple[str, ...]  # sources of loops with an unknown number of turns; they are counted once
  collectives: tuple[Collective, ...]
  module: Module  # the compiled program
  slice_of: tuple[int, ...]  # the slice of each partition of the program
  precision: str  # of the matmuls in kernels
  model_flops: float  # per device and step, from the model's formula
  tokens: int  # of the global batch
  trace_seconds: float
  compile_seconds: float
  optimized: bool  # False: compiled quickly. The program that runs uses memory differently and has less traffic

  def exchanged(self) -> list[Collective]:
    return [c for c in self.collectives if c.crosses_slices]


@dataclasses.dataclass(frozen=True)
class Refused:
  """The compiler refused the program. too_large: it needs more memory than a device has."""

  slices: int
  reason: str
  too_large: bool = False


Finding = Analysis | Refused

# XLA's optimization level O0, by the number that all versions of jax accept.
LITTLE_OPTIMIZATION = MappingProxyType({"optimization_level": 9})


def fits(found: Finding, chip: chips.Chip) -> TypeGuard[Analysis]:
  """Returns whether the step compiled and needs at most the memory of a device."""
  return isinstance(found, Analysis) and found.memory.fits(chip)


def analyse(config: Config, slices: Sequence[Sequence[Device]], num_slices_total: int) -> Finding:
  """Returns the analysis of the step for `slices`, the slices that are alive.

  Fewer than `num_slices_total` TPU slices are compiled with little optimization first, in a quarter of the time, and
  with full optimization only if that program does not fit. A fully optimized program keeps fewer values, and uses more
  memory for overlap only if there is room, so it fits whenever the quick program fits.

  Raises:
    ConfigError: sizes do not fit the devices, their compiler does not show its programs, or the user's limit of on-chip
      memory is too low.
    RuntimeError: the output of the compiler cannot be read.
  """
  start = time.monotonic()
  prog = program.build(config, slices, num_slices_total)
  try:
    lowered = prog.lower()
  except NotImplementedError as error:  # the TPU compiler lacks an operation of a Pallas kernel
    return Refused(len(slices), _first_line(error))
  compiled = functools.partial(_compiled, config, prog, lowered, slices, num_slices_total, time.monotonic() - start)
  if len(slices) < num_slices_total and slices[0][0].platform == "tpu":
    found = compiled(optimized=False)
    chip = chips.find(slices[0][0].device_kind)
    if chip is not None and fits(found, chip):
      return found
  return compiled()


def _compiled(
  config: Config,
  prog: Program,
  lowered: Any,
  slices: Sequence[Sequence[Device]],
  num_slices_total: int,
  trace_seconds: float,
  *,
  optimized: bool = True,
) -> Finding:
  start = time.monotonic()
  alive = len(slices)
  options = {**prog.compiler_options, **({} if optimized else LITTLE_OPTIMIZATION)}
  try:
    compiled = lowered.compile(compiler_options=options)
  # XLA raises JaxRuntimeError; the compiler of Pallas kernels raises a class that JAX does not export.
  except Exception as error:  # noqa: BLE001
    if "CompileTimeScopedVmemOom" in str(error):
      return _lacks_on_chip_memory(config, alive, error)
    if "RESOURCE_EXHAUSTED" not in str(error):
      return Refused(alive, _first_line(error))
    return Refused(alive, out_of_memory(str(error)), too_large=True)
  seconds = time.monotonic() - start
  try:
    found = read_compiled(config, prog, compiled, slices, num_slices_total, trace_seconds, seconds, optimized)
  except ConfigError:
    raise
  except ValueError as error:  # else it would look like a configuration error, which has another exit code
    raise RuntimeError("preflight cannot read the output of this version of the compiler") from error
  return found


def _lacks_on_chip_memory(config: Config, slices: int, error: Exception) -> Refused:
  """Returns the refusal of a step with an operation that needs more on-chip memory (VMEM) than the limit.

  Raises ConfigError if the user has set the limit.
  """
  numbers = re.search(r"Scoped allocation with size (\S+) and limit (\S+)", str(error))
  needed, limit = numbers.groups() if numbers else ("more", "lower")
  problem = f"an operation needs {needed} of on-chip memory (VMEM), and the limit is {limit}"
  option = compiler_flags.ON_CHIP_MEMORY_OPTION
  if option in compiler_flags.parse(config.run.compile_xla_flags):
    raise ConfigError(
      f"compile_xla_flags={config.run.compile_xla_flags}: {problem}.\nRaise {option}, or remove it."
    ) from error
  return Refused(slices, f"{problem}. Set compile_xla_flags=--{option}=KIB to a higher limit")


def _first_line(error: Exception) -> str:
  return (str(error) or type(error).__name__).splitlines()[0]


def out_of_memory(message: str) -> str:
  """Returns the sentence with the numbers from the compiler's out-of-memory message, else its first line."""
  patterns = (
    r"total memory required for .* exceeds available \w+ \([^)]*\)",
    r"Used [^.]*\.\w+ of [^.]*\.\w+ \w+\.[^.]*\.\w+",
  )
  found = next(filter(None, (re.search(pattern, message) for pattern in patterns)), None)
  return found.group(0) if found else message.splitlines()[0]


def read_compiled(
  config: Config,
  prog: Program,
  compiled: Any,
  slices: Sequence[Sequence[Device]],
  num_slices_total: int,
  trace_seconds: float,
  compile_seconds: float,
  optimized: bool,
) -> Analysis:
  text, stats = compiled.as_text(), compiled.memory_analysis()
  if text is None or stats is None:
    raise ConfigError(
      "The runtime of these devices does not show compiled programs, so that memory and time of the step are unknown.\n"
      "Choose a policy such as remat_policy=full instead of auto, and run preflight with compile_topology."
    )
  module = hlo.parse(text)
  slice_of_partition = slice_of(prog.mesh, slices)
  devices = list(prog.mesh.devices.flat)
  tokens = program.global_batch_size(config, num_slices_total, len(slices[0])) * config.data.max_target_length
  return Analysis(
    slices=len(slices),
    num_slices_total=num_slices_total,
    devices_per_slice=len(slices[0]),
    devices_per_host=max(collections.Counter(device.process_index for device in devices).values()),
    device_kind=devices[0].device_kind,
    mesh=dict(prog.mesh.shape),
    attention=f"{prog.attention.name} ({prog.attention.reason})",
    micro_batches=prog.plan.rounds,
    memory=Memory(
      arguments=stats.argument_size_in_bytes,
      temporaries=stats.temp_size_in_bytes,
      outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
      aliased=stats.alias_size_in_bytes,
      code=stats.generated_code_size_in_bytes,
      host=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    ),
    costs=costs.count(module, program.matmul_precision()),
    unknown_loops=tuple(module.unknown_loops()),
    collectives=tuple(collectives.find(module, slice_of_partition)),
    module=module,
    slice_of=tuple(slice_of_partition),
    precision=program.matmul_precision(),
    model_flops=counts.flops_per_token(config.model, config.data.max_target_length) * tokens / len(devices),
    tokens=tokens,
    trace_seconds=trace_seconds,
    compile_seconds=compile_seconds,
    optimized=optimized,
  )


def slice_of(mesh: Mesh, slices: Sequence[Sequence[Device]]) -> list[int]:
  """Returns the index in `slices` of the slice of each partition of a program for `mesh`, in the order of the mesh."""
  indices = {device: index for index, devices in enumerate(slices) for device in devices}
  return [indices[device] for device in mesh.devices.flat]


def timeline(analysis: Analysis, chip: chips.Chip) -> Timeline | None:
  """Returns the times of one step on `chip`, or None if the program is not the optimized one that runs."""
  if not analysis.optimized:
    return None
  return simulation.simulate(analysis.module, analysis.slice_of, prices.rates(chip, analysis.precision))


@dataclasses.dataclass(frozen=True)
class Roofline:
  """The least seconds of one step for each resource: the work divided by the peak rate of the device."""

  compute: float
  memory: float | None  # None: unknown, because the program is not optimized
  ici: float
  dcn: float | None  # None: the bandwidth is unknown
  host: float

  @property
  def bound(self) -> str:
    return max(self._parts(), key=lambda name: self._parts()[name])

  @property
  def seconds(self) -> float:
    """The longest of the parts: the step time with perfect overlap."""
    return max(self._parts().values())

  def _parts(self) -> dict[str, float]:
    return {
      "compute": self.compute, "HBM": self.memory or 0.0, "links": self.ici, "DCN": self.dcn or 0.0, "host": self.host
    }  # fmt: skip


def roofline(analysis: Analysis, chip: chips.Chip) -> Roofline:
  """Returns the bounds of one step on `chip`. Links send and receive at once, so sending gets half the bandwidth."""
  inside = sum(c.sent for c in analysis.collectives if not c.crosses_slices)
  across = sum(c.sent for c in analysis.exchanged())
  rates = prices.rates(chip)
  return Roofline(
    compute=sum(flops / chip.peak(*kind) for kind, flops in analysis.costs.flops_by_type.items()),
    memory=analysis.costs.device_bytes / chip.hbm_bandwidth if analysis.optimized else None,
    ici=inside / rates.links,
    dcn=across / rates.dcn if rates.dcn else (None if across else 0.0),
    host=analysis.costs.host_bytes / rates.host,
  )
