"""Combinations of keys that cannot work are refused at the start; similar combinations that work are accepted."""

from __future__ import annotations

import re

import pytest

from trainer.config import ConfigError, load

ELASTIC = ["elastic_enabled=true", "num_slices=3"]
PROCESSES = [*ELASTIC, "cluster=multiprocess"]
EMERGENCY = ["enable_emergency_checkpoint=true", "local_checkpoint_directory=ramdisk", "local_checkpoint_period=5"]

REFUSED = [
  (["allow_config_change=dtype,data_shufle_seed"], "Did you mean data_shuffle_seed? Possible names: data, "),
  (["allow_config_change=learning_rate"], "no resume is refused because of learning_rate"),
  (["allow_config_change=per_device_batch_size"], "Use global_batch_size, which is compared instead"),
  (["rope_max_timescale=1e39"], "rope_max_timescale=1e+39: is not a number of float32"),
  (["base_emb_dim=2000000000"], "base_emb_dim must be at least 1 and at most 131072"),
  (["base_emb_dim=131072", "base_mlp_dim=16777216", "base_num_kv_heads=8"], "the model has 5.3e+13 parameters"),
  (["max_target_length=1048576", "per_device_batch_size=4096"], "micro-batch has more than 2147483647 tokens"),
  (["global_parameter_scale=6"], "must be a power of two"),
  (["base_num_query_heads=6", "base_num_kv_heads=4"], "must be a multiple of the number of key/value heads"),
  (["head_dim=33"], "must be even"),
  (["query_proj=device"], "custom_remat=query_proj=device: has an effect only with remat_policy=custom"),
  (["remat_policy=custom", "custom_remat=qury_proj=device"], "Did you mean query_proj"),
  (["wsd_decay_steps_fraction=.2"], "only with lr_schedule_type=wsd, and it is cosine"),
  (["opt_type=sgd", "adam_b2=.5"], "only with opt_type=adamw or muon, and it is sgd"),
  (["model_name=llama3-8b", "max_target_length=8193"], "model llama3-8b allows at most 8192"),
  (["tokenizer_path=t.json"], "no effect with tokenizer_type=byte"),
  (["eos_token=</s>"], "eos_token=</s>: has no effect without a tokenizer file"),
  (["eval_fraction=1"], "nothing to train on"),
  (["learning_rate_schedule_steps=0"], "must be positive"),
  (["lr_schedule_type=wsd", "warmup_steps_fraction=0.6", "wsd_decay_steps_fraction=0.5"], "exceed the schedule"),
  (["adam_b2=1"], "must be below 1"),
  (["elastic_slow_factor=0.9"], "Use more than 1, or 0."),
  (["cluster=multiprocess", "enable_single_controller=true"], "contradicts cluster=multiprocess"),
  (["ici_tensor_parallelism=-1"], "ici_fsdp_parallelism and ici_tensor_parallelism are -1"),
  (["num_slices=3", "dcn_data_parallelism=2"], "dcn_data_parallelism=2: the product 2 must equal the 3 slices"),
  (["devices_per_slice=8", "ici_tensor_parallelism=3"], "the product 3 must divide the 8 devices per slice"),
  (["devices_per_slice=8", "ici_fsdp_parallelism=2", "ici_data_parallelism=2"], "must equal the 8 devices per slice"),
  (["devices_per_slice=4", "per_device_batch_size=0.3"], "1.2 examples per slice, which must be whole"),
  (["ici_expert_parallelism=2"], "must divide num_experts=1, and a dense model"),
  (["devices_per_slice=4", "per_device_batch_size=0.5"], "do not split over replicas x ici_fsdp x ici_expert = 4"),
  (["ici_tensor_parallelism=8"], "base_num_kv_heads=4: does not split over the 8 ways of the tensor axis"),
  (["ici_context_parallelism=3"], "max_target_length=1024: does not split over the 3 ways of the context axis"),
  (["devices_per_slice=6"], "base_emb_dim=512: does not split over the 6 ways of the fsdp axis"),
  (["enable_emergency_checkpoint=true"], "needs local_checkpoint_directory"),
  ([*EMERGENCY, "enable_checkpointing=false"], "needs enable_checkpointing=true"),
  ([EMERGENCY[0], "local_checkpoint_directory=gs://bucket/x", EMERGENCY[2]], "must be a folder of this machine"),
  (["local_checkpoint_period=5"], "no effect without enable_emergency_checkpoint"),
  (["checkpoint_keep_best=2"], "needs evaluations to compare"),
  (["quantization=int8", "num_experts=4", "num_experts_per_tok=2"], "matmuls of experts have no 8-bit form"),
  ([*ELASTIC, "elastic_min_slice_count=0"], "must be at least 1"),
  (["num_slices=2", "witness_period=8", "dcn_fsdp_parallelism=2"], "must be 1 with a witness, because"),
  (["witness_period=8", "compile_xla_flags=--xla_gpu_deterministic_ops=false"], "lets each slice compute others"),
  ([*ELASTIC, "elastic_min_slice_count=4"], "is more than the 3 slices"),
  ([*ELASTIC, "dcn_data_parallelism=3", "elastic_min_slice_count=2"], "could never work"),
  ([*ELASTIC, "dcn_fsdp_parallelism=3"], "a slice must hold the whole state to survive alone"),
  ([*ELASTIC, "snapshot_period=-1", "enable_checkpointing=false"], "needs enable_checkpointing=true"),
  ([*PROCESSES, "snapshot_period=5"], "snapshot_period=5: has no effect where each slice is a process"),
  (["fault_injection=slice_down@12:1, slice_up@30:1"], "slice_down, slice_up would only end a run that is not elastic"),
  ([*ELASTIC, "fault_injection=slice_dwn@12:1"], "slice_down, slice_up, hang or ckpt_kill"),
  (["fault_injection=ckpt_kill@50", "enable_checkpointing=false"], "interrupts a checkpoint"),
  (["compile_xla_flags=--xla_tpu_enable_x"], "--xla_tpu_enable_x is not of the form --xla_name=value"),
  (["compile_xla_flags=--xla_a=1 xla_a=2"], "xla_a=2 is given twice"),
  (["compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=4095"], "must be a whole number of at least 4096"),
  (["local_steps=30"], "checkpoint_period=1000: is no multiple of local_steps=30"),
  (["local_steps=30"], "Use checkpoint_period=990 or 1020"),
  (["local_steps=20", "eval_interval=5"], "Use eval_interval=20."),
  (["local_steps=20", *EMERGENCY], "Use local_checkpoint_period=20."),
  (["local_steps=20", "witness_period=20"], "a second slice would compute all steps of a replica again"),
  (["outer_momentum=0.9", "fault_injection=flip_weight@5:1"], "flip_weight@5:1: with local_steps, a second slice"),
  (["outer_momentum=1"], "outer_momentum must be at least 0 and below 1"),
  (["diloco_sync_period=20", "local_steps=10"], "local_steps=10 (command line) is the same key with another value"),
  (
    ["enable_diloco=false", "local_steps=10"],
    "diloco_sync_period=1 (enable_diloco=false, command line): local_steps=10",
  ),
  (["num_diloco_fragments=3"], "one exchange of all weights"),
  (["dcn_diloco_parallelism=3"], "Set num_slices, or shares_per_slice"),
  (["communication_overlapping_alpha=0.5"], "one exchange of all weights"),
  (["profiler=xplane", "steps=5"], "do not fit in steps=5"),
  (["eval_interval=5", "eval_steps=0"], "no effect with eval_steps=0"),
]

