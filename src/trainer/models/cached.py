"""The decoder with a cache of keys and values, for text that grows token by token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from trainer.config.schema import ModelSection
from trainer.models.decoder import DecoderFunctions, Params

# Keys and values of all layers, [L, B, S, K, H] in cfg.dtype. Slot s of a row is its position s.
Cache = tuple[jax.Array, jax.Array]


def empty(cfg: ModelSection, rows: int, slots: int) -> Cache:
  """Returns a cache of `slots` positions of each of the `rows`."""
  shape = (cfg.num_decoder_layers, rows, slots, cfg.num_kv_heads, cfg.head_dim)
  return jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype)


def logits(
  model: DecoderFunctions,
  params: Params,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  wanted_B: jax.Array,
  cache: Cache,
) -> tuple[jax.Array, Cache]:
  """Returns the logits [B, V] (float32) at the tokens number `wanted_B` of each row, and the cache with all tokens.

  params: with stacked layers. positions_BT: of the tokens. A token sees the slots up to its own position, so the slots
  of padding at the end of a short row are seen by no token before they are written again.
  """
  decoder = model.merge(params)
  positions = decoder.positions(positions_BT, jnp.ones_like(tokens_BT))
  graphdef, state = nnx.split(decoder.layers)
  rows = jnp.arange(len(tokens_BT))[:, None]

  def run_layer(x_BTD: jax.Array, layer: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, Cache]:
    weights, keys, values = layer
    module = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(weights)))
    kept: list[jax.Array] = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
      kept.extend((keys.at[rows, positions_BT].set(k), values.at[rows, positions_BT].set(v)))
      return _attention(q, kept[0], kept[1], positions_BT)

    module.attention.kernels = dataclasses.replace(model.kernels, attention=attend)
    x_BTD = module(x_BTD, *positions)
    return x_BTD, (kept[0], kept[1])

  x_BTD, cache = jax.lax.scan(run_layer, decoder.embed(tokens_BT), (decoder.layer_weights()[0], *cache))
  x_BD = decoder.final_norm(jnp.take_along_axis(x_BTD, wanted_B[:, None, None], axis=1))[:, 0]
  head_VD = (decoder.embedding if decoder.cfg.logits_via_embedding else decoder.lm_head)[...]
  return jnp.einsum("bd,vd->bv", x_BD, head_VD.astype(x_BD.dtype), preferred_element_type=jnp.float32), cache


def _attention(q: jax.Array, k: jax.Array, v: jax.Array, positions_BT: jax.Array) -> jax.Array:
  """Returns [B, T, N, H] in q.dtype: softmax attention of q [B, T, N, H] to the slots of k, v [B, S, K, H] up to the
  position of each query."""
  b, t, n, h = q.shape
  grouped = q.reshape(b, t, k.shape[2], -1, h)
  scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=jnp.float32) * h**-0.5
  seen = positions_BT[:, :, None] >= jnp.arange(k.shape[1])
  scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
  probabilities = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  out = jnp.einsum("bkgts,bskh->btkgh", probabilities, v, preferred_element_type=jnp.float32)
  return out.reshape(b, t, n, h).astype(q.dtype)
