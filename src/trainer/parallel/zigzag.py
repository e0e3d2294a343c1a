"""The order of positions over the mesh axis context in which every device has as much causal attention as the others.

In natural order the last of c devices attends to all positions, and the others wait for it: its work is nearly twice
the mean. In zigzag order the sequence has 2c parts, and device i has parts i and 2c - 1 - i. One of these two
parts is even. The even part comes first, so that moving a sequence between the two orders exchanges halves of devices.

mesh: None for natural order; then every function here returns its argument.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from trainer.parallel.mesh import CONTEXT


def parts(context: int) -> list[int]:
  """Returns the part at each of the 2 * context places."""
  pairs = ((i, 2 * context - 1 - i) for i in range(context))
  return [part for pair in pairs for part in sorted(pair, key=lambda part: part % 2)]


def positions(context: int, length: int) -> np.ndarray:
  """Returns the position at each of `length` places, int32 [length]. 2 * context divides `length`."""
  return np.arange(length, dtype=np.int32).reshape(2 * context, -1)[parts(context)].reshape(-1)


def spread(mesh: Mesh | None, x: jax.Array) -> jax.Array:
  """Returns x [B, T, ..] in zigzag order, from natural order."""
  return _exchanged(mesh, x, back=False)


def restored(mesh: Mesh | None, x: jax.Array) -> jax.Array:
  """Returns x [B, T, ..] in natural order, from zigzag order."""
  return _exchanged(mesh, x, back=True)


def gathered(mesh: Mesh | None, x: jax.Array) -> jax.Array:
  """Returns x [B, T, ..] in natural order, from zigzag order. The device has all positions of x."""
  if mesh is None:
    return x
  pieces = jnp.split(x, 2 * mesh.shape[CONTEXT], axis=1)
  return jnp.concatenate([pieces[place] for place in np.argsort(parts(mesh.shape[CONTEXT]))], axis=1)


def _exchanged(mesh: Mesh | None, x: jax.Array, *, back: bool) -> jax.Array:
  """Returns x [B, T, ..] after both halves of each device have moved: to zigzag order, or back."""
  if mesh is None:
    return x
  moves: list[list[tuple[int, int]]] = [[], []]  # of the first halves and of the second: from a device to another
  for place, part in enumerate(parts(mesh.shape[CONTEXT])):
    ends = part // 2, place // 2
    moves[part % 2].append(ends[::-1] if back else ends)

  def local(x: jax.Array) -> jax.Array:
    halves = zip(jnp.split(x, 2, axis=1), moves, strict=True)
    return jnp.concatenate([jax.lax.ppermute(half, CONTEXT, ends) for half, ends in halves], axis=1)

  inside, spec = jax.sharding.get_abstract_mesh(), PartitionSpec(None, CONTEXT)
  known = mesh if inside.empty else None
  return jax.shard_map(local, mesh=known, axis_names={CONTEXT}, in_specs=spec, out_specs=spec, check_vma=False)(x)
