"""Every configuration key with its section, type, range, default and meaning.

A key is declared only here; most keys of the section `data` are options of input_pipeline.

Keys are flat on the command line and in YAML (`steps=100`). In the code they are grouped in sections, and a component
receives its own section. Where MaxText has a key, the key has MaxText's name. No JAX here: `--help` must stay fast.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from input_pipeline.options import DataOptions

SERVICES = ("tensorboard", "wandb", "goodput", "goodput_json", "gcs_metrics", "checkpoint_logger")
# Fields that are not keys of a run. Values of a model: only the file that model_name names may have them, and the
# config.yml of a run with such a model.
MODEL_VALUES = frozenset({
  "max_position_embeddings", "normalization_layer_epsilon", "initializer_range", "rope_type", "rope_scaling_factor",
  "rope_low_freq_factor", "rope_high_freq_factor", "rope_original_max_position_embeddings", "norm_topk_prob",
  "decoder_sparse_step", "mlp_only_layers",
})  # fmt: skip
# Derived keys, which MaxText's users write: accepted if equal to the computed value.
FOLLOWING = frozenset({"dcn_data_parallelism", "ici_data_parallelism"})
# Activations of a layer that remat_policy=custom can keep, with MaxText's names.
ACTIVATIONS = (
  *("decoder_layer_input", "query_proj", "key_proj", "value_proj", "context"),
  *("out_proj", "mlpwi_0", "mlpwi_1", "mlpwo"),
)
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# The state counts steps in 32 bits. Other counts have the same limit.
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]
Devices = Annotated[int, Field(ge=0, le=1_000_000)]
Heads = Annotated[int, Field(ge=1, le=2**13)]
Parallelism = Annotated[int, Field(ge=-1, le=1_000_000)]


def listed(text: str) -> list[str]:
  """The entries of a comma-separated list."""
  return [entry.strip() for entry in text.split(",") if entry.strip()]


class Section(BaseModel):
  """A frozen group of keys. An unknown key is an error. The text below a key is its description."""

  model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


class RematPolicy(StrEnum):
  """Which activations of a layer are kept for the backward pass."""

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
  AUTO = "auto"  # only until the program is built: trainer.preflight.remat_choice replaces it


class RunSection(Section):
  """The run: its name, its length and its files."""

  base_output_directory: str = "runs"
  """Folder, or gs:// or s3:// address, in which every run has its own folder."""
  run_name: str = ""
  """Name of the run. Its files are in {base_output_directory}/{run_name}. Empty: the name of the config file."""
  steps: Positive = 1000
  """Optimizer steps of the whole run, counted from its first start."""
  init_weights_seed: int = Field(0, ge=-(2**31), le=2**32 - 1)  # JAX would drop higher bits in silence
  """Seed of the initial weights."""
  load_parameters_path: str = ""
  """The first parameters of a new run: a Hugging Face folder of a Qwen3 or Llama, or RUN_DIR or RUN_DIR@STEP of another
  run, local, gs:// or s3://. The optimizer and the schedule are fresh. The tokenizer there serves the data, with the
  bos_token and eos_token of its run, unless tokenizer_type or tokenizer_path is given. A run that resumes ignores it.
  Empty: random parameters."""
  jax_cache_dir: str = "~/.cache/trainer/jax"
  """Folder of the persistent compilation cache. Empty: no cache."""
  compile_xla_flags: str = ""
  """Options of the compiler for the training step: --xla_name=value --xla_name=value. They replace the trainer's own
  options of the same name."""
  allow_config_change: str = ""
  """Comma-separated names of keys that may differ from the checkpoint's when a run resumes, although they change the
  model or the order of the data."""


