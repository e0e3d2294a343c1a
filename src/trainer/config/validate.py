"""Checks between keys, before any device is touched or file written. Each message has value, rule and remedy."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container, Iterator

from pydantic import BaseModel

from trainer.config import compiler_flags, resume, rules
from trainer.config.counts import examples_per_slice, parameter_count, valid_batch_sizes
from trainer.config.errors import ConfigError, Problems, did_you_mean, shorten
from trainer.config.faults import RandomFaults
from trainer.config.faults import parse as parse_faults
from trainer.config.schema import (
  ACTIVATIONS,
  OPTIMIZER_KEYS,
  SERVICES,
  CheckpointSection,
  ClusterSection,
  Config,
  DataSection,
  ElasticSection,
  ModelSection,
  ObserveSection,
  OptimizerSection,
  ParallelismSection,
  Section,
  listed,
)

SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of float32
MOST_PARAMETERS = 10**13  # 25 times the largest file of configs/models
MOST_TOKENS = 2**31 - 1  # of a device's micro-batch: XLA indexes with 32 bits
_ROPE_SCALING = "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_position_embeddings"

# (a key, the values with which other keys have an effect, those keys). Switches of whole features are not listed: a
# user who turns checkpoints off for an hour must not have to remove all their keys. (elastic_enabled is: a minimum of
# slices without it is probably a mistake.)
EFFECTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
  ("remat_policy", ("custom",), "custom_remat"),
  ("rope_type", ("llama3",), _ROPE_SCALING),
  ("lr_schedule_type", ("wsd",), "wsd_decay_steps_fraction"),
  ("lr_schedule_type", ("cosine", "wsd"), "learning_rate_final_fraction"),
  ("dataset_type", ("grain", "synthetic"), "grain_train_files grain_eval_files grain_dataset grain_file_type"),
  ("dataset_type", ("grain", "synthetic"), "grain_train_mixture_config_path"),
  ("dataset_type", ("tfds", "hf", "synthetic"), "train_split eval_split"),
  ("dataset_type", ("grain", "tfds", "hf", "synthetic"), "train_data_columns"),
  ("dataset_type", ("text", "synthetic"), "eval_dataset_path eval_fraction"),
  ("dataset_type", ("text", "tfds", "hf", "synthetic"), "dataset_path"),
  *(
    ("opt_type", tuple(name for name, keys in OPTIMIZER_KEYS.items() if key in keys), key)
    for key in OPTIMIZER_KEYS["adamw"]
  ),
)


def check(config: Config, problems: Problems) -> None:
  """Adds to `problems` every combination of values that cannot work or can have no effect."""
  problems.add(_allow_config_change(config.run.allow_config_change))
  with problems.collect():
    compiler_flags.parse(config.run.compile_xla_flags)
  problems.add(_representable(config.model))
  problems.add(_representable(config.optimizer))
  problems.add(_model(config.model))
  problems.add(_effects(config.model))
  problems.add(_data(config.data, config.model))
  problems.add(_effects(config.data))
  problems.add(_optimizer(config.optimizer))
  problems.add(_effects(config.optimizer))
  problems.add(_cluster(config.cluster))
  problems.add(_exchange(config.elastic))
  problems.add(_witness(config.elastic, config.run.compile_xla_flags))
  problems.add(_checkpoint(config.checkpoint, config.observe))
  with problems.collect():
    problems.add(_faults(config.elastic, config.checkpoint))
  problems.add(_observe(config.observe, config.data, config.run.steps))
  parallelism = [*_parallelism(config.parallelism, config.cluster, config.model)]
  problems.add(parallelism)
  if parallelism:
    return  # the rules below compute with these sizes
  if config.cluster.cluster == "multiprocess":
    problems.add(rules.multiprocess_conflicts(config.elastic))
  problems.add(_local_steps(config))
  sizes = [*_elastic(config.elastic, config.cluster, config.parallelism, config.checkpoint)]
  sizes += _batch(config.data, config.parallelism, config.cluster)
  problems.add(sizes or _shards(config))


def check_switch(config: Config, given: Container[str]) -> None:
  """Raises ConfigError if elastic_enabled was forgotten. given: the keys that have a value. A user who turns a feature
  off for an hour, with elastic_enabled=false, need not remove its keys."""
  least = config.elastic.elastic_min_slice_count
  if least != -1 and not config.elastic.elastic_enabled and "elastic_enabled" not in given:
    raise ConfigError(
      f"elastic_min_slice_count={least}: has an effect only with elastic_enabled=true, which is not given.\n"
      "Add elastic_enabled=true, or remove elastic_min_slice_count."
    )


def _representable(section: Section) -> Iterator[str]:
  """The devices compute in float32, in which other numbers become 0 or infinity."""
  for name in type(section).model_fields:
    value = getattr(section, name)
    if isinstance(value, float) and value and not SMALLEST <= abs(value) <= LARGEST:
      yield (
        f"{name}={value:g}: is not a number of float32, which has {SMALLEST:g} to {LARGEST:g}.\n"
        f"Choose {name} within this range, or 0 where 0 is allowed."
      )


def _allow_config_change(allowed: str) -> Iterator[str]:
  """Every name can be allowed. Checked at every start: otherwise a typo would be found days later, at a resume."""
  given = f"allow_config_change={shorten(allowed)}:"
  for name in listed(allowed):
    if name in resume.CHANGES_STATE:
      yield (
        f"{given} with another {name} the checkpoint's arrays do not fit, so this cannot be allowed.\n"
        f"Choose another run_name to start a new run, or remove {name} here."
      )
    elif name not in resume.ALLOWABLE:
      judge = resume.JUDGED_BY.get(name)
      hint = f"Use {judge}, which is compared instead. " if judge else did_you_mean(name, resume.ALLOWABLE)
      yield (
        f"{given} no resume is refused because of {shorten(name)}.\n"
        f"{hint}Possible names: {', '.join(sorted(resume.ALLOWABLE))}."
      )


def _experts(model: ModelSection) -> Iterator[str]:
  if model.quantization and model.num_experts > 1:
    yield (
      f"quantization={model.quantization}, num_experts={model.num_experts}: the matmuls of experts have no 8-bit form, "
      'because quantizing their rows and weights takes longer than 8-bit matmuls save.\nSet quantization="".'
    )
  if model.num_experts_per_tok > model.num_experts:
    yield (
      f"num_experts_per_tok={model.num_experts_per_tok}: must be at most num_experts={model.num_experts}.\n"
      "Lower it or raise num_experts."
    )
  layers = range(model.num_decoder_layers)
  if outside := [layer for layer in model.dense_layers if layer not in layers]:
    yield (
      f"mlp_only_layers={shorten(model.mlp_only_layers)}: {len(outside)} of these are no layers of this model.\n"
      f"Give numbers from 0 to {len(layers) - 1}, separated by commas."
    )
  sparse = [layer for layer in layers if model.has_experts(layer)]
  if model.num_experts > 1 and not sparse:
    yield (
      f"num_experts={model.num_experts}: with decoder_sparse_step={model.decoder_sparse_step} and mlp_only_layers="
      f"{model.mlp_only_layers} no layer has experts.\nSet num_experts=1 for a dense model."
    )
  if model.scan_layers and model.has_unlike_layers:
    yield (
      "scan_layers=true: with this decoder_sparse_step or mlp_only_layers some layers have experts and others have "
      "not, and a scan needs equal layers.\nSet scan_layers=false."
    )


def _custom_remat(model: ModelSection) -> Iterator[str]:
  for name, choice in model.activations.items():
    if name not in ACTIVATIONS or choice not in ("remat", "device", "offload"):
      near = did_you_mean(name, ACTIVATIONS) if name not in ACTIVATIONS else ""
      yield (
        f"custom_remat: {shorten(name)}={shorten(choice)} is not one of {', '.join(ACTIVATIONS)} with remat, device or "
        f"offload.\n{near}Write for example custom_remat=query_proj=device,mlpwo=offload."
      )


def _model(model: ModelSection) -> Iterator[str]:
  scale = model.global_parameter_scale
  if scale & (scale - 1):
    below = 1 << (scale.bit_length() - 1)
    yield f"global_parameter_scale={scale}: must be a power of two.\nUse {below} or {2 * below}."
  elif (count := parameter_count(model)) > MOST_PARAMETERS:
    yield (
      f"base_emb_dim={model.base_emb_dim}, base_mlp_dim={model.base_mlp_dim}, "
      f"base_num_decoder_layers={model.base_num_decoder_layers}, vocab_size={model.vocab_size}: the model has "
      f"{count:.1e} parameters, and at most {MOST_PARAMETERS:.0e} are allowed.\n"
      f"Lower them or global_parameter_scale={scale}."
    )
  yield from rules.heads_share(model.base_num_query_heads, model.base_num_kv_heads)
  if model.head_dim % 2:
    yield (f"head_dim={model.head_dim}: must be even, because RoPE rotates pairs of values.\nUse {model.head_dim + 1}.")
  yield from _custom_remat(model)
  yield from _experts(model)
  if model.rope_type == "llama3" and model.rope_high_freq_factor <= model.rope_low_freq_factor:
    yield (
      f"rope_high_freq_factor={model.rope_high_freq_factor:g}: must be above rope_low_freq_factor="
      f"{model.rope_low_freq_factor:g}.\nUse 4 and 1, as Llama 3 does."
    )


def _effects(section: BaseModel) -> Iterator[str]:
  """Refuses a value other than the default for a key of this section that another key disables."""
  for choice, needed, names in EFFECTS:
    if getattr(section, choice, needed[0]) in needed:
      continue
    wanted = f"{choice}={' or '.join(needed)}"
    for name in names.split():
      value = getattr(section, name)
      if value != type(section).model_fields[name].default:
        yield (
          f"{name}={value}: has an effect only with {wanted}, and it is {getattr(section, choice)}.\n"
          f"Use {wanted}, or remove {name}."
        )


def _data(data: DataSection, model: ModelSection) -> Iterator[str]:
  if data.max_target_length > model.max_position_embeddings:
    yield (
      f"max_target_length={data.max_target_length}: model {model.model_name} allows at most "
      f"{model.max_position_embeddings} (max_position_embeddings).\nUse a shorter max_target_length."
    )
  if data.per_device_batch_size * data.max_target_length > MOST_TOKENS:
    yield (
      f"per_device_batch_size={data.per_device_batch_size:g}, max_target_length={data.max_target_length}: a device's "
      f"micro-batch has more than {MOST_TOKENS} tokens.\nLower one of them, and raise gradient_accumulation_steps."
    )
  yield from data.mistakes()
  if data.grain_train_mixture_config_path:
    if name := next((key for key in ("grain_train_files", "grain_dataset") if getattr(data, key)), ""):
      yield f"grain_train_mixture_config_path: excludes {name}.\nName these data in the mixture's file."
    if data.tokenizer_type == "bpe" and not data.tokenizer_path:
      yield (
        "tokenizer_type=bpe: no tokenizer is trained on a mixture, whose sources must share one.\n"
        "Set tokenizer_path to a tokenizers JSON file."
      )


def _optimizer(optimizer: OptimizerSection) -> Iterator[str]:
  if optimizer.learning_rate_schedule_steps == 0:
    yield "learning_rate_schedule_steps=0: must be positive, or -1 for the value of steps.\nUse -1."
  share = optimizer.warmup_steps_fraction + optimizer.wsd_decay_steps_fraction
  if optimizer.lr_schedule_type == "wsd" and share > 1:
    yield (
      f"warmup_steps_fraction={optimizer.warmup_steps_fraction:g}, wsd_decay_steps_fraction="
      f"{optimizer.wsd_decay_steps_fraction:g}: together they exceed the schedule.\nLower them to a sum of at most 1."
    )
  for name in ("adam_b1", "adam_b2"):
    if getattr(optimizer, name) == 1:
      yield f"{name}=1: must be below 1, or the moment would never change.\nUse 0.9 to 0.999."


def _local_steps(config: Config) -> Iterator[str]:
  """Between the ends of rounds there is no state of the run, so whatever needs one comes at the end of a round."""
  optimizer, saves, elastic = config.optimizer, config.checkpoint, config.elastic
  if not optimizer.has_local_steps:
    return
  periods = {"eval_interval": max(config.observe.eval_interval, 0)}
  if saves.enable_checkpointing:
    periods["checkpoint_period"] = saves.checkpoint_period
    periods["local_checkpoint_period"] = saves.local_checkpoint_period * saves.enable_emergency_checkpoint
  for name, period in periods.items():
    if rest := period % optimizer.local_steps:
      near = [value for value in (period - rest, period - rest + optimizer.local_steps) if value]
      yield (
        f"{name}={period}: is no multiple of local_steps={optimizer.local_steps}, and the slices have a common state "
        f"only at the end of a round.\nUse {name}={' or '.join(map(str, near))}."
      )
  flips = any(getattr(fault, "is_flip", False) for fault in parse_faults(elastic.fault_injection))
  if elastic.witness_period or flips:
    given = (
      f"fault_injection={shorten(elastic.fault_injection)}" if flips else f"witness_period={elastic.witness_period}"
    )
    yield (
      f"{given}: with local_steps, a second slice would compute all steps of a replica again, so there is no witness.\n"
      "Set witness_period=0 and rehearse no flips, or set local_steps=1."
    )


def _cluster(cluster: ClusterSection) -> Iterator[str]:
  if cluster.enable_single_controller and cluster.cluster == "multiprocess":
    yield (
      "enable_single_controller=true: contradicts cluster=multiprocess, where every slice has its own process.\n"
      "Use cluster=pathways or simulated, or enable_single_controller=false."
    )
  if cluster.cluster_standin and cluster.cluster != "pathways":
    yield (
      f"cluster_standin={cluster.cluster_standin}: is a stand-in for Pathways, but cluster={cluster.cluster}.\n"
      "Set cluster=pathways, or remove cluster_standin."
    )
  if cluster.cluster_standin and not re.fullmatch(r"[1-9][0-9]{0,2}x[1-9][0-9]{0,2}", cluster.cluster_standin):
    yield (
      f"cluster_standin={shorten(cluster.cluster_standin)}: must be the number of slices and of devices per slice.\n"
      "Write it like 3x4."
    )


def _parallelism(parallelism: ParallelismSection, cluster: ClusterSection, model: ModelSection) -> Iterator[str]:
  ways = parallelism.ici_expert_parallelism
  if ways > 1 and (model.num_experts == 1 or model.num_experts % ways):
    yield (
      f"ici_expert_parallelism={ways}: must divide num_experts={model.num_experts}, and a dense model (num_experts=1) "
      "needs 1.\nUse ici_fsdp_parallelism for devices that share no experts."
    )
  for group, total in (("dcn", cluster.num_slices), ("ici", cluster.devices_per_slice)):
    yield from rules.group_fits(rules.group_sizes(parallelism, group), group, total)


def _batch(data: DataSection, parallelism: ParallelismSection, cluster: ClusterSection) -> Iterator[str]:
  """A slice's share of a micro-batch is whole, and splits over the batch axes inside the slice."""
  devices = cluster.devices_per_slice
  if not devices:
    return
  examples = examples_per_slice(data.per_device_batch_size, devices)
  if examples == 0:
    yield (
      f"per_device_batch_size={data.per_device_batch_size:g}: times devices_per_slice={devices} it is "
      f"{data.per_device_batch_size * devices:g} examples per slice, which must be whole.\n"
      f"Use {valid_batch_sizes(devices)}."
    )
    return
  sizes = rules.axis_sizes(parallelism, "ici", devices)
  shards = sizes["data"] * sizes["fsdp"]
  if examples % shards:
    yield (
      f"per_device_batch_size={data.per_device_batch_size:g}: the {examples} examples of a slice do not split "
      f"over replicas x ici_fsdp x ici_expert = {shards}.\nRaise per_device_batch_size, ici_tensor_parallelism or "
      "ici_context_parallelism."
    )


