"""config.json of Qwen3, Qwen3-MoE and Llama, and the model's keys. A field that has no key is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from input_pipeline.options import DataOptions
from trainer.config.errors import ConfigError
from trainer.config.schema import ModelSection

DEQUANTIZE = (
  "Give the folder from which it was made, or dequantize it first: load it with transformers, and save what its method "
  "dequantize() returns."
)
ARCHITECTURES = {"Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "LlamaForCausalLM": "llama"}
# Fields that are numbers of the model -> its key.
_KEYS = {
  "vocab_size": "vocab_size",
  "hidden_size": "base_emb_dim",
  "intermediate_size": "base_mlp_dim",
  "num_hidden_layers": "base_num_decoder_layers",
  "num_attention_heads": "base_num_query_heads",
  "num_key_value_heads": "base_num_kv_heads",
  "head_dim": "head_dim",
  "max_position_embeddings": "max_position_embeddings",
  "rms_norm_eps": "normalization_layer_epsilon",
  "initializer_range": "initializer_range",
  "tie_word_embeddings": "logits_via_embedding",
}
# Those of a model with experts.
_EXPERTS = {
  "num_experts": "num_experts",
  "num_experts_per_tok": "num_experts_per_tok",
  "moe_intermediate_size": "base_moe_mlp_dim",
  "norm_topk_prob": "norm_topk_prob",
  "decoder_sparse_step": "decoder_sparse_step",
  "router_aux_loss_coef": "load_balance_loss_weight",
}
_SCALING = {
  "factor": "rope_scaling_factor",
  "low_freq_factor": "rope_low_freq_factor",
  "high_freq_factor": "rope_high_freq_factor",
  "original_max_position_embeddings": "rope_original_max_position_embeddings",
}
# What transformers takes for a field that is absent.
_DEFAULTS: dict[str, dict[str, Any]] = {
  "qwen3": {"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
  "qwen3_moe": {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "router_aux_loss_coef": 0.001,
  },
  "llama": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
}
# Fields that must have these values, because the decoder knows no other.
_FIXED: dict[str, tuple[Any, ...]] = {
  "hidden_act": ("silu", "swish"),
  "attention_bias": (False,),
  "mlp_bias": (False,),
  "attention_dropout": (0, None),
  "use_sliding_window": (False, None),
  "pretraining_tp": (1, None),
  "partial_rotary_factor": (1, None),
  "rope_interleaved": (False, None),
  "is_encoder_decoder": (False, None),
  "add_cross_attention": (False, None),
  "pruned_heads": ({}, None),
}
# Fields that say nothing about the function that the model computes.
_DESCRIPTIONS = frozenset(
  "architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id eos_token_id pad_token_id "
  "max_window_layers sliding_window layer_types rope_theta rope_scaling rope_parameters output_attentions "
  "output_hidden_states return_dict output_router_logits "
  # What nanotron, unsloth and transformers.js add to models that they publish.
  "is_llama_config unsloth_fixed unsloth_version transformers.js_config "
  # In the Llama of 2023, in files of other programs, and in every configuration of transformers before version 5.
  "max_sequence_length max_seq_len model_max_length seq_length unk_token_id torchscript use_bfloat16 tf_legacy_loss "
  "chunk_size_feed_forward is_decoder tie_encoder_decoder tokenizer_class prefix sep_token_id decoder_start_token_id "
  "finetuning_task task_specific_params problem_type id2label label2id "
  # For generation: folders that are older than generation_config.json have them here.
  "max_length max_new_tokens min_length min_new_tokens max_time early_stopping stop_strings do_sample num_beams "
  "num_beam_groups num_return_sequences penalty_alpha dola_layers temperature top_k top_p min_p top_h typical_p "
  "epsilon_cutoff eta_cutoff diversity_penalty repetition_penalty encoder_repetition_penalty length_penalty "
  "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids force_words_ids renormalize_logits constraints "
  "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens "
  "begin_suppress_tokens sequence_bias token_healing guidance_scale low_memory watermarking_config output_scores "
  "output_logits return_dict_in_generate is_assistant num_assistant_tokens num_assistant_tokens_schedule "
  "assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind "
  "target_lookbehind prompt_lookup_num_tokens max_matching_ngram_size speculation_type use_mtp cache_implementation "
  "cache_config max_cache_len return_legacy_cache prefill_chunk_size compile_config disable_compile "
  "continuous_batching_config generation_config".split()
)
_QUANTIZED = ("quantization_config", "compression_config", "quantization")  # absent or null in a model that can be read


def keys(config: Mapping[str, Any], where: str) -> dict[str, Any]:
  """The model's keys for the content of a config.json. Raises ConfigError that names a field which has no key."""
  family = _family(config, where)
  if quantized := next((config[name] for name in _QUANTIZED if config.get(name)), None):
    raise ConfigError(f"{where}: is quantized{_method(quantized)}. {DEQUANTIZE}")
  fields = _KEYS | (_EXPERTS if family == "qwen3_moe" else {})
  known = _DESCRIPTIONS | fields.keys() | _FIXED.keys() | set(_QUANTIZED)
  known |= {"num_local_experts", "mlp_only_layers"} if family == "qwen3_moe" else set()
  if unknown := sorted(name for name in config if name not in known and not name.startswith("_")):
    raise ConfigError(f"{where}: unknown fields {', '.join(unknown)}, which may change the model. Use another model.")
  for name, allowed in _FIXED.items():
    if name in config and config[name] not in allowed:
      raise ConfigError(f"{where}: {name}={config[name]}. The decoder has only {name}={allowed[0]}.")
  if others := set(config.get("layer_types") or ()) - {"full_attention"}:
    raise ConfigError(f"{where}: layer_types has {', '.join(sorted(others))}. The decoder has only full_attention.")
  complete: dict[str, Any] = {"initializer_range": 0.02, "tie_word_embeddings": False, **_DEFAULTS[family], **config}
  complete["num_key_value_heads"] = complete.get("num_key_value_heads") or complete.get("num_attention_heads")
  if family != "qwen3":  # a size that is missing or 0 is refused later
    D, N = complete.get("hidden_size") or 0, complete.get("num_attention_heads") or 1
    complete["head_dim"] = complete.get("head_dim") or D // N
  if family == "qwen3_moe":
    spelled = {config[name] for name in ("num_experts", "num_local_experts") if name in config}
    if len(spelled) > 1:
      raise ConfigError(f"{where}: num_experts and num_local_experts are {spelled}. Correct the file.")
    complete["num_experts"] = spelled.pop() if spelled else None
  if missing := [name for name in fields if complete.get(name) is None]:
    raise ConfigError(f"{where}: has no {', '.join(missing)}. Get the file again.")
  model = {key: complete[name] for name, key in fields.items()}
  model |= _rope(config, where) | {"use_qk_norm": family != "llama"}
  if family == "qwen3_moe":
    E, k, dense = model["num_experts"], model["num_experts_per_tok"], config.get("mlp_only_layers") or []
    if not 1 <= k <= E or E == 1:
      raise ConfigError(f"{where}: num_experts={E} with num_experts_per_tok={k}. The decoder takes k of at least 2.")
    alike = not dense and model["decoder_sparse_step"] == 1
    model |= {"mlp_only_layers": ",".join(map(str, dense)), "scan_layers": alike}
  return model


