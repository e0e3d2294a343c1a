"""Host-memory snapshots: one copy per slice, restored onto the slices that are alive."""

from __future__ import annotations

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tests.support import toy_state

from trainer.checkpoint import snapshot
from trainer.checkpoint.arrays import boxes, fingerprint, verified_load
from trainer.checkpoint.snapshot import Snapshots
from trainer.checkpoint.state_backup import Candidate
from trainer.world import SingleWorld


def slices(number=4, of=2):
  return {i: jax.devices()[i * of : (i + 1) * of] for i in range(number)}


def made(recorder=None):
  recorder = recorder or toy_state.Recorder()
  s = Snapshots(SingleWorld(), recorder.log, recorder.emit)
  s.begin_attempt(slices(), slices())
  return s


def taken(*steps, recorder=None):
  s = made(recorder)
  for step in steps:
    assert s.save(step, toy_state.state(step, toy_state.mesh(4, 2)), {"tokens": step})
    s.confirm(step)
    s.wait()
  return s


def restore(s, target, recorder=None):
  return toy_state.restore_newest([s], target, recorder)


def newest(s):
  return max((c.step for c in s.candidates()), default=None)


@pytest.mark.parametrize("alive", [{0}, {3}, {1, 2}, {0, 1, 2, 3}])
@pytest.mark.parametrize("data,fsdp,first", [(4, 2, 0), (2, 2, 4), (1, 2, 6), (1, 8, 0), (2, 4, 0)])
def test_restores_onto_the_slices_that_are_alive(alive, data, fsdp, first):
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(data, fsdp, first))
  s = taken(1, 2)
  s.begin_attempt(slices(), alive)
  restored = restore(s, target)
  assert (restored.step, restored.meta, restored.path) == (2, {"tokens": 2}, f"memory of slice {min(alive)}")
  toy_state.assert_same_bits(restored.state, toy_state.values(2))
  assert jax.tree.map(lambda x: x.sharding, restored.state) == jax.tree.map(lambda x: x.sharding, target)


def test_state_may_be_donated_at_once_and_each_slice_has_its_own_copy():
  state = toy_state.state(5, toy_state.mesh(4, 2))
  s = made()
  s.save(5, state, {})
  s.confirm(5)
  jax.block_until_ready(jax.jit(lambda t: jax.tree.map(jnp.zeros_like, t), donate_argnums=0)(state))
  s.wait()
  assert len(s.candidates()) == 4
  for i, candidate in enumerate(s.candidates()):
    target = toy_state.abstract(toy_state.values(), toy_state.mesh(1, 2, 2 * i))
    state, _ = s.restore(candidate, target, lambda meta: None)
    assert s.path(candidate) == f"memory of slice {i}"
    toy_state.assert_same_bits(state, toy_state.values(5))


@pytest.mark.parametrize("batch_bytes", [verified_load.MIN_BATCH_BYTES, 1])
def test_restoring_does_not_compile_on_a_prepared_topology(monkeypatch, batch_bytes):
  """Also not in batches, as above 64 MiB: each of them compiled its fingerprints."""
  monkeypatch.setattr(verified_load, "MIN_BATCH_BYTES", batch_bytes)
  fingerprint._program.cache_clear()
  s = taken(1)
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(3, 2))
  fingerprint.prepare(target)
  compiled = []
  listener = lambda event, seconds, **labels: compiled.append(event) if "backend_compile" in event else None
  jax.monitoring.register_event_duration_secs_listener(listener)
  try:
    assert restore(s, target) is not None
  finally:
    jax.monitoring.unregister_event_duration_listener(listener)
  assert compiled == []


def test_a_restore_copies_the_arrays_together_to_one_slice_after_the_other(monkeypatch):
  """A Pathways proxy needs a request for each array and slice if device_put gets the shardings of several slices."""
  s, put, calls = taken(1), jax.device_put, []

  def device_put(x, shardings, **kwargs):
    calls.append([(len(a.sharding.device_set), len(b.device_set)) for a, b in zip(x, shardings, strict=True)])
    return put(x, shardings, **kwargs)

  monkeypatch.setattr(jax, "device_put", device_put)
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(3, 2, 2))
  toy_state.assert_same_bits(restore(s, target).state, toy_state.values(1))
  assert calls == [[(2, 2)] * 3 * len(jax.tree.leaves(target))]


def test_a_state_that_is_not_finite_leaves_the_older_snapshot():
  recorder = toy_state.Recorder()
  s = taken(1, recorder=recorder)
  state = toy_state.state(2, toy_state.mesh(4, 2))
  state["low"] = state["low"].at[0].set(jnp.nan)
  s.save(2, state, {})
  s.confirm(2)
  s.wait()
  assert newest(s) == 1
  assert "the state is not finite (low)" in recorder.lines[-1]


def broken_replica(x: jax.Array, device: jax.Device) -> jax.Array:
  """x with one flipped bit in the shard of one device."""
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
  s.save(2, state, {})
  s.confirm(2)
  s.wait()
  assert newest(s) == 1
  assert recorder.events[-1] == ("replicas_differ", {"step": 2, "slice": 2, "array": "params.embedding"})