def _shards(config: Config) -> Iterator[str]:
  """The sizes that an axis must split, where the keys alone determine the size of the axis."""
  dcn = rules.axis_sizes(config.parallelism, "dcn", config.cluster.num_slices)
  ici = rules.axis_sizes(config.parallelism, "ici", config.cluster.devices_per_slice)
  model = config.model
  for axis, name, size in (
    ("tensor", "base_num_query_heads", model.num_query_heads),
    ("tensor", "base_num_kv_heads", model.num_kv_heads),
    ("tensor", "base_mlp_dim", model.mlp_dim),
    ("tensor", "base_moe_mlp_dim", model.moe_mlp_dim if model.num_experts > 1 else 0),
    ("fsdp", "base_emb_dim", model.emb_dim),
    ("context", "max_target_length", config.data.max_target_length),
  ):
    scaled = model.global_parameter_scale > 1 and name.startswith("base_")
    yield from rules.splits(name, size, axis, dcn[axis] * ici[axis], scaled=scaled)


def _checkpoint(checkpoint: CheckpointSection, observe: ObserveSection) -> Iterator[str]:
  if checkpoint.enable_emergency_checkpoint:
    if not checkpoint.enable_checkpointing:
      yield (
        "enable_emergency_checkpoint=true: needs enable_checkpointing=true.\n"
        "Set it, or set enable_emergency_checkpoint=false."
      )
    yield from rules.emergency_tier(checkpoint)
  else:
    for name in ("local_checkpoint_directory", "local_checkpoint_period"):
      value = getattr(checkpoint, name)
      if value:
        yield (
          f"{name}={value}: has no effect without enable_emergency_checkpoint.\n"
          f"Add enable_emergency_checkpoint=true, or remove {name}."
        )
  for name, value in (
    ("checkpoint_keep_best", checkpoint.checkpoint_keep_best),
    ("target_eval_loss", observe.target_eval_loss),
  ):
    if value and (observe.eval_interval < 1 or observe.eval_steps == 0):
      yield f"{name}={value:g}: needs evaluations to compare.\nSet eval_interval above 0 and eval_steps above 0."


