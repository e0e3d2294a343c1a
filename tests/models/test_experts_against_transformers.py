"""A mixture of experts in float32 compared with Qwen3-MoE of transformers in float64: logits and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.hf_folders import TINY, losses_and_gradients, random_params, relative
from tests.support.seeds import few

from trainer.config.schema import ModelSection
from trainer.kernels import projection
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels

torch = pytest.importorskip("torch", reason="the oracle needs torch (CPU)")
transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
pytestmark = pytest.mark.oldest

MOE = {**TINY, "num_experts": 6, "base_moe_mlp_dim": 40, "rope_max_timescale": 1e6, "load_balance_loss_weight": 0.5}
CASES = {
  "k = 1": {"num_experts_per_tok": 1, "norm_topk_prob": False},
  "k = 2": {"num_experts_per_tok": 2},
  "k = 8 of 8": {"num_experts_per_tok": 8, "num_experts": 8},
  "probabilities as they are": {"num_experts_per_tok": 2, "norm_topk_prob": False},
  "layers without experts by both rules": {  # only the second of four layers has experts
    "num_experts_per_tok": 3,
    "decoder_sparse_step": 2,
    "mlp_only_layers": "3",
    "base_num_decoder_layers": 4,
    "scan_layers": False,
  },
}
# CI has each value of norm_topk_prob in a case where it changes the result. 8 of 8 is another size.
SOAK = {"k = 2", "k = 8 of 8", "probabilities as they are"}
T = 48


def oracle(cfg: ModelSection):
  config = transformers.Qwen3MoeConfig(
    vocab_size=cfg.vocab_size,
    hidden_size=cfg.emb_dim,
    intermediate_size=cfg.mlp_dim,
    moe_intermediate_size=cfg.moe_mlp_dim,
    num_hidden_layers=cfg.num_decoder_layers,
    num_attention_heads=cfg.num_query_heads,
    num_key_value_heads=cfg.num_kv_heads,
    head_dim=cfg.head_dim,
    num_experts=cfg.num_experts,
    num_experts_per_tok=cfg.num_experts_per_tok,
    norm_topk_prob=cfg.norm_topk_prob,
    decoder_sparse_step=cfg.decoder_sparse_step,
    mlp_only_layers=cfg.dense_layers,
    rms_norm_eps=cfg.normalization_layer_epsilon,
    rope_theta=cfg.rope_max_timescale,
    tie_word_embeddings=False,
    output_router_logits=True,
    attn_implementation="eager",
    experts_implementation="eager",  # the others have no float64
  )
  return transformers.Qwen3MoeForCausalLM(config).double()


def to_theirs(params, cfg: ModelSection) -> dict[str, np.ndarray]:
  """Weights, or their gradients, by the names of transformers' model in memory."""
  D, H = cfg.emb_dim, cfg.head_dim
  tensors = {
    "model.embed_tokens.weight": params["embedding"],
    "model.norm.weight": params["final_norm"]["scale"],
    "lm_head.weight": params["lm_head"],
  }
  for i in range(cfg.num_decoder_layers):
    layers = params["layers"]
    layer = jax.tree.map(lambda x, i=i: np.asarray(x[i]), layers) if cfg.scan_layers else layers[str(i)]
    attention, mlp, name = layer["attention"], layer["feed_forward"], f"model.layers.{i}"
    flat = lambda x: np.asarray(x).reshape(D, -1).T
    tensors |= {
      f"{name}.input_layernorm.weight": layer["attention_norm"]["scale"],
      f"{name}.post_attention_layernorm.weight": layer["feed_forward_norm"]["scale"],
      f"{name}.self_attn.q_proj.weight": flat(attention["query"]),
      f"{name}.self_attn.k_proj.weight": flat(attention["key"]),
      f"{name}.self_attn.v_proj.weight": flat(attention["value"]),
      f"{name}.self_attn.o_proj.weight": np.asarray(attention["out"]).reshape(-1, D).T,
      f"{name}.self_attn.q_norm.weight": attention["query_norm"]["scale"],
      f"{name}.self_attn.k_norm.weight": attention["key_norm"]["scale"],
    }
    if cfg.has_experts(i):
      swap = lambda x: np.swapaxes(np.asarray(x), 1, 2)
      tensors |= {
        f"{name}.mlp.gate.weight": np.asarray(mlp["router"]).T,
        f"{name}.mlp.experts.gate_up_proj": np.concatenate([swap(mlp["gate"]), swap(mlp["up"])], axis=1),
        f"{name}.mlp.experts.down_proj": swap(mlp["down"]),
      }
    else:
      tensors |= {f"{name}.mlp.{part}_proj.weight": np.asarray(mlp[part]).T for part in ("gate", "up", "down")}
  assert np.asarray(params["final_norm"]["scale"]).size // cfg.num_query_heads == H
  return {key: np.array(value) for key, value in tensors.items()}


def with_loads(params, load: np.ndarray):
  """The weights with this load for every layer."""
  place = lambda path, leaf: jnp.broadcast_to(load, leaf.shape) if "load" in jax.tree_util.keystr(path) else leaf
  return jax.tree_util.tree_map_with_path(place, params)


@pytest.mark.parametrize("name", few(CASES.keys() - SOAK, CASES))
def test_logits_and_gradients(name):
  cfg = ModelSection(**{**MOE, **CASES[name]})
  model = DecoderFunctions(cfg, Kernels(dot_product, project=projection.choose("cpu", "")))
  params = random_params(cfg)
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, T + 1))
  inputs, targets = tokens[:, :-1], tokens[:, 1:]

  theirs = oracle(cfg)
  theirs.load_state_dict({key: torch.from_numpy(value).double() for key, value in to_theirs(params, cfg).items()})
  output = theirs(torch.from_numpy(inputs))
  loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), torch.from_numpy(targets).flatten())
  layers = sum(map(cfg.has_experts, range(cfg.num_decoder_layers)))
  (loss + cfg.load_balance_loss_weight * output.aux_loss).backward()
  chosen = [torch.topk(logits, cfg.num_experts_per_tok).indices.flatten().numpy() for logits in output.router_logits]
  load = np.bincount(np.concatenate(chosen), minlength=cfg.num_experts) / (layers * inputs.size)

  value, logits, grads = losses_and_gradients(model, with_loads(params, load.astype(np.float32)), inputs, targets)
  assert relative(np.asarray(logits), output.logits.detach().numpy()) < 1e-5
  assert abs(float(value) / inputs.size - loss.item()) < 1e-5 * loss.item()
  ours = to_theirs(jax.tree.map(lambda grad: grad / inputs.size, grads), cfg)
  for key, parameter in theirs.named_parameters():
    assert relative(ours[key], parameter.grad.numpy()) < 1e-5, key
  counts = [np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(grads) if "load" in str(path)]
  counts = np.concatenate([count.reshape(-1, cfg.num_experts) for count in counts])
  np.testing.assert_array_equal(counts, [np.bincount(layer, minlength=cfg.num_experts) for layer in chosen])
