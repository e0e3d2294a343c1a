"""How the devices of fsdp share the weights of experts, and compute with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from trainer.parallel import sharding
from trainer.parallel.mesh import CONTEXT, FSDP, TENSOR

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ExpertShards:
  """The communication of `experts` in a trace that is manual over fsdp.

  A device stores its own experts if they divide over fsdp, and else a part of all (sharding.PARAMETER_RULES). With
  group=1 it gathers all experts. Otherwise groups of neighbours along fsdp share them: a device gathers only
  experts / group of them, and in return the tokens of its group. The results are summed over the group.
  """

  experts: int
  group: int = 1
  first_stage: int = 1  # see sharding.first_stage

  def run(
    self,
    compute: Callable[..., jax.Array],
    x: tuple[jax.Array, ...],
    weights: tuple[jax.Array, ...],
    axes: tuple[Axes, ...],
  ) -> jax.Array:
    """Returns compute(x, weights, gather) [B, T, D] for arrays x [B, T, ...].

    weights: the device's shards, with logical `axes`. `compute` is manual over tensor and context too: it gets the
    tokens of one shard of context, and shards of the width of experts. gather(w, axes) returns a weight of the device's
    experts, whole in all other dims, from its shard.
    """
    # Without shards of fsdp, the compiler gathers what context shards.
    context = sharding.num_shards(CONTEXT) if sharding.is_manual_over_fsdp() else 1
    over_context = context > 1 and weights[0].shape[axes[0].index("embed")] % context == 0
    over = {"mlp": TENSOR, "embed": CONTEXT if over_context else None}
    specs = tuple(PartitionSpec(*map(over.get, names)) for names in axes)
    length = PartitionSpec(None, CONTEXT)
    run = functools.partial(compute, gather=functools.partial(self._gather, over_context=over_context))
    return sharding.on_shards((TENSOR, CONTEXT), run, (length, specs), length, x, weights)

  def _gather(self, w: jax.Array, axes: Axes, over_context: bool) -> jax.Array:
    if not sharding.is_manual_over_fsdp():
      return w
    experts, embed = axes.index("experts"), axes.index("embed")
    if over_context:
      w = jax.lax.all_gather(w, CONTEXT, axis=embed, tiled=True)
    if self._stored_whole:
      columns = None if self.group == 1 else self._groups.T.tolist()
      return jax.lax.all_gather(w, FSDP, axis=experts, tiled=True, axis_index_groups=columns)
    if self.group == 1:
      parts, rest = divmod(jax.lax.axis_size(FSDP), self.experts)
      if rest == 0 and (embed == experts + 1 or w.shape[experts + 1] % parts == 0):
        return self._gather_parts(w, is_embed_next=embed == experts + 1)
      return sharding.gather_weight(w, embed, (FSDP,), self.first_stage)
    w = jax.lax.all_to_all(w, FSDP, experts, embed, tiled=True, axis_index_groups=self._groups.tolist())
    return jax.lax.all_gather(w, FSDP, axis=embed, tiled=True, axis_index_groups=self._groups.T.tolist())

  def _gather_parts(self, w: jax.Array, is_embed_next: bool) -> jax.Array:
    """Returns the whole weight [E, ., .] where a number of devices share an expert.

    First, each device gets its part of one expert, along the dim behind the experts, for the shard of all experts that
    it stores. This moves little, and the gather of the whole weight is then along the first dim. A gather along another
    dim would copy the whole weight.
    """
    devices, columns = jax.lax.axis_size(FSDP), w.shape[-1]
    if is_embed_next:  # [E, D / devices, F]: neighbours have neighbouring rows of all experts
      groups = np.arange(devices).reshape(-1, self.experts)
      w = jax.lax.all_to_all(w, FSDP, 0, 1, tiled=True, axis_index_groups=groups.tolist())
      # To the order of the gather: in another one, it uses half of the links.
      w = jax.lax.ppermute(w, FSDP, [(int(source), place) for place, source in enumerate(groups.T.ravel())])
    else:  # [E, F, D / devices]
      w = jax.lax.all_to_all(w.reshape(devices, -1, columns), FSDP, 0, 2, tiled=True)
    w = jax.lax.all_gather(w, FSDP, axis=0, tiled=True)
    return w.reshape(self.experts, -1, w.shape[-1])

  def numbered(self, chosen: jax.Array) -> jax.Array:
    """Returns the experts `chosen`, numbered so that the device's experts come first, in the order of their weights."""
    stored = self.experts // (jax.lax.axis_size(FSDP) if self._stored_whole else self.group)
    owner = chosen // stored
    place = (owner - jax.lax.axis_index(FSDP)) % self.group
    return place * (self.experts // self.group) + owner // self.group * stored + chosen % stored

  def gather_tokens(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x [B, ...] of all devices of the group, which travels in `dtype`."""
    groups = self._groups.tolist()
    return jax.lax.all_gather(x.astype(dtype), FSDP, axis=0, tiled=True, axis_index_groups=groups).astype(x.dtype)

  def scatter_tokens(self, x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the device's own rows of x [B, ...], summed over the group in `dtype`."""
    groups = self._groups.tolist()
    rows = jax.lax.psum_scatter(x.astype(dtype), FSDP, scatter_dimension=0, tiled=True, axis_index_groups=groups)
    return rows.astype(x.dtype)

  @property
  def _stored_whole(self) -> bool:
    return self.experts % jax.lax.axis_size(FSDP) == 0

  @property
  def _groups(self) -> np.ndarray:
    """The positions along fsdp as an array [groups, devices of a group]."""
    return np.arange(jax.lax.axis_size(FSDP)).reshape(-1, self.group)
