"""Tries remat policies and batch sizes on the compiler and ranks those that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from trainer.config.schema import Config, RematPolicy
from trainer.observe.chips import Chip
from trainer.tools.preflight.analysis import Analysis, Finding, analyse, roofline
from trainer.tools.preflight.report import milliseconds, size

# From the most memory and least recomputation to the least memory. The first that fits is the fastest of those on the
# device; the offloading ones trade memory for traffic to the host and are ranked beside it.
POLICIES = (
  RematPolicy.NONE,
  RematPolicy.MINIMAL_WITH_CONTEXT,
  RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP,
  RematPolicy.SAVE_DOT_EXCEPT_MLP,
  RematPolicy.SAVE_OUT_PROJ,
  RematPolicy.FULL,
)
OFFLOADING = (RematPolicy.MINIMAL_OFFLOADED,)
MAX_DOUBLINGS = 5

Try = Callable[[RematPolicy, float], Finding]  # raises ValueError where a batch does not divide over the devices


@dataclasses.dataclass(frozen=True)
class Candidate:
  policy: RematPolicy
  per_device_batch_size: float
  seconds: float  # of a step, by the roofline of what was compiled
  tokens_per_second: float  # per device
  total_bytes: int
  bound: str


def lines(config: Config, living: Sequence[Sequence[Sequence[Any]]], chip: Chip | None) -> list[str]:
  """The ranking as text, the suggestion first; says on stdout what it tries, which takes a compilation each.

  living: the sets of slices on which the step must fit; the first, of all slices, is what the ranking is for.
  """
  if chip is None:
    return ["Search: this device is not in the table of chips, so nothing can be ranked"]
  whole = living[0]

  def attempt(policy: RematPolicy, batch: float) -> Finding:
    tried = with_keys(config, remat_policy=policy, per_device_batch_size=batch)
    # Fewer slices take more micro-batches and more memory, so what does not fit shows there first.
    for slices in reversed(living):
      where = f" on {len(slices)} of {len(whole)} slices" if len(living) > 1 else ""
      print(f"Search: compiling remat_policy={policy} per_device_batch_size={batch:g}{where}", flush=True)
      finding = analyse(tried, slices, len(whole))
      if not _fits(finding, chip):
        break
    return finding

  platform = whole[0][0].platform
  found = sorted(
    candidates(attempt, config.data.per_device_batch_size, chip, offload=platform != "cpu"),
    key=lambda c: -c.tokens_per_second,
  )
  if not found:
    return [
      "Search: nothing fits, not even remat_policy=full at the smallest per_device_batch_size that divides over the "
      "devices. Use more devices, ici_tensor_parallelism or ici_context_parallelism."
    ]
  best = found[0]
  text = [
    f"Search: remat_policy={best.policy} per_device_batch_size={best.per_device_batch_size:g} is the fastest that fits",
    "  Ranked by tokens/s/device at the roofline of each compiled step: the longest of its matmul FLOPs, its traffic"
    " with HBM, between chips, and with the host, each at the chip's peak. A larger batch changes the global batch.",
    "  remat_policy | per_device_batch_size | least step time | tokens/s/device | HBM | bound by",
  ]
  for c in found:
    text.append(
      f"  {c.policy} | {c.per_device_batch_size:g} | {milliseconds(c.seconds)} | {c.tokens_per_second:,.0f} | "
      f"{size(c.total_bytes)} | {c.bound}"
    )
  return text


def candidates(attempt: Try, batch: float, chip: Chip, *, offload: bool) -> Iterator[Candidate]:
  """What fits: for each batch size the first fitting policy and the offloading ones.

  The batch is doubled until nothing fits; where nothing does at the given one, it is halved until something does.
  """
  fitting = _first_that_fits(attempt, batch, chip)
  smaller = fitting is None
  if smaller:
    fitting = _of_smaller_batches(attempt, batch, chip)
  doublings = 0 if smaller else MAX_DOUBLINGS
  while fitting is not None:
    yield fitting
    batch = fitting.per_device_batch_size
    if offload and fitting.policy is not RematPolicy.NONE:
      yield from filter(None, (_candidate(attempt, policy, batch, chip) for policy in OFFLOADING))
    fitting = _first_that_fits(attempt, 2 * batch, chip, likely=fitting.policy) if doublings else None
    doublings -= 1


def _of_smaller_batches(attempt: Try, batch: float, chip: Chip) -> Candidate | None:
  """At the largest of batch / 2, batch / 4, ... at which anything fits; None: the next one does not divide."""
  fitting = None
  while fitting is None:
    batch /= 2
    try:
      fitting = _first_that_fits(attempt, batch, chip)
    except ValueError:
      return None
  return fitting


def _first_that_fits(attempt: Try, batch: float, chip: Chip, likely: RematPolicy | None = None) -> Candidate | None:
  """By bisection: a policy that keeps less needs less memory. `likely`: the first that fits a smaller batch."""
  low, high = 0, len(POLICIES)
  middle = high // 2
  if likely is not None:
    low = middle = POLICIES.index(likely)
  best = None
  while low < high:
    candidate = _candidate(attempt, POLICIES[middle], batch, chip)
    if candidate is None:
      low = middle + 1
    else:
      best, high = candidate, middle
    middle = (low + high) // 2
  return best


def _candidate(attempt: Try, policy: RematPolicy, batch: float, chip: Chip) -> Candidate | None:
  found = attempt(policy, batch)
  if not _fits(found, chip):
    return None
  bounds = roofline(found, chip)
  devices = found.slices * found.devices_per_slice
  return Candidate(
    policy, batch, bounds.seconds, found.tokens / bounds.seconds / devices, found.memory.total, bounds.bound
  )


def _fits(found: Finding, chip: Chip) -> TypeGuard[Analysis]:
  return isinstance(found, Analysis) and found.memory.fits(chip)


def with_keys(config: Config, **values: Any) -> Config:
  """`config` with some keys changed, whatever their sections."""
  changed: dict[str, Any] = {}
  for section in Config.model_fields:
    own = getattr(config, section)
    fields = {key: value for key, value in values.items() if key in type(own).model_fields}
    if fields:
      changed[section] = own.model_copy(update=fields)
  return config.model_copy(update=changed)