def test_a_copy_damaged_in_memory_is_skipped():
  recorder = toy_state.Recorder()
  s = taken(3, recorder=recorder)
  copies = s._whole.copies[0]
  copies["low"] = broken_replica(copies["low"], jax.devices()[0])
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2))
  restored = restore(s, target, recorder)
  assert restored.path == "memory of slice 1"
  toy_state.assert_same_bits(restored.state, toy_state.values(3))
  (rejected,) = (line for line in recorder.lines if "is not used" in line)
  assert "(snapshot, memory of slice 0)" in rejected and "low does not have the fingerprint" in rejected


def test_a_copy_that_cannot_be_read_is_skipped_and_kept(monkeypatch):
  """The slice that holds the copy has died unnoticed. Reading raises, so the copies of other slices are used."""
  s = taken(3)
  dead = next(iter(s._whole.copies[0].values()))
  put = jax.device_put

  def device_put(x, *args, **kwargs):
    if isinstance(x, list) and any(part is dead for part in x):
      raise jax.errors.JaxRuntimeError("UNAVAILABLE: slice 0 is gone")
    return put(x, *args, **kwargs)

  monkeypatch.setattr(jax, "device_put", device_put)
  restored = restore(s, toy_state.abstract(toy_state.values(), toy_state.mesh(1, 2, 2)))
  assert restored.path == "memory of slice 1"
  toy_state.assert_same_bits(restored.state, toy_state.values(3))
  assert len(s.candidates()) == 4


def test_a_step_that_was_not_recorded_is_never_restored():
  recorder = toy_state.Recorder()
  s = taken(1, recorder=recorder)
  s.save(2, toy_state.state(2, toy_state.mesh(4, 2)), {})
  s.confirm(1)
  s.wait()
  assert newest(s) == 1
  s.begin_attempt(slices(), slices())
  s.confirm(3)
  assert newest(s) == 1
  assert "The snapshot of step 2 is dropped: the step was not recorded." in recorder.lines


@pytest.fixture
def silent_slice(monkeypatch):
  """A function that makes copies to slice 3 wait until the test ends, as on a slice that hangs."""
  end = threading.Event()
  ready = jax.block_until_ready

  def block(x):
    if isinstance(x, dict) and set(next(iter(x.values())).sharding.device_set) & set(jax.devices()[6:8]):
      assert end.wait(60)
    return ready(x)

  yield lambda: monkeypatch.setattr(jax, "block_until_ready", block)
  end.set()


def test_a_silent_slice_that_is_lost_does_not_hold_up_the_others_copies(silent_slice):
  s = taken(1)
  silent_slice()
  s.save(2, toy_state.state(2, toy_state.mesh(4, 2)), {})
  s.confirm(2)
  begin = time.monotonic()
  s.begin_attempt(slices(), {0, 1, 2})
  assert time.monotonic() - begin < 10
  assert newest(s) == 2 and len(s.candidates()) == 3


def test_recovery_waits_a_limited_time_for_a_copy(silent_slice, monkeypatch):
  """The arrays of a hanging slice are never ready, even before the slice is known."""
  recorder = toy_state.Recorder()
  monkeypatch.setattr(snapshot, "RECOVERY_WAIT_SECONDS", 0.3)
  s = taken(1, recorder=recorder)
  silent_slice()
  s.save(2, toy_state.state(2, toy_state.mesh(4, 2)), {})
  s.confirm(2)
  assert not s.save(3, toy_state.state(3, toy_state.mesh(4, 2)), {})
  begin = time.monotonic()
  s.begin_attempt(slices(), {1, 2, 3})
  assert time.monotonic() - begin < 10
  assert newest(s) == 1
  assert "The snapshot of step 2 is abandoned: slices [3] have not copied it in 0.3 s." in recorder.lines
  assert s.save(4, toy_state.state(4, toy_state.mesh(4, 2)), {})


class Stored:
  """A backup in storage, of one step."""

  tier = "persistent"

  def __init__(self, step):
    self.step = step

  def candidates(self):
    return [Candidate(self.step)]

  def restore(self, candidate, abstract, accept):
    return "from storage", {}

  def path(self, candidate):
    return "/storage"


@pytest.mark.parametrize("stored, tier", [(1, "snapshot"), (2, "snapshot"), (3, "persistent")])
def test_a_newer_checkpoint_is_preferred_to_an_older_snapshot(stored, tier):
  target = toy_state.abstract(toy_state.values(), toy_state.mesh(4, 2))
  restored = toy_state.restore_newest([taken(2), Stored(stored)], target)
  assert (restored.step, restored.tier) == (max(stored, 2), tier)


def test_the_owners_of_all_parts_are_looked_up_once_in_an_attempt(monkeypatch):
  """For 8 slices of 64 devices this took 0.17 s in each snapshot."""
  looked_up, owners = [], boxes.owners
  monkeypatch.setattr(boxes, "owners", lambda name, *of: looked_up.append(name) or owners(name, *of))
  taken(1, 2)
  assert len(looked_up) == 4 * len({*looked_up}) > 0  # 4 slices
