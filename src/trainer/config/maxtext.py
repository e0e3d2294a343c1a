"""MaxText's keys and values that this program does not have: the answer to a user who gives one of them."""

from __future__ import annotations

import functools
import re
from fnmatch import translate

_DENSE = "Models here are dense decoders without experts; remove the key."
_ARCHITECTURE = "Models here are Qwen3 and Llama decoders, which do not have this; remove the key."
_MULTIMODAL = "Models here read text only; remove the key."
_FILES = (
  "Give files with dataset_type=grain grain_train_files=FILES, a prepared dataset with dataset_type=tfds "
  "dataset_path=FOLDER, or text with dataset_type=text dataset_path=FOLDER."
)
_EVAL_FILES = (
  "Give evaluation data with grain_eval_files, eval_split or eval_dataset_path, or set eval_fraction to hold out "
  "training text."
)
_PREPARED = "Data are tokenised and packed once, and read by index without workers; remove the key."
_FORMAT = "Checkpoints have one format; remove the key."
_FLOAT32 = "Softmax, norms, logits and the loss are always computed in float32; remove the key."
_SHARDING = "Sharding follows one table in trainer/sharding.py; set sizes with dcn_*_parallelism and ici_*_parallelism."
_GOODPUT = (
  "Goodput is computed locally: enable_pathways_goodput=true prints it and writes goodput.json. For Google's monitor, "
  "which is a program of its own, set enable_goodput_recording=true."
)
_CLOUD = "Metrics go to TensorBoard files and metrics.jsonl and, with gcs_metrics=true, to objects in the run's folder."
_TIERS = "Use enable_emergency_checkpoint=true with local_checkpoint_directory and local_checkpoint_period."
_KERNEL = "attention=flash chooses the platform's kernel and its block sizes; remove the key."
_QUANTIZED = "Use quantization=int8, fp8 or fp8_full; it needs no calibration and no other setting."
_RESUME = "A run resumes from its own folder: give the same base_output_directory and run_name."
_PIPELINE = (
  "There is no pipeline parallelism; use dcn_data_parallelism, ici_fsdp_parallelism and ici_tensor_parallelism."
)
_INFERENCE = "This program trains and does not serve; remove the key."
_PRETRAINING = "This program only pre-trains; remove the key."
_SYNCHRONOUS = "Slices are always synchronous; use dcn_data_parallelism and remove the key."
_HLO = "Set the environment variable XLA_FLAGS=--xla_dump_to=FOLDER."
_PROFILE = "Each attempt records one profile: set profiler=xplane, skip_first_n_steps_for_profiler and profiler_steps."
_STACKS = "Set watchdog_timeout_seconds: the stacks of a process that hangs are printed to the log."
_REMAT = "With remat_policy=custom set query_proj, key_proj, value_proj, context, out_proj, mlpwi_0, mlpwi_1 and mlpwo."
_NONFINITE = (
  "Steps with a non-finite loss or gradient are skipped and counted; max_nonfinite_steps=0 stops at the first."
)
_ROPE = "Use rope_max_timescale, and rope_type=llama3 with rope_scaling_factor for Llama 3.1's scaling."
_DOCUMENTS = "Documents begin with bos_token (none: no token) and end with eos_token: set these, and remove the key."
_OWN_ROWS = "Every process reads only its own rows; remove the key."
_CONTEXT = "Use ici_context_parallelism to shard the sequence; remove the key."
_DECAY = "Use weight_decay_mask=matrices (no norms, biases, embeddings) or all."

