"""The loss without a kernel, from all logits at once: the oracle of the fused loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def plain_cross_entropy(
  x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, *, z_loss: float, valid_vocab: int | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns what `linear_cross_entropy` returns, from [B, T, V] logits. Here z_sum has its own gradient."""
  logits = jnp.einsum("btd,vd->btv", x, w.astype(x.dtype), preferred_element_type=jnp.float32)
  logits = logits[..., : valid_vocab or w.shape[0]]
  log_z = jax.nn.logsumexp(logits, axis=-1)
  target = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  return jnp.sum(weights * (log_z - target)), z_loss * jnp.sum(weights * jnp.square(log_z))
