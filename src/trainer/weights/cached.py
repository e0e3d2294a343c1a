"""The decoder with a cache of keys and values, for text that grows token by token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config.schema import ModelSection
from trainer.kernels import attention
from trainer.models.decoder import DecoderFunctions, DecoderLayer, Params

# Keys and values, [B, K, S, H] in cfg.dtype, of each layer. With scan_layers one pair, [L, B, K, S, H].
Cache = Any


def empty(cfg: ModelSection, rows: int, slots: int) -> Cache:
  shape = (rows, cfg.num_kv_heads, slots, cfg.head_dim)
  pair = lambda *layers: (jnp.zeros((*layers, *shape), cfg.dtype), jnp.zeros((*layers, *shape), cfg.dtype))
  return pair(cfg.num_decoder_layers) if cfg.scan_layers else [pair() for _ in range(cfg.num_decoder_layers)]


# A separate program: a CPU would copy the whole cache in a program that also reads it.
@functools.partial(jax.jit, donate_argnums=0)
def extended(cache: Cache, new: Cache, slot: jax.Array) -> Cache:
  """Returns the cache with the keys and values of `new` in the slots from `slot` on."""
  return jax.tree.map(lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, slot, axis=old.ndim - 2), cache, new)


def logits(
  model: DecoderFunctions, params: Params, tokens_BT: jax.Array, starts_B: jax.Array, slot: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
  """Returns the logits [B, V] (float32) after the last token of each row, and the keys and values of all T tokens.

  The tokens fill the slots from `slot` on; `slot` is 0 unless T=1. Row b begins in slot starts_B[b]; before it
  are tokens of padding.
  """
  decoder = model.merge(params)
  positions_BT = slot + jnp.arange(tokens_BT.shape[1]) - starts_B[:, None]
  positions = decoder.positions(positions_BT, (positions_BT >= 0).astype(jnp.int32))

  def run_layer(
    layer: DecoderLayer, x_BTD: jax.Array, earlier: tuple[jax.Array, jax.Array], *, is_last: bool = False
  ) -> tuple[jax.Array, Any]:
    new_slot: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
      key, value = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
      new_slot.extend((key, value))
      if q.shape[1] > 1 and not is_last:
        return _of_prompts(q, k, v, *segments)
      before = earlier if q.shape[1] == 1 else (key[:, :, :-1], value[:, :, :-1])
      slots = jnp.arange(before[0].shape[2])
      seen_BS = (slots >= starts_B[:, None]) & (slots < slot + q.shape[1] - 1)
      return _of_one(q[:, -1:], key[:, :, -1:], value[:, :, -1:], *before, seen_BS)

    layer.attention.kernels = dataclasses.replace(model.kernels, attention=attend)
    if not is_last:
      return layer(x_BTD, *positions), tuple(new_slot)
    # Nothing reads the stream of the other tokens after the last layer.
    x_B1D = x_BTD[:, -1:] + layer.attention(layer.attention_norm(x_BTD), *positions)
    return x_B1D + layer.feed_forward(layer.feed_forward_norm(x_B1D), positions[-1][:, -1:]), tuple(new_slot)

  x_BTD = decoder.embed(tokens_BT)
  new: Cache = []
  if model.cfg.scan_layers:
    graphdef, state = nnx.split(decoder.layers)
    body = lambda x, layer: run_layer(nnx.merge(graphdef, layer[0]), x, layer[1])
    x_BTD, new = jax.lax.scan(body, x_BTD, (state, cache))
  else:
    for i, earlier in enumerate(cache):
      x_BTD, slots = run_layer(decoder.layers[str(i)], x_BTD, earlier, is_last=i + 1 == len(cache))
      new.append(slots)
  x_BD = decoder.final_norm(x_BTD[:, -1])
  return decoder.head_logits(x_BD), new


def _of_prompts(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
  """Returns the causal attention [B, T, N, H] in q.dtype."""
  platform = jax.default_backend()
  name = "autoselected" if platform == "cpu" else "dot_product"
  _, length, heads, head_dim = q.shape
  shape = attention.Shape(platform, None, head_dim, length, heads, k.shape[2], q.dtype)
  return attention.choose(name, shape)(q, k, v, *segments)


def _of_one(
  q: jax.Array, k: jax.Array, v: jax.Array, keys: jax.Array, values: jax.Array, seen_BS: jax.Array
) -> jax.Array:
  """Returns [B, 1, N, H] in q.dtype: softmax attention of q [B, 1, N, H] to k, v [B, K, 1, H] of its own token, and to
  the slots of keys, values [B, K, S, H] that are seen."""
  b, _, n, h = q.shape
  grouped = q.reshape(b, k.shape[1], -1, h)
  score = functools.partial(jnp.einsum, "bkgh,bksh->bkgs", grouped, preferred_element_type=jnp.float32)
  earlier = jnp.where(seen_BS[:, None, None], score(keys), jnp.finfo(jnp.float32).min)
  shares = jax.nn.softmax(jnp.concatenate([earlier, score(k)], axis=-1) * h**-0.5, axis=-1).astype(v.dtype)
  out = jnp.einsum("bkgs,bksh->bkgh", shares[..., :-1], values, preferred_element_type=jnp.float32)
  return (out + shares[..., -1:] * v).reshape(b, 1, n, h).astype(q.dtype)
