"""Compiles the training step of one set of slices and reads everything that the compiler can tell about it."""

from __future__ import annotations

import collections
import dataclasses
import re
import time
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, TypeGuard

from jax import Device

from trainer import program
from trainer.config import counts
from trainer.config.schema import Config, DegradedStep
from trainer.observe import chips
from trainer.program import Program
from trainer.tools.preflight import collectives, costs, hlo
from trainer.tools.preflight.collectives import Collective
from trainer.tools.preflight.costs import Costs


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device, as the compiler plans them."""

  arguments: int  # state and batch
  temporaries: int
  outputs: int  # those that do not reuse an argument's buffer
  aliased: int  # results that take the place of donated arguments
  code: int  # the program, and on several TPU slices the buffers of what they exchange
  host: int  # pinned host memory

  @property
  def total(self) -> int:
    return self.arguments + self.temporaries + self.outputs + self.code

  def fits(self, chip: chips.Chip) -> bool:
    return self.total <= chip.hbm_bytes


@dataclasses.dataclass(frozen=True)
class Analysis:
  """What is known of the step on `slices` of `num_slices_total` slices; everything per device."""

  slices: int
  num_slices_total: int
  devices_per_slice: int
  devices_per_host: int
  device_kind: str
  mesh: dict[str, int]
  attention: str
  micro_batches: int
  memory: Memory
  xla_flops: float  # the compiler's own counts: a loop's body once
  xla_bytes: float
  costs: Costs
  unknown_loops: tuple[str, ...]  # sources of loops that are counted once, as nothing shows how often they turn
  collectives: tuple[Collective, ...]
  model_flops: float  # per device and step, from the model's formula
  tokens: int  # of the global batch
  trace_seconds: float
  compile_seconds: float
  optimized: bool  # False: compiled quickly; the program that runs has other memory, and less traffic with it

  def exchanged(self) -> list[Collective]:
    """Collectives that leave the slice."""
    return [c for c in self.collectives if c.crosses_slices]


@dataclasses.dataclass(frozen=True)
class DoesNotFit:
  """The compiler refused: the program needs more memory than a device has."""

  slices: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Refused:
  """The compiler refused for a reason other than memory."""

  slices: int
  reason: str


Finding = Analysis | DoesNotFit | Refused

# XLA's effort O0, by the number that all versions of jax know it by.
LITTLE_OPTIMIZATION = MappingProxyType({"optimization_level": 9})


def fits(found: Finding, chip: chips.Chip) -> TypeGuard[Analysis]:
  """Whether the compiler took the step, and in no more than a device's memory."""
  return isinstance(found, Analysis) and found.memory.fits(chip)


def analyse(config: Config, slices: Sequence[Sequence[Device]], num_slices_total: int) -> Finding:
  """The analysis of the step for the living `slices`.

  With preflight_degraded=quick the step of fewer slices than all is, for TPUs, compiled with little optimization first,
  in a quarter of the time, and as it runs only if that does not fit. Optimized it keeps less, and to overlap more it
  takes only what there is room for.

  Raises:
    ValueError: sizes do not fit the devices.
    RuntimeError: the compiler's output cannot be read.
  """
  start = time.monotonic()
  prog = program.build(config, slices, num_slices_total)
  try:
    lowered = prog.lower()
  except NotImplementedError as error:  # what a Pallas kernel has and the TPU's compiler lacks
    return Refused(len(slices), _first_line(error))
  trace_seconds = time.monotonic() - start
  quick = len(slices) < num_slices_total and config.preflight.preflight_degraded is DegradedStep.QUICK
  if quick and slices[0][0].platform == "tpu":
    found = _compiled(config, prog, lowered, num_slices_total, trace_seconds, optimized=False)
    chip = chips.find(slices[0][0].device_kind)
    if chip is not None and fits(found, chip):
      return found
  return _compiled(config, prog, lowered, num_slices_total, trace_seconds, optimized=True)


def _compiled(
  config: Config, prog: Program, lowered: Any, num_slices_total: int, trace_seconds: float, optimized: bool
) -> Finding:
  start = time.monotonic()
  alive = prog.plan.rows.shape[1]
  options = prog.compiler_options if optimized else {**(prog.compiler_options or {}), **LITTLE_OPTIMIZATION}
  try:
    compiled = lowered.compile(compiler_options=options)
  # XLA raises a JaxRuntimeError, the compiler of kernels a class that JAX does not export.
  except Exception as error:  # noqa: BLE001
    if "RESOURCE_EXHAUSTED" not in str(error):
      return Refused(alive, _first_line(error))
    return DoesNotFit(alive, out_of_memory(str(error)))
  seconds = time.monotonic() - start
  try:
    return read(config, prog, compiled, num_slices_total, trace_seconds, seconds, optimized)
  except ValueError as error:  # would pass for a wrong configuration, which ends with another exit code
    raise RuntimeError("preflight cannot read what this version of the compiler wrote") from error


def _first_line(error: Exception) -> str:
  return (str(error) or type(error).__name__).splitlines()[0]