# (names, what to do). A name may hold a wildcard: * is any text. The first match wins.
_KEYS: tuple[tuple[str, str], ...] = (
  (
    "hardware",
    "JAX finds the platform. To force one, set the environment variable JAX_PLATFORMS=cpu, tpu, cuda or proxy.",
  ),
  (
    "skip_jax_distributed_system subslice_shape",
    "Set cluster=simulated, pathways or multiprocess to say what a slice is.",
  ),
  ("jax_distributed_initialization_timeout", "JAX waits five minutes for processes to join; remove the key."),
  ("jax_debug_log_modules", "Set the environment variable JAX_DEBUG_LOG_MODULES."),
  ("enable_nnx pure_nnx pure_nnx_decoder", "The model is always written in flax.nnx; remove the key."),
  (
    "constant_bound_config save_config_to_gcs",
    "The resolved configuration is always written to the run's folder; remove the key.",
  ),
  # Data.
  ("dataset_name olmo_*", _FILES),
  ("eval_dataset_name", _EVAL_FILES),
  ("eval_data_columns", "Evaluation uses the same column as training: set train_data_columns."),
  (
    "tokenize_train_data tokenize_eval_data",
    "A column of strings is tokenised, and a column of integers has token ids; remove the key.",
  ),
  ("add_bos add_eos", _DOCUMENTS),
  (
    "grain_packing_type use_truncation max_segments_per_seq",
    "Use packing=split, best_fit, or none (one document per example, cut at max_target_length).",
  ),
  (
    "generate_padding_batch_train generate_padding_batch_eval",
    "Training data start again in a new order when they end, and evaluation data are padded; remove the key.",
  ),
  ("max_corpus_chars", "The tokenizer is trained on a sample of the corpus; remove the key."),
  ("enable_data_shuffling", "Examples are always shuffled; set data_shuffle_seed for another order."),
  ("num_epoch", "Set the length of the run with steps; the data starts again in a new order when it ends."),
  ("expansion_factor_real_data colocated_python_data_input", _OWN_ROWS),
  (
    "grain_use_elastic_iterator",
    "Every loader is elastic: a batch depends only on the seed and the step; remove the key.",
  ),
  ("chat_template* use_chat_template sft_* default_prompt", _PRETRAINING),
  ("hf_*", _FILES),
  (
    "grain_worker_count* grain_per_worker_* grain_num_threads* grain_prefetch_* grain_ram_* grain_data_source_* "
    "grain_shuffle_*",
    _PREPARED,
  ),
  # Batch and optimizer.
  ("global_batch_size", "The global batch is per_device_batch_size x devices x gradient_accumulation_steps."),
  ("eval_per_device_batch_size", "Evaluation uses per_device_batch_size; set its length with eval_steps."),
  (
    "enable_rampup_batch_size per_device_batch_size_* global_rampup_samples",
    "The global batch is constant for the whole run; remove the key.",
  ),
  ("adamw_mask", _DECAY),
  ("cosine_learning_rate_final_fraction", "Its name here is learning_rate_final_fraction."),
  ("learning_rate_schedule", "Use lr_schedule_type=cosine, wsd or constant."),
  ("gradient_clipping", "Use gradient_clipping_threshold=1.0 (0 turns clipping off)."),
  ("abort_on_nan_loss abort_on_inf_loss skip_step_*", _NONFINITE),
  ("grad_dtype", "Gradients are summed in float32; remove the key."),
  ("adam_eps_root", "It is always 0; use adam_eps."),
  (
    "muon_beta muon_weight_decay muon_consistent_rms",
    "Muon's momentum is adam_b1 and its decay adam_weight_decay; remove the key.",
  ),
  ("trainable_parameters_mask lora_*", "This program trains every parameter; remove the key."),
  ("optimizer_memory_host_offload", "The optimizer state stays on the devices; shard it with ici_fsdp_parallelism."),
  ("parameter_memory_host_offload", "Parameters stay on the devices; shard them with ici_fsdp_parallelism."),
  ("shard_optimizer_over_data", "Every slice holds the whole state, so that it can survive alone; remove the key."),
  # Evaluation.
  (
    "eval_start_step",
    "Evaluation begins after eval_interval steps; remove the key.",
  ),
  # Model.
  ("decoder_block", "Qwen3 and Llama are one decoder: set use_qk_norm, rope_type and logits_via_embedding."),
  ("mlp_activations mlp_activations_limit", "The feed-forward is SwiGLU (silu, linear); remove the key."),
  ("normalize_embedding_logits", "Tied logits are never rescaled; remove the key."),
  ("dropout_rate enable_dropout", "There is no dropout in pre-training here; remove the key."),
  ("logits_dot_in_fp32 cast_logits_to_fp32 float32_logits float32_qk_product", _FLOAT32),
  ("activations_in_float32", "Set the type of matmuls and activations with dtype=float32 or bfloat16."),
  ("param_scan_axis", "The layer axis of stacked weights is always the first; remove the key."),
  (
    "force_unroll inhomogeneous_layer_cycle_interval use_sequential_layers",
    "Use scan_layers=false, or scan_unroll to run several layers per iteration.",
  ),
  ("rope_min_timescale", "It is always 1; set rope_max_timescale (theta)."),
  ("rope_use_scale", "Use rope_type=llama3 with rope_scaling_factor, rope_low_freq_factor and rope_high_freq_factor."),
  (
    "rope_linear_scaling_factor rope_factor rope_interleave rope_truncate rope_attention_scaling rope_pairwise "
    "original_max_position_embeddings beta_fast beta_slow mscale",
    _ROPE,
  ),
  ("attention_type sliding_window_size", "Attention is global and causal; remove the key."),
  ("attn_logits_soft_cap final_logits_soft_cap", "Qwen3 and Llama have no logit caps; remove the key."),
  ("fused_qkv fused_mlp", "Projections are separate weights; remove the key."),
  ("dense_init_scale", "Set initializer_range."),
  ("mtp_*", "There is no multi-token prediction; remove the key."),
  ("emb_dim", "Set base_emb_dim."),
  ("mlp_dim", "Set base_mlp_dim."),
  ("num_query_heads", "Set base_num_query_heads."),
  ("num_kv_heads", "Set base_num_kv_heads."),
  ("num_decoder_layers", "Set base_num_decoder_layers."),
  ("global_head_dim", "Set head_dim."),
  ("global_num_kv_heads", "Set base_num_kv_heads."),
  (
    "num_experts num_experts_per_tok base_moe_mlp_dim moe_* megablox sparse_matmul capacity_factor num_moe_* "
    "ragged_buffer_factor ragged_gather* load_balance_loss_weight use_random_routing use_custom_sort_vjp "
    "use_ring_of_experts use_ragged_sort use_gather_mosaic_kernel wi_tile_* wo_tile_* merge_gating_gmm use_tokamax_gmm "
    "use_gmm_v2 norm_topk_prob shard_exp_on_fsdp use_2d_fsdp_sharding first_num_dense_layers shared_experts "
    "routed_* n_routing_groups topk_routing_group first_num_hash_layers float32_weight_sum float32_gate_logits "
    "use_batch_split_schedule batch_split_factor interleave_moe_layer_step *_expert_parallelism",
    _DENSE,
  ),
  (
    "*_for_vit *_for_audio *_image_column use_multimodal use_audio freeze_* dtype_mm *_placeholder image_path "
    "video_path audio_path "
    "use_audio_in_video video_max_* max_num_images_per_example vision_output_length use_mrope mrope_section "
    "position_id_per_seconds",
    _MULTIMODAL,
  ),
  # Attention and other kernels.
  (
    "sa_* local_sa_* local_use_splash_scheduler use_splash_scheduler experimental_sa_* use_tokamax_splash "
    "use_jax_splash use_max_logit_estimate cost_estimate_* dq_reduction_steps use_ragged_attention ragged_block_size "
    "ring_scan_unroll force_q_layout te_comm_gemm_overlap",
    _KERNEL,
  ),
  ("quantize_kvcache kv_quant_*", _INFERENCE),
  (
    "use_qwix_quantization use_manual_quantization quant_cfg_path weight_quantization_calibration_method "
    "act_quantization_calibration_method bwd_quantization_calibration_method quantization_local_shard_count "
    "replicate_quant_scale weight_sparsity_*",
    _QUANTIZED,
  ),
  # Rematerialization.
  ("qkv_proj kv_proj", "With remat_policy=custom set query_proj, key_proj and value_proj."),
  ("mlpwi", "With remat_policy=custom set mlpwi_0 and mlpwi_1."),
  ("attention_out", "With remat_policy=custom set context (before the output projection) or out_proj (after it)."),
  ("query_wa_proj kv_wa_proj mla_q mla_kv engram indexer_cutoff_threshold", _REMAT),
  # Architectures that are not here.
  (
    "mla_* moba* use_indexer indexer_* q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "use_sliced_mla_proj o_lora_rank o_groups compress_ratios compressed_rope_max_timescale use_qk_clip "
    "qk_clip_threshold gdn_* use_qk_norm_in_gdn partial_rotary_factor engram_* mhc_* enable_mhc_lite "
    "use_mhc_pallas_kernel sinkhorn_iterations share_kv_projections attention_bias attention_sink attention_output_dim "
    "chunk_attn_window_size causal_block_size use_post_attn_norm use_post_ffw_norm v_norm_with_scale "
    "qk_norm_with_scale hidden_size_per_layer_input vocab_size_per_layer_input num_kv_shared_layers "
    "use_double_wide_mlp mlp_bias nope_layer_interval temperature_tuning local_rope_* global_rope_* "
    "use_untrainable_positional_embedding trainable_position_size block_diffusion_* training_objective "
    "enable_padding_causal_mask",
    _ARCHITECTURE,
  ),
  # Parallelism.
  (
    "ici_parallelism",
    "Set ici_data_parallelism, ici_fsdp_parallelism, ici_tensor_parallelism, ici_context_parallelism.",
  ),
  (
    "dcn_parallelism",
    "Set dcn_data_parallelism, dcn_fsdp_parallelism, dcn_tensor_parallelism, dcn_context_parallelism.",
  ),
  ("ici_sequence_parallelism dcn_sequence_parallelism", "The sequence is sharded with ici_context_parallelism."),
  ("ici_fsdp_transpose_parallelism dcn_fsdp_transpose_parallelism dense_fsdp_*", "Use ici_fsdp_parallelism."),
  ("ici_tensor_*_parallelism dcn_tensor_*_parallelism", "Use ici_tensor_parallelism."),
  ("*_context_usp_* *_context_autoregressive_* context_parallel_* context_sharding ulysses_*", _CONTEXT),
  ("ici_autoregressive_parallelism dcn_autoregressive_parallelism", _INFERENCE),
  ("ici_pipeline_parallelism dcn_pipeline_parallelism *pipeline_* *_per_stage scan_pipeline_*", _PIPELINE),
  ("*diloco* dcn_bandwidth_* num_communication_overlapping_steps communication_overlapping_alpha", _SYNCHRONOUS),
  (
    "mesh_axes logical_axis_rules* override_logical_axis_rules data_sharding custom_mesh* allow_split_physical_axes "
    "optimize_mesh_for_tpu_v6e shard_mode shardy debug_sharding input_data_sharding_logical_axes check_vma "
    "remove_size_one_mesh_axis_from_type vocab_tiling_ag_once",
    _SHARDING,
  ),
  # Checkpoints.
  ("save_checkpoint_on_completion", "A checkpoint is always saved at the end; remove the key."),
  ("save_checkpoint_on_start", "The first checkpoint is at checkpoint_period; remove the key."),
  ("enable_continuous_checkpointing", "Set checkpoint_period; enable_autocheckpoint also saves on SIGTERM."),
  ("load_full_state_path load_from_prefill_dir force_load_checkpoint", _RESUME),
  (
    "enable_orbax_v1 checkpoint_storage_* checkpoint_conversion_fn source_checkpoint_layout checkpoint_is_quantized "
    "save_quantized_params_path colocated_python_checkpointing",
    _FORMAT,
  ),
  ("checkpoint_todelete_*", "Old checkpoints are deleted in place: set max_num_checkpoints_to_keep; remove the key."),
  (
    "multi_tier_checkpointing_backup_interval_minutes multi_tier_checkpointing_backup_interval_steps",
    _TIERS + " The backup is the persistent checkpoint: set checkpoint_period.",
  ),
  (
    "enable_multi_tier_checkpointing mtc_data_parallelism use_replicator_service replicator_backup_interval_minutes",
    _TIERS,
  ),
  # What is recorded.
  (
    "monitor_goodput goodput_upload_interval_seconds enable_gcp_goodput_metrics "
    "enable_gcp_step_deviation_metrics monitor_step_time_deviation step_deviation_interval_seconds",
    _GOODPUT,
  ),
  ("metrics_file", "Metrics are always written to metrics.jsonl in the run's folder."),
  ("tensorboard_dir", "TensorBoard files are in the run's folder; enable_tensorboard=false turns them off."),
  ("checkpoint_dir", "Checkpoints are in {base_output_directory}/{run_name}/checkpoints."),
  ("metrics_dir", "Metrics are in {base_output_directory}/{run_name}."),
  (
    "use_vertex_tensorboard report_heartbeat_metric_for_gcp_monitoring report_performance_metric_for_gcp_monitoring "
    "heartbeat_reporting_interval_in_seconds vertex_* managed_mldiagnostics* "
    "record_internal_nn_metrics write_estimator_result prometheus_port",
    _CLOUD,
  ),
  (
    "upload_all_profiler_results profile_periodically_period profile_cleanly hide_profiler_step_metric "
    "enable_tpu_profiling_options tpu_num_* enable_jax_profiler jax_profiler_port xprof_* profile_power_events",
    _PROFILE,
  ),
  ("collect_stack_trace stack_trace_to_cloud stack_trace_interval_seconds", _STACKS),
  ("dump_hlo dump_hlo_* dump_step dump_jaxpr*", _HLO),
  ("max_checkify", "Set the environment variable JAX_DEBUG_NANS=true to find the operation that makes a NaN."),
  # Compilation.
  ("compiled_trainstep_file", "Compiled steps are found again through jax_cache_dir; remove the key."),
  ("internal_compile internal_compile_num_devices", "Use compile_topology with python -m trainer.tools.preflight."),
  ("max_inflight_computations", "The program dispatches at most one step ahead; remove the key."),
  # Inference and other training.
  (
    "inference_* prefill_* generate_slice prompt max_prefill_predict_length autoregressive_decode_assert decode_* "
    "model_call_mode enable_model_warmup enable_llm_inference_pool multi_sampling return_log_prob "
    "stack_prefill_result_cache ar_cache_axis_order compute_axis_order reshape_q use_chunked_prefill "
    "enable_prefix_caching prefix_caching_* vllm_*",
    _INFERENCE,
  ),
  ("use_dpo use_sft use_grpo distill_*", _PRETRAINING),
)