def _elastic(
  elastic: ElasticSection, cluster: ClusterSection, parallelism: ParallelismSection, checkpoint: CheckpointSection
) -> Iterator[str]:
  least = elastic.elastic_min_slice_count
  if least == 0:
    yield "elastic_min_slice_count=0: must be at least 1, or -1 for all slices.\nUse 1."
  if not elastic.elastic_enabled and not elastic.witness_period:
    return
  key, reason = ("elastic_enabled=true", "survive") if elastic.elastic_enabled else ("a witness", "be checked")
  if (size := parallelism.dcn_fsdp_parallelism) != 1:
    yield (
      f"dcn_fsdp_parallelism={size}: must be 1 with {key}, because a slice must hold the whole state to {reason} "
      "alone.\nUse dcn_fsdp_parallelism=1 and shard inside the slice with ici_fsdp_parallelism."
    )
  if not elastic.elastic_enabled:
    return
  replicas = parallelism.dcn_data_parallelism
  slices = cluster.num_slices or max(replicas, 0)
  if slices and least > slices:
    yield f"elastic_min_slice_count={least}: is more than the {slices} slices of the run.\nUse at most {slices}."
  if replicas != -1 and 0 < least < replicas:
    yield (
      f"dcn_data_parallelism={replicas}: fixes the slice count, so elastic_min_slice_count={least} could never work.\n"
      "Remove dcn_data_parallelism, which follows the slices alive."
    )
  if elastic.snapshot_period == -1 and not checkpoint.enable_checkpointing:
    yield (
      "snapshot_period=-1: needs enable_checkpointing=true, or a recovery starts from step 0.\n"
      "Use snapshot_period=0, or turn checkpoints on."
    )


