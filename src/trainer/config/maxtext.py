"""MaxText's keys that have no meaning here, each with what to use instead. None of them is ever swallowed."""

from __future__ import annotations


def reason_for(name: str) -> str | None:
  """Why MaxText's key (or the launcher's flag) `name` is refused and what to use here; None for any other."""
  if name in _REASONS:
    return _REASONS[name]
  return next((reason for prefix, reason in _PREFIXES.items() if name.startswith(prefix)), None)


def reason_for_value(name: str, value: str) -> str | None:
  """What to use instead of MaxText's `value` of a key that is known here; None for any other."""
  values, reason = _VALUES.get(name, ("", None))
  return reason if value in values.split() else None


_DENSE = "Models are dense decoders here: there are no experts."
_TEXT = "Give local text files or folders with dataset_type=text dataset_path=FOLDER."
_FORMAT = "Checkpoints have one format; leave the key out."
_FLOAT32 = "Softmax, norms, logits and the loss are always float32; leave the key out."
_SHARDING = "Sharding is one table in trainer/sharding.py; choose sizes with dcn_*_parallelism and ici_*_parallelism."
_GOODPUT = "Goodput is computed locally: enable_pathways_goodput=true prints it and writes goodput.json."
_CLOUD = "Metrics go to TensorBoard files, metrics.jsonl and, with gcs_metrics=true, to objects in the run's folder."
_TIERS = "Use enable_emergency_checkpoint=true with local_checkpoint_directory and local_checkpoint_period."
_KERNEL = "attention=flash picks the platform's kernel and its block sizes."
_QUANTIZED = "quantization=int8 or fp8 is all there is to choose: it is always qwix's, with nothing to calibrate."
_LAUNCHER = "It is a flag of the launcher (xpk, torchrun), which starts this program."
_RESUME = "A run resumes from its own folder: give the same base_output_directory and run_name."

# Of keys that both have: MaxText's values that this program lacks.
_VALUES = {
  "dataset_type": ("tfds grain hf olmo_grain c4_mlperf", _TEXT),
  "attention": ("cudnn_flash_te cudnn_flash_jax paged vllm_rpa", _KERNEL),
  "quantization": ("intmm fp8_gpu fp8_nanoo nanoo_fp8 aqt_fp8 aqt_fp8_full", _QUANTIZED),
}

