"""What a checkpoint knows about the run that wrote it, and whether a run may resume from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.checkpoint.errors import ConfigMismatch

# Every key of the sections model, data and optimizer is in exactly one of the sets below (a test checks), and every
# key of the other sections is free: they say where and how fast the run goes, not what it computes.

# The arrays of the state, the function that they are the parameters of, or how they were initialised: a resumed run
# takes its weights from the checkpoint, so another seed would be recorded and have had no effect.
CHANGES_MODEL = frozenset({
  "base_emb_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "head_dim",
  "vocab_size", "global_parameter_scale", "normalization_layer_epsilon", "use_qk_norm", "logits_via_embedding",
  "rope_max_timescale", "rope_type", "rope_scaling_factor", "rope_low_freq_factor", "rope_high_freq_factor",
  "rope_original_max_position_embeddings", "initializer_range", "init_weights_seed", "dtype", "weight_dtype",
  "matmul_precision", "quantization", "opt_type", "mu_dtype",
})  # fmt: skip

# Which examples step n trains on.
CHANGES_DATA_ORDER = frozenset({
  "dataset_type", "eval_fraction", "tokenizer_type", "max_target_length", "data_shuffle_seed", "reuse_example_batch",
})  # fmt: skip

# Keys whose values may differ where what they lead to is the same: the name in `identity` that is compared instead.
# A data set may have moved, and half the devices may take twice the examples each.
JUDGED_BY = {
  "dataset_path": "data",
  "eval_dataset_path": "data",
  "tokenizer_path": "data",
  "per_device_batch_size": "global_batch_size",
  "gradient_accumulation_steps": "global_batch_size",
}

# The same function computed otherwise, limits, places; and what people do change in mid-run: learning rate, its
# schedule, decay, clipping. A change of these is named on resume and goes ahead.
FREE = frozenset({
  "model_name", "override_model_config", "max_position_embeddings", "use_iota_embed", "attention", "scan_layers",
  "scan_unroll", "remat_policy", "decoder_layer_input", "query_proj", "key_proj", "value_proj", "context", "out_proj",
  "mlpwi_0", "mlpwi_1", "mlpwo", "dataset_cache_directory", "prefetch_buffer_size", "learning_rate",
  "lr_schedule_type", "learning_rate_schedule_steps", "warmup_steps_fraction", "learning_rate_final_fraction",
  "wsd_decay_steps_fraction", "wsd_decay_style", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay",
  "weight_decay_mask", "gradient_clipping_threshold", "z_loss_multiplier", "num_vocab_tiling", "max_nonfinite_steps",
})  # fmt: skip


def build(
  *, tokens: int, cursor: Mapping[str, Any], config: Mapping[str, Any], identity: Mapping[str, Any]
) -> dict[str, Any]:
  """The meta of a save. The tiers add step, versions and the arrays with their fingerprints.

  tokens: seen by the whole run; cursor: Loader.cursor(step); config: Config.flat(); identity: what JUDGED_BY names,
  {"data": Loader.fingerprint(), "global_batch_size": examples per step}.
  """
  return {"tokens": tokens, "cursor": dict(cursor), "config": dict(config), "identity": dict(identity)}


def check_config(
  saved: Mapping[str, Any], config: Mapping[str, Any], identity: Mapping[str, Any], allow_config_change: str = ""
) -> list[str]:
  """Lines that name the harmless differences between a checkpoint's meta and the present run.

  Raises ConfigMismatch with a table where a difference changes the model or the data order and its key is not in
  allow_config_change, and ValueError where allow_config_change names something that cannot be compared.
  """
  allowed = {key.strip() for key in allow_config_change.split(",") if key.strip()}
  comparable = CHANGES_MODEL | CHANGES_DATA_ORDER | set(JUDGED_BY.values())
  if unknown := sorted(allowed - comparable):
    raise ValueError(
      f"allow_config_change names {', '.join(unknown)}, which no resume is refused for; "
      f"it takes: {', '.join(sorted(comparable))}"
    )
  differences = meta_diff(saved["config"], config) | {
    key: (saved["identity"].get(key), identity.get(key))
    for key in sorted({*saved["identity"], *identity})
    if saved["identity"].get(key) != identity.get(key)
  }
  refused = {key: pair for key, pair in differences.items() if key in comparable and key not in allowed}
  if refused:
    raise ConfigMismatch(_message(saved, refused, differences))
  return [f"{key}: {old!r} in the checkpoint, now {new!r}" for key, (old, new) in differences.items()]


def meta_diff(saved: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
  """{key: (saved value, present value)} of keys that differ; a key that only one side knows is no difference."""
  return {key: (saved[key], config[key]) for key in saved if key in config and saved[key] != config[key]}


def _message(
  saved: Mapping[str, Any], refused: Mapping[str, tuple[Any, Any]], differences: Mapping[str, tuple[Any, Any]]
) -> str:
  rows: list[tuple[str, str, str, str]] = []
  for key, (old, new) in refused.items():
    what = "changes the model" if key in CHANGES_MODEL else "changes the data order"
    rows.append((key, _short(old), _short(new), what))
    causes = [cause for cause, judge in JUDGED_BY.items() if judge == key and cause in differences]
    rows += [(cause, _short(differences[cause][0]), _short(differences[cause][1]), "a cause of it") for cause in causes]
  widths = [max(len(row[column]) for row in rows) for column in range(3)]
  table = [f"  {key:{widths[0]}}  {old:>{widths[1]}} -> {new:{widths[2]}}  {why}" for key, old, new, why in rows]
  return "\n".join([
    f"the checkpoint of step {saved.get('step')} was made with other values (checkpoint -> now):",
    *table,
    "Set them back, or choose another run_name to start anew, or, if this is meant, "
    f"allow_config_change={','.join(refused)}",
  ])  # fmt: skip


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}"