class ModelSection(Section):
  """The decoder model. Qwen3 and Llama differ only in these values."""

  model_name: str = "default"
  """A file of configs/models without .yml, or a path to a YAML file with model keys, or 'default' to set the model's
  keys here."""
  override_model_config: bool = False
  """Let explicit keys replace values of the model's YAML. Without it, a different value is an error."""
  base_emb_dim: int = Field(512, ge=1, le=2**17)
  """D: width of the residual stream, before global_parameter_scale."""
  base_num_decoder_layers: int = Field(8, ge=1, le=2**14)
  """L: number of decoder layers, before global_parameter_scale."""
  base_num_query_heads: Heads = 8
  """N: number of query heads, before global_parameter_scale."""
  base_num_kv_heads: Heads = 4
  """K: number of key/value heads, before global_parameter_scale. N must be a multiple of K."""
  base_mlp_dim: int = Field(1536, ge=1, le=2**24)
  """F: hidden width of the SwiGLU feed-forward, before global_parameter_scale."""
  num_experts: int = Field(1, ge=1, le=2**12)
  """E: experts of a layer with a mixture of experts (Qwen3-MoE). 1: a dense model."""
  num_experts_per_tok: int = Field(1, ge=1, le=2**8)
  """k: experts that compute a token. At most num_experts."""
  base_moe_mlp_dim: int = Field(768, ge=1, le=2**20)
  """Hidden width of one expert, before global_parameter_scale."""
  norm_topk_prob: bool = True
  """Divide the router's probabilities of the k experts by their sum."""
  decoder_sparse_step: Positive = 1
  """Every so many layers one has experts: layers i with (i + 1) % decoder_sparse_step = 0. The others are dense. Not 1:
  needs scan_layers=false."""
  mlp_only_layers: str = ""
  """Layers without experts, counted from 0 and separated by commas. Needs scan_layers=false."""
  load_balance_loss_weight: float = Field(0.001, ge=0, le=1000)
  """Weight of the loss that balances the load of the experts: E times the sum over experts of their load in the step
  before times their mean probability, as a mean over the layers with experts."""
  routed_bias_update_rate: float = Field(0.0, ge=0, le=1000)
  """Balances the load of the experts without a loss: a bias on the router's logits, only for the choice of the k
  experts. After a step it rises by this rate for experts with less than the mean load and falls for experts with more.
  0: no bias."""
  head_dim: int = Field(64, ge=1, le=2**13)
  """H: width of one attention head. Must be even."""
  vocab_size: int = Field(32000, ge=1, le=2**26)
  """V: size of the vocabulary. At least the tokenizer's size."""
  global_parameter_scale: int = Field(1, ge=1, le=2**12)
  """Factor by which the model's parameters grow, a power of two: heads and feed-forward, width, layers are doubled in
  turn."""
  max_position_embeddings: Positive = 1048576
  """Longest sequence of the model, in tokens. max_target_length must not exceed it. Exports have it, or
  max_target_length if it has its default."""
  normalization_layer_epsilon: float = Field(1e-6, gt=0)
  """Epsilon of RMSNorm."""
  use_qk_norm: bool = True
  """Apply RMSNorm to each query and key head before RoPE, as Qwen3 does."""
  logits_via_embedding: bool = False
  """Use the embedding table as output head (tied weights)."""
  use_iota_embed: bool = False
  """Look up embeddings with a one-hot matmul instead of a gather."""
  rope_max_timescale: float = Field(10000.0, gt=0)
  """Base of RoPE (theta)."""
  rope_type: Literal["default", "llama3"] = "default"
  """Frequency scaling of RoPE: default is none, llama3 is Llama 3.1's."""
  rope_scaling_factor: float = Field(8.0, ge=1)
  """rope_type=llama3: factor by which low frequencies are divided."""
  rope_low_freq_factor: float = Field(1.0, gt=0)
  """rope_type=llama3: wavelengths longer than rope_original_max_position_embeddings / this factor are fully scaled."""
  rope_high_freq_factor: float = Field(4.0, gt=0)
  """rope_type=llama3: wavelengths shorter than rope_original_max_position_embeddings / this factor are not scaled."""
  rope_original_max_position_embeddings: Positive = 8192
  """rope_type=llama3: sequence length of the original pre-training, in tokens."""
  initializer_range: float = Field(0.02, gt=0, le=1000)
  """Standard deviation of the initial embedding table and of matrices that read the residual stream. Matrices that
  write to it are also scaled by 1/sqrt(2 L). An untied head has at most 0.28/sqrt(D), and the final norm of a tied
  model starts with a scale of at most 0.28/(sqrt(D) * initializer_range), so that the first loss is ln(V)."""
  dtype: Literal["bfloat16", "float32"] = "bfloat16"
  """Type in which matmuls and activations are computed. Softmax, norms and the loss are always float32."""
  weight_dtype: Literal["float32", "bfloat16"] = "float32"
  """Type in which matrices and tables are stored. Scales of norms are float32. A bfloat16 weight does not change by
  updates smaller than 1/512 of its value."""
  quantization: Literal["", "int8", "fp8", "fp8_full"] = ""
  """Compute the matmuls of the layers in 8 bits, forward and backward (qwix). fp8 is e4m3; fp8_full also has e5m2
  gradients. Weights are stored in weight_dtype. Not with experts. Empty: no quantization."""
  attention: Literal["autoselected", "dot_product", "flash"] = "autoselected"
  """flash is the flash kernel of the platform (TPU Pallas, GPU cuDNN, CPU blockwise). dot_product is plain XLA.
  autoselected is flash where the kernel supports the sizes, else dot_product."""
  scan_layers: bool = True
  """Stack the layers and scan over them. Compile time is then independent of the number of layers."""
  remat_policy: RematPolicy = RematPolicy.FULL
  """Which activations of a layer are kept for the backward pass. The others are recomputed. auto: chosen once for the
  run, on TPUs the fastest that fits by the estimate of preflight. Policies compute the same function, but do not give
  bit-identical numbers."""
  custom_remat: str = ""
  """remat_policy=custom: what happens to each activation, such as query_proj=device,mlpwo=offload. device: kept on the
  device; offload: kept on the host; remat: recomputed, which is the default. Activations: decoder_layer_input (the
  layer's input, which is always kept), query_proj, key_proj, value_proj, context (attention output before the output
  projection), out_proj, mlpwi_0 (gate), mlpwi_1 (up), mlpwo (down). MaxText's keys are accepted too: query_proj=device.
  What a file or the command line says is added to what the files of lower precedence say."""

  @property
  def _scales(self) -> tuple[int, int, int]:
    """Factors of (heads and feed-forward, width, layers): global_parameter_scale doubles them in turn, like MaxText."""
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
  def moe_mlp_dim(self) -> int:
    return self.base_moe_mlp_dim * self._scales[0]

  def has_experts(self, layer: int) -> bool:
    """Whether the layer (from 0) has experts instead of the feed-forward of a dense model."""
    return self.num_experts > 1 and (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.dense_layers

  @property
  def has_balance_loss(self) -> bool:
    return self.num_experts > 1 and self.load_balance_loss_weight > 0

  @property
  def has_unlike_layers(self) -> bool:
    """Whether some layers have experts and others have not: they cannot be stacked."""
    return len({self.has_experts(layer) for layer in range(self.num_decoder_layers)}) > 1

  @property
  def activations(self) -> dict[str, str]:
    """{activation: what custom_remat says of it}; the last entry of a name counts."""
    entries = (entry.partition("=") for entry in listed(self.custom_remat))
    return {"decoder_layer_input": "device"} | {name.strip(): choice.strip() for name, _, choice in entries}

  @property
  def dense_layers(self) -> list[int]:
    """The layers that mlp_only_layers lists; -1 for each text there that is not a number of at most nine digits."""
    return [int(text) if re.fullmatch("[0-9]{1,9}", text) else -1 for text in listed(self.mlp_only_layers)]

  @property
  def num_decoder_layers(self) -> int:
    return self.base_num_decoder_layers * self._scales[2]


class DataSection(DataOptions):
  """The training and evaluation data. A batch is a pure function of (seed, step)."""

  grain_train_mixture_config_path: str = ""
  """dataset_type=grain: a YAML or JSON file of weighted sources to train on, instead of grain_train_files; docs/data.md
  describes it."""
  eval_sets: str = ""
  """A YAML or JSON file of named sets that are evaluated besides the evaluation data of the keys above; docs/data.md
  describes it."""
  per_device_batch_size: float = Field(1.0, gt=0, le=1_000_000)
  """Examples per device in one micro-batch. Times the devices of a slice it must be a whole number of at least 1."""


class ParallelismSection(Section):
  """The device mesh. Its axes are data, fsdp, tensor and context; the devices that share experts are a part of fsdp.
  An axis has a size inside a slice (ici_*); fsdp also has one across slices (dcn_*). One size of each group may be -1:
  it is computed from the number of devices. What the sizes leave of the devices and slices are replicas (data)."""

  dcn_data_parallelism: Parallelism = -1
  """Replicas across slices: the slices that dcn_fsdp_parallelism leaves. -1 follows them."""
  dcn_fsdp_parallelism: Parallelism = 1
  """Sharding of parameters across slices. Must be 1 with elastic_enabled: every slice must hold the whole state."""
  ici_data_parallelism: Parallelism = -1
  """Replicas inside a slice: the devices that the other sizes leave. -1 follows them."""
  ici_fsdp_parallelism: Parallelism = -1
  """Sharding of parameters and batch inside a slice."""
  ici_expert_parallelism: int = Field(1, ge=1, le=2**12)
  """Devices of a slice that share the experts: each computes its part of them for the tokens of all. For other weights
  and the batch it counts as more ici_fsdp_parallelism. Must divide num_experts."""
  ici_tensor_parallelism: Parallelism = 1
  """Sharding of heads, feed-forward and vocabulary inside a slice."""
  ici_context_parallelism: Parallelism = 1
  """Sharding of the sequence inside a slice. On TPUs all devices have as much causal attention; on GPUs and CPUs
  attention also computes the scores that the causal mask removes."""


# Optimizer -> the keys of OptimizerSection that it reads and some other optimizer does not.
OPTIMIZER_KEYS: dict[str, tuple[str, ...]] = {
  "adamw": ("adam_b1", "adam_b2", "adam_eps", "mu_dtype"),
  "adafactor": (),
  "muon": ("adam_b1", "adam_b2", "adam_eps", "mu_dtype"),
  "sgd": ("adam_b1", "mu_dtype"),
}


class OptimizerSection(Section):
  """Optimizer, learning-rate schedule and gradients."""

  opt_type: Literal["adamw", "adafactor", "muon", "sgd"] = "adamw"
  """Optimizer. muon updates embeddings, head and norms by adamw with Nesterov momentum, as MaxText does, with the same
  learning rate."""
  learning_rate: float = Field(3e-4, ge=0, le=1e9)
  """Peak learning rate."""
  lr_schedule_type: Literal["cosine", "wsd", "constant"] = "cosine"
  """Learning-rate schedule after the warm-up. wsd: constant, then decay."""
  learning_rate_schedule_steps: int = Field(-1, ge=-1, le=2**31 - 1)
  """Length of the schedule in steps. -1: the value of steps."""
  warmup_steps_fraction: Fraction = 0.1
  """Share of the schedule in which the learning rate rises linearly from 0."""
  learning_rate_final_fraction: Fraction = 0.1
  """Learning rate at the end of the schedule, as a share of learning_rate."""
  wsd_decay_steps_fraction: Fraction = 0.1
  """lr_schedule_type=wsd: share of the schedule, at its end, in which the learning rate decays."""
  adam_b1: Fraction = 0.9
  """Decay rate of the first moment of adamw; momentum of muon and sgd."""
  adam_b2: Fraction = 0.95
  """Decay rate of the second moment of adamw."""
  adam_eps: float = Field(1e-8, gt=0, le=1)
  """Added to the square root of the second moment."""
  adam_weight_decay: float = Field(0.1, ge=0, le=1000)
  """Decoupled weight decay of every optimizer."""
  mu_dtype: Literal["", "float32", "bfloat16"] = ""
  """Type of the first moment. Empty: weight_dtype. The rest of the optimizer's state is float32."""
  gradient_clipping_threshold: float = Field(1.0, ge=0)
  """Largest global norm of the gradient. 0: no clipping."""
  grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
  """Type in which gradients are summed over slices. bfloat16 halves the bytes."""
  gradient_accumulation_steps: int = Field(1, ge=1, le=1_000_000)
  """Micro-batches per device and step on the full topology."""
  z_loss_multiplier: float = Field(0.0, ge=0, le=1000)
  """Weight of the squared log-partition function in the loss."""
  max_nonfinite_steps: NonNegative = 10
  """Consecutive steps with a non-finite loss or gradient that are skipped. One more stops the run."""
  local_steps: Positive = 1
  """Slices as separate processes: steps that each replica takes alone before the slices average their weights and the
  optimizer's state (DiLoCo, Local Adam; docs/local_steps.md). 1: the slices sum the gradients of every step. MaxText's
  enable_diloco, diloco_sync_period, diloco_outer_lr and diloco_outer_momentum are accepted too."""
  outer_learning_rate: float = Field(1.0, gt=0, le=1000)
  """Learning rate of the outer step, which follows local_steps: its gradient is how far the replicas have moved, on
  average. 1 with outer_momentum=0: the mean of the replicas."""
  outer_momentum: float = Field(0.0, ge=0, lt=1)
  """Nesterov momentum of the outer step. 0: none. A run cannot change it when it resumes."""

  @property
  def has_local_steps(self) -> bool:
    """Whether replicas take steps alone, and an outer step follows. Also with local_steps=1 and another outer step."""
    return self.local_steps > 1 or self.outer_learning_rate != 1 or self.outer_momentum > 0


class CheckpointSection(Section):
  """Checkpoints: persistent (every checkpoint_period steps) and emergency (local, more frequent)."""

  enable_checkpointing: bool = True
  """Save checkpoints to {run}/checkpoints and restore them."""
  async_checkpointing: bool = True
  """Write checkpoints in the background. The step waits only for the copy to host memory."""
  checkpoint_period: Positive = 1000
  """Steps between persistent checkpoints. The last step is always saved."""
  max_num_checkpoints_to_keep: Positive = 3
  """Number of newest persistent checkpoints that are kept."""
  checkpoint_keep_period: NonNegative = 0
  """Keep every checkpoint whose step is a multiple of this number. 0: keep none for this reason."""
  checkpoint_keep_best: NonNegative = 0
  """Number of checkpoints with the lowest evaluation loss that are kept. 0: keep none for this reason."""
  enable_single_replica_ckpt_restoring: bool = False
  """Only one replica reads a checkpoint, and the others receive it over the network."""
  enable_autocheckpoint: bool = True
  """On SIGTERM, SIGUSR1 or SIGHUP finish the step, save, commit, and exit with code 42."""
  autocheckpoint_grace_seconds: float = Field(25.0, gt=0, le=1e9)
  """Seconds from SIGTERM to SIGKILL that the scheduler grants. A new start waits this long for the run's folder to be
  released."""
  enable_emergency_checkpoint: bool = False
  """Save one replica per slice to local_checkpoint_directory every local_checkpoint_period steps."""
  local_checkpoint_directory: str = ""
  """Fast local folder (ramdisk) for emergency checkpoints."""
  local_checkpoint_period: NonNegative = 0
  """Steps between emergency checkpoints."""


class ElasticSection(Section):
  """Recovery when a slice is lost, and growth when it returns."""

  elastic_enabled: bool = False
  """Continue training in the same process when slices are lost."""
  elastic_timeout_seconds: float = Field(300.0, gt=0, le=1e9)
  """Longest wait for the slices that training needs, in seconds."""
  elastic_max_retries: Positive = 10
  """Attempts without progress before the run gives up, including the first attempt. 10 completed steps are progress.
  Slices as separate processes: a loss that other slices survive ends no attempt."""
  elastic_min_slice_count: int = Field(-1, ge=-1, le=1_000_000)
  """Number of slices that training needs. -1: all slices (wait for the replacement)."""
  shares_per_slice: int = Field(-1, ge=-1, le=1024)
  """Slices as separate processes: into how many equal shares the part of the batch of a slice is cut, once for the life
  of the run. The living slices divide the shares of a lost slice among them. The result has the same bits, whichever
  slice computes a share. -1: as in the run so far; in a new run the most, up to 8, that leave a device at least 8,192
  tokens in a share."""
  elastic_slow_factor: float = Field(0.0, ge=0, le=1000)
  """Slices as separate processes: replace a slice that needs so many times the median for a share, over 60 steps, if a
  spare waits that was not as slow. 0: never. In any case its shares move to the others, and it is named."""
  exchange_network: str = ""
  """Slices as separate processes: the network on which they exchange gradients. A network interface (eth1) or a subnet
  (10.1.0.0/16); every host must have an address there. "": the address that a host has towards the supervisor, or that
  its launcher gives."""
  elastic_min_resize_interval_seconds: float = Field(30.0, ge=0, le=1e9)
  """Shortest time between the last resize and growing again, in seconds. It limits the cost of a slice that comes and
  goes."""
  snapshot_period: int = Field(0, ge=-1, le=2**31 - 1)
  """Steps between snapshots, copies of the state in host memory: the first source of a recovery. 0: chosen so that
  snapshots cost at most 1 % of the step time. -1: no snapshots, a recovery begins with the newest checkpoint. Not for
  slices as separate processes, which send each other the state."""
  witness_period: NonNegative = 0
  """Steps between two witnesses: a second slice computes a part of the step too, and the bits of both are compared
  (docs/trust.md). 0: never. Needs at least two slices."""
  fault_injection: str = ""
  """Faults to rehearse: 'slice_down@12:1, slice_up@30:1, hang@40:2, ckpt_kill@50' or 'random:seed=1,rate=0.05'.
  docs/elastic.md describes the grammar."""


class ClusterSection(Section):
  """The slices and their devices."""

  cluster: Literal["auto", "simulated", "pathways", "multiprocess"] = "auto"
  """Where the slices come from. auto: multiprocess if a launcher started this process as one slice of several, pathways
  if JAX_PLATFORMS=proxy, else simulated (slices are groups of the devices of this process)."""
  num_slices: Devices = 0
  """Number of slices. 0: as many as the devices report; on a CPU 1."""
  devices_per_slice: Devices = 0
  """On a CPU: host devices per slice. 0: 1, or the number that XLA_FLAGS sets."""
  cluster_standin: str = ""
  """With cluster=pathways: SLICESxDEVICES such as 3x4 starts a stand-in for Pathways on this machine, with so many
  slices of so many CPU devices, which ends with the run. JAX_PLATFORMS, JAX_BACKEND_TARGET,
  enable_single_controller and devices_per_slice are not needed then."""
  enable_single_controller: bool = False
  """One process controls all slices (Pathways, or one machine)."""


class ObserveSection(Section):
  """Logs, metrics, evaluation, profiles and the sample."""

  log_period: Positive = 1
  """Steps between printed lines. For the service gcs_metrics also the number of steps in one object."""
  services: str = "tensorboard"
  """Where the numbers of the run go besides metrics.jsonl, separated by commas. tensorboard: event files in
  {run}/tensorboard. wandb: Weights & Biases (extra wandb); offline, in {run}/wandb, without an API key or with
  WANDB_MODE=offline; WANDB_PROJECT and WANDB_NAME name the run. goodput: the run's events for Google's
  ml-goodput-measurement (extra goodput), in Cloud Logging, or without credentials in {run}/goodput_records.jsonl.
  goodput_json: the end of the run prints its goodput and writes goodput.json, whose categories sum to 100 %.
  gcs_metrics: one object per log_period in {run}/metrics, for object stores, which cannot append to files.
  checkpoint_logger: records of save and restore times, in Cloud Logging if its library is installed, else in a JSONL
  file in the run's folder. Empty: none. MaxText's switches are accepted too: enable_goodput_recording=true adds goodput
  to what files of lower precedence say, and enable_pathways_goodput=true adds goodput_json."""
  receipt_state_period: NonNegative = 100
  """Steps between digests of the state in receipt.jsonl, which has a line for each step (docs/trust.md). States of
  checkpoints and of the last step have one too. 0: no receipt."""
  enable_report: bool = True
  """Write report.html and loss.png at the end."""
  profiler: Literal["", "xplane"] = ""
  """Record a profile of each attempt to {run}/profile/PROCESS-ATTEMPT."""
  skip_first_n_steps_for_profiler: NonNegative = 1
  """Steps of an attempt before the profile starts."""
  profiler_steps: Positive = 5
  """Steps in the profile."""
  watchdog_timeout_seconds: float = Field(0.0, ge=-1, le=1e9)
  """Seconds without a completed step after which all stacks are printed and the process ends with exit code 134; 10
  times as long for a start, an evaluation or a save. -1: max(5, 3 times the 99th percentile of the last steps), and 60
  before 20 steps are done. 0: never; the stacks of such a late step are printed all the same."""
  eval_interval: int = Field(-1, ge=-1, le=2**31 - 1)
  """Steps between evaluations. -1: only at the end, if there is evaluation data."""
  eval_steps: NonNegative = 8
  """Batches per evaluation of a set. 0: no evaluation."""
  target_eval_loss: float = Field(0.0, ge=0, le=1e9)
  """The run is complete at the first evaluation with this eval_loss or a lower one. 0: never."""
  sample_prompt: str = ""
  """Text that the trained model continues at the end, for 64 tokens. Empty: no sample."""

  def sends_to(self, service: str) -> bool:
    return service in listed(self.services)


class PreflightOptions(Section):
  """Options of trainer.tools.preflight: no keys of a run, but written like keys."""

  compile_topology: str = ""
  """TPU slice or GPUs to compile for, which need not be here. MaxText's names such as v5e-16 or v5p-64 (v5e and v6e
  count chips; v4, v5p and 7x count cores), a JAX topology name such as v5e:4x4, or GPUs of one host: a100-8, h100-8,
  h200-8, b200-8."""
  compile_topology_num_slices: int = Field(1, ge=1, le=511)
  """Number of slices of compile_topology, at most 511: the limit of the TPU compiler."""


class Config(Section):
  """The resolved configuration: one attribute per section, and `flat()` for all fields."""

  run: RunSection = RunSection()
  model: ModelSection = ModelSection()
  data: DataSection = DataSection()
  parallelism: ParallelismSection = ParallelismSection()
  optimizer: OptimizerSection = OptimizerSection()
  checkpoint: CheckpointSection = CheckpointSection()
  elastic: ElasticSection = ElasticSection()
  cluster: ClusterSection = ClusterSection()
  observe: ObserveSection = ObserveSection()

  def flat(self) -> dict[str, bool | int | float | str]:
    """All fields in schema order, with their values as YAML scalars."""
    return {key: value for section in self.model_dump(mode="json").values() for key, value in section.items()}

  def with_values(self, **values: Any) -> Config:
    """Returns a copy in which these keys, of any section, have other values. The values are not validated."""
    changed = {}
    for name, section in self:
      of_section = {key: value for key, value in values.items() if key in type(section).model_fields}
      changed[name] = section.model_copy(update=of_section)
    return self.model_copy(update=changed)

  @property
  def run_directory(self) -> str:
    """{base_output_directory}/{run_name}, local (with ~ expanded) or gs://."""
    return f"{os.path.expanduser(self.run.base_output_directory).rstrip('/')}/{self.run.run_name}"
