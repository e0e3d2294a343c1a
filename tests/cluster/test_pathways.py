"""The Pathways cluster with pathwaysutils' own functions, on CPU devices that are given slice indices.

There is no Pathways server to run locally; docs/elastic.md lists what therefore stays untested.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pathwaysutils.elastic import elastic
from pathwaysutils.test import mock_fault_injection

from trainer.cluster.pathways import PathwaysCluster
from trainer.config.schema import ClusterSection

PROXY = {"JAX_PLATFORMS": "proxy,cpu"}
SECTION = ClusterSection(cluster="pathways", enable_single_controller=True)


@pytest.fixture
def down(monkeypatch):
  """Four slices of two CPU devices; the returned set holds the slices whose health check fails as a real one does."""
  down: set[int] = set()
  monkeypatch.setattr(type(jax.devices()[0]), "slice_index", property(lambda d: d.id // 2), raising=False)
  healthy = elastic.DefaultSliceHealthChecker._simple_execution

  def simple_execution(self, devices):
    if devices[0].slice_index not in down:
      return healthy(self, devices)
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))
    aval = jax.ShapeDtypeStruct((len(devices),), np.dtype("float32"), sharding=sharding)
    return transfer.make_error_array(aval, "DATA_LOSS: slice down")

  monkeypatch.setattr(elastic.DefaultSliceHealthChecker, "_simple_execution", simple_execution)
  return down


def start(poll_seconds=0.01):
  return PathwaysCluster.start(SECTION, PROXY, poll_seconds)


def until(condition, seconds=30):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "did not happen in time"
    time.sleep(0.01)


def test_slices_come_from_the_devices_slice_index(down):
  cluster = start()
  assert cluster.kind == "pathways" and cluster.num_slices == 4 and cluster.devices_per_slice == 2
  assert cluster.alive() == {0, 1, 2, 3}
  assert cluster.slices[1] == tuple(jax.devices()[2:4])


@pytest.mark.parametrize(
  ("section", "environment", "message"),
  [
    (SECTION, {"JAX_PLATFORMS": "cpu"}, "needs JAX_PLATFORMS=proxy"),
    (ClusterSection(cluster="pathways"), PROXY, "enable_single_controller=true"),
    (SECTION.model_copy(update={"num_slices": 3}), PROXY, "num_slices=3, but Pathways has 4 slices"),
  ],
)
def test_start_refuses(down, section, environment, message):
  with pytest.raises(ValueError, match=message):
    PathwaysCluster.start(section, environment, 1.0)


def test_a_down_slice_is_missed_waited_for_and_found_again(down):
  cluster = start()
  down.add(2)
  assert cluster.alive() == {0, 1, 3}
  assert cluster.wait_for(3, timeout=10) == {0, 1, 3}
  with pytest.raises(TimeoutError):
    cluster.wait_for(4, timeout=0.05)
  view = cluster.view(cluster.alive())
  assert cluster.returned(view) == frozenset()
  down.clear()
  until(lambda: cluster.returned(view) == {2})
  assert cluster.returned(cluster.view({0, 1, 2, 3})) == frozenset()
  cluster.stop()


def test_only_data_loss_proves_a_lost_slice(down):
  cluster = start()
  mesh = Mesh(np.array(jax.devices()), ("x",))
  sharding = NamedSharding(mesh, PartitionSpec("x"))
  good = jax.device_put(np.arange(8.0, dtype=np.float32), sharding)
  step = jax.jit(lambda x: jnp.sum(x * x))
  for text, proof in (("DATA_LOSS: slice down", True), ("INTERNAL: kernel failed", False)):
    bad = transfer.make_error_array(jax.ShapeDtypeStruct(good.shape, good.dtype, sharding=sharding), text)
    loss = step(bad)  # the error flows through the jitted step and surfaces where it is waited for
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
      cluster.block_until_ready(loss, cluster.view({0, 1, 2, 3}))
    assert cluster.is_slice_loss(caught.value) is proof
    assert elastic.is_error_due_to_slice_down(caught.value, log_traceback=False)
  assert not cluster.is_slice_loss(ValueError("DATA_LOSS"))


def test_errors_of_pathwaysutils_own_simulator_are_recognised(down):
  cluster = start()
  array = jnp.arange(4.0)
  with mock_fault_injection.DeviceLossSimulator() as simulator:
    simulator.bind_array_to_devices(array, cluster.slices[1])
    simulator.mark_slice_lost(1, cluster.slices)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
      cluster.block_until_ready(array, cluster.view({0, 1}))
    simulator.mark_slice_connected(1, cluster.slices)
  assert cluster.is_slice_loss(caught.value)