def _family(config: Mapping[str, Any], where: str) -> str:
  """The model_type of a config.json, by itself or by its architectures, which may be of the model without a head."""
  architectures, kind = config.get("architectures") or [], config.get("model_type")
  ours = {name.lower(): family for name, family in ARCHITECTURES.items()}  # the first folders have LLaMAForCausalLM
  named = [ours.get(re.sub("model$", "forcausallm", str(name).lower())) for name in architectures] or [kind]
  if len(named) != 1 or named[0] not in ARCHITECTURES.values() or kind not in (None, named[0]):
    found = f"architectures={architectures}, model_type={kind}"
    raise ConfigError(f"{where}: {found}. Only {' and '.join(ARCHITECTURES)} can be read.")
  return str(named[0])


def _method(quantized: Any) -> str:
  fields = quantized if isinstance(quantized, Mapping) else {}
  bits = next((name for name in ("load_in_4bit", "load_in_8bit") if fields.get(name)), None)
  name = fields.get("quant_method") or fields.get("quant_algo") or (bits and "bitsandbytes")
  return f" with {name}" if name else ""


def field(key: str) -> str:
  """The field of config.json that gives `key` of the model."""
  fields = _KEYS | _EXPERTS | _SCALING | {"rope_theta": "rope_max_timescale"}
  return {known: name for name, known in fields.items()}.get(key, key)


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
  """The keys of RoPE, from either spelling or from both."""
  both: dict[str, Any] = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
  for spelling in (config.get("rope_scaling") or {}, config.get("rope_parameters") or {}):
    for field, value in spelling.items():
      name = "rope_type" if field == "type" else field
      if value is None or (name, value) == ("partial_rotary_factor", 1):
        continue
      if both.setdefault(name, value) != value:
        raise ConfigError(f"{where}: {name} is {both[name]} in one place and {value} in another. Correct the file.")
  kind = both.pop("rope_type", "default")
  found = {"rope_type": kind, "rope_max_timescale": both.pop("rope_theta", 10000.0)}
  if kind not in ("default", "llama3"):
    raise ConfigError(f"{where}: rope_type={kind}. Only default and llama3 can be read.")
  if kind == "llama3":
    if missing := _SCALING.keys() - both.keys():
      raise ConfigError(f"{where}: rope_type=llama3 has no {', '.join(sorted(missing))}. Get the file again.")
    found |= {key: both.pop(name) for name, key in _SCALING.items()}
  if both:
    raise ConfigError(f"{where}: unknown fields of RoPE: {', '.join(sorted(both))}. Use another model.")
  return found


