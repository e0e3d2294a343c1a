"""Checks between keys, before any device or byte is touched. Each failure is one message: value, rule, remedy."""

from __future__ import annotations

import math

from trainer.config import resume
from trainer.config.counts import examples_per_slice, shares_that_are_whole
from trainer.config.errors import ConfigError, did_you_mean, shorten
from trainer.config.faults import RandomFaults
from trainer.config.faults import parse as parse_faults
from trainer.config.schema import (
  CheckpointSection,
  ClusterSection,
  Config,
  DataSection,
  ElasticSection,
  ModelSection,
  ObserveSection,
  OptimizerSection,
  ParallelismSection,
  PreflightSection,
  Section,
)

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # of float32's normal numbers
LONGEST_SIDE = 2**31 - 1  # of an array: XLA counts with 32 bits
AXES = ("data", "fsdp", "tensor", "context")
_CUSTOM_REMAT = "decoder_layer_input query_proj key_proj value_proj context out_proj mlpwi_0 mlpwi_1 mlpwo"
_ROPE_SCALING = "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_position_embeddings"

# (a key, its values with which other keys have an effect, those keys). Switches of whole features are not among them:
# who turns checkpoints off for an hour must not have to take out their keys too.
EFFECTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
  ("remat_policy", ("custom",), _CUSTOM_REMAT),
  ("rope_type", ("llama3",), _ROPE_SCALING),
  ("lr_schedule_type", ("wsd",), "wsd_decay_steps_fraction wsd_decay_style"),
  ("lr_schedule_type", ("cosine", "wsd"), "learning_rate_final_fraction"),
  ("opt_type", ("adamw", "muon"), "adam_b2 adam_eps"),
  ("opt_type", ("adamw", "muon", "sgd"), "adam_b1 mu_dtype"),
)


def check(config: Config) -> None:
  """ConfigError for the first combination of values that cannot work or can have no effect."""
  _check_allowed(config.run.allow_config_change)
  _check_representable(config.model)
  _check_representable(config.optimizer)
  _check_model(config.model)
  _check_data(config.data, config.model)
  _check_optimizer(config.optimizer)
  _check_cluster(config.cluster)
  _check_parallelism(config.parallelism, config.cluster)
  _check_batch(config.data, config.parallelism, config.cluster)
  _check_checkpoint(config.checkpoint, config.observe)
  _check_elastic(config.elastic, config.cluster, config.parallelism, config.checkpoint)
  _check_observe(config.observe, config.data, config.run.steps)
  _check_shards(config)
  _check_preflight(config.preflight)


def _check_representable(section: Section) -> None:
  """The devices compute with float32, where another number would become 0 or infinity."""
  for name in type(section).model_fields:
    value = getattr(section, name)
    if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
      raise ConfigError(
        f"{name}={value:g}: is no number of float32, which reaches from {SMALLEST:g} to {LARGEST:g}.\n"
        f"Choose {name} inside that, or 0 where it may be."
      )


def _check_allowed(allow_config_change: str) -> None:
  """At every start, not only when a resume asks for it: a typo would come out after days."""
  for name in resume.names(allow_config_change):
    given = f"allow_config_change={shorten(allow_config_change)}:"
    if name in resume.CHANGES_STATE:
      raise ConfigError(
        f"{given} with another {name} the checkpoint's arrays do not fit, so this cannot be allowed.\n"
        "Choose another run_name to start anew, or leave it out."
      )
    if name not in resume.ALLOWABLE:
      judge = resume.JUDGED_BY.get(name)
      hint = f"Use {judge}, which is compared instead. " if judge else did_you_mean(name, resume.ALLOWABLE)
      raise ConfigError(
        f"{given} no resume is refused for {shorten(name)}.\n{hint}It takes {', '.join(sorted(resume.ALLOWABLE))}."
      )


