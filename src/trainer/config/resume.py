"""Which keys may change when a run resumes from a checkpoint, and which changes allow_config_change can allow."""

from __future__ import annotations

# Every key of the sections model, data and optimizer is in exactly one of the sets below (a test checks this). Every
# key of the other sections may change: those keys determine where and how fast the run computes, not the result.

# The arrays of the state and their shapes. The arrays of a checkpoint with another value do not fit.
CHANGES_STATE = frozenset({
  "base_emb_dim", "base_num_decoder_layers", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "head_dim",
  "vocab_size", "global_parameter_scale", "use_qk_norm", "logits_via_embedding", "opt_type",
  "num_experts", "base_moe_mlp_dim", "decoder_sparse_step", "mlp_only_layers", "scan_layers",
  "routed_bias_update_rate", "outer_momentum",
})  # fmt: skip

# The function that the model computes, the types of its arrays (a checkpoint is cast to them), and the initialization:
# a resumed run reads its weights from the checkpoint, so another seed would be recorded without an effect.
CHANGES_MODEL = frozenset({
  "normalization_layer_epsilon", "rope_max_timescale", "rope_type", "rope_scaling_factor", "rope_low_freq_factor",
  "rope_high_freq_factor", "rope_original_max_position_embeddings", "initializer_range", "init_weights_seed", "dtype",
  "num_experts_per_tok", "norm_topk_prob",
  "weight_dtype", "quantization", "mu_dtype",
})  # fmt: skip

# The examples of each step.
CHANGES_DATA_ORDER = frozenset({
  "dataset_type", "eval_fraction", "packing", "tokenizer_type", "max_target_length", "data_shuffle_seed",
  "reuse_example_batch",
})  # fmt: skip

# Keys whose values may differ if their result is the same, and the name in `identity` that is compared instead. For
# example, a data set may have moved, and half as many devices may have twice as many examples each.
JUDGED_BY = {
  "dataset_path": "data",
  "eval_dataset_path": "data",
  "grain_train_files": "data",
  "grain_eval_files": "data",
  "grain_dataset": "data",
  "grain_train_mixture_config_path": "data",
  "grain_file_type": "data",
  "train_data_columns": "data",
  "train_split": "data",
  "train_on": "data",
  "chat_template_path": "data",
  "max_bad_records": "data",
  "eval_split": "data",
  "tokenizer_path": "data",
  "bos_token": "data",
  "eos_token": "data",
  "per_device_batch_size": "global_batch_size",
  "gradient_accumulation_steps": "global_batch_size",
}

# Keys that change how the same function is computed, limits and places, and keys that users change during a run:
# learning rate, schedule, decay, clipping. The resume logs a change of these keys and continues.
FREE = frozenset({
  "model_name", "override_model_config", "max_position_embeddings", "use_iota_embed", "attention",
  "remat_policy", "custom_remat", "dataset_cache_directory", "eval_sets", "learning_rate",
  "lr_schedule_type", "learning_rate_schedule_steps", "warmup_steps_fraction", "learning_rate_final_fraction",
  "wsd_decay_steps_fraction", "adam_b1", "adam_b2", "adam_eps", "adam_weight_decay",
  "grad_reduce_dtype", "gradient_clipping_threshold", "z_loss_multiplier", "max_nonfinite_steps",
  "load_balance_loss_weight", "local_steps", "outer_learning_rate",
})  # fmt: skip

# The values of allow_config_change: keys, and names in `identity`, for which a resume is refused but would work.
ALLOWABLE = CHANGES_MODEL | CHANGES_DATA_ORDER | set(JUDGED_BY.values())