def _exchange(elastic: ElasticSection) -> Iterator[str]:
  if 0 < (factor := elastic.elastic_slow_factor) <= 1:
    yield f"elastic_slow_factor={factor:g}: would replace slices that are not slow.\nUse more than 1, or 0."
  if "/" in (network := elastic.exchange_network):  # no network interface has such a name
    try:
      ipaddress.ip_network(network, strict=False)
    except ValueError as error:
      yield f"exchange_network={shorten(network)}: {error}.\nGive a subnet such as 10.1.0.0/16, or an interface."


def _witness(elastic: ElasticSection, flags: str) -> Iterator[str]:
  if elastic.witness_period and re.search("xla_gpu_deterministic_ops=(false|0)", flags.lower()):
    yield (
      f"witness_period={elastic.witness_period}: compares bits, and compile_xla_flags lets each slice compute others.\n"
      "Remove xla_gpu_deterministic_ops=false, or set witness_period=0."
    )


def _faults(elastic: ElasticSection, checkpoint: CheckpointSection) -> Iterator[str]:
  """Refuses faults outside the grammar (ConfigError), and faults from which the run could not recover."""
  text = shorten(elastic.fault_injection)
  faults = parse_faults(elastic.fault_injection)
  kinds = dict.fromkeys("random" if isinstance(fault, RandomFaults) else fault.kind for fault in faults)
  of_slices = [kind for kind in kinds if kind != "ckpt_kill" and not kind.startswith("flip_")]
  if of_slices and not elastic.elastic_enabled:
    yield (
      f"fault_injection={text}: {', '.join(of_slices)} would only end a run that is not elastic.\n"
      "Add elastic_enabled=true."
    )
  if "ckpt_kill" in kinds and not checkpoint.enable_checkpointing:
    yield f"fault_injection={text}: ckpt_kill interrupts a checkpoint.\nAdd enable_checkpointing=true."