def _check_model(model: ModelSection) -> None:
  scale = model.global_parameter_scale
  if scale & (scale - 1):
    below = 1 << (scale.bit_length() - 1)
    raise ConfigError(f"global_parameter_scale={scale}: must be a power of two.\nUse {below} or {2 * below}.")
  sizes = {
    "base_emb_dim": model.emb_dim,
    "base_num_decoder_layers": model.num_decoder_layers,
    "base_mlp_dim": model.mlp_dim,
    "head_dim": model.num_query_heads * model.head_dim,
    "vocab_size": model.vocab_size,
  }
  for name, size in sizes.items():
    if size > LONGEST_SIDE:
      raise ConfigError(
        f"{name}={getattr(model, name)}: makes a weight {size} wide, and an array's side is at most {LONGEST_SIDE}.\n"
        f"Choose a smaller {name}."
      )
  if model.base_num_query_heads % model.base_num_kv_heads:
    raise ConfigError(
      f"base_num_query_heads={model.base_num_query_heads}, base_num_kv_heads={model.base_num_kv_heads}: query heads "
      "share key/value heads evenly, so the first must be a multiple of the second.\nChange one of them."
    )
  if model.head_dim % 2:
    raise ConfigError(f"head_dim={model.head_dim}: must be even, RoPE turns pairs.\nUse {model.head_dim + 1}.")
  if model.num_decoder_layers % model.scan_unroll:
    raise ConfigError(
      f"scan_unroll={model.scan_unroll}: must divide the {model.num_decoder_layers} layers.\nUse scan_unroll=1."
    )
  if model.scan_unroll > 1 and not model.scan_layers:
    raise ConfigError("scan_unroll without scan_layers has no effect.\nUse scan_layers=true, or scan_unroll=1.")
  if model.rope_type == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
    raise ConfigError(
      f"rope_high_freq_factor={model.rope_high_freq_factor:g}: must be above rope_low_freq_factor="
      f"{model.rope_low_freq_factor:g}.\nLlama 3 uses 4 and 1."
    )
  _check_effects(model)


def _check_effects(section: Section) -> None:
  """Refuses other values than the default for keys of this section that have no effect."""
  for choice, needed, names in EFFECTS:
    if getattr(section, choice, needed[0]) in needed:
      continue
    wanted = f"{choice}={' or '.join(needed)}"
    for name in names.split():
      value = getattr(section, name)
      if value != type(section).model_fields[name].default:
        raise ConfigError(
          f"{name}={value}: has an effect only with {wanted}, and it is {getattr(section, choice)}.\n"
          f"Use {wanted}, or leave {name} out."
        )


def _check_data(data: DataSection, model: ModelSection) -> None:
  if data.max_target_length > model.max_position_embeddings:
    raise ConfigError(
      f"max_target_length={data.max_target_length}: model {model.model_name} allows at most "
      f"{model.max_position_embeddings} (max_position_embeddings).\nUse a shorter max_target_length."
    )
  if data.reuse_example_batch > 1:
    raise ConfigError(
      f"reuse_example_batch={data.reuse_example_batch}: must be 0 or 1; 1 trains every step on the first batch.\n"
      "Use reuse_example_batch=1."
    )
  if data.tokenizer_path and data.tokenizer_type != "bpe":
    raise ConfigError(
      f"tokenizer_path={data.tokenizer_path}: has no effect with tokenizer_type={data.tokenizer_type}.\n"
      "Use tokenizer_type=bpe, or leave tokenizer_path out."
    )
  if data.eval_fraction == 1 and not data.eval_dataset_path:
    raise ConfigError("eval_fraction=1: leaves nothing to train on.\nUse a share below 1, such as 0.05.")


def _check_optimizer(optimizer: OptimizerSection) -> None:
  if optimizer.learning_rate_schedule_steps == 0:
    raise ConfigError("learning_rate_schedule_steps=0: must be positive, or -1 for steps.\nUse -1.")
  _check_effects(optimizer)
  share = optimizer.warmup_steps_fraction + optimizer.wsd_decay_steps_fraction
  if optimizer.lr_schedule_type == "wsd" and share > 1:
    raise ConfigError(
      f"warmup_steps_fraction={optimizer.warmup_steps_fraction:g} and wsd_decay_steps_fraction="
      f"{optimizer.wsd_decay_steps_fraction:g}: together they exceed the schedule.\nTheir sum may be at most 1."
    )
  for name in ("adam_b1", "adam_b2"):
    if getattr(optimizer, name) == 1:
      raise ConfigError(f"{name}=1: the moment would never change; it must be below 1.\nUse 0.9 to 0.999.")


def _check_cluster(cluster: ClusterSection) -> None:
  if cluster.enable_single_controller and cluster.cluster == "multiprocess":
    raise ConfigError(
      "enable_single_controller=true: contradicts cluster=multiprocess, where every slice has its own process.\n"
      "Use cluster=pathways or simulated, or enable_single_controller=false."
    )


def _sizes(parallelism: ParallelismSection, group: str) -> dict[str, int]:
  """The four sizes of a group ('ici' or 'dcn') by key; -1 stands for 'fill'."""
  return {f"{group}_{axis}_parallelism": getattr(parallelism, f"{group}_{axis}_parallelism") for axis in AXES}


