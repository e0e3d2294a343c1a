"""The weights of Qwen3 and Llama under our names and under Hugging Face's, with the layouts of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainer.config.errors import ConfigError
from trainer.config.schema import ModelSection

# Path inside a layer of our tree -> name inside `model.layers.{i}.` of Hugging Face.
_NORMS = {
  "attention_norm.scale": "input_layernorm.weight",
  "feed_forward_norm.scale": "post_attention_layernorm.weight",
  "attention.query_norm.scale": "self_attn.q_norm.weight",
  "attention.key_norm.scale": "self_attn.k_norm.weight",
}
_READ_RESIDUAL = {
  "attention.query": "self_attn.q_proj.weight",
  "attention.key": "self_attn.k_proj.weight",
  "attention.value": "self_attn.v_proj.weight",
  "feed_forward.gate": "mlp.gate_proj.weight",
  "feed_forward.up": "mlp.up_proj.weight",
}
_WRITE_RESIDUAL = {"attention.out": "self_attn.o_proj.weight", "feed_forward.down": "mlp.down_proj.weight"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Weight:
  """One weight: its name in Hugging Face's folders, and its shape here.

  Hugging Face stores a Linear as [out, in], the transpose of ours, with heads and head_dim folded into one dim. kind:
  same: both have the same layout; reads, writes: a matrix that reads the residual stream, or writes to it.
  """

  theirs: str
  shape: tuple[int, ...]
  kind: Literal["same", "reads", "writes"] = "same"

  @property
  def their_shape(self) -> tuple[int, ...]:
    """The shape in Hugging Face's folders."""
    if self.kind == "reads":
      return int(np.prod(self.shape[1:])), self.shape[0]
    return (self.shape[-1], int(np.prod(self.shape[:-1]))) if self.kind == "writes" else self.shape

  def to_ours(self, array: np.ndarray) -> np.ndarray:
    """A view of their array in our layout."""
    return array if self.kind == "same" else array.T.reshape(self.shape)

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    """A view of our array in their layout."""
    return array if self.kind == "same" else array.reshape(self.their_shape[::-1]).T


def weights(cfg: ModelSection) -> dict[str, Weight]:
  """{name in a state with separate layers: Weight}, for Qwen3ForCausalLM and LlamaForCausalLM. A tied head is none.

  Raises ConfigError for a model with experts.
  """
  if cfg.num_experts > 1:
    raise ConfigError(
      f"num_experts={cfg.num_experts}: weights of experts have no conversion to Hugging Face's names yet. Only dense "
      "models can be imported and exported."
    )
  V, D, F, H = cfg.vocab_size, cfg.emb_dim, cfg.mlp_dim, cfg.head_dim
  N, K = cfg.num_query_heads, cfg.num_kv_heads
  shapes: dict[str, tuple[int, ...]] = {
    "attention.query": (D, N, H),
    "attention.key": (D, K, H),
    "attention.value": (D, K, H),
    "attention.out": (N, H, D),
    "feed_forward.gate": (D, F),
    "feed_forward.up": (D, F),
    "feed_forward.down": (F, D),
  }
  found = {"params.embedding": Weight(EMBEDDING, (V, D))}
  for i in range(cfg.num_decoder_layers):
    ours, theirs = f"params.layers.{i}.", f"model.layers.{i}."
    for path, name in _NORMS.items():
      if cfg.use_qk_norm or not path.startswith("attention."):
        found[ours + path] = Weight(theirs + name, (H,) if path.startswith("attention.") else (D,))
    found |= {ours + path: Weight(theirs + name, shapes[path], "reads") for path, name in _READ_RESIDUAL.items()}
    found |= {ours + path: Weight(theirs + name, shapes[path], "writes") for path, name in _WRITE_RESIDUAL.items()}
  found["params.final_norm.scale"] = Weight("model.norm.weight", (D,))
  if not cfg.logits_via_embedding:
    found["params.lm_head"] = Weight(HEAD, (V, D))
  return found
