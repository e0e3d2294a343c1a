"""The Pathways cluster on CPU devices that are given slice indices, with health checks that fail or hang on command.

docs/pathways.md has the stand-in for Pathways, and what is not tested.
"""

from __future__ import annotations

import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pathwaysutils.elastic import elastic
from pathwaysutils.test import mock_fault_injection

from trainer.cluster import ProxyLost, pathways
from trainer.cluster.health import HealthChecks
from trainer.cluster.pathways import PathwaysCluster
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection
from trainer.elastic.classification import Kind, classify
from trainer.process import runtime_errors

PROXY = {"JAX_PLATFORMS": "proxy,cpu"}
SECTION = ClusterSection(cluster="pathways", enable_single_controller=True)
TIME_LIMIT = 1.0
PROXY_LOST = (
  "UNAVAILABLE: Connection to IFRT proxy server was terminated: FAILED_PRECONDITION: writes no longer allowed."
)


class Slices:
  """Four slices of two CPU devices. `down` maps a slice to the error text of its health check; `silent` ones hang."""

  def __init__(self):
    self.down: dict[int, str] = {}
    self.silent: dict[int, threading.Event] = {}
    self.checks: list[tuple[float, int]] = []

  def run(self, slice_id):
    self.checks.append((time.monotonic(), slice_id))
    if slice_id in self.silent:
      self.silent[slice_id].wait()
    if slice_id in self.down:
      raise jax.errors.JaxRuntimeError(self.down[slice_id])

  def hang(self, slice_id):
    self.silent[slice_id] = threading.Event()

  def release(self, slice_id):
    self.silent.pop(slice_id).set()

  def cluster(self, poll_seconds=0.01):
    devices = jax.devices()
    health = functools.partial(HealthChecks, time_limit=TIME_LIMIT, run=self.run)
    return PathwaysCluster({i: tuple(devices[2 * i : 2 * i + 2]) for i in range(4)}, poll_seconds, health)


@pytest.fixture
def slices():
  slices = Slices()
  yield slices
  for i in list(slices.silent):
    slices.release(i)


def until(condition, seconds=30):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "did not happen in time"
    time.sleep(0.01)


def seconds_of(call):
  start = time.monotonic()
  return call(), time.monotonic() - start