_REASONS = {
  "elastic_slices": _LAUNCHER,
  "max_slice_restarts": _LAUNCHER,
  "ramdisk_directory": _LAUNCHER,
  "nnodes": _LAUNCHER,
  "nproc_per_node": _LAUNCHER,
  "max_restarts": _LAUNCHER,
  "hardware": "JAX finds the platform; force one with the environment variable JAX_PLATFORMS=cpu, tpu, cuda or proxy.",
  "skip_jax_distributed_system": "Say who the slices are with cluster=simulated, pathways or multiprocess.",
  "enable_goodput_recording": _GOODPUT,
  "monitor_goodput": _GOODPUT,
  "goodput_upload_interval_seconds": _GOODPUT,
  "enable_gcp_goodput_metrics": _GOODPUT,
  "enable_gcp_step_deviation_metrics": _GOODPUT,
  "monitor_step_time_deviation": _GOODPUT,
  "dataset_name": _TEXT,
  "eval_dataset_name": "Give evaluation files with eval_dataset_path=FOLDER.",
  "train_split": _TEXT,
  "eval_split": "Give evaluation files with eval_dataset_path=FOLDER, or hold out eval_fraction of the training files.",
  "train_data_columns": "Text is read from the field 'text' of .jsonl files, or from whole .txt, .md and .py files.",
  "tokenize_train_data": "Text is always tokenised, once, and cached in dataset_cache_directory.",
  "add_bos": "Every document stands between the tokenizer's own bos, if it has one, and eos; leave the key out.",
  "add_eos": "Every document stands between the tokenizer's own bos, if it has one, and eos; leave the key out.",
  "packing": "Documents are always packed, end to end, with segment ids that keep them apart; leave the key out.",
  "enable_data_shuffling": "Examples are always shuffled; the order is set by data_shuffle_seed.",
  "num_epoch": "Give the length of the run in steps=; the data starts again by itself, in a new order.",
  "expansion_factor_real_data": "Every process reads only its own rows; leave the key out.",
  "colocated_python_data_input": "Every process reads only its own rows; leave the key out.",
  "global_batch_size": "The global batch is per_device_batch_size x devices x gradient_accumulation_steps.",
  "eval_per_device_batch_size": "Evaluation uses per_device_batch_size; its length is eval_steps.",
  "decoder_block": "Qwen3 and Llama are one decoder: use_qk_norm, rope_type and logits_via_embedding tell them apart.",
  "mlp_activations": "The feed-forward is SwiGLU (silu, linear); leave the key out.",
  "normalize_embedding_logits": "Tied logits are never rescaled; leave the key out.",
  "dropout_rate": "There is no dropout in pre-training here; leave the key out.",
  "enable_dropout": "There is no dropout in pre-training here; leave the key out.",
  "logits_dot_in_fp32": _FLOAT32,
  "cast_logits_to_fp32": _FLOAT32,
  "float32_logits": _FLOAT32,
  "float32_qk_product": _FLOAT32,
  "activations_in_float32": "Choose the compute type of matmuls and activations with dtype=float32 or bfloat16.",
  "grad_dtype": "Gradients are summed in float32; leave the key out.",
  "param_scan_axis": "The layer axis of stacked weights is always the first; leave the key out.",
  "force_unroll": "Use scan_layers=false, or scan_unroll to run several layers per iteration.",
  "rope_min_timescale": "It is always 1; set rope_max_timescale (theta).",
  "rope_use_scale": "Use rope_type=llama3 with rope_scaling_factor, rope_low_freq_factor and rope_high_freq_factor.",
  "attention_type": "Attention is global and causal; leave the key out.",
  "sliding_window_size": "Attention is global and causal; leave the key out.",
  "attn_logits_soft_cap": "Qwen3 and Llama have no logit caps; leave the key out.",
  "final_logits_soft_cap": "Qwen3 and Llama have no logit caps; leave the key out.",
  "fused_qkv": "Projections are separate weights; leave the key out.",
  "fused_mlp": "Projections are separate weights; leave the key out.",
  "use_tokamax_splash": _KERNEL,
  "use_jax_splash": _KERNEL,
  "use_qwix_quantization": _QUANTIZED,
  "quant_cfg_path": _QUANTIZED,
  "weight_quantization_calibration_method": _QUANTIZED,
  "act_quantization_calibration_method": _QUANTIZED,
  "bwd_quantization_calibration_method": _QUANTIZED,
  "quantization_local_shard_count": _QUANTIZED,
  "replicate_quant_scale": _QUANTIZED,
  "quantize_kvcache": "It serves decoding only; this program trains.",
  "adamw_mask": "Use weight_decay_mask=matrices (no norms, biases, embeddings) or all.",
  "cosine_learning_rate_final_fraction": "Its name here is learning_rate_final_fraction.",
  "learning_rate_schedule": "Use lr_schedule_type=cosine, wsd or constant.",
  "gradient_clipping": "Use gradient_clipping_threshold=1.0 (0 turns clipping off).",
  "abort_on_nan_loss": "Non-finite steps are skipped and counted; max_nonfinite_steps=0 stops at the first.",
  "abort_on_inf_loss": "Non-finite steps are skipped and counted; max_nonfinite_steps=0 stops at the first.",
  "skip_step_on_spikes": "Only non-finite steps are skipped; see max_nonfinite_steps.",
  "enable_rampup_batch_size": "The global batch is constant for the life of a run; leave the key out.",
  "optimizer_memory_host_offload": "The optimizer state stays on the devices; shard it with ici_fsdp_parallelism.",
  "parameter_memory_host_offload": "Parameters stay on the devices; shard them with ici_fsdp_parallelism.",
  "shard_optimizer_over_data": "A slice holds the whole state, so that it can survive alone; leave the key out.",
  "ici_sequence_parallelism": "The sequence is sharded with ici_context_parallelism.",
  "dcn_sequence_parallelism": "The sequence is sharded with ici_context_parallelism.",
  "ici_fsdp_transpose_parallelism": "Use ici_fsdp_parallelism.",
  "dcn_fsdp_transpose_parallelism": "Use ici_fsdp_parallelism.",
  "ici_tensor_transpose_parallelism": "Use ici_tensor_parallelism.",
  "dcn_tensor_transpose_parallelism": "Use ici_tensor_parallelism.",
  "ici_tensor_sequence_parallelism": "Use ici_tensor_parallelism.",
  "dcn_tensor_sequence_parallelism": "Use ici_tensor_parallelism.",
  "ici_autoregressive_parallelism": "It serves decoding only; this program trains.",
  "dcn_autoregressive_parallelism": "It serves decoding only; this program trains.",
  "ici_pipeline_parallelism": "There is no pipeline parallelism; use ici_fsdp_parallelism and ici_tensor_parallelism.",
  "dcn_pipeline_parallelism": "There is no pipeline parallelism; use dcn_data_parallelism.",
  "ici_expert_parallelism": _DENSE,
  "dcn_expert_parallelism": _DENSE,
  "ici_diloco_parallelism": "Slices are always synchronous; use dcn_data_parallelism.",
  "dcn_diloco_parallelism": "Slices are always synchronous; use dcn_data_parallelism.",
  "enable_diloco": "Slices are always synchronous; use dcn_data_parallelism.",
  "num_experts": _DENSE,
  "num_experts_per_tok": _DENSE,
  "base_moe_mlp_dim": _DENSE,
  "mesh_axes": _SHARDING,
  "logical_axis_rules": _SHARDING,
  "data_sharding": _SHARDING,
  "custom_mesh": _SHARDING,
  "allow_split_physical_axes": _SHARDING,
  "optimize_mesh_for_tpu_v6e": _SHARDING,
  "shard_mode": _SHARDING,
  "save_checkpoint_on_completion": "A checkpoint is always saved at the end; leave the key out.",
  "save_checkpoint_on_start": "The first checkpoint is at checkpoint_period; leave the key out.",
  "enable_continuous_checkpointing": "Set checkpoint_period; enable_autocheckpoint saves on SIGTERM besides.",
  "load_parameters_path": _RESUME,
  "load_full_state_path": _RESUME,
  "load_from_prefill_dir": _RESUME,
  "force_load_checkpoint": _RESUME,
  "enable_orbax_v1": _FORMAT,
  "enable_multi_tier_checkpointing": _TIERS,
  "multi_tier_checkpointing_backup_interval_minutes": _TIERS + " Its backup is the persistent tier, checkpoint_period.",
  "multi_tier_checkpointing_backup_interval_steps": _TIERS + " Its backup is the persistent tier, checkpoint_period.",
  "mtc_data_parallelism": _TIERS,
  "use_replicator_service": _TIERS,
  "replicator_backup_interval_minutes": _TIERS,
  "grain_use_elastic_iterator": "Every loader is elastic: a batch depends on the seed and the step only.",
  "compiled_trainstep_file": "Compiled steps are found again through jax_cache_dir.",
  "metrics_file": "Metrics are always written to metrics.jsonl in the run's folder.",
  "tensorboard_dir": "TensorBoard files are in the run's folder; enable_tensorboard=false turns them off.",
  "checkpoint_dir": "Checkpoints are in {base_output_directory}/{run_name}/checkpoints.",
  "metrics_dir": "Metrics are in {base_output_directory}/{run_name}.",
  "upload_all_profiler_results": "Every process writes its own profile; leave the key out.",
  "profile_periodically_period": "Each attempt takes one profile: skip_first_n_steps_for_profiler, profiler_steps.",
  "profile_cleanly": "The profile always starts and stops between finished steps; leave the key out.",
  "collect_stack_trace": "watchdog_timeout_seconds dumps the stacks of a hung process.",
  "stack_trace_to_cloud": "watchdog_timeout_seconds dumps the stacks of a hung process to the log.",
  "stack_trace_interval_seconds": "watchdog_timeout_seconds dumps the stacks of a hung process.",
  "dump_hlo": "Set the environment variable XLA_FLAGS=--xla_dump_to=FOLDER.",
  "jax_distributed_initialization_timeout": "JAX waits five minutes for processes to join; leave it out.",
  "use_vertex_tensorboard": _CLOUD,
  "report_heartbeat_metric_for_gcp_monitoring": _CLOUD,
  "report_performance_metric_for_gcp_monitoring": _CLOUD,
  "use_dpo": "This program pre-trains only.",
  "use_sft": "This program pre-trains only.",
}

_PREFIXES = {
  "hf_": _TEXT,
  "grain_": _TEXT,
  "sa_": _KERNEL,
  "vertex_": _CLOUD,
  "wandb_": _CLOUD,
  "enable_wandb": _CLOUD,
  "dump_hlo_": "Set the environment variable XLA_FLAGS=--xla_dump_to=FOLDER.",
  "checkpoint_storage_": _FORMAT,
  "moe_": _DENSE,
  "mtp_": "There is no multi-token prediction; leave the key out.",
  "lora_": "This program trains every parameter; leave the key out.",
}