ACCEPTED = [
  ["local_steps=30", "checkpoint_period=90", "eval_interval=60", "cluster=multiprocess"],
  ["local_steps=30", "enable_checkpointing=false"],
  ["allow_config_change=data, dtype,,global_batch_size "],
  ["query_proj=device", "remat_policy=custom"],
  ["model_name=llama3-8b", "max_target_length=8192"],
  ["ici_tensor_parallelism=-1", "ici_fsdp_parallelism=2"],
  ["num_slices=4", "dcn_data_parallelism=2", "dcn_fsdp_parallelism=2", "ici_data_parallelism=1"],
  ["devices_per_slice=8", "ici_tensor_parallelism=2", "ici_context_parallelism=2"],
  ["devices_per_slice=4", "per_device_batch_size=0.25", "ici_tensor_parallelism=-1", "ici_fsdp_parallelism=1"],
  ["per_device_batch_size=0.3"],
  EMERGENCY,
  ["checkpoint_keep_best=2", "eval_interval=5"],
  [*ELASTIC, "elastic_min_slice_count=1"],
  [*ELASTIC, "enable_checkpointing=false"],
  [*ELASTIC, "fault_injection=slice_down@12:1, slice_up@30:1"],
  ["fault_injection=ckpt_kill@50"],
  ["profiler=xplane", "steps=6"],
]


@pytest.mark.parametrize(("keys", "words"), REFUSED, ids=[" ".join(keys) for keys, _ in REFUSED])
def test_refused(keys, words):
  with pytest.raises(ConfigError) as caught:
    load(["configs/base.yml", *keys])
  message = str(caught.value)
  assert words in message
  most = 4 if not re.match(r"\d+ mistakes", message) else 6
  assert 2 <= len(message.splitlines()) <= most, "a message has the remedy on a line of its own"


@pytest.mark.parametrize("keys", ACCEPTED, ids=" ".join)
def test_accepted(keys):
  load(["configs/base.yml", *keys])
