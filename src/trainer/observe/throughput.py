"""Rates of a step: tokens and FLOP per second and device, MFU, time to the end."""

from __future__ import annotations

import collections
import dataclasses
import statistics


@dataclasses.dataclass(frozen=True)
class Rates:
  """Speed of one step, per living device."""

  tokens_per_second_per_device: float
  tflops_per_device: float  # model FLOP, in units of 1e12 per second
  mfu: float | None  # 0..1, None where no peak is known


class Throughput:
  """Turns step times into rates. `flops_per_token` is the model's forward and backward FLOP (no recomputation)."""

  def __init__(
    self, *, flops_per_token: float, tokens_per_step: int, total_steps: int, peak_flops: float | None
  ) -> None:
    """peak_flops: bf16 FLOP/s of one device (chips.find(kind).peak_flops, or measured); None: no MFU."""
    self._flops_per_token = flops_per_token
    self._tokens_per_step = tokens_per_step
    self._total_steps = total_steps
    self._peak_flops = peak_flops
    self._recent: collections.deque[float] = collections.deque(maxlen=50)

  def rates(self, seconds: float, devices: int) -> Rates:
    """Rates of a step of the global batch that took `seconds` (> 0) on `devices` living devices."""
    tokens = self._tokens_per_step / max(seconds, 1e-9) / devices
    flops = tokens * self._flops_per_token
    return Rates(tokens, flops / 1e12, None if not self._peak_flops else flops / self._peak_flops)

  def eta(self, step: int, seconds: float) -> float:
    """Seconds from `step` to the last step, by the median of the last 50 steps: one compilation does not change it."""
    self._recent.append(seconds)
    return max(0, self._total_steps - step) * statistics.median(self._recent)
