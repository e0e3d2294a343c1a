"""Hugging Face folders of tiny random models, written by the library `safetensors`, and runs with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.state_backup import RunContext
from trainer.config.schema import CheckpointSection, Config, ModelSection
from trainer.models.decoder import DecoderFunctions, Params
from trainer.models.layers import Kernels
from trainer.world import SINGLE_WORLD

TINY = {
  "base_emb_dim": 64,
  "base_num_decoder_layers": 3,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 96,
  "head_dim": 16,
  "vocab_size": 199,
  "max_position_embeddings": 4096,
  "dtype": "float32",
  "remat_policy": "none",
  # Larger than the default, so that the logits depend on the layers and not mostly on the embedding.
  "initializer_range": 0.2,
}
LLAMA31 = {
  "use_qk_norm": False,
  "rope_max_timescale": 500000.0,
  "rope_type": "llama3",
  "rope_original_max_position_embeddings": 24,  # shorter than the sequence, so that all three cases of the rule occur
}
MODELS: dict[str, dict[str, Any]] = {
  "qwen3": {"use_qk_norm": True, "rope_max_timescale": 1e6},
  "qwen3-tied": {"use_qk_norm": True, "rope_max_timescale": 1e6, "logits_via_embedding": True, "head_dim": 32},
  "qwen3-moe": {
    "use_qk_norm": True,
    "rope_max_timescale": 1e6,
    "num_experts": 12,  # two digits: "10" sorts before "2"
    "num_experts_per_tok": 3,
    "base_moe_mlp_dim": 40,
  },
  "qwen3-moe-layers": {
    "use_qk_norm": True,
    "rope_max_timescale": 1e6,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
    "base_moe_mlp_dim": 40,
    "mlp_only_layers": "1",
    "scan_layers": False,
  },
  "llama2": {"use_qk_norm": False, "base_num_kv_heads": 4, "normalization_layer_epsilon": 1e-5},
  "llama3": {"use_qk_norm": False, "rope_max_timescale": 500000.0, "normalization_layer_epsilon": 1e-5},
  "llama3.1": LLAMA31,
  "llama3.2": {**LLAMA31, "rope_scaling_factor": 32.0, "logits_via_embedding": True},
}

# Sizes of a Qwen3 model for runs of the command. Runs with RUN_KEYS on two slices share one compiled program.
RUN_SIZES: dict[str, Any] = {
  "base_emb_dim": 16,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 1,
  "base_mlp_dim": 32,
  "head_dim": 8,
  "vocab_size": 258,
  "use_qk_norm": True,
  "rope_max_timescale": 1e6,
  "dtype": "float32",
}
RUN_KEYS = [*(f"{key}={value}" for key, value in RUN_SIZES.items()), "learning_rate_schedule_steps=1000"]


def model(name: str, **changes: Any) -> ModelSection:
  return ModelSection(**{**TINY, **MODELS[name], **changes})


def transformers_config(cfg: ModelSection) -> Any:
  """The configuration of the transformers model of the same shape."""
  import transformers  # here: every worker of pytest imports this module, and few need a second of imports

  rope: dict[str, Any] = {"rope_type": "default", "rope_theta": cfg.rope_max_timescale}
  if cfg.rope_type == "llama3":
    rope |= {
      "rope_type": "llama3",
      "factor": cfg.rope_scaling_factor,
      "low_freq_factor": cfg.rope_low_freq_factor,
      "high_freq_factor": cfg.rope_high_freq_factor,
      "original_max_position_embeddings": cfg.rope_original_max_position_embeddings,
    }
  experts: dict[str, Any] = {}
  kind = transformers.Qwen3Config if cfg.use_qk_norm else transformers.LlamaConfig
  if cfg.num_experts > 1:
    kind = transformers.Qwen3MoeConfig
    experts = {name: getattr(cfg, name) for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")}
    experts |= {"moe_intermediate_size": cfg.moe_mlp_dim, "decoder_sparse_step": cfg.decoder_sparse_step}
    experts |= {"mlp_only_layers": cfg.dense_layers, "router_aux_loss_coef": cfg.load_balance_loss_weight}
  return kind(
    architectures=[kind.__name__.replace("Config", "ForCausalLM")],
    vocab_size=cfg.vocab_size,
    hidden_size=cfg.emb_dim,
    intermediate_size=cfg.mlp_dim,
    num_hidden_layers=cfg.num_decoder_layers,
    num_attention_heads=cfg.num_query_heads,
    num_key_value_heads=cfg.num_kv_heads,
    head_dim=cfg.head_dim,
    rms_norm_eps=cfg.normalization_layer_epsilon,
    initializer_range=cfg.initializer_range,
    tie_word_embeddings=cfg.logits_via_embedding,
    max_position_embeddings=cfg.max_position_embeddings,
    rope_theta=cfg.rope_max_timescale,
    rope_scaling=rope,
    attn_implementation="eager",
    **experts,
  )


def random_params(cfg: ModelSection, seed: int = 7) -> Params:
  """Weights drawn by numpy, because to compile the real initialization takes as long as the step."""
  rng = np.random.default_rng(seed)

  def draw(path: Any, leaf: Any) -> jax.Array:
    if "scale" in jax.tree_util.keystr(path):  # of a norm: not 1, so that a wrong scale changes the result
      return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
    return jnp.asarray(cfg.initializer_range * rng.standard_normal(leaf.shape), leaf.dtype)

  abstract = jax.eval_shape(DecoderFunctions(cfg, Kernels(None)).init, jax.random.key(0))
  return jax.tree_util.tree_map_with_path(draw, abstract)


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
  """The largest difference, relative to the largest number of `theirs`."""
  return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def losses_and_gradients(
  decoder: DecoderFunctions, params: Params, inputs: np.ndarray, targets: np.ndarray
) -> tuple[jax.Array, jax.Array, Params]:
  """(the sum of the cross-entropies, logits [B, T, V], gradients of the sum). inputs, targets: [B, T]; a row is one
  document."""
  positions = jnp.asarray(np.broadcast_to(np.arange(inputs.shape[1]), inputs.shape))

  @jax.jit
  def run(params: Params) -> tuple[jax.Array, jax.Array, Params]:
    def sum_of_losses(params: Params) -> tuple[jax.Array, jax.Array]:
      logits = decoder.merge(params).logits(jnp.asarray(inputs), positions, jnp.ones(inputs.shape, jnp.int32))
      log_probs = jax.nn.log_softmax(logits)
      return -jnp.sum(jnp.take_along_axis(log_probs, jnp.asarray(targets)[..., None], axis=-1)), logits

    (value, logits), grads = jax.value_and_grad(sum_of_losses, has_aux=True)(params)
    return value, logits, grads

  return run(params)


def to_hugging_face(params: Params, cfg: ModelSection) -> dict[str, np.ndarray]:
  """The weights under Hugging Face's names and in its layouts."""
  from trainer.weights import names  # here: tests of the core draw their weights with this module

  flat = state_tree.flatten({"params": params})
  found = {}
  for name, weight in names.weights(cfg).items():
    _, _, rest = name.partition("params.layers.")
    number, _, path = rest.partition(".")
    array = flat[name] if name in flat else flat[f"params.layers.{path}"][int(number)]
    arrays = np.asarray(array) if weight.of_experts else [np.asarray(array)]
    for theirs, one in zip(weight.theirs, arrays):
      found[theirs] = np.empty(weight.their_shape, one.dtype)
      weight.to_ours(found[theirs])[...] = one
  return found