def _check_parallelism(parallelism: ParallelismSection, cluster: ClusterSection) -> None:
  totals = {"dcn": ("num_slices", cluster.num_slices), "ici": ("devices_per_slice", cluster.devices_per_slice)}
  for group, (total_name, total) in totals.items():
    sizes = _sizes(parallelism, group)
    for name, size in sizes.items():
      if size == 0:
        raise ConfigError(f"{name}=0: must be a positive size, or -1 to fill.\nUse 1 for an unused axis.")
    filled = [name for name, size in sizes.items() if size == -1]
    if len(filled) > 1:
      raise ConfigError(f"{' and '.join(filled)} are -1: only one size of a group can be filled.\nSet the others.")
    product = math.prod(size for size in sizes.values() if size > 0)
    fits = total % product == 0 if filled else total == product
    if total and not fits:
      written = " x ".join(f"{name}={size}" for name, size in sizes.items() if size not in (1, -1))
      rule = "divide" if filled else "be"
      raise ConfigError(
        f"{written or f'every {group}_* size is 1'}: the product {product} must {rule} {total_name}={total}.\n"
        "Change the sizes, or set one to -1 to fill."
      )


def _check_batch(data: DataSection, parallelism: ParallelismSection, cluster: ClusterSection) -> None:
  """A slice's share of a micro-batch is whole, and splits over the batch axes inside the slice."""
  devices = cluster.devices_per_slice
  if not devices:
    return
  rows = examples_per_slice(data.per_device_batch_size, devices)
  if rows == 0:
    raise ConfigError(
      f"per_device_batch_size={data.per_device_batch_size:g}: times devices_per_slice={devices} it is "
      f"{data.per_device_batch_size * devices:g} examples per slice, which must be whole.\n"
      f"Use {shares_that_are_whole(devices)}."
    )
  inner = parallelism.ici_tensor_parallelism, parallelism.ici_context_parallelism
  outer = parallelism.ici_data_parallelism, parallelism.ici_fsdp_parallelism
  shards = math.prod(outer) if -1 in inner else devices // math.prod(inner)
  if rows % shards:
    raise ConfigError(
      f"per_device_batch_size={data.per_device_batch_size:g}: a slice's {rows} examples do not split "
      f"over ici_data x ici_fsdp = {shards}.\nRaise per_device_batch_size, ici_tensor_parallelism or "
      "ici_context_parallelism."
    )


def _check_shards(config: Config) -> None:
  """The sizes that an axis must split, where the axis's size follows from the keys alone."""
  ways = {axis: _ways(config.parallelism, config.cluster, axis) for axis in AXES}
  model = config.model
  for axis, name, size in (
    ("tensor", "base_num_query_heads", model.num_query_heads),
    ("tensor", "base_num_kv_heads", model.num_kv_heads),
    ("tensor", "base_mlp_dim", model.mlp_dim),
    ("fsdp", "base_emb_dim", model.emb_dim),
    ("context", "max_target_length", config.data.max_target_length),
  ):
    if size % ways[axis]:
      raise ConfigError(
        f"{name}={size}: does not split over the {ways[axis]} ways of the {axis} axis.\n"
        f"Choose ici_{axis}_parallelism and dcn_{axis}_parallelism so that the axis divides {size}."
      )


