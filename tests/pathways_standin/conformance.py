"""Ordinary JAX programs, each on the devices of a Pathways stand-in and on CPU devices of this process.

Run with JAX_PLATFORMS=proxy,cpu against a server with at least 4 devices. Prints a JSON object: name of the program ->
"" if both results have the same bits, else what differs.
"""

from __future__ import annotations

import json
import re
import sys
import traceback

import jax
import numpy as np
import pathwaysutils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DEVICES = 4
PROGRAMS = {}


def program(function):
  """Registers a program: devices -> a tree of arrays, numbers and strings."""
  PROGRAMS[function.__name__] = function
  return function


def example(shape, dtype=np.float32, seed=0):
  values = np.random.default_rng(seed).normal(size=shape) * 3
  return values.astype(dtype)


def mesh(devices, *shape):
  return Mesh(np.array(devices).reshape(shape), ("a", "b", "c")[: len(shape)])


def named(devices, shape, *axes, **kwargs):
  return NamedSharding(mesh(devices, *shape), PartitionSpec(*axes), **kwargs)


@program
def sharded_matmul(devices):
  x = jax.device_put(example((8, 8)), named(devices, (2, 2), "a", "b"))
  out = (named(devices, (2, 2), "a"), named(devices, (2, 2)), named(devices, (2, 2), None, "b"))
  return jax.jit(lambda x: (x @ x, x.sum(), x.T), out_shardings=out)(x)


@program
def donation(devices):
  sharding = named(devices, (4,), "a")
  f = jax.jit(lambda a, b: (a + 1, b * 2), donate_argnums=0)
  x, kept = jax.device_put(example((8,)), sharding), jax.device_put(example((8,), seed=1), sharding)
  y, z = f(x, kept)
  for _ in range(5):
    y, z = f(y, z)
  try:
    use = str(np.asarray(x))
  except RuntimeError as error:
    use = type(error).__name__
  return y, z, kept, x.is_deleted(), kept.is_deleted(), use


@program
def collectives(devices):
  x = jax.device_put(example((8, 4)), named(devices, (4,), "a"))

  def f(x):
    rank = jax.lax.axis_index("a")
    around = [(i, (i + 1) % 4) for i in range(4)]
    same_everywhere = jax.lax.psum(x, "a"), jax.lax.pmax(x, "a"), jax.lax.all_gather(x, "a", tiled=True)
    scattered = jax.lax.psum_scatter(x, "a", scatter_dimension=1, tiled=True)
    exchanged = jax.lax.all_to_all(x, "a", 1, 0, tiled=True)
    return same_everywhere, (scattered, jax.lax.ppermute(x, "a", around), exchanged, x + rank.astype(x.dtype))

  in_specs, out_specs = PartitionSpec("a"), (PartitionSpec(), PartitionSpec("a"))
  shard_map = jax.shard_map(f, mesh=mesh(devices, 4), in_specs=in_specs, out_specs=out_specs, check_vma=False)
  return jax.jit(shard_map)(x)


@program
def memory_kinds(devices):
  device = named(devices, (4,), "a")
  host = device.with_memory_kind("pinned_host")
  x = jax.device_put(example((8,)), device)
  on_host = jax.device_put(x, host)
  back = jax.device_put(on_host, device)
  computed = jax.jit(lambda x: x * 2, out_shardings=host)(x)
  inside = jax.jit(lambda x: jax.device_put(x, device) + 1)(on_host)
  unpinned = jax.device_put(x, device.with_memory_kind("unpinned_host"))
  arrays = [x, on_host, back, computed, inside, unpinned]
  return arrays, [array.sharding.memory_kind for array in arrays]


@program
def ahead_of_time(devices):
  x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=named(devices, (4,), "a"))
  compiled = jax.jit(lambda x: (x @ x, x.sum()), donate_argnums=0).lower(x).compile()
  memory = compiled.memory_analysis()
  sizes = [memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.alias_size_in_bytes]
  cost = {key: np.float32(value) for key, value in compiled.cost_analysis().items()}
  shardings = [str(sharding.spec) for sharding in compiled.output_shardings]
  operations = re.findall(r" = \S+ ([\w-]+)\(", compiled.as_text())
  return compiled(jax.device_put(example((8, 8)), x.sharding)), sizes, cost, shardings, operations


@program
def assembled_arrays(devices):
  x, sharding = example((8, 4)), named(devices, (4,), "a")
  shards = [jax.device_put(x[2 * i : 2 * i + 2], device) for i, device in enumerate(devices)]
  assembled = jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
  called = jax.make_array_from_callback(x.shape, named(devices, (2, 2), "b", "a"), lambda index: x[index])
  local = jax.make_array_from_process_local_data(sharding, x)
  parts = [(str(shard.index), shard.replica_id, shard.data) for shard in called.addressable_shards]
  return assembled, called, local, parts, assembled + local, called[3], called[2:5, ::2]


def same(ours, expected, path=""):
  """What differs between two trees, in words; "" if nothing does."""
  if isinstance(expected, jax.Array):
    a, b = np.asarray(ours), np.asarray(expected)
    if (a.dtype, a.shape) != (b.dtype, b.shape):
      return f"{path}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
    if a.tobytes() != b.tobytes():
      return f"{path}: {a!r}, not {b!r}"
    if isinstance(expected.sharding, NamedSharding) and str(ours.sharding.spec) != str(expected.sharding.spec):
      return f"{path}: {ours.sharding}, not {expected.sharding}"
    return ""
  if isinstance(expected, list | tuple):
    differences = [same(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(ours, expected, strict=True))]
    return next(filter(None, differences), "")
  if isinstance(expected, dict):
    return next(filter(None, (same(ours[k], v, f"{path}.{k}") for k, v in expected.items())), "")
  return "" if np.array_equal(ours, expected) else f"{path}: {ours!r}, not {expected!r}"


def main(names):
  jax.config.update("jax_num_cpu_devices", DEVICES)
  pathwaysutils.initialize()  # jax 0.10 does not know the proxy backend without it
  ours, local = jax.devices("proxy")[:DEVICES], jax.devices("cpu")
  report = {}
  for name in names or PROGRAMS:
    try:
      expected = PROGRAMS[name](local)
      report[name] = same(PROGRAMS[name](ours), expected)
    except Exception:  # noqa: BLE001 -- reported
      report[name] = traceback.format_exc()
  print(json.dumps(report))


if __name__ == "__main__":
  main(sys.argv[1:])
