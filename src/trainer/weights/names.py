"""The weights of Qwen3, Qwen3-MoE and Llama under our names and under Hugging Face's, with the layouts of both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainer.config.schema import ModelSection

# Path inside a layer of our tree -> name inside `model.layers.{i}.` of Hugging Face.
_NORMS = {
  "attention_norm.scale": "input_layernorm.weight",
  "feed_forward_norm.scale": "post_attention_layernorm.weight",
  "attention.query_norm.scale": "self_attn.q_norm.weight",
  "attention.key_norm.scale": "self_attn.k_norm.weight",
}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Weight:
  """One weight: its names in Hugging Face's folders, and its shape here.

  theirs: one name. Experts are one array here and many there: one name for each expert, in the order of the first dim.
  Empty: Hugging Face's models lack this weight, and all its values start as `start`. kind: "same": both layouts are
  equal. "reads", "writes": a Linear that reads the residual stream, or writes to it. Hugging Face stores it as
  [out, in], the transpose of ours, with heads and head_dim folded into one dim.
  """

  theirs: tuple[str, ...]
  shape: tuple[int, ...]
  kind: Literal["same", "reads", "writes"] = "same"
  start: float = 0.0

  @property
  def of_experts(self) -> bool:
    """Whether each of `theirs` is one index of the first dim here."""
    return len(self.theirs) > 1

  @property
  def their_shape(self) -> tuple[int, ...]:
    shape = self.our_shape
    if self.kind == "reads":
      return math.prod(shape[1:]), shape[0]
    return (shape[-1], math.prod(shape[:-1])) if self.kind == "writes" else shape

  @property
  def our_shape(self) -> tuple[int, ...]:
    """The shape here of the part that has one of the names in `theirs`."""
    return self.shape[1:] if self.of_experts else self.shape

  def to_ours(self, array: np.ndarray) -> np.ndarray:
    """A view of one of their arrays in our layout: values that are assigned to the view are written to their array."""
    return array if self.kind == "same" else np.reshape(array.T, self.our_shape, copy=False)


def weights(cfg: ModelSection) -> dict[str, Weight]:
  """{name in a state with separate layers: Weight}, for the architectures of hf_config.py. A tied head is not in it."""
  V, D, H = cfg.vocab_size, cfg.emb_dim, cfg.head_dim
  N, K = cfg.num_query_heads, cfg.num_kv_heads
  found = {"params.embedding": Weight((EMBEDDING,), (V, D))}
  for i in range(cfg.num_decoder_layers):
    ours, theirs = f"params.layers.{i}.", f"model.layers.{i}."
    for path, name in _NORMS.items():
      if cfg.use_qk_norm or not path.startswith("attention."):
        found[ours + path] = Weight((theirs + name,), (H,) if path.startswith("attention.") else (D,))
    found |= {
      f"{ours}attention.query": Weight((f"{theirs}self_attn.q_proj.weight",), (D, N, H), "reads"),
      f"{ours}attention.key": Weight((f"{theirs}self_attn.k_proj.weight",), (D, K, H), "reads"),
      f"{ours}attention.value": Weight((f"{theirs}self_attn.v_proj.weight",), (D, K, H), "reads"),
      f"{ours}attention.out": Weight((f"{theirs}self_attn.o_proj.weight",), (N, H, D), "writes"),
    }
    found |= _feed_forward(cfg, f"{ours}feed_forward.", f"{theirs}mlp.", cfg.has_experts(i))
  found["params.final_norm.scale"] = Weight(("model.norm.weight",), (D,))
  if not cfg.logits_via_embedding:
    found["params.lm_head"] = Weight((HEAD,), (V, D))
  return found


def _feed_forward(cfg: ModelSection, ours: str, theirs: str, has_experts: bool) -> dict[str, Weight]:
  D, E = cfg.emb_dim, cfg.num_experts
  F = cfg.moe_mlp_dim if has_experts else cfg.mlp_dim
  places = [f"{theirs}experts.{e}." for e in range(E)] if has_experts else [theirs]
  stack = (E,) if has_experts else ()
  named = lambda part: tuple(f"{place}{part}_proj.weight" for place in places)
  found = {f"{ours}{part}": Weight(named(part), (*stack, D, F), "reads") for part in ("gate", "up")}
  found[f"{ours}down"] = Weight(named("down"), (*stack, F, D), "writes")
  if has_experts:
    found[f"{ours}router"] = Weight((f"{theirs}gate.weight",), (D, E), "reads")
    found[f"{ours}load"] = Weight((), (E,), start=cfg.num_experts_per_tok / E)  # an even load, as of a fresh model
  return found