def out_of_memory(message: str) -> str:
  """The sentence of the compiler's message that has the numbers."""
  told = (
    r"total memory required for .* exceeds available \w+ \([^)]*\)",
    r"Used [^.]*\.\w+ of [^.]*\.\w+ \w+\.[^.]*\.\w+",
  )
  found = next(filter(None, (re.search(pattern, message) for pattern in told)), None)
  return found.group(0) if found else message.splitlines()[0]


def read(
  config: Config,
  prog: Program,
  compiled: Any,
  num_slices_total: int,
  trace_seconds: float,
  compile_seconds: float,
  optimized: bool,
) -> Analysis:
  """What the compiled step of `prog` says."""
  module = hlo.parse(compiled.as_text())
  stats = compiled.memory_analysis()
  counted = compiled.cost_analysis() or {}
  devices = list(prog.mesh.devices.flat)
  alive = prog.plan.rows.shape[1]
  tokens = program.global_batch_size(config, num_slices_total, len(devices) // alive) * config.data.max_target_length
  return Analysis(
    slices=alive,
    num_slices_total=num_slices_total,
    devices_per_slice=len(devices) // alive,
    devices_per_host=max(collections.Counter(device.process_index for device in devices).values()),
    device_kind=devices[0].device_kind,
    mesh=dict(prog.mesh.shape),
    attention=f"{prog.attention.name} ({prog.attention.reason})",
    micro_batches=prog.plan.micro_batches,
    memory=Memory(
      arguments=stats.argument_size_in_bytes,
      temporaries=stats.temp_size_in_bytes,
      outputs=stats.output_size_in_bytes - stats.alias_size_in_bytes,
      aliased=stats.alias_size_in_bytes,
      code=stats.generated_code_size_in_bytes,
      host=stats.host_argument_size_in_bytes + stats.host_temp_size_in_bytes,
    ),
    xla_flops=counted.get("flops", 0.0),
    xla_bytes=counted.get("bytes accessed", 0.0),
    costs=costs.count(module, config.model.matmul_precision),
    unknown_loops=tuple(module.unknown_loops()),
    collectives=tuple(collectives.find(module, slice_of(prog))),
    model_flops=counts.flops_per_token(config.model, config.data.max_target_length) * tokens / len(devices),
    tokens=tokens,
    trace_seconds=trace_seconds,
    compile_seconds=compile_seconds,
    optimized=optimized,
  )


def slice_of(prog: Program) -> list[int]:
  """The slice of each partition of the compiled program: positions in the mesh, whose axes have slices outermost."""
  known = [getattr(device, "slice_index", None) for device in prog.mesh.devices.flat]
  if all(index is not None for index in known) and len(set(known)) > 1:
    return [int(index) for index in known if index is not None]
  per_slice = prog.mesh.devices.size // prog.plan.rows.shape[1]
  return [position // per_slice for position in range(prog.mesh.devices.size)]


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Seconds that one step takes at least, by what it has to do and what a device can do at best."""

  compute: float
  memory: float | None  # None: not known of what is not optimized
  ici: float
  dcn: float | None  # None: the bandwidth is not known
  host: float

  @property
  def bound(self) -> str:
    return max(self._parts(), key=lambda name: self._parts()[name])

  @property
  def seconds(self) -> float:
    """With perfect overlap: the longest of the parts."""
    return max(self._parts().values())

  def _parts(self) -> dict[str, float]:
    return {
      "compute": self.compute, "HBM": self.memory or 0.0, "links": self.ici, "DCN": self.dcn or 0.0, "host": self.host
    }  # fmt: skip


# Bytes/s of the data centre's network for one chip: v5e 6.4 Tbit/s and v6e 25.6 Tbit/s per pod of 256 chips, v5p
# 50 Gbit/s per chip (docs.cloud.google.com/tpu/docs, pages of the versions). The others' pages do not say.
DCN_BANDWIDTH = {"v5e": 25e9 / 8, "v6e": 100e9 / 8, "v5p": 50e9 / 8}
# Bytes/s between a device and its host: what PCIe 3 x16 reaches. Only offloading uses it.
HOST_BANDWIDTH = 12e9


def roofline(analysis: Analysis, chip: chips.Chip) -> Roofline:
  """The bounds of one step on `chip`. Its links' two directions work at once, so each carries half of the figure."""
  inside = sum(c.sent for c in analysis.collectives if not c.crosses_slices)
  across = sum(c.sent for c in analysis.exchanged())
  bandwidth = DCN_BANDWIDTH.get(chip.name)
  return Roofline(
    compute=sum(flops / chip.peak(*kind) for kind, flops in analysis.costs.flops_by_type.items()),
    memory=analysis.costs.device_bytes / chip.hbm_bandwidth if analysis.optimized else None,
    ici=inside / (chip.link_bandwidth / 2),
    dcn=across / bandwidth if bandwidth else (None if across else 0.0),
    host=analysis.costs.host_bytes / HOST_BANDWIDTH,
  )
