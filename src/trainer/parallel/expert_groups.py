"""Groups of neighbours along fsdp, of which each device computes a part of the experts for the tokens of its group."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from trainer.parallel.mesh import FSDP


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
  """The communication of groups of `size` neighbours along fsdp, in a trace that is manual over fsdp.

  Weights are stored as without groups: each device has a part of every expert. A group exchanges these parts, so that
  each device has a part of its own experts, and gathers only them: 1 / size of what all experts would be. In return
  the tokens of the group are gathered, and the results are summed and split again.
  """

  size: int = 1

  def gather_weight(self, w: jax.Array, experts_dim: int, dim: int) -> jax.Array:
    """Returns the device's own experts of a weight of which each device has a part of `dim` of all experts."""
    positions = np.arange(jax.lax.axis_size(FSDP)).reshape(-1, self.size)
    w = jax.lax.all_to_all(w, FSDP, experts_dim, dim, tiled=True, axis_index_groups=positions.tolist())
    if len(positions) == 1:
      return w
    return jax.lax.all_gather(w, FSDP, axis=dim, tiled=True, axis_index_groups=positions.T.tolist())

  def gather_tokens(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x [B, ...] of all devices of the group, which travels in `dtype`."""
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=0, tiled=True, axis_index_groups=self._groups).astype(x.dtype)

  def scatter_tokens(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the device's own rows of x [B, ...], summed over the group in `dtype`."""
    own = jax.lax.psum_scatter(x.astype(dtype), FSDP, scatter_dimension=0, tiled=True, axis_index_groups=self._groups)
    return own.astype(x.dtype)

  def first_expert(self, experts: int) -> jax.Array:
    """Returns the first of the device's own experts; `experts`: their number."""
    return jax.lax.axis_index(FSDP) % self.size * experts

  @property
  def _groups(self) -> list[list[int]]:
    return np.arange(jax.lax.axis_size(FSDP)).reshape(-1, self.size).tolist()


NO_GROUPS = ExpertGroups()  # each device has all experts