def _ways(parallelism: ParallelismSection, cluster: ClusterSection, axis: str) -> int:
  """Size of a mesh axis; a factor that is filled from an unknown number of devices counts as 1."""
  ways = 1
  for group, total in (("dcn", cluster.num_slices), ("ici", cluster.devices_per_slice)):
    sizes = _sizes(parallelism, group)
    size = sizes[f"{group}_{axis}_parallelism"]
    ways *= max(1, total // math.prod(s for s in sizes.values() if s > 0)) if size == -1 else size
  return ways


def _check_checkpoint(checkpoint: CheckpointSection, observe: ObserveSection) -> None:
  if checkpoint.enable_emergency_checkpoint:
    missing = {
      "enable_checkpointing=true": checkpoint.enable_checkpointing,
      "local_checkpoint_directory (a ramdisk)": checkpoint.local_checkpoint_directory,
      "a local_checkpoint_period above 0": checkpoint.local_checkpoint_period,
    }
    for needed, present in missing.items():
      if not present:
        raise ConfigError(f"enable_emergency_checkpoint=true: needs {needed}.\nAdd it, or turn the emergency tier off.")
    if "://" in checkpoint.local_checkpoint_directory:
      raise ConfigError(
        f"local_checkpoint_directory={checkpoint.local_checkpoint_directory}: must be a folder of this machine.\n"
        "Give a ramdisk or local disk; base_output_directory is the place for an object store."
      )
  else:
    for name in ("local_checkpoint_directory", "local_checkpoint_period"):
      value = getattr(checkpoint, name)
      if value:
        raise ConfigError(
          f"{name}={value}: has no effect without enable_emergency_checkpoint.\n"
          f"Add enable_emergency_checkpoint=true, or leave {name} out."
        )
  if checkpoint.checkpoint_keep_best and (observe.eval_interval < 1 or observe.eval_steps == 0):
    raise ConfigError(
      f"checkpoint_keep_best={checkpoint.checkpoint_keep_best}: needs evaluations to compare.\n"
      "Set eval_interval above 0 and eval_steps above 0."
    )


def _check_elastic(
  elastic: ElasticSection, cluster: ClusterSection, parallelism: ParallelismSection, checkpoint: CheckpointSection
) -> None:
  _check_faults(elastic.fault_injection, elastic.elastic_enabled, checkpoint.enable_checkpointing)
  least = elastic.elastic_min_slice_count
  if least == 0:
    raise ConfigError("elastic_min_slice_count=0: must be at least 1, or -1 for all slices.\nUse 1.")
  if not elastic.elastic_enabled:
    return
  for name, size in _sizes(parallelism, "dcn").items():
    if size != 1 and name != "dcn_data_parallelism":
      raise ConfigError(
        f"{name}={size}: not with elastic_enabled=true, because a slice that survives alone must hold it all.\n"
        f"Use {name}=1 and shard inside the slice with {name.replace('dcn', 'ici')}."
      )
  replicas = parallelism.dcn_data_parallelism
  slices = cluster.num_slices or max(replicas, 0)
  if slices and least > slices:
    raise ConfigError(
      f"elastic_min_slice_count={least}: is more than the {slices} slices of the run.\nUse at most {slices}."
    )
  if replicas != -1 and 0 < least < replicas:
    raise ConfigError(
      f"dcn_data_parallelism={replicas}: fixes the slice count, so elastic_min_slice_count={least} could never work.\n"
      "Use dcn_data_parallelism=-1, which follows the slices alive."
    )
  if elastic.elastic_backup_kind == "checkpoint" and not checkpoint.enable_checkpointing:
    raise ConfigError(
      "elastic_backup_kind=checkpoint: needs enable_checkpointing=true, or a recovery starts from step 0.\n"
      "Use elastic_backup_kind=snapshot, or turn checkpoints on."
    )


def _check_faults(faults: str, elastic_enabled: bool, enable_checkpointing: bool) -> None:
  """Refuses faults outside the grammar, and those that the run could not answer."""
  for fault in parse_faults(faults):
    kind = "random" if isinstance(fault, RandomFaults) else fault.kind
    if kind != "ckpt_kill" and not elastic_enabled:
      raise ConfigError(
        f"fault_injection={faults}: {kind} just ends a run that is not elastic.\nAdd elastic_enabled=true."
      )
    if kind == "ckpt_kill" and not enable_checkpointing:
      raise ConfigError(f"fault_injection={faults}: {kind} interrupts a checkpoint.\nAdd enable_checkpointing=true.")


def _check_observe(observe: ObserveSection, data: DataSection, steps: int) -> None:
  last = observe.skip_first_n_steps_for_profiler + observe.profiler_steps
  if observe.profiler and last > steps:
    raise ConfigError(
      f"profiler={observe.profiler}: its {observe.profiler_steps} steps after "
      f"{observe.skip_first_n_steps_for_profiler} skipped ones do not fit in steps={steps}.\nUse fewer profiler_steps."
    )
  if observe.eval_interval == 0:
    raise ConfigError("eval_interval=0: must be a number of steps, or -1 for the end only.\nUse eval_steps=0 for none.")
  no_files = data.dataset_type == "text" and not data.eval_dataset_path and data.eval_fraction == 0
  if observe.eval_interval > 0 and (observe.eval_steps == 0 or no_files):
    reason = "eval_steps=0" if observe.eval_steps == 0 else "eval_fraction=0 and no eval_dataset_path"
    raise ConfigError(f"eval_interval={observe.eval_interval}: has no effect with {reason}.\nChange one of the two.")


def _check_preflight(preflight: PreflightSection) -> None:
  count = preflight.compile_topology_num_slices
  if count != 1 and not preflight.compile_topology:
    raise ConfigError(
      f"compile_topology_num_slices={count}: has no effect without compile_topology.\n"
      "Add compile_topology, such as v5e-16; for simulated slices of this machine use num_slices."
    )
