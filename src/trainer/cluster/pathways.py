"""Slices behind a Pathways controller: this one process drives all of them (JAX_PLATFORMS=proxy)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import jax
import pathwaysutils
from pathwaysutils.elastic import elastic

from trainer import world as world_lib
from trainer.cluster.api import Cluster, View
from trainer.config.schema import ClusterSection


class PathwaysCluster(Cluster):
  """pathwaysutils answers all questions: slice membership, health checks (a small program per slice), waiting."""

  kind = "pathways"

  def __init__(
    self,
    slices: Mapping[int, tuple[jax.Device, ...]],
    poll_seconds: float,
    clock: Callable[[], float] = time.monotonic,
  ) -> None:
    super().__init__(slices, world_lib.SingleWorld())  # one controller process
    self._poll_seconds = poll_seconds
    self._clock = clock
    self._looked = -float("inf")
    self._look: threading.Thread | None = None
    self._found: frozenset[int] = frozenset()

  @classmethod
  def start(cls, cfg: ClusterSection, environment: Mapping[str, str], poll_seconds: float) -> PathwaysCluster:
    """Registers the proxy backend and asks it for the slices."""
    platforms = environment.get("JAX_PLATFORMS", "")
    if "proxy" not in platforms:
      raise ValueError(
        f"cluster=pathways needs JAX_PLATFORMS=proxy in the environment, found {platforms!r}; start the run as a "
        "Pathways job, or use cluster=simulated"
      )
    if not cfg.enable_single_controller:
      raise ValueError("on Pathways one process controls all slices; say so with enable_single_controller=true")
    pathwaysutils.initialize()
    slices = {i: tuple(devices) for i, devices in elastic.get_slice_to_devices(jax.devices()).items()}
    if cfg.num_slices not in (0, len(slices)):
      raise ValueError(f"num_slices={cfg.num_slices}, but Pathways has {len(slices)} slices; leave it at 0")
    return cls(slices, poll_seconds)

  def alive(self) -> frozenset[int]:
    return frozenset(elastic.get_active_slice_indices(self.slices))

  def wait_for(self, count: int, timeout: float, stop: Callable[[], bool] = lambda: False) -> frozenset[int]:
    end = self._clock() + timeout
    while not stop():
      left = end - self._clock()
      try:  # poll by poll, to look up from it
        found = elastic.wait_for_slices(
          count,
          poll_interval=self._poll_seconds,
          timeout=min(left, self._poll_seconds),
          slice_to_devices=self.slices,
        )
        return frozenset(found)
      except TimeoutError:
        if left <= self._poll_seconds:
          raise TimeoutError(
            f"waited {timeout:g} s for {count} slices of {sorted(self.slices)}. Raise elastic_timeout_seconds, or let "
            "the run go on with fewer by elastic_min_slice_count."
          ) from None
    return self.alive()

  def returned(self, view: View) -> frozenset[int]:
    """Checks the missing slices at most every poll_seconds, in a thread of its own: a check compiles and waits."""
    missing = {i: devices for i, devices in self.slices.items() if i not in view.slices}
    if not missing:
      return frozenset()
    busy = self._look is not None and self._look.is_alive()
    if not busy and self._clock() - self._looked >= self._poll_seconds:
      self._looked = self._clock()
      self._look = threading.Thread(target=self._look_for, args=(missing,), name="returned-slices", daemon=True)
      self._look.start()
    return self._found & missing.keys()

  def is_slice_loss(self, error: BaseException) -> bool:
    # pathwaysutils also counts INTERNAL, NOT_FOUND and DEADLINE_EXCEEDED; those have other causes as often, so they
    # prove nothing without a health check.
    return isinstance(error, jax.errors.JaxRuntimeError) and "DATA_LOSS" in str(error)

  def stop(self) -> None:
    if self._look is not None:
      self._look.join(timeout=self._poll_seconds)

  def _look_for(self, missing: Mapping[int, tuple[jax.Device, ...]]) -> None:
    self._found = frozenset(elastic.get_active_slice_indices(missing))
