"""remat_policy=auto: chooses the policy of a run by compiling its step with each candidate.

On TPUs the choice is the policy with the shortest estimated step (docs/preflight.md) among the policies that fit. CPUs
and GPUs have no such estimate: their choice is the first policy of a fixed order that fits. A run keeps its choice,
because policies compute the same function with different rounding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jax import Device

from input_pipeline import places
from stepcost import chips
from trainer import world as world_lib
from trainer.cluster import Cluster
from trainer.config import config_files
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, RematPolicy
from trainer.observe import environment, files
from trainer.parallel import memory
from trainer.preflight import analysis
from trainer.preflight.analysis import Analysis, Refused

# From the least memory to the most: after a policy that does not fit, no other one fits. Policies that offload are not
# candidates where `full` fits: the traffic to the host takes longer than its recomputation.
CANDIDATES = (
  RematPolicy.FULL,
  RematPolicy.SAVE_OUT_PROJ,
  RematPolicy.SAVE_DOT_EXCEPT_MLP,
  RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP,
  RematPolicy.MINIMAL_WITH_CONTEXT,
  RematPolicy.NONE,
)
# From the shortest step. CPUs: measured; the other candidates are slower than a policy that
# needs less memory. GPUs: not measured, from the least recomputation.
FIXED_ORDER: Mapping[str, tuple[RematPolicy, ...]] = MappingProxyType(
  {
    "cpu": (
      RematPolicy.MINIMAL_WITH_CONTEXT,
      RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP,
      RematPolicy.SAVE_OUT_PROJ,
      RematPolicy.FULL,
    ),
    "gpu": CANDIDATES[::-1],
  }
)

SliceSets = Sequence[Sequence[Sequence[Device]]]  # sets of slices on which the step must fit; first the set of all


@dataclasses.dataclass(frozen=True)
class PolicyResult:
  """The step with one policy on all slices. If it cannot be chosen, `problem` says why, and the numbers are 0."""

  policy: RematPolicy
  problem: str = ""
  too_large: bool = False  # the problem is memory
  total_bytes: int = 0  # on a device
  seconds: float = 0.0  # of the step, estimated; 0 on CPUs and GPUs
  exposed: float = 0.0  # seconds of communication in it


class Choice(NamedTuple):
  """The chosen policy, and the reason, which continues the sentence."""

  policy: RematPolicy
  reason: str

  def __str__(self) -> str:
    return f"remat_policy=auto: {self.policy}, {self.reason}"

  def applied(self, config: Config) -> Config:
    """Returns `config` with the chosen policy instead of auto."""
    return config.with_values(remat_policy=self.policy, custom_remat="")


def resolve(config: Config, cluster: Cluster, notify: Callable[[str], None]) -> tuple[Config, str]:
  """Returns `config` with the policy of the run instead of auto, and a line for the log.

  A run that has been started before keeps the policy of its config.yml. Otherwise the choice comes from the cache in
  jax_cache_dir, or from compiling, which `notify` announces. All processes of the run call this and get the same.

  Raises ConfigError for sizes that do not fit the devices, or a config.yml that cannot be read.
  """
  views = [cluster.view(cluster.slices)]
  if needs_fewer(config, len(cluster.slices)):  # not num_slices: a process of `multiprocess` has one
    views.append(cluster.view(list(cluster.slices)[:-1]))
  slice_sets = [view.devices for view in views]
  known, failed = None, ""
  if cluster.world.is_primary:
    try:
      known = _of_run(config.run_directory) or _cached(config, slice_sets)
    except ConfigError as error:
      failed = str(error)
  known, failed = world_lib.from_primary(cluster.world, [known, failed])
  if failed:
    raise ConfigError(failed)
  if known is None:
    notify("remat_policy=auto: compiling the step with several policies. For a large model this takes minutes.")
    known = world_lib.from_primary(cluster.world, choose(config, slice_sets)[0])
    if cluster.world.is_primary:
      keep(config, slice_sets, Choice(*known))
  choice = Choice(RematPolicy(known[0]), known[1])
  return choice.applied(config), str(choice)


def needs_fewer(config: Config, num_slices: int) -> bool:
  """Returns whether the step must also fit with one slice lost: whether the run continues then."""
  return config.elastic.elastic_enabled and 0 < config.elastic.elastic_min_slice_count < num_slices


def choose(config: Config, slice_sets: SliceSets) -> tuple[Choice, list[PolicyResult]]:
  """Returns the choice, and the candidates that were compiled for it. If none of them fits, the choice is full.

  Raises ConfigError if sizes do not fit the devices, or if the memory or the rates of a device are unknown.
  """
  platform = slice_sets[0][0][0].platform
  order = FIXED_ORDER.get(platform)
  if order is not None:
    tried = list(_until(lambda candidate: not candidate.problem, config, slice_sets, order))
  else:
    tried = list(_until(lambda candidate: candidate.too_large, config, slice_sets, CANDIDATES))
  fitting = [candidate for candidate in tried if not candidate.problem]
  if not fitting:
    return Choice(RematPolicy.FULL, f"which needs the least memory; no policy fits ({tried[0].problem})"), tried
  best = min(fitting, key=lambda candidate: candidate.seconds)
  if order is None:
    reason = f"the shortest of {len(fitting)} estimated steps, {best.seconds * 1e3:,.1f} ms"
    return Choice(best.policy, reason), tried
  return Choice(best.policy, f"the first policy that fits, in the order for {platform}s: {', '.join(order)}"), tried


def _until(
  is_last: Callable[[PolicyResult], bool],
  config: Config,
  slice_sets: SliceSets,
  policies: Sequence[RematPolicy],
) -> Iterator[PolicyResult]:
  """Compiles the step with each policy, and yields the candidates up to the last one."""
  for policy in policies:
    candidate = _compile(config, policy, slice_sets)
    yield candidate
    if is_last(candidate):
      return


def _compile(config: Config, policy: RematPolicy, slice_sets: SliceSets) -> PolicyResult:
  """Returns the step with `policy`. Fewer slices need more micro-batches and memory, so they are compiled first."""
  config = config.with_values(remat_policy=policy, custom_remat="")
  all_slices = slice_sets[0]
  most = limit(all_slices)
  for slices in reversed(slice_sets):
    found = analysis.analyse(config, slices, len(all_slices))
    if isinstance(found, Refused):
      return PolicyResult(policy, problem=found.reason, too_large=found.too_large)
    if found.memory.total > most:
      return PolicyResult(policy, problem=f"needs {_gib(found.memory.total)} of {_gib(most)}", too_large=True)
  assert isinstance(found, Analysis)  # of all slices, because they are compiled last
  if all_slices[0][0].platform in FIXED_ORDER:
    return PolicyResult(policy, total_bytes=found.memory.total)
  times = analysis.timeline(found, _chip(all_slices[0][0]))
  assert times is not None, "the step on all slices is compiled with full optimization"
  exposed = times.seconds - times.computed
  return PolicyResult(policy, total_bytes=found.memory.total, seconds=times.seconds, exposed=exposed)


def limit(slices: Sequence[Sequence[Device]]) -> int:
  """Returns the bytes of memory of a device. The CPU devices of a process share the memory of their machine."""
  device = slices[0][0]
  if device.platform == "cpu":
    return memory.of_host() // sum(other.process_index == device.process_index for group in slices for other in group)
  if device.platform == "gpu" and (found := memory.of_device(device, cluster_kind="")) is not None:
    return found
  return _chip(device).hbm_bytes


def _chip(device: Device) -> chips.Chip:
  chip = chips.find(device.device_kind)
  if chip is None:
    raise ConfigError(
      f"remat_policy=auto: needs the memory and the peak rates of the device, and {device.device_kind} is not in the "
      f"table of chips.\nChoose a policy, such as remat_policy={RematPolicy.FULL}."
    )
  return chip


def _gib(count: int) -> str:
  return f"{count / 2**30:,.2f} GiB"


def _of_run(run_directory: str) -> Choice | None:
  """Returns the policy in the run's config.yml; None if there is no such file, or if no choice can have made it.

  Raises ConfigError if the file cannot be read.
  """
  path = places.at(run_directory) / config_files.CONFIG_FILE
  if not path.exists():
    return None
  given = config_files.read_yaml(path)
  policy = given.get("remat_policy", ("", ""))[0]
  if policy not in CANDIDATES:
    return None
  return Choice(RematPolicy(policy), f"as at an earlier start of this run ({path})")


def _cached(config: Config, slice_sets: SliceSets) -> Choice | None:
  """Returns the choice that `keep` has written for the same facts; None if there is none, or it cannot be read."""
  if not config.run.jax_cache_dir:
    return None
  path = places.at(config.run.jax_cache_dir) / _entry(config, slice_sets)
  try:
    policy, reason = json.loads(path.read_text())
    return Choice(RematPolicy(policy), f"{reason} (cached in {path})")
  except (OSError, ValueError, TypeError):
    return None


def keep(config: Config, slice_sets: SliceSets, choice: Choice) -> None:
  """Writes the choice into jax_cache_dir, if there is one.

  The run continues without the file if it cannot be written: the disk may be full, or another run may write it now.
  """
  if config.run.jax_cache_dir:
    folder = os.path.expanduser(config.run.jax_cache_dir)
    with contextlib.suppress(OSError):
      files.write_text(folder, _entry(config, slice_sets), json.dumps(choice))


def _entry(config: Config, slice_sets: SliceSets) -> str:
  """Returns the file name of a choice: a hash of all facts that it depends on.

  Of the keys, numbers of type float are left out: they are constants in the step and change neither memory nor time.
  """
  sections = (config.model, config.optimizer, config.parallelism)
  keys = {name: value for section in sections for name, value in section if not isinstance(value, float)}
  batch = config.data.per_device_batch_size, config.data.max_target_length, config.elastic.shares_per_slice
  devices = [(device.device_kind, getattr(device, "coords", None)) for device in slice_sets[0][0]]
  compiler = config.run.compile_xla_flags, environment.versions()
  facts = [keys, batch, [len(slices) for slices in slice_sets], devices, limit(slice_sets[0]), compiler]
  return f"remat_policy-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]}.json"
