"""Cross-entropy fused with the output projection. Only the logits of one chunk of the sequence exist at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.parallel import sharding
from trainer.parallel.mesh import CONTEXT
from trainer.parallel.sharding import constrain

# Platform -> bytes of one chunk's float32 logits on a device. TPU: a chunk that fits into VMEM (128 MiB on v5e and v6e)
# needs no pass over HBM; much smaller chunks add to dw too often. CPU: a chunk that fits into the cache.
# GPU: logits do not stay on the chip, and each chunk reads and writes dw.
CHUNK_LOGITS_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 8 << 20, "tpu": 96 << 20, "gpu": 768 << 20})


def linear_cross_entropy(
  x: jax.Array,
  w: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  z_loss: float,
  num_chunks: int = 0,
  valid_vocab: int | None = None,
  vocab_shards: int = 1,
  head_neighbours: int = 1,
  chunk_logits_bytes: int = CHUNK_LOGITS_BYTES["tpu"],
) -> tuple[jax.Array, jax.Array]:
  """Returns (loss_sum, z_sum), float32 scalars: sums over tokens of weight * CE and of weight * z_loss * logZ**2.

  Args:
    x: [B, T, D] in the compute dtype.
    w: [V, D], cast to x.dtype for the matmuls.
    targets: [B, T] int32, below V.
    weights: [B, T] float32.
    z_loss: the factor of logZ**2.
    num_chunks: number of parts of a device's T, computed one after the other. 0 chooses it so that the float32 logits
      of a chunk on a device need at most `chunk_logits_bytes`.
    valid_vocab: logits from this index on are padding and count as -inf.
    vocab_shards: number of devices over which the vocabulary is split.
    head_neighbours: number of devices that gather their rows of the head: see sharding.LossExchange.
    chunk_logits_bytes: see `num_chunks`.

  Differentiable once, in x and w. The gradient of loss_sum is the gradient of loss_sum + z_sum, and z_sum has no
  gradient. So differentiate the sum of both, and use z_sum on its own only for logging.

  The forward pass computes the gradients too, chunk by chunk, while it has the logits. That takes three matmuls in all.
  The only array of size V that is kept is dw, accumulated in float32.
  """
  vocab = w.shape[0] if valid_vocab is None else valid_vocab
  if not 0 < vocab <= w.shape[0]:
    raise ValueError(f"valid_vocab={valid_vocab} must be in 1..{w.shape[0]}, the rows of the output head.")
  length = x.shape[1] // sharding.num_shards(CONTEXT)
  chunks = num_chunks or choose_chunks(length, 4 * x.shape[0] * w.shape[0] / vocab_shards, chunk_logits_bytes)
  padded_from = vocab if vocab < w.shape[0] else None
  static = _Static(z_loss, min(chunks, length), padded_from, head_neighbours)
  return _fused(x, w, targets, weights, static)


def head_logits(x: jax.Array, head_VD: jax.Array) -> jax.Array:
  """Returns logits [..., V] in float32 of the stream [..., D] after the final norm. The only place that computes them:
  what is done to them here, in training too, needs its derivative in `_shard_sums`."""
  return jnp.einsum("...d,vd->...v", x, head_VD.astype(x.dtype), preferred_element_type=jnp.float32)


def choose_chunks(length: int, position_bytes: float, limit: int) -> int:
  """Returns the number of chunks of `length` so that the logits of a chunk need at most `limit` bytes.

  `position_bytes` is the size of the logits of one position. Prefers a number that divides the length, up to twice the
  smallest possible number, because other numbers pad the last chunk.
  """
  least = math.ceil(length / max(1, int(limit / position_bytes)))
  return next((n for n in range(least, min(2 * least, length) + 1) if length % n == 0), least)


class _Static(NamedTuple):
  """The arguments of the fused loss that are known when it is traced."""

  z_loss: float
  chunks: int
  padded_from: int | None  # logits from this index on are padding
  neighbours: int  # number of devices that gather their rows of the head


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _fused(
  x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, static: _Static
) -> tuple[jax.Array, jax.Array]:
  return _sums(x, w, targets, weights, static, with_grads=False)[0]


def _fused_fwd(
  x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, static: _Static
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
  return _sums(x, w, targets, weights, static, with_grads=True)


def _fused_bwd(
  static: _Static, grads: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, None]:
  del static
  dx, dw = grads
  scale = cotangents[0]
  scaled = lambda grad: (grad.astype(scale.dtype) * scale).astype(grad.dtype)
  return scaled(dx), scaled(dw), None, None


_fused.defvjp(_fused_fwd, _fused_bwd)


def _by_chunk(array: jax.Array, chunks: int) -> jax.Array:
  """Returns [B, chunks, t, ...] from an array [B, T, ...], padded with zeros.

  `_chunk` reads from this view in place, without a transposition.
  """
  b, length = array.shape[:2]
  if pad := -length % chunks:
    array = jnp.pad(array, [(0, 0), (0, pad)] + [(0, 0)] * (array.ndim - 2))
  return array.reshape(b, chunks, -1, *array.shape[2:])


def _chunk(view: jax.Array, i: jax.Array) -> jax.Array:
  """Returns chunk i, [B, t, ...], of the result of `_by_chunk`."""
  return jax.lax.dynamic_index_in_dim(view, i, axis=1, keepdims=False, allow_negative_indices=False)


def _store_chunk(view: jax.Array, part: jax.Array, i: jax.Array) -> jax.Array:
  """Returns `view` with `part` written where `_chunk` reads."""
  return jax.lax.dynamic_update_index_in_dim(view, part, i, axis=1, allow_negative_indices=False)


def _whole(view: jax.Array, length: int) -> jax.Array:
  """Returns [B, length, ...] from `view`: the inverse of `_by_chunk`."""
  return view.reshape(view.shape[0], -1, *view.shape[3:])[:, :length]


def _sums(
  x: jax.Array, w: jax.Array, targets: jax.Array, weights: jax.Array, static: _Static, *, with_grads: bool
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, Any]]:
  """Returns ((loss_sum, z_sum), (dx, dw)). Without `with_grads` the gradients are None."""
  run = functools.partial(_shard_sums, static, with_grads)
  token_ids = jnp.arange(w.shape[0], dtype=jnp.int32)
  return sharding.loss_on_shards(run, static.neighbours, (w, token_ids), (x, targets, weights))


def _softmax(
  exchange: sharding.LossExchange, logits: jax.Array, hit: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Returns (exponents, their sum [B, T, 1], log of the normaliser [B, T], logit of the target [B, T]), float32.

  The exponents have the shape of `logits`: [B, T, this device's part of V]. The other results are over the whole
  vocabulary. hit: bool of the same shape, true at the target.
  """
  largest = exchange.max_over_vocab(jnp.max(logits, axis=-1, keepdims=True))
  exponents = jnp.exp(logits - largest)
  # A masked sum instead of a gather: with a sharded vocabulary it needs only one sum across devices.
  sums = jnp.sum(exponents, axis=-1, keepdims=True), jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
  total, target = exchange.sum_over_vocab(sums)
  return exponents, total, (jnp.log(total) + largest)[..., 0], target


