"""Converts weights between our tree and Hugging Face's names and layouts, in both directions, without transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer.config.schema import ModelSection
from trainer.models.decoder import Params

# Path inside a layer of our tree -> name inside `model.layers.{i}.` of Hugging Face. Hugging Face stores a Linear as
# [out, in], the transpose of ours, with heads and head_dim folded into one dim.
_NORMS = {
  ("attention_norm", "scale"): "input_layernorm.weight",
  ("feed_forward_norm", "scale"): "post_attention_layernorm.weight",
  ("attention", "query_norm", "scale"): "self_attn.q_norm.weight",
  ("attention", "key_norm", "scale"): "self_attn.k_norm.weight",
}
_READ_RESIDUAL = {
  ("attention", "query"): "self_attn.q_proj.weight",
  ("attention", "key"): "self_attn.k_proj.weight",
  ("attention", "value"): "self_attn.v_proj.weight",
  ("feed_forward", "gate"): "mlp.gate_proj.weight",
  ("feed_forward", "up"): "mlp.up_proj.weight",
}
_WRITE_RESIDUAL = {
  ("attention", "out"): "self_attn.o_proj.weight",
  ("feed_forward", "down"): "mlp.down_proj.weight",
}


def to_hugging_face(params: Params, cfg: ModelSection) -> dict[str, np.ndarray]:
  """Returns the weights under Hugging Face's names for Qwen3ForCausalLM and LlamaForCausalLM, without a tied head."""
  tensors = {
    "model.embed_tokens.weight": np.asarray(params["embedding"]),
    "model.norm.weight": np.asarray(params["final_norm"]["scale"]),
  }
  if not cfg.logits_via_embedding:
    tensors["lm_head.weight"] = np.asarray(params["lm_head"])
  D = cfg.emb_dim
  for path, name in _layer_names(cfg).items():
    for i in range(cfg.num_decoder_layers):
      ours = _get(params["layers"], path)[i] if cfg.scan_layers else _get(params["layers"][str(i)], path)
      ours = np.asarray(ours)
      if path in _READ_RESIDUAL:
        ours = ours.reshape(D, -1).T
      elif path in _WRITE_RESIDUAL:
        ours = ours.reshape(-1, D).T
      tensors[f"model.layers.{i}.{name}"] = ours
  return tensors


def from_hugging_face(tensors: Mapping[str, np.ndarray], cfg: ModelSection) -> Params:
  """Returns our tree of numpy arrays in weight_dtype (norm scales in float32) from Hugging Face's tensors.

  Raises ValueError if a weight is missing, unknown, or has another shape than `cfg` gives.
  """
  unused = set(tensors)
  if cfg.logits_via_embedding:
    unused.discard("lm_head.weight")  # some files repeat the embedding under this name

  def take(name: str, shape: tuple[int, ...], back: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> np.ndarray:
    if name not in tensors:
      raise ValueError(f"Weight {name} is missing. Set model_name to the model that was saved (now {cfg.model_name}).")
    unused.discard(name)
    theirs = np.asarray(tensors[name])
    if theirs.shape != shape:
      raise ValueError(
        f"Weight {name} has shape {theirs.shape}; model_name={cfg.model_name} needs {shape}. Set the right model_name."
      )
    return np.ascontiguousarray(back(theirs)).astype(np.float32 if len(shape) == 1 else _dtype(cfg))

  V, D, F, H = cfg.vocab_size, cfg.emb_dim, cfg.mlp_dim, cfg.head_dim
  N, K = cfg.num_query_heads, cfg.num_kv_heads
  shapes: dict[tuple[str, ...], tuple[int, ...]] = {
    ("attention", "query"): (D, N, H),
    ("attention", "key"): (D, K, H),
    ("attention", "value"): (D, K, H),
    ("attention", "out"): (N, H, D),
    ("feed_forward", "gate"): (D, F),
    ("feed_forward", "up"): (D, F),
    ("feed_forward", "down"): (F, D),
  }

  def layer_weight(path: tuple[str, ...], name: str) -> np.ndarray:
    if path in _NORMS:
      return take(name, (H,) if "attention" in path else (D,))
    ours = shapes[path]
    size = int(np.prod(ours)) // D
    theirs = (size, D) if path in _READ_RESIDUAL else (D, size)
    return take(name, theirs, lambda x: x.T.reshape(ours))

  layers: list[Params] = []
  for i in range(cfg.num_decoder_layers):
    layer: Params = {}
    for path, name in _layer_names(cfg).items():
      _set(layer, path, layer_weight(path, f"model.layers.{i}.{name}"))
    layers.append(layer)
  params: Params = {
    "embedding": take("model.embed_tokens.weight", (V, D)),
    "layers": _stack(layers) if cfg.scan_layers else {str(i): layer for i, layer in enumerate(layers)},
    "final_norm": {"scale": take("model.norm.weight", (D,))},
  }
  if not cfg.logits_via_embedding:
    params["lm_head"] = take("lm_head.weight", (V, D))
  if unused:
    raise ValueError(
      f"model_name={cfg.model_name} has no place for {len(unused)} weights: {', '.join(sorted(unused)[:5])}. "
      "Set the model_name that was saved."
    )
  return params


def _layer_names(cfg: ModelSection) -> dict[tuple[str, ...], str]:
  names = _NORMS | _READ_RESIDUAL | _WRITE_RESIDUAL
  qk_norm = lambda path: path[-2] in ("query_norm", "key_norm")
  return {path: name for path, name in names.items() if cfg.use_qk_norm or not qk_norm(path)}


def _stack(layers: list[Params]) -> Params:
  first = layers[0]
  return {
    key: _stack([layer[key] for layer in layers])
    if isinstance(value, dict)
    else np.stack([layer[key] for layer in layers])
    for key, value in first.items()
  }


def _dtype(cfg: ModelSection) -> Any:
  import jax.numpy as jnp

  return jnp.dtype(cfg.weight_dtype)


def _get(tree: Params, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _set(tree: Params, path: tuple[str, ...], value: Any) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value
