"""Matmuls of rows with the weights of their groups: the matmul of a mixture of experts without dropped tokens.

M: rows. E: groups (experts). K, N: widths of the two sides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

# (x [M, K], w [E, K, N], sizes int32 [E]) -> [M, N] in the dtype of x. The first sizes[0] rows belong to group 0, the
# next sizes[1] to group 1, and so on; the sizes add up to M. Differentiable in x and w.
GroupedMatmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

# The two products of a platform. `differentiable` makes a grouped matmul of them. Results have the given dtype.
# times_weights(x [M, K], w [E, K, N], sizes, dtype, transposed=) -> [M, N]: rows times the weights of their groups. If
#   transposed, w is [E, N, K].
# times_rows(x [M, K], g [M, N], sizes, dtype) -> [E, K, N]: the sum of the outer products of the rows of each group
Product = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Chosen:
  """A grouped matmul, its name, and why it was chosen, for the log."""

  name: str
  reason: str
  function: GroupedMatmul


def choose(platform: str) -> Chosen:
  """Returns the grouped matmul for a platform: "cpu", "gpu" or "tpu"."""
  if platform == "cpu":
    return Chosen("tiles", "XLA's ragged_dot computes every expert for every token on a CPU", in_tiles)
  if platform == "tpu":
    return Chosen("megablox", "the Pallas kernel of JAX for TPUs", _megablox)
  return Chosen("blocks", "a Pallas kernel: XLA's ragged_dot computes every expert for every token on a GPU", _blocks)


def _megablox(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """The Pallas kernel of JAX for TPUs. Rows are padded to whole tiles."""
  from jax.experimental.pallas.ops.tpu.megablox import gmm  # imported here: only a TPU needs Pallas

  tiles = (512, min(512, w.shape[1]), min(512, w.shape[2]))

  def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    # The rows of the padding belong to the last group. They are zeros, and so are their results.
    padded = jnp.pad(x, ((0, -len(x) % tiles[0]), (0, 0)))
    sizes = sizes.at[-1].add(len(padded) - len(x))
    return gmm(padded, w.astype(x.dtype), sizes, x.dtype, tiles)[: len(x)]

  return _on_each_device(run, x, w, sizes)


def _blocks(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """The Pallas kernels for GPUs."""
  from trainer.kernels import grouped_matmul_gpu as gpu  # imported here: only a GPU needs Triton

  return _on_each_device(differentiable(gpu.times_weights, gpu.times_rows), x, w, sizes)


def with_rows_behind(multiply: GroupedMatmul, parts: int) -> GroupedMatmul:
  """Returns `multiply` for sizes that add up to at most M. The results of the rows behind all groups are zeros.

  parts: on average, the groups have one of so many parts of the rows. Its name tells stepcost.
  """

  def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    inside = (jnp.arange(len(x), dtype=jnp.int32) < jnp.sum(sizes))[:, None]
    # The kernels do not compute these rows, so their memory, and the memory of their gradients, may hold anything.
    with jax.named_scope(f"one_of_{parts}_parts"):
      return jnp.where(inside, multiply(jnp.where(inside, x, 0), w, sizes), 0)

  return run


def _on_each_device(run: GroupedMatmul, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
  """Returns run(x, w, sizes). XLA cannot partition a Pallas kernel, not even over axes of one device."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return run(x, w, sizes)
  whole, axes = PartitionSpec(), set(mesh.axis_names) - set(mesh.manual_axes)
  return jax.shard_map(run, axis_names=axes, in_specs=whole, out_specs=whole, check_vma=False)(x, w, sizes)


@functools.cache
def differentiable(times_weights: Product, times_rows: Product) -> GroupedMatmul:
  """Returns the grouped matmul of two products."""

  @jax.custom_vjp
  def multiply(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return times_weights(x, w.astype(x.dtype), sizes, x.dtype, transposed=False)

  def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return multiply(x, w, sizes), (x, w, sizes)

  def backward(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, w, sizes = saved
    dx = times_weights(g, w.astype(g.dtype), sizes, g.dtype, transposed=True)
    return dx, times_rows(x, g, sizes, w.dtype), None

  multiply.defvjp(forward, backward)
  return multiply


def tile_times_weights(
  x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: jnp.dtype, *, transposed: bool
) -> jax.Array:
  """The first product for a CPU: a loop over tiles. XLA's ragged_dot multiplies all rows by all groups there."""
  tile, rows = _tile(x, sizes), len(x)
  padded = jnp.pad(x, ((0, tile), (0, 0)))
  contracted = (((1,), (1 if transposed else 0,)), ((), ()))

  def group(out: jax.Array, given: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    weights, start, size = given

    def one(i: jax.Array, out: jax.Array) -> jax.Array:
      # The last tile of a group also writes rows of the next groups, which these write after it.
      at = start + i * tile
      part = jax.lax.dynamic_slice_in_dim(padded, at, tile)
      result = jax.lax.dot_general(part, weights, contracted)
      return jax.lax.dynamic_update_slice_in_dim(out, result.astype(dtype), at, 0)

    return jax.lax.fori_loop(0, -(-size // tile), one, out), None

  out = jnp.zeros((rows + tile, w.shape[1 if transposed else 2]), dtype)
  out, _ = jax.lax.scan(group, out, (w, jnp.cumsum(sizes) - sizes, sizes))
  return out[:rows]


def tile_times_rows(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """The second product for a CPU."""
  tile = _tile(x, sizes)
  left, right = (jnp.pad(array, ((0, tile), (0, 0))) for array in (x, g))

  def group(_: None, given: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
    start, size = given

    def one(i: jax.Array, total: jax.Array) -> jax.Array:
      at = start + i * tile
      in_group = (i * tile + jnp.arange(tile, dtype=jnp.int32) < size)[:, None]
      part = jnp.where(in_group, jax.lax.dynamic_slice_in_dim(left, at, tile), 0)
      contracted = (((0,), (0,)), ((), ()))
      other = jax.lax.dynamic_slice_in_dim(right, at, tile)
      return total + jax.lax.dot_general(part, other, contracted, preferred_element_type=jnp.float32)

    return None, jax.lax.fori_loop(0, -(-size // tile), one, jnp.zeros((left.shape[1], right.shape[1]), jnp.float32))

  return jax.lax.scan(group, None, (jnp.cumsum(sizes) - sizes, sizes))[1].astype(dtype)


def _tile(x: jax.Array, sizes: jax.Array) -> int:
  """Rows of a tile: about a quarter of the mean group, a power of two from 8 to 256. It depends on shapes alone."""
  return min(256, max(8, 1 << (max(1, len(x) // (4 * len(sizes))).bit_length() - 1)))


in_tiles = differentiable(tile_times_weights, tile_times_rows)
