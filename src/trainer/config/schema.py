"""Every configuration key: its section, type, default and meaning. The only place where a key is declared.

Keys are flat on the command line and in YAML (`steps=100`); in the code they live in sections, and a component
receives its own section. Names follow MaxText wherever MaxText has the key. No JAX here: `--help` must stay fast.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Remat = Literal["remat", "device", "offload"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Devices = Annotated[int, Field(ge=0, le=1_000_000)]
# The state counts steps in 32 bits.
Steps = Annotated[int, Field(ge=1, le=2**31 - 1)]
Parallelism = Annotated[int, Field(ge=-1)]


class Section(BaseModel):
  """A frozen group of keys; an unknown key is an error."""

  model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=False)


class RematPolicy(StrEnum):
  NONE = "none"
  FULL = "full"
  MINIMAL = "minimal"
  MINIMAL_WITH_CONTEXT = "minimal_with_context"
  SAVE_OUT_PROJ = "save_out_proj"
  SAVE_QKV_PROJ = "save_qkv_proj"
  SAVE_DOT_EXCEPT_MLP = "save_dot_except_mlp"
  SAVE_DOT_EXCEPT_MLPWI = "save_dot_except_mlpwi"
  SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP = "save_dot_with_context_except_mlp"
  QKV_PROJ_OFFLOADED = "qkv_proj_offloaded"
  MINIMAL_OFFLOADED = "minimal_offloaded"
  CUSTOM = "custom"


class DegradedStep(StrEnum):
  """How preflight compiles the step of one slice less."""

  NONE = "none"
  QUICK = "quick"
  FULL = "full"


class RunSection(Section):
  """What is run and where its files go."""

  base_output_directory: str = Field(
    "runs", description="Folder or gs:// prefix under which every run has a folder of its own."
  )
  run_name: str = Field(
    "",
    description="Name of the run: its files are in {base_output_directory}/{run_name}. Empty: the config file's name.",
  )
  steps: Steps = Field(1000, description="Optimizer steps in the whole run, counted from its first start.")
  init_weights_seed: int = Field(
    0,
    ge=-(2**31),
    le=2**32 - 1,  # JAX takes 32 bits, and would drop those above them in silence
    description="Seed of the initial weights and of every other model random number.",
  )
  log_config: bool = Field(
    True,
    description="Print the keys that are not at their default once at the start; all of them are in {run}/config.yml.",
  )
  jax_cache_dir: str = Field(
    "~/.cache/trainer/jax", description="Persistent compilation cache folder; empty turns it off."
  )
  allow_config_change: str = Field(
    "",
    description="Comma-separated keys that may differ from the checkpoint's on resume although they change the model or the data order.",
  )


class ModelSection(Section):
  """The decoder. Qwen3 and Llama differ only in these values."""

  model_name: str = Field(
    "default",
    description="A file of configs/models without .yml, or a path to a YAML with model keys, or 'default' to give the keys here.",
  )
  override_model_config: bool = Field(
    False, description="Let explicit keys win over the model's YAML; without it a conflict is an error."
  )
  base_emb_dim: Positive = Field(512, description="D: width of the residual stream, before global_parameter_scale.")
  base_num_decoder_layers: Positive = Field(
    8, description="L: number of decoder layers, before global_parameter_scale."
  )
  base_num_query_heads: Positive = Field(8, description="N: query heads, before global_parameter_scale.")
  base_num_kv_heads: Positive = Field(
    4, description="K: key/value heads (N must be a multiple), before global_parameter_scale."
  )
  base_mlp_dim: Positive = Field(
    1536, description="F: hidden width of the SwiGLU feed-forward, before global_parameter_scale."
  )
  head_dim: Positive = Field(64, description="H: width of one attention head (even).")
  vocab_size: Positive = Field(32000, description="V: size of the vocabulary; at least the tokenizer's.")
  global_parameter_scale: Annotated[int, Field(ge=1, le=2**30)] = Field(
    1,
    description="Power of two by which the model's parameters grow: heads and ffw, width, layers are doubled in turn.",
  )
  max_position_embeddings: Positive = Field(
    1048576, description="Longest sequence that the model allows; max_target_length may not exceed it."
  )
  normalization_layer_epsilon: float = Field(1e-6, gt=0, description="Epsilon of RMSNorm.")
  use_qk_norm: bool = Field(True, description="RMSNorm on each query and key head before RoPE (Qwen3).")
  logits_via_embedding: bool = Field(False, description="Tie the output head to the embedding table.")
  use_iota_embed: bool = Field(False, description="Look embeddings up by a one-hot matmul instead of a gather.")
  rope_max_timescale: float = Field(10000.0, gt=0, description="RoPE base (theta).")
  rope_type: Literal["default", "llama3"] = Field(
    "default", description="RoPE frequency scaling: none, or Llama 3.1's."
  )
  rope_scaling_factor: float = Field(8.0, ge=1, description="llama3 RoPE: factor by which low frequencies are slowed.")
  rope_low_freq_factor: float = Field(
    1.0, gt=0, description="llama3 RoPE: wavelengths above original length / this are fully scaled."
  )
  rope_high_freq_factor: float = Field(
    4.0, gt=0, description="llama3 RoPE: wavelengths below original length / this are untouched."
  )
  rope_original_max_position_embeddings: Positive = Field(
    8192, description="llama3 RoPE: sequence length of the original pre-training."
  )
  initializer_range: float = Field(
    0.02,
    gt=0,
    description="Standard deviation of the embedding and of the matrices that read the residual stream; those that write to it are scaled by 1/sqrt(2 L) besides. A tied embedding has at most 2/D, an untied head 0.25/sqrt(D), so that the first loss is ln(V).",
  )
  dtype: Literal["bfloat16", "float32"] = Field(
    "bfloat16", description="Compute type of matmuls and activations; softmax, norms and loss are always float32."
  )
  weight_dtype: Literal["float32", "bfloat16"] = Field(
    "float32",
    description="Type in which matrices and tables are stored; scales of norms are float32. A bfloat16 weight does not see an update below 1/512 of itself.",
  )
  matmul_precision: Literal["default", "high", "highest"] = Field("default", description="JAX matmul precision.")
  quantization: Literal["", "int8", "fp8", "fp8_full"] = Field(
    "",
    description="Matmuls of the layers' projections in 8 bits, forward and backward (qwix); fp8 is e4m3, fp8_full has e5m2 gradients. Weights stay in weight_dtype. Empty: none.",
  )
  attention: Literal["autoselected", "dot_product", "flash"] = Field(
    "autoselected",
    description="flash is the platform's own flash kernel (TPU splash, GPU cuDNN, CPU blockwise); dot_product is plain XLA; autoselected takes flash where it can serve.",
  )
  scan_layers: bool = Field(
    True, description="Stack the layers and scan over them (compile time independent of depth)."
  )
  scan_unroll: Positive = Field(1, description="Layers per iteration of the scan; must divide the number of layers.")
  remat_policy: RematPolicy = Field(
    RematPolicy.FULL,
    description="Which activations of a layer are kept for the backward pass; the others are recomputed.",
  )
  decoder_layer_input: Remat = Field(
    "device", description="remat_policy=custom: the layer's input; never recomputed, so only offload changes anything."
  )
  query_proj: Remat = Field("remat", description="remat_policy=custom: queries.")
  key_proj: Remat = Field("remat", description="remat_policy=custom: keys.")
  value_proj: Remat = Field("remat", description="remat_policy=custom: values.")
  context: Remat = Field("remat", description="remat_policy=custom: attention output before the output projection.")
  out_proj: Remat = Field("remat", description="remat_policy=custom: attention output projection.")
  mlpwi_0: Remat = Field("remat", description="remat_policy=custom: feed-forward gate.")
  mlpwi_1: Remat = Field("remat", description="remat_policy=custom: feed-forward up projection.")
  mlpwo: Remat = Field("remat", description="remat_policy=custom: feed-forward down projection.")

  @property
  def _scales(self) -> tuple[int, int, int]:
    """(heads and ffw, width, layers) multipliers of global_parameter_scale, doubled in turn as MaxText does."""
    rounds, rest = divmod(self.global_parameter_scale.bit_length() - 1, 3)
    return 2 ** (rounds + (rest > 0)), 2 ** (rounds + (rest > 1)), 2**rounds

  @property
  def emb_dim(self) -> int:
    return self.base_emb_dim * self._scales[1]

  @property
  def num_query_heads(self) -> int:
    return self.base_num_query_heads * self._scales[0]

  @property
  def num_kv_heads(self) -> int:
    return self.base_num_kv_heads * self._scales[0]

  @property
  def mlp_dim(self) -> int:
    return self.base_mlp_dim * self._scales[0]

  @property
  def num_decoder_layers(self) -> int:
    return self.base_num_decoder_layers * self._scales[2]


class DataSection(Section):
  """Where examples come from. Batches are a pure function of (seed, step)."""

  dataset_type: Literal["synthetic", "text"] = Field(
    "text", description="synthetic: random tokens; text: local files, tokenised once and cached."
  )
  dataset_path: str = Field(
    "",
    description="dataset_type=text: a file or folder of .txt .md .py .jsonl; empty: the Python standard library's sources beside the interpreter.",
  )
  eval_dataset_path: str = Field(
    "", description="dataset_type=text: files for evaluation; empty: eval_fraction of the training text is held out."
  )
  eval_fraction: Fraction = Field(
    0.05,
    description="About this share of the text is held out for evaluation when eval_dataset_path is empty: files, and parts of large files, spread evenly over the text.",
  )
  dataset_cache_directory: str = Field(
    "~/.cache/trainer/data", description="Where tokenised corpora and trained tokenizers are kept."
  )
  tokenizer_type: Literal["byte", "bpe"] = Field(
    "byte",
    description="byte: 256 bytes and specials; bpe: byte-level BPE, trained on the corpus unless tokenizer_path is given.",
  )
  tokenizer_path: str = Field("", description="A tokenizers JSON file to use instead of training one.")
  max_target_length: Positive = Field(1024, description="T: tokens of one training example.")
  per_device_batch_size: float = Field(
    1.0,
    gt=0,
    le=1_000_000,
    description="Examples per device and micro-batch; times the devices of the full topology it must be whole.",
  )
  data_shuffle_seed: int = Field(0, ge=-(2**63), le=2**64 - 1, description="Seed of the order of examples.")
  reuse_example_batch: NonNegative = Field(
    0, description="1: every step trains on the first batch (a speed or overfit test)."
  )
  prefetch_buffer_size: NonNegative = Field(2, description="Batches prepared ahead of the step by a background thread.")


class ParallelismSection(Section):
  """The mesh. Axes: data, fsdp, tensor, context. dcn_*: across slices; ici_*: inside one. One -1 in each group is filled."""

  dcn_data_parallelism: Parallelism = Field(-1, description="Replicas across slices.")
  dcn_fsdp_parallelism: Parallelism = Field(
    1, description="Parameter sharding across slices (not with elastic_enabled: a slice must hold the whole state)."
  )
  dcn_tensor_parallelism: Parallelism = Field(
    1, description="Tensor parallelism across slices (not with elastic_enabled)."
  )
  dcn_context_parallelism: Parallelism = Field(
    1, description="Sequence sharding across slices (not with elastic_enabled)."
  )
  ici_data_parallelism: Parallelism = Field(1, description="Replicas inside a slice.")
  ici_fsdp_parallelism: Parallelism = Field(-1, description="Parameter and batch sharding inside a slice.")
  ici_tensor_parallelism: Parallelism = Field(1, description="Heads, ffw and vocabulary sharding inside a slice.")
  ici_context_parallelism: Parallelism = Field(1, description="Sequence sharding inside a slice.")
  sharding_tolerance: Fraction = Field(
    0.02, description="Largest share of parameters that may be left unsharded by accident."
  )


class OptimizerSection(Section):
  """Optimizer, schedule and what guards a step."""

  opt_type: Literal["adamw", "adafactor", "muon", "sgd"] = Field(
    "adamw", description="The optimizer of all parameters; muon takes adamw for embeddings, head and norms."
  )
  learning_rate: float = Field(3e-4, ge=0, description="Peak learning rate.")
  lr_schedule_type: Literal["cosine", "wsd", "constant"] = Field(
    "cosine", description="Schedule after warm-up; wsd: warm-up, stable, decay."
  )
  learning_rate_schedule_steps: int = Field(
    -1, ge=-1, le=2**31 - 1, description="Length of the schedule in steps; -1: steps."
  )
  warmup_steps_fraction: Fraction = Field(0.1, description="Share of the schedule that warms up linearly from 0.")
  learning_rate_final_fraction: Fraction = Field(
    0.1, description="Learning rate at the end of the schedule, as a share of the peak."
  )
  wsd_decay_steps_fraction: Fraction = Field(
    0.1, description="lr_schedule_type=wsd: share of the schedule that decays at its end."
  )
  wsd_decay_style: Literal["linear", "cosine"] = Field(
    "linear", description="lr_schedule_type=wsd: shape of the decay."
  )
  adam_b1: Fraction = Field(
    0.9, description="Decay of the first moment (adamw, muon's adamw part); momentum of muon and sgd."
  )
  adam_b2: Fraction = Field(0.95, description="Decay of the second moment.")
  adam_eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
  adam_weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay, for every optimizer.")
  weight_decay_mask: Literal["matrices", "all"] = Field(
    "matrices",
    description="What decays; matrices: all but norms, biases and embeddings (a tied head is the embedding).",
  )
  mu_dtype: Literal["", "float32", "bfloat16"] = Field(
    "", description="Type of the first moment; empty: weight_dtype. The rest of the optimizer's state is float32."
  )
  gradient_clipping_threshold: float = Field(1.0, ge=0, description="Largest global gradient norm; 0: no clipping.")
  gradient_accumulation_steps: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
    1, description="Micro-batches per device and step on the full topology."
  )
  z_loss_multiplier: float = Field(0.0, ge=0, description="Weight of the squared log-partition added to the loss.")
  num_vocab_tiling: NonNegative = Field(
    0, description="Chunks of the sequence in which logits and loss are computed; 0: chosen from the sizes."
  )
  max_nonfinite_steps: NonNegative = Field(
    10, description="Steps in a row with a non-finite loss or gradient that are skipped; one more stops the run."
  )


class CheckpointSection(Section):
  """The persistent and the emergency tier."""

  enable_checkpointing: bool = Field(True, description="Save and restore checkpoints under {run}/checkpoints.")
  async_checkpointing: bool = Field(
    True, description="Write in the background; the step waits only for the copy to the host."
  )
  checkpoint_period: Positive = Field(
    1000, description="Steps between persistent checkpoints; one more is saved at the end."
  )
  max_num_checkpoints_to_keep: Positive = Field(3, description="Newest persistent checkpoints kept.")
  checkpoint_keep_period: NonNegative = Field(
    0, description="Keep every checkpoint whose step is a multiple of this; 0: none."
  )
  checkpoint_keep_best: NonNegative = Field(
    0, description="Keep this many checkpoints of lowest evaluation loss; 0: none."
  )
  enable_single_replica_ckpt_restoring: bool = Field(
    False, description="One replica reads a checkpoint and the others receive it over the network."
  )
  enable_checkpoint_cloud_logger: bool = Field(
    False,
    description="Structured records of save and restore timings: Cloud Logging where its library is installed, else a JSONL file in the run's folder.",
  )
  enable_autocheckpoint: bool = Field(
    True, description="On SIGTERM finish the step, save, commit, and exit with code 42."
  )
  autocheckpoint_grace_seconds: float = Field(
    25.0,
    gt=0,
    description="Time from SIGTERM to the kill that the scheduler grants; so long a new start waits for the run's folder.",
  )
  enable_emergency_checkpoint: bool = Field(
    False, description="Frequent local saves, one replica per slice, in local_checkpoint_directory."
  )
  local_checkpoint_directory: str = Field("", description="Fast local folder (ramdisk) for emergency checkpoints.")
  local_checkpoint_period: NonNegative = Field(0, description="Steps between emergency checkpoints.")
  max_num_local_checkpoints_to_keep: Annotated[int, Field(ge=2)] = Field(
    2, description="Emergency checkpoints kept; at least two, as the newest may be unfinished."
  )


class ElasticSection(Section):
  """What happens when a slice is lost or returns."""

  elastic_enabled: bool = Field(False, description="Survive the loss of slices inside the process.")
  elastic_timeout_seconds: float = Field(
    300.0, gt=0, le=1e9, description="Longest wait for the slices that an attempt needs."
  )
  elastic_max_retries: Positive = Field(
    10, description="Attempts without progress before giving up, the first included."
  )
  elastic_min_slice_count: int = Field(
    -1, ge=-1, description="Fewest slices to go on with; -1: all of them (wait for the replacement)."
  )
  elastic_backup_kind: Literal["snapshot", "checkpoint"] = Field(
    "snapshot", description="What a recovery restores from first: a copy in host memory, or the checkpoint tiers."
  )
  elastic_retry_reset_steps: Positive = Field(
    10, description="Good steps after which the count of attempts starts anew."
  )
  elastic_min_resize_interval_seconds: float = Field(
    30.0, ge=0, le=1e9, description="Least time between the last resize and a scale-up, against a flapping slice."
  )
  elastic_poll_seconds: float = Field(
    10.0, gt=0, le=1e9, description="Time between looks for returned slices on a real cluster."
  )
  elastic_backoff_seconds: float = Field(
    1.0,
    ge=0,
    le=1e9,
    description="First pause before another attempt after one without progress; doubles each time, at most 60.",
  )
  elastic_hang_check_seconds: float = Field(
    60.0,
    ge=0,
    le=1e9,
    description="Time after which a step that has not finished makes us check the slices' health, and again each such time; 0: never.",
  )
  snapshot_period: NonNegative = Field(
    0,
    description="Steps between snapshots; 0: chosen so that they cost at most snapshot_max_overhead of the step time.",
  )
  snapshot_max_overhead: Fraction = Field(
    0.01, description="Largest share of step time that chosen snapshots may cost."
  )
  fault_injection: str = Field(
    "",
    description="Faults to rehearse: 'slice_down@12:1, slice_up@30:1, hang@40:2, ckpt_kill@50' or 'random:seed=1,rate=0.05'; docs/elastic.md has the whole grammar.",
  )


class ClusterSection(Section):
  """Who the slices are."""

  cluster: Literal["auto", "simulated", "pathways", "multiprocess"] = Field(
    "auto",
    description="auto: pathways under JAX_PLATFORMS=proxy, else simulated (slices are groups of this JAX world's devices).",
  )
  num_slices: Devices = Field(0, description="Slices; 0: as many as the devices report. On a CPU 0 means 1.")
  devices_per_slice: Devices = Field(
    0, description="On a CPU: forced host devices per slice; 0: 1, or what XLA_FLAGS already forces."
  )
  enable_single_controller: bool = Field(
    False, description="One process controls all slices (Pathways, or one machine)."
  )
  jax_distributed_heartbeat_timeout_seconds: Positive = Field(
    100, description="Several processes: how long a silent one is believed alive."
  )


class ObserveSection(Section):
  """What is printed and recorded."""

  log_period: Positive = Field(
    1, description="Steps between printed lines; with gcs_metrics also the steps of one metrics object."
  )
  enable_tensorboard: bool = Field(True, description="Write TensorBoard event files to {run}/tensorboard.")
  gcs_metrics: bool = Field(
    False,
    description="Also write one immutable metrics object per log_period under {run}/metrics (object stores cannot append).",
  )
  enable_pathways_goodput: bool = Field(
    False, description="Print the run's goodput and write goodput.json at the end; its buckets sum to 100 %."
  )
  enable_report: bool = Field(True, description="Write report.html and loss.png at the end.")
  profiler: Literal["", "xplane"] = Field("", description="Record a profile to {run}/profile.")
  skip_first_n_steps_for_profiler: NonNegative = Field(1, description="Steps of an attempt before the profile begins.")
  profiler_steps: Positive = Field(5, description="Steps in the profile.")
  watchdog_timeout_seconds: float = Field(
    0.0,
    ge=0,
    description="Time without a completed step after which stacks are dumped and the process aborts with 134 (10 times "
    "as long in a start, an evaluation or a save); 0: off.",
  )
  eval_interval: int = Field(
    -1, ge=-1, description="Steps between evaluations; -1: only at the end when there is evaluation data."
  )
  eval_steps: NonNegative = Field(8, description="Batches per evaluation; 0: no evaluation.")
  sample_prompt: str = Field("", description="Text that the trained model continues at the end; empty: no sample.")
  sample_tokens: Positive = Field(64, description="Tokens of the sample.")


class PreflightSection(Section):
  """trainer.tools.preflight only."""

  compile_topology: str = Field(
    "",
    description="TPU slice to compile for without having it: v5e-16, v5p-64, ... (MaxText's names; v5e and v6e count chips, v4, v5p and 7x count cores) or a jax topology name such as v5e:4x4.",
  )
  compile_topology_num_slices: Positive = Field(
    1, le=511, description="Slices of compile_topology; the TPU compiler knows no more than 511."
  )
  preflight_search: bool = Field(
    False,
    description="Also try remat policies and batch sizes and suggest the fastest that fits (preflight.search=true).",
  )
  preflight_degraded: DegradedStep = Field(
    DegradedStep.QUICK,
    description="How to compile the step of one slice less, which runs when a slice is lost (preflight.degraded=full): quick, for TPUs with little optimization, which is enough where it fits even so; full, as it runs; none.",
  )


class Config(Section):
  """The resolved configuration: one attribute per section, `flat()` for all keys."""

  run: RunSection = RunSection()
  model: ModelSection = ModelSection()
  data: DataSection = DataSection()
  parallelism: ParallelismSection = ParallelismSection()
  optimizer: OptimizerSection = OptimizerSection()
  checkpoint: CheckpointSection = CheckpointSection()
  elastic: ElasticSection = ElasticSection()
  cluster: ClusterSection = ClusterSection()
  observe: ObserveSection = ObserveSection()
  preflight: PreflightSection = PreflightSection()

  def flat(self) -> dict[str, bool | int | float | str]:
    """All keys in schema order, with their values as YAML scalars."""
    return {key: value for section in self.model_dump(mode="json").values() for key, value in section.items()}

  @property
  def run_directory(self) -> str:
    """{base_output_directory}/{run_name}, local (with ~ expanded) or gs://."""
    return f"{os.path.expanduser(self.run.base_output_directory).rstrip('/')}/{self.run.run_name}"
