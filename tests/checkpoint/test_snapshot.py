"""Host-memory snapshots: one copy per slice, restored onto whatever slices live."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tests.support import toy_state

from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.snapshot import Snapshots
from trainer.world import SingleWorld


def slices(number=4, of=2):
  return {i: jax.devices()[i * of : (i + 1) * of] for i in range(number)}


def taken(*steps, recorder=None):
  recorder = recorder or toy_state.Recorder()
  s = Snapshots(SingleWorld(), recorder.log, recorder.emit)
  for step in steps:
    assert s.save(step, toy_state.state(step, toy_state.mesh(4, 2)), {"tokens": step}, slices())
    s.wait()
  return s


@pytest.mark.parametrize("alive", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("data,fsdp,first", [(4, 2, 0), (2, 2, 4), (1, 2, 6), (1, 8, 0), (2, 4, 0)])
def test_restores_onto_the_slices_that_live(alive, data, fsdp, first):
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(data, fsdp, first))
  restored = taken(1, 2).restore(target, alive)
  assert (restored.step, restored.meta, restored.slice) == (2, {"tokens": 2}, min(alive))
  toy_state.assert_same_bits(restored.state, toy_state.values(2))
  assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(lambda x: x.sharding, target)


def test_nothing_to_restore():
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2))
  assert Snapshots(SingleWorld()).newest({0, 1}) is None
  assert Snapshots(SingleWorld()).restore(target, {0, 1}) is None
  s = taken(1)
  assert s.newest({9}) is None and s.restore(target, {9}) is None
  assert s.newest({2}) == 1


def test_state_may_be_donated_at_once_and_each_slice_has_its_own_copy():
  state = toy_state.state(5, toy_state.mesh(4, 2))
  s = Snapshots(SingleWorld())
  s.save(5, state, {}, slices())
  jax.block_until_ready(jax.jit(lambda t: jax.tree.map(jnp.zeros_like, t), donate_argnums=0)(state))
  for i in range(4):
    restored = s.restore(toy_state.abstract(toy_state.values(), toy_state.mesh(1, 2, 2 * i)), {i})
    assert restored.slice == i
    toy_state.assert_same_bits(restored.state, toy_state.values(5))


def test_meta_is_a_copy():
  s, meta = Snapshots(SingleWorld()), {"cursor": {"next_example": 1}}
  s.save(1, toy_state.state(1, toy_state.mesh(4, 2)), meta, slices())
  meta["cursor"]["next_example"] = 2
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2))
  s.restore(target, {0}).meta["cursor"]["next_example"] = 3
  assert s.restore(target, {0}).meta == {"cursor": {"next_example": 1}}


def test_restoring_does_not_compile_on_a_prepared_topology():
  s = taken(1)
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(3, 2))
  fingerprint.prepare(target)
  compiled = []
  listener = lambda event, seconds, **labels: compiled.append(event) if "backend_compile" in event else None
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    assert s.restore(target, {1}) is not None
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert compiled == []


def test_a_state_that_is_not_finite_leaves_the_older_snapshot():
  recorder = toy_state.Recorder()
  s = taken(1, recorder=recorder)
  state = toy_state.state(2, toy_state.mesh(4, 2))
  state["low"] = state["low"].at[0].set(jnp.nan)
  s.save(2, state, {}, slices())
  assert s.newest({0}) == 1
  assert "the state is not finite (low)" in recorder.lines[-1]


def broken_replica(x: jax.Array, device: jax.Device) -> jax.Array:
  """x with one bit turned in the shard of one device."""
  buffers = []
  for shard in x.addressable_shards:
    data = np.array(shard.data)
    if shard.device == device:
      data.reshape(-1).view(np.uint8)[0] ^= 1
    where = SingleDeviceSharding(shard.device, memory_kind=x.sharding.memory_kind)
    buffers.append(jax.device_put(data, where))
  return jax.make_array_from_single_device_arrays(x.shape, x.sharding, buffers)


def test_replicas_that_differ_are_noticed_and_not_kept():
  recorder = toy_state.Recorder()
  s = taken(1, recorder=recorder)
  state = toy_state.state(2, toy_state.mesh(4, 2))
  state["params"]["embedding"] = broken_replica(state["params"]["embedding"], jax.devices()[5])
  s.save(2, state, {}, slices())
  assert s.newest({0}) == 1
  assert recorder.events[-1] == ("replicas_differ", {"step": 2, "slice": 2, "array": "params.embedding"})


def test_a_copy_damaged_in_memory_is_passed_over():
  recorder = toy_state.Recorder()
  s = taken(3, recorder=recorder)
  copies = s._whole.copies[0]
  copies["low"] = broken_replica(copies["low"], jax.devices()[0])
  restored = s.restore(toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2)), {0, 1, 2, 3})
  assert restored.slice == 1
  toy_state.assert_same_bits(restored.state, toy_state.values(3))
  assert "slice 0 is not used: low does not have the fingerprint" in recorder.lines[-1]


def test_a_slice_without_a_full_copy_is_refused():
  with pytest.raises(ValueError, match="is sharded across slices"):
    Snapshots(SingleWorld()).save(1, toy_state.state(1, toy_state.mesh(1, 8)), {}, slices())


def test_the_memory_of_a_lost_slice_does_not_come_back_with_it():
  s = Snapshots(SingleWorld())
  s.save(5, toy_state.state(5, toy_state.mesh(4, 2)), {}, slices())
  s.keep({0, 1})
  assert s.newest({0, 1, 2, 3}) == 5
  assert s.newest({2, 3}) is None
  s.keep(set())
  assert s.newest({0, 1, 2, 3}) is None
