"""The stand-in for Pathways that a run starts for itself: a server on this machine, whose slices can be lost."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

import jax

from pathways_standin.process import Standin, StandinError, StandinLost, start_standin
from trainer.cluster import cpu_compiler
from trainer.cluster.api import FaultTarget
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection

REPLACEMENT_SECONDS = 1.0  # how long the stand-in's scheduler takes to replace a slice that the run waits for


def start(cfg: ClusterSection, environment: MutableMapping[str, str]) -> Standin:
  """Starts the stand-in of cluster_standin, and makes it JAX's backend. Call it before the first use of a device.
  Raises ConfigError if the environment already names a proxy, or the stand-in does not start; StandinLost if the
  stand-in was killed meanwhile."""
  if target := environment.get("JAX_BACKEND_TARGET"):
    raise ConfigError(
      f"cluster_standin={cfg.cluster_standin}: the environment already names a proxy, JAX_BACKEND_TARGET={target}.\n"
      "Remove one of them."
    )
  slices, devices = map(int, cfg.cluster_standin.split("x"))
  cpu_compiler.prepare_environment(environment)  # inherited by the server, which compiles
  try:
    server = start_standin(slices, devices)
  except StandinLost:
    raise
  except StandinError as error:
    raise ConfigError(f"cluster_standin={cfg.cluster_standin}: {error}") from error
  environment["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = "true"  # read by the client when it connects
  jax.config.update("jax_platforms", "proxy")
  jax.config.update("jax_backend_target", server.address)
  return server


def describe(server: Standin) -> str:
  """What a user needs to know to lose slices by hand."""
  port = server.address.rpartition(":")[2]
  return (
    f"The stand-in for Pathways is process {server.process.pid}. Commands for it: "
    f"python -m pathways_standin.control --port {port} --help"
  )


@dataclass(eq=False)
class _Outage:
  """A slice that is dead, or hangs, and when that ends."""

  hangs: bool
  waits: bool  # it ends when the run waits for the slice
  timer: threading.Timer | None = None


class Faults(FaultTarget):
  """Losses and hangs of the stand-in's slices. The faults are the server's: the run has to find out about them."""

  def __init__(self, server: Standin, replacement_seconds: float = REPLACEMENT_SECONDS) -> None:
    self.server, self._replacement_seconds = server, replacement_seconds
    self._outages: dict[int, _Outage] = {}  # by slice
    self._lock = threading.Lock()

  def lose(self, slice_id: int, seconds: float | None = None) -> None:
    """The slice dies. It returns after `seconds`; None: at `give_back`, or if waited for."""
    with self._lock:
      self.server.control("kill", slice_id)
      self._begin(slice_id, seconds, hangs=False)

  def hang(self, slice_id: int, seconds: float | None = None) -> None:
    """The slice computes nothing. It goes on after `seconds`; None: at `give_back`. Replaced when the run waits."""
    with self._lock:
      before = self._outages.get(slice_id)
      is_dead = before is not None and not before.hangs  # a dead slice stays dead, now until the hang would end
      if not is_dead:
        self.server.control("hang", slice_id)
      self._begin(slice_id, seconds, hangs=not is_dead)

  def give_back(self, slice_id: int) -> None:
    with self._lock:
      self._end(slice_id, self._outages.get(slice_id))

  def replace(self) -> None:
    """The run waits for slices: the scheduler replaces slices that have no time of their return."""
    with self._lock:
      for entry in self.server.control("status")["slices"]:
        if entry["down"] and entry["slice"] not in self._outages:  # somebody else has killed it
          self._outages[entry["slice"]] = _Outage(hangs=False, waits=True)
      for slice_id, outage in list(self._outages.items()):
        if outage.waits:
          if outage.hangs:
            self.server.control("kill", slice_id)  # the replacement has empty memory
          self._begin(slice_id, self._replacement_seconds, hangs=False)

  def close(self) -> None:
    """No slice returns any more. The stand-in does not end here: JAX's client would print a page of errors about it."""
    with self._lock:
      for outage in self._outages.values():
        _cancel(outage)

  def _begin(self, slice_id: int, seconds: float | None, *, hangs: bool) -> None:
    _cancel(self._outages.get(slice_id))
    outage = self._outages[slice_id] = _Outage(hangs, waits=seconds is None)
    if seconds is not None:
      outage.timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._expire, [slice_id, outage])
      outage.timer.daemon = True
      outage.timer.start()

  def _expire(self, slice_id: int, outage: _Outage) -> None:
    with self._lock:
      self._end(slice_id, outage)

  def _end(self, slice_id: int, outage: _Outage | None) -> None:
    if outage is None or self._outages.get(slice_id) is not outage:  # another fault has come meanwhile
      return
    del self._outages[slice_id]
    _cancel(outage)
    self.server.control("release" if outage.hangs else "revive", slice_id)


def _cancel(outage: _Outage | None) -> None:
  if outage is not None and outage.timer is not None:
    outage.timer.cancel()
