"""The logits of a model of any size on a short prompt, with one layer in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from trainer.config.schema import ModelSection, RematPolicy
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions, Params
from trainer.models.layers import Kernels
from trainer.weights import names

_ROWS = 4096  # of the head that are multiplied at once


# Gives some rows of a weight by its name in names.weights.
Read = Callable[[str, slice], np.ndarray]


def logits(cfg: ModelSection, read: Read, prompt: Sequence[int]) -> np.ndarray:
  """Returns the logits [T, V], computed in float32 on a CPU.

  cfg: without a global_parameter_scale. prompt: T ids, taken modulo the vocabulary. The stream between two layers is
  the embedding of a model of one layer with a vocabulary of the T positions.
  """
  tokens = np.arange(len(prompt), dtype=np.int32)[None]
  x_TD = np.concatenate([read("params.embedding", slice(i, i + 1)) for i in (x % cfg.vocab_size for x in prompt)])
  x_TD = x_TD.astype(np.float32)
  norm = {"scale": read("params.final_norm.scale", slice(0, cfg.emb_dim)).astype(np.float32)}
  one = {"base_num_decoder_layers": 1, "scan_layers": False, "vocab_size": len(prompt), "logits_via_embedding": True}
  plain = {"dtype": "float32", "remat_policy": RematPolicy.NONE, "decoder_sparse_step": 1}
  run = {}
  for has_experts in (False, True):
    dense = "" if has_experts else "0"
    model = DecoderFunctions(cfg.model_copy(update={**one, **plain, "mlp_only_layers": dense}), Kernels(dot_product))
    run[has_experts] = jax.jit(lambda params, model=model: _layer(model, params, tokens))
  with jax.default_device(jax.devices("cpu")[0]):
    for i in range(cfg.num_decoder_layers):
      x_TD, normed_TD = run[cfg.has_experts(i)](
        {"embedding": x_TD, "layers": {"0": _tree(cfg, i, read)}, "final_norm": norm}
      )
  x_TD, head = np.asarray(normed_TD), "params.embedding" if cfg.logits_via_embedding else "params.lm_head"
  rows = (slice(i, min(i + _ROWS, cfg.vocab_size)) for i in range(0, cfg.vocab_size, _ROWS))
  return np.concatenate([x_TD @ read(head, part).astype(np.float32).T for part in rows], axis=1)


def _layer(model: DecoderFunctions, params: Params, tokens: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """The stream [T, D] after the layer, and after the final norm."""
  decoder = model.merge(params)
  weights, _ = decoder.layer_weights()
  positions = decoder.positions(tokens, np.ones_like(tokens))
  x_BTD = decoder.run_layer(decoder.layers["0"], decoder.embed(tokens), weights["0"], positions)
  return x_BTD[0], decoder.final_norm(x_BTD)[0]


def _tree(cfg: ModelSection, layer: int, read: Read) -> Params:
  """The weights of a layer."""
  prefix = f"params.layers.{layer}."
  tree: Params = {}
  for name, weight in names.weights(cfg).items():
    if name.startswith(prefix):
      *path, leaf = name.removeprefix(prefix).split(".")
      place = tree
      for part in path:
        place = place.setdefault(part, {})
      array = read(name, slice(0, weight.shape[0]))
      place[leaf] = array if array.ndim > 1 else array.astype(np.float32)  # as the scale of a norm always is
  return tree
