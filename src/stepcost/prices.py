"""Seconds of computation of each instruction of a compiled program, and the rates of what it communicates over.

The TPU compiler estimates the cycles of a fusion. Pallas kernels and the programs of other compilers have no estimate:
the price is then the time of the matmuls at the peak, or of the memory traffic, whichever is longer. Attention kernels
of TPUs take as long as their instructions if that is longer, and GPUs in `CALIBRATIONS` reach a known share of the
peaks.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType

from stepcost import costs, custom_calls
from stepcost.chips import Chip
from stepcost.hlo import DEVICE, HOST, Computation, Instruction, Module

# Bytes/s per chip over the data center network (DCN): v5e 6.4 Tbit/s and v6e 25.6 Tbit/s per pod of 256 chips, v5p
# 50 Gbit/s per chip (docs.cloud.google.com/tpu/docs, the page of each version). Other versions publish no number. GPUs:
# one network adapter each, of 200 (A100) or 400 Gbit/s (NVIDIA's guides of DGX A100, H100, H200 and B200).
DCN_BANDWIDTH = {"v5e": 25e9 / 8, "v6e": 100e9 / 8, "v5p": 50e9 / 8, "A100": 200e9 / 8} | dict.fromkeys(
  ("H100", "H200", "B200"), 400e9 / 8
)
# Bytes/s between a device and its host, as PCIe 3 x16 reaches. Used only for offloaded activations. v6e has PCIe 5
# (docs.cloud.google.com/tpu/docs/v6e), four times as fast, and counts with 8 lanes: their number is not published.
HOST_BANDWIDTH = 12e9
HOST_BANDWIDTHS = {"v6e": 24e9}
# Instructions of an attention kernel for 2**20 scores (a score: one query, one key, one head), by chip, kernel, and
# number of keys whose scores it computes at a time. Counted in the last schedules of libtpu 0.0.52 (--xla_jf_dump_to),
# for all blocks of a causal head of T = 8192, H = 128. They hardly depend on the width of a head up to 256: the vector
# units are busy, not the matrix units.
ATTENTION_INSTRUCTIONS: Mapping[str, Mapping[str, Mapping[int, float]]] = MappingProxyType(
  {
    "v4": {
      "flash_attention fwd": {512: 2957}, "flash_attention fused": {512: 5350},
      "fwd": {512: 4239}, "fused": {512: 6380}, "dkv": {512: 5536}, "dq": {512: 4110},
    },
    "v5e": {
      "flash_attention fwd": {512: 4355}, "flash_attention fused": {512: 9285},
      "fwd": {512: 4973}, "fused": {512: 9182}, "dkv": {512: 7705}, "dq": {512: 6050},
    },
    "v5p": {
      "flash_attention fwd": {512: 2185}, "flash_attention fused": {512: 4767},
      "fwd": {512: 2552}, "fused": {512: 4716}, "dkv": {512: 3854}, "dq": {512: 3071},
    },
    "v6e": {
      "flash_attention fwd": {512: 2958}, "flash_attention fused": {512: 5812},
      "fwd": {512: 3951, 2048: 5153}, "fused": {512: 6318, 2048: 5847}, "dkv": {512: 5261}, "dq": {512: 4482},
    },
    "7x": {
      "flash_attention fwd": {512: 3063}, "flash_attention fused": {512: 5053},
      "fwd": {512: 3944, 2048: 4775}, "fused": {512: 5792, 2048: 5731}, "dkv": {512: 4711}, "dq": {512: 4903},
      "tokamax fwd": {512: 3353, 2048: 3770}, "tokamax fwd, fixed maximum": {512: 2345},
      "tokamax fused": {256: 5583, 512: 5379, 2048: 5546},
    },
  }
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What measured steps say about the times on one kind of chip (docs/benchmarks: calibration.md, accelerator.md)."""

  attention: float = 1.0  # share of the peak that a GPU's attention kernels reach, with heads of at most HEAD_WIDTH
  others: float = 1.0  # share of the peaks that all else reaches, if the compiler has no estimate for it
  fitted: int = 0  # number of measured steps from which the shares follow; 0: they are not known
  held_out: int = 0  # number of other measured steps that were compiled and simulated
  error: float = 0.0  # the largest |simulated / measured - 1| of these
  measured_on: str = ""  # if it was another chip
  # Of an instruction of a TPU's attention kernel, with those in which it waits; 0: only its FLOPs count.
  cycles: float = 0.0

  def __str__(self) -> str:
    steps = "1 measured step" if self.held_out == 1 else f"{self.held_out} measured steps"
    error = f"up to {self.error:.0%} on {steps}" if self.held_out else "unknown"
    if not self.fitted:
      return error
    where = f" on {self.measured_on}" if self.measured_on else ""
    if self.cycles:
      return f"{error}; {self.cycles} cycles for each instruction of attention kernels follow from one more{where}"
    others = "" if self.others == 1 else f" and all else at {self.others:.0%} of its peaks"
    shares = f"attention kernels at {self.attention:.0%} of the peak{others}"
    return f"{error}; {shares} follow from {self.fitted} measured steps{where}"


