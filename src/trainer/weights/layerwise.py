"""The logits of a model of any size on a short prompt, with one feed-forward or one expert in memory at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from trainer.checkpoint.arrays import state_tree
from trainer.config.schema import ModelSection, RematPolicy
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions, Params
from trainer.models.experts import choose
from trainer.models.layers import Kernels, rms_norm, swiglu
from trainer.weights import names

_ROWS = 512  # of a matrix that are multiplied at once


# Gives some rows of a weight by its name in names.weights.
Read = Callable[[str, slice], np.ndarray]


class Layerwise:
  """A model that computes in float32 on a CPU and holds no weights."""

  def __init__(self, cfg: ModelSection) -> None:
    """cfg: without a global_parameter_scale."""
    self._cfg, self._weights = cfg, names.weights(cfg)
    one = {"base_num_decoder_layers": 1, "scan_layers": False, "num_experts": 1, "num_experts_per_tok": 1}
    plain = {"dtype": "float32", "remat_policy": RematPolicy.NONE, "logits_via_embedding": True}
    self._dense = DecoderFunctions(cfg.model_copy(update=one | plain), Kernels(dot_product))
    self._attend = jax.jit(functools.partial(_attend, self._dense))

  def logits(self, read: Read, prompt: Sequence[int]) -> np.ndarray:
    """Returns the logits [T, V]. prompt: T ids, taken modulo the vocabulary.

    Reads one weight after the other, and of the experts only those that the prompt chooses.
    """

    def whole(name: str) -> np.ndarray:
      array = read(name, slice(0, self._weights[name].shape[0]))
      return array if array.ndim > 1 else array.astype(np.float32)  # as the scale of a norm always is

    cfg = self._cfg
    ids = [x % cfg.vocab_size for x in prompt]
    with jax.default_device(jax.devices("cpu")[0]):
      x_TD = jnp.asarray(np.concatenate([read("params.embedding", slice(i, i + 1)) for i in ids]), jnp.float32)
      for i in range(cfg.num_decoder_layers):
        x_TD = self._layer(i, x_TD, read, whole)
      x_TD = rms_norm(x_TD, whole("params.final_norm.scale"), cfg.normalization_layer_epsilon)
      head = "params.embedding" if cfg.logits_via_embedding else "params.lm_head"
      rows = (slice(i, min(i + _ROWS, cfg.vocab_size)) for i in range(0, cfg.vocab_size, _ROWS))
      return np.concatenate([_times_rows(x_TD, read(head, part)) for part in rows], axis=1)

  def _layer(self, i: int, x_TD: jax.Array, read: Read, whole: Callable[[str], np.ndarray]) -> jax.Array:
    """Returns the stream [T, D] after layer i."""
    prefix, abstract = f"params.layers.{i}.", self._dense.abstract()
    flat: Params = dict.fromkeys(state_tree.flatten(abstract), np.float32(0))  # for weights that _attend does not use
    for name in flat:
      if name.startswith("layers.0.") and not name.startswith("layers.0.feed_forward."):
        flat[name] = whole(prefix + name.removeprefix("layers.0."))
    x_TD, normed_TD = self._attend(state_tree.unflatten(abstract, flat), x_TD)
    parts = [f"{prefix}feed_forward.{part}" for part in ("gate", "up", "down")]
    if not self._cfg.has_experts(i):
      return x_TD + _feed_forward(normed_TD, *map(whole, parts))
    router = whole(f"{prefix}feed_forward.router").astype(np.float32)
    _, scores_Tk, chosen_Tk = choose(self._cfg, normed_TD @ router)
    for expert in np.unique(chosen_Tk):
      share_T = jnp.sum(jnp.where(chosen_Tk == expert, scores_Tk, 0), axis=-1)
      one = (read(part, slice(expert, expert + 1))[0] for part in parts)
      x_TD += share_T[:, None] * _feed_forward(normed_TD, *one)
    return x_TD


def _attend(model: DecoderFunctions, params: Params, x_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the stream [T, D] after the attention of the only layer, and what its feed-forward gets."""
  decoder, positions = model.merge(params), jnp.arange(len(x_TD), dtype=jnp.int32)[None]
  layer, x_BTD = decoder.layers["0"], x_TD[None]
  x_BTD += layer.attention(layer.attention_norm(x_BTD), *decoder.positions(positions, jnp.ones_like(positions)))
  return x_BTD[0], layer.feed_forward_norm(x_BTD)[0]


@jax.jit
def _feed_forward(x_TD: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
  return _times(swiglu(_times(x_TD, gate), _times(x_TD, up)), down)


def _times(x: jax.Array, matrix: jax.Array) -> jax.Array:
  """Returns x @ matrix. Converts some rows at a time: for a CPU, a large new array costs more than the product."""
  rows = math.gcd(len(matrix), _ROWS)
  blocks = x.reshape(len(x), -1, rows).swapaxes(0, 1), matrix.reshape(-1, rows, matrix.shape[1])
  add = lambda total, block: (total + block[0] @ block[1].astype(jnp.float32), None)
  return jax.lax.scan(add, jnp.zeros((len(x), matrix.shape[1]), jnp.float32), blocks)[0]


@jax.jit
def _times_rows(x_TD: jax.Array, rows_RD: jax.Array) -> jax.Array:
  return x_TD @ rows_RD.astype(jnp.float32).T
