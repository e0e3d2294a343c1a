"""What clients of a Pathways stand-in see when slices fail.

Run with JAX_PLATFORMS=proxy against a server with 2 slices of 2 devices; the argument is its control socket. Prints a
JSON object: name of the scenario -> "" if it went as expected, else a traceback.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pathwaysutils
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pathwaysutils.elastic import elastic

from pathways_standin import process

SCENARIOS = {}
DATA_LOSS = "DATA_LOSS: slice 1 is down"


def scenario(function):
  """Registers a scenario. All slices work before and after it."""
  SCENARIOS[function.__name__] = function
  return function


class Setup:
  """The devices, and ways to use them."""

  def __init__(self, control_path):
    self.control_path = control_path
    pathwaysutils.initialize()  # jax 0.10 does not know the proxy backend without it
    self.devices = jax.devices()
    self.everywhere = self.sharding(self.devices)
    self.living, self.dying = self.sharding(self.devices[:2]), self.sharding(self.devices[2:])
    self.value = np.arange(8, dtype=np.float32)
    self.add = jax.jit(lambda x: x + 1)
    specs = {"mesh": self.everywhere.mesh, "in_specs": PartitionSpec("a"), "out_specs": PartitionSpec("a")}
    self.total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "a") * 0.25, **specs, check_vma=False))

  def sharding(self, devices, **kwargs):
    return NamedSharding(Mesh(np.array(devices), ("a",)), PartitionSpec("a"), **kwargs)

  def put(self, sharding):
    return jax.device_put(self.value, sharding)

  def control(self, *words):
    return process.send(self.control_path, [str(word) for word in words])

  def wait_until(self, condition):
    deadline = time.monotonic() + 30
    while not condition():
      assert time.monotonic() < deadline
      time.sleep(0.02)

  def works(self, sharding):
    np.testing.assert_array_equal(self.add(self.put(sharding)), self.value + 1)


def fails(call, text=DATA_LOSS):
  with pytest.raises(jax.errors.JaxRuntimeError, match=text):
    call()


@scenario
def the_devices(s):
  assert [device.slice_index for device in s.devices] == [0, 0, 1, 1]
  assert {device.device_kind for device in s.devices} == {"TPU v5 lite"}
  assert {device.platform for device in s.devices} == {"cpu"}
  assert [memory.kind for memory in s.devices[3].addressable_memories()] == ["device", "pinned_host", "unpinned_host"]
  assert s.devices[0].client.runtime_type == "proxy/pathways"


@scenario
def callbacks_are_refused(s):
  shape = jax.ShapeDtypeStruct((8,), np.float32)
  for program in (
    lambda x: jax.pure_callback(lambda x: x, shape, x),
    lambda x: io_callback(lambda x: x, shape, x),
    lambda x: jax.debug.print("{}", x),
  ):
    fails(lambda program=program: jax.jit(program)(s.put(s.living)), "UNIMPLEMENTED: .*callback")


@scenario
def a_program_that_fails_when_it_runs(s):
  result = jax.jit(lambda x: jnp.full((1 << 46,), x[0]))(s.put(s.living))
  fails(result.block_until_ready, "Out of memory")
  fails(jax.jit(lambda x: x[:3] + 1)(result).block_until_ready, "Out of memory")
  s.works(s.living)


@scenario
def a_killed_slice(s):
  kept, lost, both = s.put(s.living), s.put(s.dying), s.put(s.everywhere)
  jax.block_until_ready((kept, lost, both))  # commands do not wait for requests that are on their way
  assert s.control("kill", 1)["lost_shards"] >= 4
  result = s.add(both)  # the dispatch succeeds
  for array in (result, lost, both, s.put(s.dying), s.add(lost), jax.device_put(lost, s.living)):
    fails(array.block_until_ready)
    fails(lambda array=array: np.asarray(array))
  np.testing.assert_array_equal(kept, s.value)
  s.works(s.living)
  assert elastic.get_active_slice_indices() == {0}
  assert not both.is_deleted()
  # The shards of the living slice are still there, as on Pathways: each is an array of its own.
  np.testing.assert_array_equal(both.addressable_shards[1].data, s.value[2:4])
  fails(lambda: np.asarray(both.addressable_shards[2].data))
  s.control("revive", 1)
  assert elastic.wait_for_slices(2, poll_interval=0.1, timeout=20) == {0, 1}
  fails(lambda: np.asarray(lost))  # its memory was lost
  s.works(s.everywhere)


@scenario
def a_program_that_runs_fails_on_all_its_slices(s):
  kept = s.add(s.put(s.living))
  kept.block_until_ready()
  s.control("hang", 1)  # so that the program runs until the kill
  dispatched = s.control("status")["dispatches"] + 3
  running = s.add(s.put(s.everywhere))
  part = running.addressable_shards[0].data  # on the living slice
  after = s.add(part)
  alone = s.add(s.put(s.living))
  while s.control("status")["dispatches"] < dispatched:
    time.sleep(0.01)
  s.control("kill", 1)
  for array in (running, part, after):
    fails(array.block_until_ready)
  for array in (kept, alone):
    np.testing.assert_array_equal(array, s.value + 1)
  s.control("revive", 1)


@scenario
def a_hanging_slice(s):
  before = s.put(s.dying)
  s.control("hang", 1)
  waiting = [s.add(before) for _ in range(60)]
  threads = [threading.Thread(target=array.block_until_ready) for array in (*waiting, s.put(s.everywhere))]
  for thread in threads:
    thread.start()
  for _ in range(5):
    s.works(s.living)  # as many waits as the server has threads do not stop the others
  time.sleep(0.3)
  assert all(thread.is_alive() for thread in threads)
  assert not waiting[0].is_ready()
  s.control("release", 1)
  for thread in threads:
    thread.join(30)
  assert not any(thread.is_alive() for thread in threads)
  np.testing.assert_array_equal(waiting[7], s.value + 1)


@scenario
def a_hanging_slice_is_killed(s):
  s.control("hang", 1)
  result = s.add(s.put(s.everywhere))
  assert not result.is_ready()
  threading.Timer(0.3, s.control, ("kill", 1)).start()
  fails(result.block_until_ready)
  s.control("revive", 1)
  s.works(s.everywhere)  # the new life does not hang


@scenario
def snapshots_in_the_host_memory_of_a_living_slice(s):
  host = s.living.with_memory_kind("pinned_host")
  snapshot = jax.device_put(s.put(s.living), host)
  snapshot.block_until_ready()
  s.control("kill", 1)
  back = jax.device_put(snapshot, s.living)
  np.testing.assert_array_equal(s.add(back), s.value + 1)
  s.control("revive", 1)
  np.testing.assert_array_equal(jax.device_put(snapshot, s.everywhere), s.value)


@scenario
def no_leak(s):
  step = jax.jit(lambda x, y: (x + y, (x * y).sum()), donate_argnums=0)
  x, y = s.put(s.everywhere), s.put(s.everywhere)

  def held():
    deadline = time.monotonic() + 20
    previous = None
    while time.monotonic() < deadline:  # the client sends deletions a little later
      (client,) = s.control("status")["clients"]
      found = {key: client[key] for key in ("arrays", "executables", "host_buffers", "futures")}
      if found == previous:
        return found
      previous = found
      time.sleep(0.3)
    raise AssertionError(f"the number of handles does not settle: {previous}")

  x, loss = step(x, y)
  float(loss)
  before = held()
  for i in range(300):
    x, loss = step(x, y)
    if i % 10 == 0:
      float(loss), jax.device_put(x, s.living), s.put(s.living)
  x.block_until_ready()
  float(loss)
  assert held() == before


@scenario
def a_dropped_connection(s):
  """The last scenario: a client does not connect again."""
  x = s.put(s.everywhere)
  x.block_until_ready()
  assert s.control("drop") == {"clients": 1}
  fails(lambda: np.asarray(s.add(x)), "UNAVAILABLE")


def main(control_path, *names):
  setup = Setup(control_path)
  report = {}
  for name in names or SCENARIOS:
    try:
      SCENARIOS[name](setup)
      report[name] = ""
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 -- reported
      report[name] = traceback.format_exc()
    finally:
      setup.control("reset")
  print(json.dumps(report))


if __name__ == "__main__":
  main(*sys.argv[1:])