HEAD_WIDTH = 128  # of all steps that were measured on GPUs
# Of an instruction of an attention kernel. It follows from the step of 7x with rows of 131,072 tokens.
CYCLES = 1.16
_TPU = Calibration(cycles=CYCLES, fitted=1, measured_on="7x")
CALIBRATIONS = MappingProxyType(
  {
    "v4": _TPU,
    "v5e": dataclasses.replace(_TPU, held_out=5, error=0.27),
    "v5p": dataclasses.replace(_TPU, held_out=2, error=0.21),
    "v6e": dataclasses.replace(_TPU, held_out=2, error=0.9),  # 5% with few copies to the host
    "7x": dataclasses.replace(_TPU, held_out=3, error=0.07, measured_on=""),
    # 5% with rows of 2,048 tokens and one document, 16% with 8,192; packed rows have the largest error.
    "H200": Calibration(0.41, 0.69, fitted=3, held_out=18, error=0.31),
    # The same cores. 22% with rows of 8,192 tokens, 17% with 2,048, all of one document.
    "H100": Calibration(0.41, 0.69, fitted=3, held_out=9, error=0.22, measured_on="H200"),
  }
)


class Basis(enum.StrEnum):
  """How an instruction is priced."""

  ESTIMATE = "by the compiler's cycles"
  KERNEL = "in kernels at the peak"
  ATTENTION = "in attention kernels, slower than the peak"
  RATES = "without an estimate: bytes and FLOPs at the peak"
  SHARE = "without an estimate: bytes and FLOPs at their measured share of the peak"
  UNKNOWN_KERNEL = "in kernels with unknown FLOPs: bytes only"


@dataclasses.dataclass(frozen=True)
class Rates:
  """What one device computes and moves per second."""

  chip: Chip
  dcn: float | None  # bytes/s; None: unknown
  precision: str = "default"  # of the kernels, whose text does not show it
  calibration: Calibration = Calibration()
  host: float = HOST_BANDWIDTH  # bytes/s to the host, or from it

  @property
  def links(self) -> float:
    """Bytes/s that a device sends to the others of its slice. Links send and receive at once; sending gets half."""
    return self.chip.link_bandwidth / 2


def rates(chip: Chip, precision: str = "default") -> Rates:
  host = HOST_BANDWIDTHS.get(chip.name, HOST_BANDWIDTH)
  return Rates(chip, DCN_BANDWIDTH.get(chip.name), precision, calibration(chip), host)


def calibration(chip: Chip) -> Calibration:
  """Returns what measured steps say about the times on a device of kind `chip`."""
  return CALIBRATIONS.get(chip.name, Calibration())


@dataclasses.dataclass(frozen=True)
class Price:
  seconds: float
  basis: Basis
  host_bytes: float  # that the instruction itself moves to or from the host


def price(module: Module, computation: Computation, instruction: Instruction, given: Rates) -> Price:
  """Returns the price of one run of `instruction`, which is not a collective and calls nothing but a fusion.

  Raises ValueError if its cost is unknown. A fusion may have any custom calls: the compiler has written them.
  """
  moved = costs.bytes_moved(module, computation, instruction)
  cycles = costs.estimated_cycles(instruction)
  if cycles and given.chip.clock_hz:
    return Price(cycles / given.chip.clock_hz, Basis.ESTIMATE, moved[HOST])
  if kind := costs.unpriced(instruction):
    raise ValueError(f"{instruction.name} is {kind}, whose cost is unknown. Compile the program without it")
  matmuls = slower = 0.0
  for owner, part in module.parts(computation, instruction):  # a fusion may have a kernel and store its result
    seconds = sum(flops / given.chip.peak(*kind) for kind, flops in costs.flops_of(owner, part, given.precision))
    matmuls += seconds
    attention = custom_calls.attention(owner, part)
    slower += max(0.0, attention_seconds(attention, seconds, given) - seconds) if attention else 0.0
  seconds = max(matmuls + slower, moved[DEVICE] / given.chip.hbm_bandwidth)
  basis = Basis.RATES
  if slower:
    basis = Basis.ATTENTION
  elif custom_calls.is_kernel(instruction) and costs.is_unpriced(computation, instruction):
    basis = Basis.UNKNOWN_KERNEL
  elif given.calibration.others < 1:
    seconds, basis = seconds / given.calibration.others, Basis.SHARE
  elif custom_calls.is_kernel(instruction):
    basis = Basis.KERNEL
  return Price(seconds, basis, moved[HOST])


def attention_seconds(attention: custom_calls.Attention, at_peak: float, given: Rates) -> float:
  """Returns the seconds of one run of an attention kernel whose matmuls take the seconds `at_peak`."""
  cycles = given.calibration.cycles
  if cycles and given.chip.clock_hz:
    kernels = ATTENTION_INSTRUCTIONS[given.chip.name]
    # JAX's kernel stands for one of tokamax that was not compiled for this chip.
    sizes = kernels.get(attention.name, kernels[attention.phase])
    instructions = sizes[min((size for size in sizes if size >= attention.keys), default=max(sizes))]
    return attention.scores / 2**20 * instructions * cycles / given.chip.clock_hz
  return at_peak if attention.width > HEAD_WIDTH else at_peak / given.calibration.attention
