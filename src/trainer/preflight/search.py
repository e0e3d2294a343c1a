"""Compiles the step with different remat policies, batch sizes and groups of experts, and ranks the ones that fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepcost.chips import Chip
from stepcost.text import milliseconds, size
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, RematPolicy
from trainer.preflight.analysis import Analysis, Finding, Refused, analyse, fits, timeline
from trainer.preflight.remat_choice import CANDIDATES

MAX_DOUBLINGS = 5

# Both raise ConfigError if a batch or a group does not divide over the devices.
CompileStep = Callable[[RematPolicy, float], Finding]
CompileGroups = Callable[[RematPolicy, float, int], Finding]  # also of ici_expert_parallelism


@dataclasses.dataclass(frozen=True)
class SearchResult:
  policy: RematPolicy
  per_device_batch_size: float
  seconds: float  # of a step, by the schedule of the compiled program
  exposed: float  # seconds of communication in it
  tokens_per_second: float  # per device
  total_bytes: int
  host_bytes: int  # pinned
  expert_parallelism: int = 1


def lines(config: Config, slice_sets: Sequence[Sequence[Sequence[Any]]], chip: Chip | None) -> list[str]:
  """Returns the ranking as text, with the suggestion first. Prints each attempt, because each one is a compilation.

  slice_sets: the sets of slices on which the step must fit. The ranking is for the first one, which has all slices.
  """
  if chip is None:
    return ["Search: this device is not in the table of chips, so candidates cannot be ranked"]
  all_slices = slice_sets[0]
  refused: dict[str, str] = {}  # reason -> the first program that was refused for it

  own_groups = config.parallelism.ici_expert_parallelism

  def compile_step(policy: RematPolicy, batch: float, groups: int = own_groups) -> Finding:
    tried = with_groups(config, groups).with_values(remat_policy=policy, per_device_batch_size=batch)
    # Fewer slices need more micro-batches and more memory, so try the smallest set first.
    for slices in reversed(slice_sets):
      where = f" on {len(slices)} of {len(all_slices)} slices" if len(slice_sets) > 1 else ""
      name = f"{_keys(policy, batch, groups)}{where}"
      print(f"Search: compiling {name}", flush=True)
      finding = analyse(tried, slices, len(all_slices))
      if isinstance(finding, Refused) and not finding.too_large:
        refused.setdefault(finding.reason, name)
      if not fits(finding, chip):
        break
    return finding

  given = config.model.remat_policy
  of_user = None if given in CANDIDATES else given
  found = list(candidates(compile_step, config.data.per_device_batch_size, chip, of_user))
  found = [dataclasses.replace(candidate, expert_parallelism=own_groups) for candidate in found]
  if found and config.model.num_experts > 1:
    found += expert_groups(compile_step, max(found, key=lambda c: c.tokens_per_second), config.model.num_experts, chip)
  found.sort(key=lambda c: -c.tokens_per_second)
  text = _ranking(config, found) if found else [
    "Search: nothing fits, not even remat_policy=full with the smallest per_device_batch_size that divides over the "
    "devices. Use more devices, or raise ici_tensor_parallelism or ici_context_parallelism."
  ]  # fmt: skip
  for reason, name in refused.items():
    text.append(f"Search: the compiler refused {name} for a reason other than memory: {reason}")
  return text


def _ranking(config: Config, found: Sequence[SearchResult]) -> list[str]:
  """Returns the suggestion and the table of all candidates that fit."""
  best, has_experts = found[0], config.model.num_experts > 1
  suggested = _keys(best.policy, best.per_device_batch_size, best.expert_parallelism)
  text = [f"Search: {suggested} is the fastest candidate that fits"]
  if config.model.custom_remat and best.policy is not RematPolicy.CUSTOM:
    text.append(f"  Ignored, because it applies only to remat_policy=custom: custom_remat={config.model.custom_remat}")
  text += [
    "  Ranked by tokens/s/device at the estimated time of each compiled step: its computation, and the communication"
    " that its schedule does not hide. Another per_device_batch_size changes the global batch.",
    f"  remat_policy | per_device_batch_size |{' ici_expert_parallelism |' if has_experts else ''} step time | exposed "
    "communication | tokens/s/device | HBM | pinned host memory",
  ]
  for c in found:
    groups = f" {c.expert_parallelism} |" if has_experts else ""
    text.append(
      f"  {c.policy} | {c.per_device_batch_size:g} |{groups} {milliseconds(c.seconds)} | {milliseconds(c.exposed)} | "
      f"{c.tokens_per_second:,.0f} | {size(c.total_bytes)} | {size(c.host_bytes)}"
    )
  return text


def candidates(
  compile_step: CompileStep, batch: float, chip: Chip, of_user: RematPolicy | None = None
) -> Iterator[SearchResult]:
  """Yields the candidates that fit, for each batch size: of remat_choice.CANDIDATES, and the policy of the user.

  Doubles the batch until nothing fits. Then halves it until something fits, and continues while smaller batches are
  faster: a smaller batch may leave room for a policy that recomputes less.
  """

  def of_batch(batch: float) -> list[SearchResult]:
    findings = {} if of_user is None else {of_user: compile_step(of_user, batch)}
    for policy in CANDIDATES:
      findings[policy] = found = compile_step(policy, batch)
      refused = isinstance(found, Refused) and not found.too_large
      if not fits(found, chip) and not refused:
        break  # the next policies need more memory
    return [_candidate(policy, batch, found, chip) for policy, found in findings.items() if fits(found, chip)]

  here = of_batch(batch)
  yield from here
  larger, doublings = here, 0
  while larger and doublings < MAX_DOUBLINGS:
    doublings += 1
    larger = of_batch(batch * 2**doublings)
    yield from larger
  fastest = _fastest(here)
  while RematPolicy.NONE not in {candidate.policy for candidate in here}:
    batch /= 2
    try:
      here = of_batch(batch)
    except ConfigError:  # the batch does not divide over the devices
      return
    yield from here
    if fastest and _fastest(here) <= fastest:
      return
    fastest = _fastest(here)


def expert_groups(
  compile_step: CompileGroups, best: SearchResult, num_experts: int, chip: Chip
) -> Iterator[SearchResult]:
  """Yields the candidates like `best` with experts in groups of 1, 2, 4, ... devices, as long as they become faster."""
  fastest, groups = best.tokens_per_second, 1
  while num_experts % groups == 0:
    if groups != best.expert_parallelism:
      try:
        finding = compile_step(best.policy, best.per_device_batch_size, groups)
      except ConfigError:  # the group does not divide the devices
        return
      if not fits(finding, chip):
        return
      candidate = _candidate(best.policy, best.per_device_batch_size, finding, chip)
      yield dataclasses.replace(candidate, expert_parallelism=groups)
      if candidate.tokens_per_second <= fastest and groups > best.expert_parallelism:
        return
      fastest = max(fastest, candidate.tokens_per_second)
    groups *= 2


def with_groups(config: Config, groups: int) -> Config:
  """Returns `config` with experts in groups of so many devices, on the same devices."""
  experts, fsdp = config.parallelism.ici_expert_parallelism, config.parallelism.ici_fsdp_parallelism
  if fsdp != -1 and fsdp * experts % groups:
    raise ConfigError(f"ici_fsdp_parallelism={fsdp}: cannot be divided for ici_expert_parallelism={groups}.")
  return config.with_values(
    ici_expert_parallelism=groups, ici_fsdp_parallelism=fsdp if fsdp == -1 else fsdp * experts // groups
  )


def _keys(policy: RematPolicy, batch: float, groups: int) -> str:
  experts = f" ici_expert_parallelism={groups}" if groups > 1 else ""
  return f"remat_policy={policy} per_device_batch_size={batch:g}{experts}"


def _fastest(found: Sequence[SearchResult]) -> float:
  return max((c.tokens_per_second for c in found), default=0.0)


def _candidate(policy: RematPolicy, batch: float, found: Analysis, chip: Chip) -> SearchResult:
  times = timeline(found, chip)
  assert times is not None, "a candidate is compiled with full optimization on all slices"
  devices = found.slices * found.devices_per_slice
  return SearchResult(
    policy,
    batch,
    times.seconds,
    times.seconds - times.computed,
    found.tokens / times.seconds / devices,
    found.memory.total,
    found.memory.host,
  )