def _shard_sums(
  static: _Static,
  with_grads: bool,
  exchange: sharding.LossExchange,
  head: tuple[jax.Array, jax.Array],
  tokens: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, Any]]:
  """Returns what `_sums` returns, computed by each shard of fsdp and context from its own parts.

  head: w, and the token of each of its rows. tokens: x, targets and weights.
  """
  (w, token_ids), (x, *labels) = head, tokens
  z_loss, chunks, padded_from, _ = static
  head_VD = exchange.gather_head(constrain(w.astype(x.dtype), "vocab", "embed"))
  token_ids = exchange.gather_head(token_ids)
  # float32: accumulate dw transposed, [D, V]. A CPU then transposes the narrow x of a chunk, and not its dlogits. For
  # bfloat16, the CPU runtime has no kernel of this form.
  transposed = x.dtype == jnp.float32
  dw_axes = ("embed", "vocab") if transposed else ("vocab", "embed")
  x_view = _by_chunk(x, chunks)
  views = [_by_chunk(exchange.gather_tokens(array), chunks) for array in labels]

  def one(i: jax.Array, carry: Any) -> Any:
    loss, z, dx, dw = carry
    targets, weights = (_chunk(view, i) for view in views)
    x = constrain(exchange.gather_tokens(_chunk(x_view, i)), "loss_batch", "length", "embed")
    logits = constrain(head_logits(x, head_VD), "loss_batch", "length", "vocab")
    if padded_from is not None:
      logits = jnp.where(token_ids < padded_from, logits, -jnp.inf)
    hit = token_ids == targets[..., None]
    exponents, total, log_z, target = _softmax(exchange, logits, hit)
    loss += jnp.sum(weights * (log_z - target))
    z += z_loss * jnp.sum(weights * jnp.square(log_z))
    if not with_grads:
      return loss, z, None, None
    scale = (weights * (1 + 2 * z_loss * log_z))[..., None] / total
    dlogits = (exponents * scale - jnp.where(hit, weights[..., None], 0.0)).astype(x.dtype)
    # The barrier makes XLA compute dlogits once, and not again inside each of the two matmuls that read it.
    dlogits = jax.lax.optimization_barrier(dlogits)
    equation = "btd,btv->dv" if transposed else "btv,btd->vd"
    operands = (x, dlogits) if transposed else (dlogits, x)
    dw += constrain(jnp.einsum(equation, *operands, preferred_element_type=jnp.float32), *dw_axes)
    dx_chunk = exchange.scatter_tokens(jnp.einsum("btv,vd->btd", dlogits, head_VD, preferred_element_type=jnp.float32))
    return loss, z, _store_chunk(dx, constrain(dx_chunk.astype(x.dtype), "batch", "length", "embed"), i), dw

  zero, dx, dw = jnp.zeros((), jnp.float32), None, None
  if with_grads:
    dx = _by_chunk(constrain(jnp.zeros_like(x), "batch", "length", "embed"), chunks)
    dw = constrain(jnp.zeros(head_VD.shape[::-1] if transposed else head_VD.shape, jnp.float32), *dw_axes)
  with jax.named_scope("linear_cross_entropy"):
    loss, z, dx, dw = jax.lax.fori_loop(0, chunks, one, (zero, zero, dx, dw))
  loss, z = exchange.sum_over_tokens((loss, z))
  if not with_grads:
    return (loss, z), (None, None)
  dw = exchange.scatter_head(dw.T if transposed else dw)
  return (loss, z), (_whole(dx, x.shape[1]), dw.astype(w.dtype))
