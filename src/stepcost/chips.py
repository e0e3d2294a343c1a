"""Peak rates of each accelerator: the denominators of MFU and of preflight's roofline.

Numbers are per JAX device, which is a chip except on TPU7x, where a chip is two devices. Peaks are dense.
Sources: Cloud TPU documentation, pages "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU7x (Ironwood)"
(docs.cloud.google.com/tpu/docs/...), tables of key specifications, and for v5p's int8 its announcement on the Google
Cloud blog (6 December 2023); NVIDIA data sheets of A100, H100, H200 (SXM) and of DGX B200 (an eighth of the system),
dense figures: half of those printed "with sparsity".
"""

from __future__ import annotations

import dataclasses

GiB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Chip:
  """Peaks of one JAX device."""

  name: str
  kinds: tuple[str, ...]  # values, or beginnings of values, of jax.Device.device_kind
  peak_flops: float  # bf16 FLOP/s
  hbm_bytes: int
  hbm_bandwidth: float  # bytes/s
  link_bandwidth: float  # bytes/s between chips of a slice (ICI, NVLink), both directions together
  devices_per_chip: int = 1
  # Operations/s of 8-bit matmuls; None: the chip has no unit for them and computes in bf16.
  peak_int8: float | None = None
  peak_fp8: float | None = None
  # Clock of the matrix units, for the TPU compiler's estimates in cycles: the peak, divided by the FLOPs of one cycle.
  # These are 2 x 128 x 128 per matrix unit (v6e and 7x: 2 x 256 x 256). Other compilers report no cycles.
  clock_hz: float | None = None
  # Number of ICI links of a chip, and the devices from which on a slice is a torus: an axis of a v5e or v6e slice has a
  # wraparound if it is 16 long, an axis of the others if it is a multiple of 4. 0: not TPUs.
  links: int = 0
  torus_devices: int = 0

  def has_wraparounds(self, devices: int) -> bool:
    """Returns whether a slice of this many devices has wraparound links."""
    return 0 < self.torus_devices <= devices

  def peak(self, dtype: str, precision: str = "default") -> float:
    """Operations/s of matmuls whose operands are of HLO type `dtype`: "s8", "f8e4m3fn", "bf16", ...

    precision: XLA's, of float32 operands. TPUs multiply bfloat16, and make a float32 product of 1, 3 or 6 of those
    (jax.lax.Precision; the TPU compiler's cycles of a matmul grow by 3.0 and 5.8).
    """
    special = self.peak_int8 if dtype in ("s8", "u8") else self.peak_fp8 if dtype.startswith("f8") else None
    of_bfloat16 = dtype == "f32" and any(kind.startswith("TPU") for kind in self.kinds)
    passes = {"high": 3, "highest": 6}.get(precision, 1) if of_bfloat16 else 1
    return (special or self.peak_flops) / passes


