"""Tries remat policies and batch sizes on the compiler and ranks those that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.config.schema import Config, RematPolicy
from trainer.kernels import remat
from trainer.observe.chips import Chip
from trainer.tools.preflight.analysis import Finding, Refused, analyse, fits, roofline
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
  host_bytes: int  # pinned
  bound: str


def lines(config: Config, living: Sequence[Sequence[Sequence[Any]]], chip: Chip | None) -> list[str]:
  """The ranking as text, the suggestion first; says on stdout what it tries, which takes a compilation each.

  living: the sets of slices on which the step must fit; the first, of all slices, is what the ranking is for.
  """
  if chip is None:
    return ["Search: this device is not in the table of chips, so nothing can be ranked"]
  whole = living[0]
  refused: dict[str, str] = {}  # the first program of each reason

  def attempt(policy: RematPolicy, batch: float) -> Finding:
    tried = with_keys(config, remat_policy=policy, per_device_batch_size=batch)
    # Fewer slices take more micro-batches and more memory, so what does not fit shows there first.
    for slices in reversed(living):
      where = f" on {len(slices)} of {len(whole)} slices" if len(living) > 1 else ""
      name = f"remat_policy={policy} per_device_batch_size={batch:g}{where}"
      print(f"Search: compiling {name}", flush=True)
      finding = analyse(tried, slices, len(whole))
      if isinstance(finding, Refused):
        refused.setdefault(finding.reason, name)
      if not fits(finding, chip):
        break
    return finding

  given = config.model.remat_policy
  others = OFFLOADING if whole[0][0].platform != "cpu" else ()
  if given not in (*POLICIES, *others):
    others = (*others, given)
  found = sorted(
    candidates(attempt, config.data.per_device_batch_size, chip, others), key=lambda c: -c.tokens_per_second
  )
  text = _ranking(config, found) if found else [
    "Search: nothing fits, not even remat_policy=full at the smallest per_device_batch_size that divides over the "
    "devices. Use more devices, ici_tensor_parallelism or ici_context_parallelism."
  ]  # fmt: skip
  return text + [f"Search: the compiler refused {name}, not for its memory: {why}" for why, name in refused.items()]


def _ranking(config: Config, found: Sequence[Candidate]) -> list[str]:
  """The suggestion, and the table of all that fit."""
  best = found[0]
  suggested = f"remat_policy={best.policy} per_device_batch_size={best.per_device_batch_size:g}"
  text = [f"Search: {suggested} is the fastest of those tried that fit"]
  fields = type(config.model).model_fields
  choices = [name for name in remat.NAMES if getattr(config.model, name) != fields[name].default]
  if choices and best.policy is not RematPolicy.CUSTOM:
    text.append(f"  It goes without {', '.join(choices)}, which only remat_policy=custom reads.")
  text += [
    "  Ranked by tokens/s/device at the roofline of each compiled step: the longest of its matmul FLOPs, its traffic"
    " with HBM, between chips, and with the host, each at the chip's peak. Another batch changes the global batch.",
    "  remat_policy | per_device_batch_size | least step time | tokens/s/device | HBM | pinned host memory | bound by",
  ]
  for c in found:
    text.append(
      f"  {c.policy} | {c.per_device_batch_size:g} | {milliseconds(c.seconds)} | {c.tokens_per_second:,.0f} | "
      f"{size(c.total_bytes)} | {size(c.host_bytes)} | {c.bound}"
    )
  return text


def candidates(attempt: Try, batch: float, chip: Chip, others: Sequence[RematPolicy] = ()) -> Iterator[Candidate]:
  """What fits: for each batch size the first fitting policy of POLICIES, and those of `others`.

  The batch is doubled until nothing fits. It is halved until something does, and on while that makes it faster: a
  smaller batch may afford a policy that recomputes less.
  """

  def of(batch: float, likely: RematPolicy | None = None) -> list[Candidate]:
    fitting = _first_that_fits(attempt, batch, chip, likely)
    if fitting is not None and fitting.policy is RematPolicy.NONE:
      return [fitting]  # nothing is recomputed, so there is nothing to save
    tried = [fitting, *(_candidate(attempt, policy, batch, chip) for policy in others)]
    return [candidate for candidate in tried if candidate is not None]

  here = of(batch)
  yield from here
  larger, doublings = here, 0
  while larger and doublings < MAX_DOUBLINGS:
    doublings += 1
    larger = of(batch * 2**doublings, likely=larger[0].policy)
    yield from larger
  fastest = _fastest(here)
  while not here or here[0].policy is not RematPolicy.NONE:
    batch /= 2
    try:
      here = of(batch)
    except ValueError:  # it does not divide over the devices
      return
    yield from here
    if fastest and _fastest(here) <= fastest:
      return
    fastest = _fastest(here)


def _fastest(found: Sequence[Candidate]) -> float:
  return max((c.tokens_per_second for c in found), default=0.0)


def _first_that_fits(attempt: Try, batch: float, chip: Chip, likely: RematPolicy | None = None) -> Candidate | None:
  """By bisection: a policy that keeps less needs less memory. `likely`: the first that fits a smaller batch."""
  low, high = 0, len(POLICIES)
  middle = high // 2
  if likely in POLICIES:
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
  if not fits(found, chip):
    return None
  bounds = roofline(found, chip)
  devices = found.slices * found.devices_per_slice
  return Candidate(
    policy,
    batch,
    bounds.seconds,
    found.tokens / bounds.seconds / devices,
    found.memory.total,
    found.memory.host,
    bounds.bound,
  )


def with_keys(config: Config, **values: Any) -> Config:
  """`config` with some keys changed, whatever their sections."""
  changed: dict[str, Any] = {}
  for section in Config.model_fields:
    own = getattr(config, section)
    fields = {key: value for key, value in values.items() if key in type(own).model_fields}
    if fields:
      changed[section] = own.model_copy(update=fields)
  return config.model_copy(update=changed)
