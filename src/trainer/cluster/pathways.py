"""Slices behind a Pathways controller: this one process drives all of them (JAX_PLATFORMS=proxy)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, MutableMapping

import jax
from pathwaysutils.elastic import elastic

from trainer import world as world_lib
from trainer.cluster import proxy, standin
from trainer.cluster.api import Cluster, FaultTarget, View
from trainer.cluster.health import HealthChecks
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection
from worlds import lines

# A stand-in's slices return within a second, and its programs are small.
_STANDIN_POLL_SECONDS, _STANDIN_TIME_LIMIT = 0.5, 5.0


class PathwaysCluster(Cluster):
  """The slices of a Pathways job. Health checks tell which of them are alive."""

  kind = "pathways"
  is_behind_proxy = True

  def __init__(
    self,
    slices: Mapping[int, tuple[jax.Device, ...]],
    poll_seconds: float = Cluster.poll_seconds,
    health: Callable[..., HealthChecks] = HealthChecks,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    faults: standin.Faults | None = None,
  ) -> None:
    """poll_seconds, health: replaced in tests. faults: of the stand-in that this process has started, if it has."""
    super().__init__(slices, world_lib.SingleWorld(), clock=clock, sleep=sleep)  # one controller process
    # A failed check means that the slice has lost its memory, even if it answers again later.
    self._health = health(self.slices, failed=lambda slice_id: self._record_deaths([slice_id]))
    self.poll_seconds = poll_seconds
    self._last_look = -float("inf")  # on the clock, when `returned` last started checks
    self._faults = faults

  @classmethod
  def start(cls, cfg: ClusterSection, environment: MutableMapping[str, str]) -> PathwaysCluster:
    """Connects to the proxy, or to a stand-in that it starts, and gets the slices from it."""
    if cfg.cluster_standin:
      return cls._start_standin(cfg, environment)
    platforms = environment.get("JAX_PLATFORMS", "")
    if "proxy" not in platforms:
      raise ConfigError(
        f"cluster=pathways needs JAX_PLATFORMS=proxy in the environment, found {platforms!r}. Start the run as a "
        "Pathways job, or use cluster=simulated."
      )
    if not cfg.enable_single_controller:
      raise ConfigError("On Pathways one process controls all slices. Set enable_single_controller=true.")
    return cls(_connect(cfg, environment))

  @classmethod
  def _start_standin(cls, cfg: ClusterSection, environment: MutableMapping[str, str]) -> PathwaysCluster:
    server = standin.start(cfg, environment)
    health = functools.partial(HealthChecks, time_limit=_STANDIN_TIME_LIMIT)
    slices = _connect(cfg, dict(environment, JAX_BACKEND_TARGET=server.address))
    lines.tell(standin.describe(server))
    return cls(slices, _STANDIN_POLL_SECONDS, health, faults=standin.Faults(server))

  @property
  def fault_target(self) -> FaultTarget | None:
    return self._faults

  def alive(self) -> frozenset[int]:
    return self._health.check(self.slices.keys() - self._barred)

  def _reasons(self) -> str:
    return f" ({self._health.describe(self.slices)})"

  def _replace_lost(self) -> None:
    if self._faults is not None:
      self._faults.replace()

  def returned(self, view: View) -> frozenset[int]:
    missing = frozenset(self.slices) - frozenset(view.slices) - self._barred
    found = self._health.passed(missing)  # before new checks begin: those have no result yet
    if missing and self._clock() - self._last_look >= self.poll_seconds:
      self._last_look = self._clock()
      for slice_id in missing:
        self._health.begin(slice_id)
    return found

  def copied(self, view: View) -> dict[int, tuple[jax.Device, ...]]:
    """One slice: this process writes all local copies, and copies of several slices would be equal."""
    return {view.slices[0]: view.devices[0]}

  def stop(self) -> None:
    self._health.stop()
    if self._faults is not None:
      self._faults.close()


def _connect(cfg: ClusterSection, environment: Mapping[str, str]) -> dict[int, tuple[jax.Device, ...]]:
  """{slice: devices} of the proxy that the environment names."""
  groups = elastic.get_slice_to_devices(proxy.connect(environment))
  if cfg.num_slices not in (0, len(groups)):
    raise ConfigError(f"num_slices={cfg.num_slices}, but Pathways has {len(groups)} slices. Set num_slices=0.")
  return {i: tuple(group) for i, group in groups.items()}
