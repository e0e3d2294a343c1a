"""Ordinary JAX programs, each on the devices of a Pathways stand-in and on CPU devices of this process.

Run with JAX_PLATFORMS=proxy,cpu against a server with at least 4 devices. Prints a JSON object: name of the program ->
"" if both results have the same bits, else what differs.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import traceback

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pathwaysutils
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

DEVICES = 4
DTYPES = (
  "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16 "
  "float8_e3m4 float8_e4m3 float8_e4m3fn float8_e4m3b11fnuz float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
  "float4_e2m1fn int4 uint4 int2 uint2"
).split()
PROGRAMS = {}


def program(function):
  """Registers a program: devices -> a tree of arrays, numbers and strings."""
  PROGRAMS[function.__name__] = function
  return function


def numpy_dtype(name):
  return np.dtype(getattr(ml_dtypes, name, None) or name)


def example(shape, dtype=np.float32, seed=0):
  values = np.random.default_rng(seed).normal(size=shape) * 3
  return values.astype(dtype)


def mesh(devices, *shape):
  return Mesh(np.array(devices).reshape(shape), ("a", "b", "c")[: len(shape)])


def named(devices, shape, *axes, **kwargs):
  return NamedSharding(mesh(devices, *shape), PartitionSpec(*axes), **kwargs)


def _round_trip(name):
  def run(devices):
    dtype = numpy_dtype(name)
    with jax.enable_x64(True):
      values = [example(shape, np.float32).astype(dtype) for shape in ((), (3,), (2, 0), (3, 4, 5))]
      return [jax.device_put(value, devices[1]) for value in values]

  return run


def _arithmetic(name):
  def run(devices):
    dtype = numpy_dtype(name)
    with jax.enable_x64(True):
      x = jax.device_put(np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype), devices[0])
      f = jax.jit(lambda x: (x, x.T, x == x, jnp.where(x.astype(bool), x, x), x.astype(np.float32).sum()))
      return f(x)

  return run


for _name in DTYPES:
  PROGRAMS[f"round_trip_{_name}"] = _round_trip(_name)
  PROGRAMS[f"arithmetic_{_name}"] = _arithmetic(_name)


@program
def host_arrays_with_strides(devices):
  x = example((6, 8, 4))
  views = [x.T, x[::2], x[:, 1:5:2, ::3], x[..., None], np.asfortranarray(x)]
  return [jax.device_put(view, devices[0]) for view in views]


@program
def large_array(devices):
  return jax.device_put(example((1500, 1000)), devices[2])


@program
def linear_algebra(devices):
  with jax.default_device(devices[0]):
    x = example((8, 8))
    spd = jnp.asarray(x @ x.T + 8 * np.eye(8, dtype=np.float32))
    return [
      jnp.linalg.svd(x), jnp.linalg.qr(x), jnp.linalg.eigh(spd), jnp.linalg.cholesky(spd), jnp.linalg.solve(spd, x[0]),
      jnp.linalg.det(x), jnp.linalg.eigvals(x), jnp.fft.fft2(x), jnp.fft.irfft(jnp.fft.rfft(x)),
    ]  # fmt: skip


@program
def operations(devices):
  with jax.default_device(devices[1]):
    x = jnp.asarray(example((16, 16)))
    image, kernel = example((1, 3, 9, 9)), example((4, 3, 3, 3), seed=1)
    return [
      x @ x, jnp.sort(x, axis=0), jnp.argsort(x), jnp.cumsum(x, axis=1), x.at[3].add(1.0), jnp.tanh(x).sum(),
      jax.lax.conv(image, kernel, (1, 1), "SAME"), jax.lax.top_k(x, 3), jnp.einsum("ij,kj->ik", x, x),
      jax.nn.softmax(x), jax.lax.reduce_window(x, -np.inf, jax.lax.max, (2, 2), (2, 2), "VALID"), jnp.median(x),
    ]  # fmt: skip


@program
def control_flow(devices):
  with jax.default_device(devices[0]):
    x = jnp.asarray(example((4, 4)) * 0.1)
    return [
      jax.lax.scan(lambda c, i: (jnp.sin(c @ c) + i, c.sum()), x, jnp.arange(5.0)),
      jax.lax.while_loop(lambda c: c[1] < 4, lambda c: (c[0] * 2, c[1] + 1), (x, 0)),
      jax.jit(lambda p, x: jax.lax.cond(p, jnp.sin, jnp.cos, x))(True, x),
      jax.lax.fori_loop(0, 3, lambda i, c: c + i, x),
      jax.lax.switch(2, [jnp.sin, jnp.cos, jnp.tan], x),
      jax.lax.map(jnp.sum, x),
      jax.lax.associative_scan(jnp.add, x),
    ]


@program
def transformations(devices):
  with jax.default_device(devices[3]):
    x = jnp.asarray(example((4, 4)))

    @jax.custom_vjp
    def clipped(x):
      return x * x

    clipped.defvjp(lambda x: (x * x, x), lambda x, g: (jnp.clip(g * 2 * x, -1, 1),))
    f = lambda x: jnp.sum(jax.checkpoint(jnp.tanh)(x @ x))
    return [
      jax.grad(f)(x), jax.hessian(f)(x), jax.jvp(f, (x,), (x,)), jax.vmap(jax.grad(lambda v: (v**3).sum()))(x),
      jax.grad(lambda x: clipped(x).sum())(x), jax.jit(jax.value_and_grad(f))(x), jax.linearize(f, x)[0],
    ]  # fmt: skip


@program
def random_numbers(devices):
  found = []
  with jax.default_device(devices[0]):
    for implementation in ("threefry2x32", "rbg", "unsafe_rbg"):
      key = jax.random.key(7, impl=implementation)
      a, b = jax.random.split(key)
      found += [jax.random.key_data(a), jax.random.normal(b, (100,)), jax.random.bits(jax.random.fold_in(a, 3), (7,))]
      found += [
        jax.random.permutation(a, 20),
        jax.random.bernoulli(b, shape=(9,)),
        jax.random.uniform(a, (3,), np.float16),
      ]
      found += [jax.random.categorical(a, jnp.arange(5.0), shape=(6,)), jax.random.truncated_normal(b, -1, 1, (5,))]
    found.append(jax.random.PRNGKey(3))
  return found


@program
def arrays_of_keys_move(devices):
  data = np.arange(16, dtype=np.uint32).reshape(8, 2)
  keys = jax.random.wrap_key_data(jax.device_put(data, devices[0]))
  spread = jax.device_put(keys, named(devices, (4,), "a"))
  drawn = jax.jit(jax.vmap(lambda key: jax.random.normal(key, (2,))))(spread)
  return jax.random.key_data(spread), drawn, str(spread.dtype)


@program
def sharded_matmul(devices):
  x = jax.device_put(example((8, 8)), named(devices, (2, 2), "a", "b"))
  out = (named(devices, (2, 2), "a"), named(devices, (2, 2)), named(devices, (2, 2), None, "b"))
  return jax.jit(lambda x: (x @ x, x.sum(), x.T), out_shardings=out)(x)


@program
def resharding(devices):
  x = example((8, 12))
  y = jax.device_put(x, named(devices, (2, 2), "a", "b"))
  targets = [
    named(devices, (2, 2), "b", "a"),
    named(devices, (2, 2), ("a", "b")),
    named(devices, (2, 2)),
    named(devices, (4,), None, "a"),
    named(devices[::-1], (4,), "a"),
    named(devices[:2], (2,), None, "a"),
    SingleDeviceSharding(devices[3]),
    named([devices[i] for i in (2, 0, 3, 1)], (2, 2), "a", "b"),
  ]
  moved = [jax.device_put(y, target) for target in targets]
  again = [jax.device_put(array, targets[0]) for array in moved]
  inside = jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, targets[1]))(y)
  return moved, again, inside, [jax.device_put(x, target) for target in targets]


@program
def reshard_with_donation(devices):
  x = jax.device_put(example((8, 8)), named(devices, (4,), "a"))
  y = jax.device_put(x, named(devices, (4,), None, "a"), donate=True)
  z = jax.device_put(y, named(devices[:2], (2,), "a"), may_alias=True)
  return y, z, x.is_deleted()


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
def one_argument_twice(devices):
  x = jax.device_put(example((8,)), devices[0])
  return jax.jit(lambda a, b: a + b)(x, x), jax.jit(lambda a: (a, a))(x), jax.jit(lambda a: a)(x)


@program
def deletion(devices):
  x = jax.device_put(example((8,)), named(devices, (4,), "a"))
  part = x.addressable_shards[1].data + 0
  x.delete()
  return part, x.is_deleted()


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
def bfloat16_collectives_on_a_submesh(devices):
  middle = devices[1:3]
  x = jax.device_put(example((4, 4), ml_dtypes.bfloat16), named(middle, (2,), "a"))
  specs = {"in_specs": PartitionSpec("a"), "out_specs": PartitionSpec()}
  return jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "a"), mesh=mesh(middle, 2), **specs))(x)


@program
def pmap(devices):
  f = jax.pmap(lambda x: x / jax.lax.psum(x, "i"), axis_name="i", devices=devices)
  return f(np.arange(1.0, 5.0, dtype=np.float32))


@program
def gradients_over_a_mesh(devices):
  w = jax.device_put(example((8, 8)), named(devices, (2, 2), None, "b"))
  x = jax.device_put(example((8, 8), seed=1), named(devices, (2, 2), "a"))
  step = jax.jit(lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w)) ** 2))(w), donate_argnums=0)
  for _ in range(4):
    w = step(w, x)
  return w


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
def layouts(devices):
  x = jax.device_put(example((4, 6)), devices[0])
  column = Format(Layout((1, 0)), SingleDeviceSharding(devices[0]))
  y = jax.jit(lambda x: x + 1, out_shardings=column)(x)
  z = jax.jit(lambda y: y * 2, in_shardings=column)(y)
  return y, z, y + 1, str(y.format.layout.major_to_minor), np.asarray(y).T.copy()


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
def exported(devices):
  from jax import export

  with jax.default_device(devices[0]):
    return export.export(jax.jit(lambda x: jnp.sin(x) * 2), platforms=["cpu"])(jnp.ones((3,))).call(example((3,)))


@program
def assembled_arrays(devices):
  x, sharding = example((8, 4)), named(devices, (4,), "a")
  shards = [jax.device_put(x[2 * i : 2 * i + 2], device) for i, device in enumerate(devices)]
  assembled = jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
  called = jax.make_array_from_callback(x.shape, named(devices, (2, 2), "b", "a"), lambda index: x[index])
  local = jax.make_array_from_process_local_data(sharding, x)
  parts = [(str(shard.index), shard.replica_id, shard.data) for shard in called.addressable_shards]
  return assembled, called, local, parts, assembled + local, called[3], called[2:5, ::2]


@program
def ready_and_copied(devices):
  x = jax.jit(lambda x: x @ x)(jax.device_put(example((64, 64)), named(devices, (4,), "a")))
  x.copy_to_host_async()
  jax.block_until_ready(x)
  return x, x.is_ready(), jnp.array(x, copy=True), x.nbytes


@program
def scalars_and_empty_results(devices):
  with jax.default_device(devices[2]):
    x = jnp.asarray(3)
    return (
      int(x),
      float(x / 2),
      bool(x > 2),
      jax.jit(lambda: ())(),
      jax.jit(lambda x: x)(()),
      jnp.zeros((0, 3)) @ jnp.ones((3, 2)),
      x.item(),
    )


@program
def threads(devices):
  found = [None] * 8

  def work(i):
    x = jax.device_put(example((16, 16), seed=i), devices[i % 4])
    for _ in range(10):
      x = jnp.tanh(x @ x)
    found[i] = x

  workers = [threading.Thread(target=work, args=(i,)) for i in range(8)]
  for worker in workers:
    worker.start()
  for worker in workers:
    worker.join()
  return found


@program
def wrong_programs(devices):
  found = []
  x = jax.device_put(example((4,)), devices[0])
  for wrong in (
    lambda: x + np.ones(3, np.float32),
    lambda: jax.jit(lambda a, b: a + b)(x, jax.device_put(x, devices[1])),
    lambda: jax.device_put(np.ones(3), named(devices, (4,), "a")),
    lambda: jnp.asarray(["text"]),
  ):
    try:
      wrong()
    except (TypeError, ValueError) as error:
      found.append(type(error).__name__)
  return found


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