def longest(cfg: ModelSection, data: DataOptions | None) -> int:
  """Tokens of the longest text of a model: max_position_embeddings if it is set, else max_target_length of `data`,
  on which it was trained."""
  declared = cfg.max_position_embeddings
  if data is None or declared != ModelSection.model_fields["max_position_embeddings"].default:
    return declared
  return data.max_target_length


def build(cfg: ModelSection, dtype: str, ends: Mapping[str, int | None]) -> dict[str, Any]:
  """The content of config.json for a model. ends: bos_token_id and eos_token_id.

  In both spellings, because transformers 5 writes rope_parameters and dtype, and older readers know only rope_theta,
  rope_scaling and torch_dtype.
  """
  has_experts = cfg.num_experts > 1
  if has_experts and not cfg.use_qk_norm:
    raise ConfigError(
      "use_qk_norm=false: Hugging Face has no model with experts and without these norms (Qwen3-MoE has them). Set "
      "use_qk_norm=true."
    )
  family = "qwen3_moe" if has_experts else "qwen3" if cfg.use_qk_norm else "llama"
  architecture = next(name for name, known in ARCHITECTURES.items() if known == family)
  # As model_type=default would give them: global_parameter_scale is in these properties.
  sizes = {
    "base_emb_dim": cfg.emb_dim,
    "base_mlp_dim": cfg.mlp_dim,
    "base_num_decoder_layers": cfg.num_decoder_layers,
    "base_num_query_heads": cfg.num_query_heads,
    "base_num_kv_heads": cfg.num_kv_heads,
    "base_moe_mlp_dim": cfg.moe_mlp_dim,
  }
  fields = _KEYS | (_EXPERTS if has_experts else {})
  scaling: dict[str, Any] = {"rope_type": cfg.rope_type}
  if cfg.rope_type == "llama3":
    scaling |= {name: getattr(cfg, key) for name, key in _SCALING.items()}
  return {
    "architectures": [architecture],
    "model_type": family,
    **{name: sizes.get(key, getattr(cfg, key)) for name, key in fields.items()},
    **({"num_local_experts": cfg.num_experts, "mlp_only_layers": cfg.dense_layers} if has_experts else {}),
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    **({} if cfg.use_qk_norm else {"mlp_bias": False}),
    "rope_theta": cfg.rope_max_timescale,
    "rope_scaling": None if cfg.rope_type == "default" else scaling,
    "rope_parameters": {"rope_theta": cfg.rope_max_timescale, **scaling},
    "torch_dtype": dtype,
    "dtype": dtype,
    "use_cache": True,
    **ends,
  }
