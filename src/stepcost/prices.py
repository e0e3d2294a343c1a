"""Seconds of computation of each instruction of a compiled program, and the rates of what it communicates over.

The TPU compiler estimates the cycles of a fusion. Pallas kernels and the programs of other compilers have no estimate:
the price is then the time of the matmuls at the peak, or of the memory traffic, whichever is longer. Attention kernels
of the chips in `CALIBRATIONS` reach a known share of the peak.
"""

from __future__ import annotations

import dataclasses
import enum
from types import MappingProxyType

from stepcost import costs, custom_calls
from stepcost.chips import Chip
from stepcost.hlo import DEVICE, HOST, Computation, Instruction, Module

# Bytes/s per chip over the data center network (DCN): v5e 6.4 Tbit/s and v6e 25.6 Tbit/s per pod of 256 chips, v5p
# 50 Gbit/s per chip (docs.cloud.google.com/tpu/docs, the page of each version). Other versions publish no number.
DCN_BANDWIDTH = {"v5e": 25e9 / 8, "v6e": 100e9 / 8, "v5p": 50e9 / 8}
# Bytes/s between a device and its host, as PCIe 3 x16 reaches. Used only for offloaded activations.
HOST_BANDWIDTH = 12e9


@dataclasses.dataclass(frozen=True)
class Calibration:
  """What measured steps say about the times on one kind of chip (docs/benchmarks/calibration.md)."""

  attention: float = 1.0  # share of the peak that attention kernels reach, with heads of at most HEAD_WIDTH
  fitted: int = 0  # number of measured steps from which the share follows; 0: kernels count at the peak
  held_out: int = 0  # number of other measured steps that were compiled and simulated
  error: float = 0.0  # the largest |simulated / measured - 1| of these

  def __str__(self) -> str:
    steps = "1 measured step" if self.held_out == 1 else f"{self.held_out} measured steps"
    error = f"up to {self.error:.0%} on {steps} of MaxText" if self.held_out else "unknown"
    if not self.fitted:
      return error
    return f"{error}; attention kernels at {self.attention:.0%} of the peak follow from {self.fitted} measured steps"


# All measured steps have heads of this width. The matrix units of v6e and 7x are 256 wide.
HEAD_WIDTH = 128
CALIBRATIONS = MappingProxyType(
  {
    "v5e": Calibration(held_out=2, error=0.27),
    "v5p": Calibration(held_out=1, error=0.09),
    "v6e": Calibration(0.21, fitted=2, held_out=1, error=1.82),  # offloaded activations: mostly the price of the host
    "7x": Calibration(0.37, fitted=2, held_out=1, error=0.01),
  }
)


class Basis(enum.StrEnum):
  """How an instruction is priced."""

  ESTIMATE = "by the compiler's cycles"
  KERNEL = "in kernels at the peak"
  ATTENTION = "in attention kernels at their measured share of the peak"
  RATES = "without an estimate: bytes and FLOPs at the peak"
  UNKNOWN_KERNEL = "in kernels with unknown FLOPs: bytes only"


@dataclasses.dataclass(frozen=True)
class Rates:
  """What one device computes and moves per second."""

  chip: Chip
  dcn: float | None  # bytes/s; None: unknown
  precision: str = "default"  # of the kernels, whose text does not show it
  attention: float = 1.0  # share of the peak that attention kernels reach

  @property
  def links(self) -> float:
    """Bytes/s that a device sends to the others of its slice. Links send and receive at once; sending gets half."""
    return self.chip.link_bandwidth / 2


def rates(chip: Chip, precision: str = "default") -> Rates:
  """Returns the rates of a device of kind `chip`."""
  return Rates(chip, DCN_BANDWIDTH.get(chip.name), precision, calibration(chip).attention)


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
  matmuls = sum(
    flops / given.chip.peak(*kind)
    for owner, part in module.parts(computation, instruction)
    for kind, flops in costs.flops_of(owner, part, given.precision)
  )
  basis = Basis.RATES
  if given.attention < 1 and 0 < custom_calls.head_width(computation, instruction) <= HEAD_WIDTH:
    matmuls, basis = matmuls / given.attention, Basis.ATTENTION
  elif custom_calls.is_kernel(instruction):
    basis = Basis.UNKNOWN_KERNEL if costs.is_unpriced(computation, instruction) else Basis.KERNEL
  return Price(max(matmuls, moved[DEVICE] / given.chip.hbm_bandwidth), basis, moved[HOST])