def _observe(observe: ObserveSection, data: DataSection, steps: int) -> Iterator[str]:
  last = observe.skip_first_n_steps_for_profiler + observe.profiler_steps
  if observe.profiler and last > steps:
    yield (
      f"profiler={observe.profiler}: its {observe.profiler_steps} steps after "
      f"{observe.skip_first_n_steps_for_profiler} skipped ones do not fit in steps={steps}.\nUse fewer profiler_steps."
    )
  for service in listed(observe.services):
    if service not in SERVICES:
      yield (
        f"services={shorten(observe.services)}: {shorten(service)} is not one of {', '.join(SERVICES)}.\n"
        f"{did_you_mean(service, SERVICES)}Write for example services=tensorboard,wandb, or services= for none."
      )
  if observe.eval_interval == 0:
    yield "eval_interval=0: must be a number of steps, or -1 for the end only.\nUse eval_steps=0 for no evaluation."
  held_out = data.dataset_type == "synthetic" or (data.dataset_type == "text" and data.eval_fraction > 0)
  no_files = not held_out and not data.names_eval_data and not data.eval_sets
  if observe.eval_interval > 0 and (observe.eval_steps == 0 or no_files):
    no_data = "eval_fraction=0 and no eval_dataset_path" if data.dataset_type == "text" else "no evaluation data"
    reason = "eval_steps=0" if observe.eval_steps == 0 else no_data
    yield f"eval_interval={observe.eval_interval}: has no effect with {reason}.\nChange one of the two."