def test_start_groups_the_proxys_devices_by_slice_index(monkeypatch):
  monkeypatch.setattr(type(jax.devices()[0]), "slice_index", property(lambda d: d.id // 2), raising=False)
  monkeypatch.setattr(pathways.proxy, "connect", lambda environment: jax.devices())
  cluster = PathwaysCluster.start(SECTION, PROXY)
  assert cluster.kind == "pathways" and cluster.num_slices == 4 and cluster.devices_per_slice == 2
  assert cluster.slices[1] == tuple(jax.devices()[2:4])
  with pytest.raises(ConfigError, match="num_slices=3, but Pathways has 4 slices"):
    PathwaysCluster.start(SECTION.model_copy(update={"num_slices": 3}), PROXY)


@pytest.mark.parametrize(
  ("section", "environment", "message"),
  [
    (SECTION, {"JAX_PLATFORMS": "cpu"}, "needs JAX_PLATFORMS=proxy"),
    (ClusterSection(cluster="pathways"), PROXY, "enable_single_controller=true"),
  ],
)
def test_start_refuses_a_wrong_environment(section, environment, message):
  with pytest.raises(ConfigError, match=message):
    PathwaysCluster.start(section, environment)


def test_a_down_slice_is_missed_waited_for_and_found_again(slices):
  cluster = slices.cluster()
  slices.down[2] = "DATA_LOSS: slice down"
  assert cluster.alive() == {0, 1, 3}
  assert cluster.wait_for(3, timeout=10) == {0, 1, 3}
  with pytest.raises(TimeoutError, match=r"only \[0, 1, 3\] of .* \(slice 2: DATA_LOSS: slice down\)"):
    cluster.wait_for(4, timeout=0.05)
  view = cluster.view(cluster.alive())
  assert cluster.returned(view) == frozenset()
  slices.down.clear()
  until(lambda: cluster.returned(view) == {2})
  assert cluster.returned(cluster.view({0, 1, 2, 3})) == frozenset()
  cluster.stop()


@pytest.mark.parametrize("code", ["DATA_LOSS", "UNAVAILABLE", "ABORTED", "CANCELLED", "INVALID_ARGUMENT", "INTERNAL"])
def test_every_error_of_a_health_check_means_that_the_slice_does_not_answer(slices, code):
  cluster = slices.cluster()
  slices.down[1] = f"{code}: worker is gone"
  assert cluster.alive() == {0, 2, 3}


def test_a_silent_slice_costs_one_time_limit_and_no_more(slices):
  cluster = slices.cluster()
  slices.hang(1)
  alive, seconds = seconds_of(cluster.alive)
  assert alive == {0, 2, 3} and TIME_LIMIT <= seconds < TIME_LIMIT + 5
  (alive, again), seconds = seconds_of(lambda: (cluster.alive(), cluster.wait_for(3, timeout=10)))
  assert alive == again == {0, 2, 3} and seconds < TIME_LIMIT
  assert len([i for _, i in slices.checks if i == 1]) == 1  # one thread waits, however often the slice is asked
  slices.release(1)
  until(lambda: cluster.alive() == {0, 1, 2, 3})


def test_a_returned_slice_that_dies_again_is_not_reported_as_returned(slices):
  cluster = slices.cluster()
  slices.down[1] = "DATA_LOSS: slice 1"
  view = cluster.view(cluster.alive())
  slices.down.clear()
  until(lambda: cluster.returned(view) == {1})
  whole = cluster.view(cluster.wait_for(4, timeout=10))
  slices.down[1] = "DATA_LOSS: slice 1"  # the second loss
  assert cluster.lost(whole) == {1}
  view = cluster.view(cluster.wait_for(3, timeout=10))
  for _ in range(10):
    assert cluster.returned(view) == frozenset()
    time.sleep(0.02)


def test_a_slice_that_died_and_was_replaced_is_lost(slices):
  """The health check saw the outage; when the loop asks again, the replacement answers."""
  cluster = slices.cluster()
  view = cluster.view(cluster.alive())
  slices.down[1] = "UNAVAILABLE: gone"
  assert cluster.lost(view) == {1}
  slices.down.clear()
  assert cluster.wait_for(4, timeout=10) == {0, 1, 2, 3}
  assert cluster.died(view) == cluster.lost(view) == {1}
  assert cluster.died(cluster.view(cluster.alive())) == frozenset()


def test_a_silent_slice_is_lost_once_the_loop_gives_it_up(slices):
  cluster = slices.cluster()
  view = cluster.view(cluster.alive())
  slices.hang(1)
  assert cluster.alive() == {0, 2, 3}
  assert cluster.died(view) == frozenset()  # a silent slice is not dead yet: the hang may end
  assert cluster.lost(view) == {1}
  slices.release(1)
  until(lambda: cluster.alive() == {0, 1, 2, 3})
  assert cluster.died(view) == {1}


def test_a_lost_proxy_is_not_a_lost_slice(slices):
  cluster = slices.cluster()
  view = cluster.view(cluster.alive())
  slices.down.update(dict.fromkeys(range(4), PROXY_LOST))
  for ask in (cluster.alive, lambda: cluster.lost(view), lambda: cluster.wait_for(1, timeout=10)):
    with pytest.raises(ProxyLost, match="terminated"):
      ask()
  # The error of the step may be ambiguous. The health check then decides.
  for text in (PROXY_LOST, "UNAVAILABLE: Socket closed"):
    error = jax.errors.JaxRuntimeError(text)
    assert classify(error, cluster, view).kind is Kind.DISCONNECTED
  assert "resumes from the last checkpoint" in runtime_errors.advice(jax.errors.JaxRuntimeError(PROXY_LOST))


def test_errors_of_pathwaysutils_own_simulator_are_slice_losses(slices):
  cluster = slices.cluster()
  array = jnp.arange(4.0)
  with mock_fault_injection.DeviceLossSimulator() as simulator:
    simulator.bind_array_to_devices(array, cluster.slices[1])
    simulator.mark_slice_lost(1, cluster.slices)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
      jax.block_until_ready(array)
    simulator.mark_slice_connected(1, cluster.slices)
  assert classify(caught.value, cluster, cluster.view({0, 1})).kind is Kind.SLICE_DOWN


def test_an_error_array_flows_through_a_step_and_is_a_slice_loss(slices):
  cluster = slices.cluster()
  mesh = Mesh(np.array(jax.devices()), ("x",))
  sharding = NamedSharding(mesh, PartitionSpec("x"))
  step = jax.jit(lambda x: jnp.sum(x * x))
  for text, kind in (("DATA_LOSS: slice down", Kind.SLICE_DOWN), ("INTERNAL: kernel failed", Kind.UNKNOWN)):
    bad = transfer.make_error_array(jax.ShapeDtypeStruct((8,), np.dtype("float32"), sharding=sharding), text)
    loss = step(bad)  # the thread that waits for the result gets the error
    view = cluster.view({0, 1, 2, 3})
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
      jax.block_until_ready(loss)
    assert classify(caught.value, cluster, view).kind is kind
    # pathwaysutils takes both for a lost slice.
    assert elastic.is_error_due_to_slice_down(caught.value, log_traceback=False)