CHIPS = (
  # v4: 275 TFLOPs, 32 GiB, 1200 GBps; ICI six links of 50 GBps each way; 8 matrix units.
  Chip("v4", ("TPU v4",), 275e12, 32 * GiB, 1.2e12, 600e9, clock_hz=1.05e9, links=6, torus_devices=64),
  # v5e: 197 TFLOPs, int8 393 TOPs, 16 GB, 819 GBps, ICI 400 GBps bidirectional; 4 matrix units.
  Chip(
    "v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 16 * GiB, 819e9, 400e9,
    peak_int8=393e12, clock_hz=1.5e9, links=4, torus_devices=256,
  ),
  # v5p: 459 TFLOPs, int8 918 TOPs, 95 GiB, 2765 GBps, ICI 1200 GBps bidirectional; 8 matrix units.
  Chip(
    "v5p", ("TPU v5p", "TPU v5"), 459e12, 95 * GiB, 2765e9, 1200e9,
    peak_int8=918e12, clock_hz=1.75e9, links=6, torus_devices=64,
  ),
  # v6e: 918 TFLOPs, int8 1836 TOPs, 32 GB, 1638 GBps, ICI 800 GBps bidirectional. Compiled matmuls reach 4.6e5 FLOPs
  # per estimated cycle, so the estimates are for 4 matrix units.
  Chip(
    "v6e", ("TPU v6 lite", "TPU v6e"), 918e12, 32 * GiB, 1638e9, 800e9,
    peak_int8=1836e12, clock_hz=1.75e9, links=4, torus_devices=256,
  ),
  # TPU7x: 2307 TFLOPs, fp8 4614 TFLOPs, 192 GiB, 7380 GBps, ICI 1200 GBps bidirectional per chip; JAX sees each of its
  # two chiplets. Compiled matmuls reach 4.2e5 FLOPs per estimated cycle: 4 matrix units per chiplet.
  Chip(
    "7x", ("TPU7x", "TPU v7x", "TPU7"), 2307e12 / 2, 96 * GiB, 7380e9 / 2, 1200e9 / 2,
    devices_per_chip=2, peak_fp8=4614e12 / 2, clock_hz=2.2e9, links=6, torus_devices=128,
  ),
  # A100 SXM: 312 TFLOPS, int8 624 TOPS; 80 GB, 2039 GB/s or 40 GB, 1555 GB/s; NVLink 600 GB/s.
  Chip(
    "A100-40GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 312e12, 40 * GiB, 1555e9, 600e9, peak_int8=624e12
  ),
  Chip("A100", ("NVIDIA A100",), 312e12, 80 * GiB, 2039e9, 600e9, peak_int8=624e12),
  # H100 SXM: 989.4 TFLOPS, int8 and fp8 1979, 80 GB, 3.35 TB/s, NVLink 900 GB/s. The PCIe card: 756 TFLOPS, 1513,
  # 2.0 TB/s, 600 GB/s bridge. The NVL card: 835 TFLOPS, 1671, 94 GB, 3.9 TB/s, 600 GB/s bridge.
  Chip("H100-PCIe", ("NVIDIA H100 PCIe",), 756e12, 80 * GiB, 2.0e12, 600e9, peak_int8=1513e12, peak_fp8=1513e12),
  Chip("H100-NVL", ("NVIDIA H100 NVL",), 835e12, 94 * 10**9, 3.9e12, 600e9, peak_int8=1671e12, peak_fp8=1671e12),
  Chip("H100", ("NVIDIA H100",), 989.4e12, 80 * GiB, 3.35e12, 900e9, peak_int8=1979e12, peak_fp8=1979e12),
  # H200 SXM: the same cores, 141 GB, 4.8 TB/s.
  Chip("H200", ("NVIDIA H200",), 989.4e12, 141 * 10**9, 4.8e12, 900e9, peak_int8=1979e12, peak_fp8=1979e12),
  # DGX B200 / 8: 2250 TFLOPS, int8 and fp8 4500, 180 GB, 8 TB/s, NVLink 1.8 TB/s.
  Chip("B200", ("NVIDIA B200",), 2250e12, 180 * 10**9, 8.0e12, 1800e9, peak_int8=4500e12, peak_fp8=4500e12),
)  # fmt: skip


def find(device_kind: str) -> Chip | None:
  """The chip of a jax device_kind ("TPU v5 lite", "NVIDIA H100 80GB HBM3") or of a name ("v5e"); None if unknown."""
  wanted = device_kind.strip().lower()
  for chip in CHIPS:
    if wanted == chip.name.lower() or any(wanted == kind.lower() for kind in chip.kinds):
      return chip
  # GPU kinds carry memory size and form factor after the name. TPU kinds are exact: "TPU v4 lite" is not a v4.
  gpus = (chip for chip in CHIPS if chip.name[0] in "AHB")
  return next((chip for chip in gpus if any(wanted.startswith(kind.lower()) for kind in chip.kinds)), None)