# Of keys that both programs have: MaxText's values that this program lacks, and what to do.
_VALUES: dict[str, tuple[tuple[str, str], ...]] = {
  "dataset_type": (("olmo_grain c4_mlperf", _FILES),),
  "grain_file_type": (("tfrecord", "Convert the files to ArrayRecord or Parquet once."),),
  "packing": (("true True", "Use packing=split or best_fit."), ("false False", "Use packing=none.")),
  "attention": (
    ("cudnn_flash_te cudnn_flash_jax paged vllm_rpa", "Use attention=flash: it chooses the platform's kernel."),
    (
      "minimal_flash",
      "It is a value of remat_policy in older MaxText. Use attention=flash and remat_policy=minimal_with_context.",
    ),
  ),
  "remat_policy": (
    ("minimal_flash", "Use remat_policy=minimal_with_context, its newer name."),
    ("save_dot_except_logits_ffw1", "Use remat_policy=save_dot_except_mlpwi."),
  ),
  "quantization": (
    (
      "fp8_gpu fp8_nanoo nanoo_fp8 fp8_e5m2 fp8_e4m3 te_* aqt_fp8",
      "Use quantization=fp8, or fp8_full for e5m2 gradients.",
    ),
    ("int4 fp4 intmp intmm w4a8*", "Use quantization=int8: 4 bits are not supported in training here."),
    ("aqt_fp8_full", "Use quantization=fp8_full."),
  ),
  "tokenizer_type": (
    (
      "sentencepiece huggingface tiktoken hf",
      "Use tokenizer_type=bpe with tokenizer_path=FILE, a tokenizer.json of Hugging Face's tokenizers library; convert "
      "other formats with that library. Or leave tokenizer_path out to train a BPE on the text.",
    ),
  ),
  "opt_type": (("adam_pax adam", "Use opt_type=adamw."),),
  "rope_type": (
    ("llama3.1 llama3_1", "Use rope_type=llama3 (Llama 3.1's scaling)."),
    ("yarn linear", "Use rope_type=default or llama3; other scalings are not supported."),
  ),
  "lr_schedule_type": (("linear", "Use lr_schedule_type=wsd with wsd_decay_style=linear."),),
  "profiler": (("nsys", "Use profiler=xplane, or start the program under nsys with profiler=''."),),
  "matmul_precision": (("bfloat16", "Use matmul_precision=default."), ("float32", "Use matmul_precision=highest.")),
  "dtype": (("float16", "Use dtype=bfloat16: the range of float16 needs loss scaling, which is not supported."),),
  "weight_dtype": (("float16", "Use weight_dtype=float32 or bfloat16."),),
  "max_num_checkpoints_to_keep": (("None none null 0 -1", "To keep every checkpoint, set checkpoint_keep_period=1."),),
  "steps": (("-1", "Give the number of steps; learning_rate_schedule_steps=-1 then follows it."),),
  "eval_steps": (("-1", "Give the number of batches per evaluation; the whole evaluation set (-1) is not supported."),),
  "checkpoint_period": (("0 -1", "To save no checkpoints, set enable_checkpointing=false."),),
  "log_period": (("0 -1", "To print fewer lines, set a larger log_period."),),
  "compile_topology_num_slices": (("0", "Give the number of slices; one is the default."),),
}

# Values of MaxText that mean "not set", and what they are here.
_UNSET = {"num_slices": {"-1": "0"}, "compile_topology_num_slices": {"-1": "1"}}


def answer(name: str) -> str | None:
  """What to do instead of giving MaxText's key `name`, which this program lacks; None if MaxText has no such key."""
  for pattern, remedy in _patterns():
    if pattern.fullmatch(name):
      return remedy
  return None


def answer_for_value(name: str, value: str) -> str | None:
  """What to do instead of giving MaxText's `value` of the key `name`, which this program has; None for other values."""
  for values, remedy in _VALUES.get(name, ()):
    if any(re.fullmatch(translate(word), value) for word in values.split()):
      return remedy
  return None


def translated(name: str, value: str) -> str:
  """`value` of the key `name`, with MaxText's value for "not set" replaced by the one of this program."""
  return _UNSET.get(name, {}).get(value, value)


@functools.cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
  """(pattern of a name, remedy), in the order of _KEYS."""
  return tuple((re.compile("|".join(map(translate, names.split()))), remedy) for names, remedy in _KEYS)
