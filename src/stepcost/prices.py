"""Seconds of computation of each instruction of a compiled program, and the rates of what it communicates over.

The TPU compiler estimates the cycles of a fusion. Pallas kernels and the programs of other compilers have no estimate:
the price is then the time of the matmuls at the peak, or of the memory traffic, whichever is longer. Chips in
`CALIBRATIONS` reach a known share of these peaks.
"""

from __future__ import annotations

import dataclasses
import enum
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
# Bytes/s between a device and its host, as PCIe 3 x16 reaches. Used only for offloaded activations.
HOST_BANDWIDTH = 12e9


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What measured steps say about the times on one kind of chip (docs/benchmarks: calibration.md, gpu_models.md)."""

  attention: float = 1.0  # share of the peak that attention kernels reach, with heads of at most HEAD_WIDTH
  others: float = 1.0  # share of the peaks that all else reaches, if the compiler has no estimate for it
  fitted: int = 0  # number of measured steps from which the shares follow; 0: they are not known
  held_out: int = 0  # number of other measured steps that were compiled and simulated
  error: float = 0.0  # the largest |simulated / measured - 1| of these
  measured_on: str = ""  # if it was another chip

  def __str__(self) -> str:
    steps = "1 measured step" if self.held_out == 1 else f"{self.held_out} measured steps"
    error = f"up to {self.error:.0%} on {steps}" if self.held_out else "unknown"
    if not self.fitted:
      return error
    others = "" if self.others == 1 else f" and all else at {self.others:.0%} of its peaks"
    where = f" on {self.measured_on}" if self.measured_on else ""
    shares = f"attention kernels at {self.attention:.0%} of the peak{others}"
    return f"{error}; {shares} follow from {self.fitted} measured steps{where}"


# All measured steps have heads of this width. The matrix units of v6e and 7x are 256 wide.
HEAD_WIDTH = 128
CALIBRATIONS = MappingProxyType(
  {
    "v5e": Calibration(held_out=5, error=0.27),
    "v5p": Calibration(held_out=2, error=0.2),
    "v6e": Calibration(0.21, fitted=2, held_out=1, error=1.82),  # offloaded activations: mostly the price of the host
    "7x": Calibration(0.37, fitted=2, held_out=2, error=0.05),
    "H200": Calibration(0.41, 0.69, fitted=3, held_out=3, error=0.05),
    "H100": Calibration(0.41, 0.69, fitted=3, measured_on="H200"),  # the same cores
  }
)


class Basis(enum.StrEnum):
  """How an instruction is priced."""

  ESTIMATE = "by the compiler's cycles"
  KERNEL = "in kernels at the peak"
  ATTENTION = "in attention kernels at their measured share of the peak"
  RATES = "without an estimate: bytes and FLOPs at the peak"
  SHARE = "without an estimate: bytes and FLOPs at their measured share of the peak"
  UNKNOWN_KERNEL = "in kernels with unknown FLOPs: bytes only"


@dataclasses.dataclass(frozen=True)
class Rates:
  """What one device computes and moves per second."""

  chip: Chip
  dcn: float | None  # bytes/s; None: unknown
  precision: str = "default"  # of the kernels, whose text does not show it
  attention: float = 1.0  # share of the peak that attention kernels reach
  others: float = 1.0  # share of the peaks that all else reaches, if the compiler has no estimate for it

  @property
  def links(self) -> float:
    """Bytes/s that a device sends to the others of its slice. Links send and receive at once; sending gets half."""
    return self.chip.link_bandwidth / 2


def rates(chip: Chip, precision: str = "default") -> Rates:
  """Returns the rates of a device of kind `chip`."""
  known = calibration(chip)
  return Rates(chip, DCN_BANDWIDTH.get(chip.name), precision, known.attention, known.others)


def calibration(chip: Chip) -> Calibration:
  """Returns what measured steps say about the times on a device of kind `chip`."""
  return CALIBRATIONS.get(chip.name, Calibration())


@dataclasses.dataclass(frozen=True)
class Price:
  """Computation of one run of an instruction."""

  seconds: float
  basis: Basis
  host_bytes: float  # that the instruction itself moves to or from the host


def price(module: Module, computation: Computation, instruction: Instruction, given: Rates) -> Price:
  """Returns the price of one run of `instruction`, which is not a collective and calls nothing but a fusion."""
  moved = costs.bytes_moved(module, computation, instruction)
  cycles = costs.estimated_cycles(instruction)
  if cycles and given.chip.clock_hz:
    return Price(cycles / given.chip.clock_hz, Basis.ESTIMATE, moved[HOST])
  matmuls = attention = 0.0
  for owner, part in module.parts(computation, instruction):  # a fusion may have a kernel and store its result
    seconds = sum(flops / given.chip.peak(*kind) for kind, flops in costs.flops_of(owner, part, given.precision))
    if 0 < custom_calls.head_width(owner, part) <= HEAD_WIDTH:
      attention += seconds
    else:
      matmuls += seconds
  seconds = max(matmuls + attention / given.attention, moved[DEVICE] / given.chip.hbm_bandwidth)
  basis = Basis.RATES
  if attention and given.attention < 1:
    basis = Basis.ATTENTION
  elif custom_calls.is_kernel(instruction) and costs.is_unpriced(computation, instruction):
    basis = Basis.UNKNOWN_KERNEL
  elif given.others < 1:
    seconds, basis = seconds / given.others, Basis.SHARE
  elif custom_calls.is_kernel(instruction):
    basis = Basis.KERNEL
  return Price(seconds, basis, moved[HOST])