def write_folder(folder: Path, cfg: ModelSection, dtype: str = "float32", shards: int = 2) -> dict[str, np.ndarray]:
  """A folder as transformers saves it; returns its tensors."""
  folder.mkdir(parents=True)
  tensors = {k: v.astype(jnp.dtype(dtype)) for k, v in to_hugging_face(random_params(cfg), cfg).items()}
  (folder / "config.json").write_text(json.dumps(transformers_config(cfg).to_diff_dict() | {"dtype": dtype}))
  if shards == 1:
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return tensors
  places = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
  for file in set(places.values()):
    part = {name: tensor for name, tensor in tensors.items() if places[name] == file}
    safetensors.numpy.save_file(part, folder / file)
  index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": places}
  (folder / "model.safetensors.index.json").write_text(json.dumps(index))
  return tensors


def read_folder(folder: Path) -> dict[str, np.ndarray]:
  """All tensors of a folder, as the library `safetensors` reads them."""
  found: dict[str, np.ndarray] = {}
  for path in sorted(folder.glob("*.safetensors")):
    found |= safetensors.numpy.load_file(path)
  return found


def write_run(run: Path, config: Config, params: Params, step: int = 5) -> None:
  """A run with a checkpoint of `params`, and the configuration that a run leaves."""
  persistent = Persistent(
    str(run / "checkpoints"), CheckpointSection(async_checkpointing=False), RunContext(SINGLE_WORLD)
  )
  meta = {"tokens": 0, "cursor": {}, "config": config.flat(), "identity": {}}
  persistent.save(step, {"params": params, "opt_state": {"mu": params}, "step": jnp.int32(step)}, meta)
  persistent.close()
