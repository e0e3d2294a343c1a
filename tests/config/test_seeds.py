"""The commands of the guides that people come from: every key has its meaning here or is refused with the reason."""

from __future__ import annotations

import re

import pytest

from trainer.config import ConfigError, load
from trainer.config.keys import all_keys
from trainer.config.maxtext import _PREFIXES, _REASONS

ELASTIC_GUIDE = """
base_output_directory=gs://my-bucket/runs run_name=elastic-qwen3-20260101-000000 model_name=qwen3-0.6b
dataset_type=synthetic per_device_batch_size=1 max_target_length=2048 attention=flash remat_policy=full steps=5000
enable_checkpointing=true checkpoint_period=100 enable_single_controller=True elastic_enabled=true
elastic_timeout_seconds=300 elastic_max_retries=10
"""
PATHWAYS_GUIDE = """
base_output_directory=gs://my-bucket per_device_batch_size=4 enable_checkpointing=false remat_policy=full
global_parameter_scale=8 steps=50 max_target_length=2048 use_iota_embed=true reuse_example_batch=1
dataset_type=synthetic attention=flash gcs_metrics=True enable_pathways_goodput=True run_name=pathways-me
"""
EMERGENCY_GUIDE = """
base_output_directory=gs://my-bucket/out dataset_path={data} steps=120 per_device_batch_size=6
enable_checkpoint_cloud_logger=True checkpoint_period=100 enable_emergency_checkpoint=True local_checkpoint_period=20
local_checkpoint_directory={ramdisk}
"""
EMERGENCY_FLAGS = """
enable_checkpointing=True async_checkpointing=True enable_single_replica_ckpt_restoring=True enable_autocheckpoint=True
"""


@pytest.mark.usefixtures("gcsfs")
@pytest.mark.parametrize("command", [ELASTIC_GUIDE, PATHWAYS_GUIDE, EMERGENCY_GUIDE, EMERGENCY_GUIDE + EMERGENCY_FLAGS])
def test_the_guides_commands_load_and_every_key_arrives(command, tmp_path):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "a.txt").write_text("text")
  arguments = command.format(data=tmp_path / "data", ramdisk=tmp_path / "ramdisk").split()
  flat = load(["configs/base.yml", *arguments]).flat()
  for argument in arguments:
    name, _, text = argument.partition("=")
    default = all_keys()[name].default
    assert str(flat[name]).lower() == (str(float(text)) if isinstance(default, float) else text.lower())


@pytest.mark.usefixtures("gcsfs")
def test_the_pathways_guides_model_is_eight_times_as_large():
  model = load(["configs/base.yml", *PATHWAYS_GUIDE.split()]).model
  assert (model.num_query_heads, model.mlp_dim) == (16, 3072)
  assert (model.emb_dim, model.num_decoder_layers) == (1024, 16)


REFUSED = """
hardware=cpu skip_jax_distributed_system=true enable_goodput_recording=true monitor_goodput=true packing=true
ici_expert_parallelism=2 dataset_name=c4/en hf_path=allenai/c4 hf_access_token=x grain_train_files=a
cosine_learning_rate_final_fraction=0.1 decoder_block=llama2 enable_multi_tier_checkpointing=true
multi_tier_checkpointing_backup_interval_minutes=30 load_parameters_path=x metrics_file=m.txt compiled_trainstep_file=x
logits_dot_in_fp32=true sa_block_q=512 num_experts=8 ici_sequence_parallelism=2 save_checkpoint_on_completion=true
adamw_mask=x skip_step_on_spikes=true use_vertex_tensorboard=true checkpoint_storage_use_zarr3=true rope_use_scale=true
grain_use_elastic_iterator=true mtc_data_parallelism=2 collect_stack_trace=true enable_dropout=false
use_qwix_quantization=true
"""


@pytest.mark.parametrize("argument", REFUSED.split())
def test_maxtext_keys_without_meaning_are_refused_with_a_reason(argument):
  with pytest.raises(ConfigError) as caught:
    load(["configs/base.yml", argument])
  first, reason = str(caught.value).splitlines()
  assert "has no meaning here" in first
  assert len(reason) > 20


def test_the_refusals_name_only_keys_that_exist():
  words = {word for text in [*_REASONS.values(), *_PREFIXES.values()] for word in re.findall(r"\w+_\w+", text)}
  not_keys = {"base_output_directory", "run_name", "dcn_", "ici_", "JAX_PLATFORMS", "XLA_FLAGS", "xla_dump_to"}
  not_keys |= {"ici_data", "ici_fsdp"}
  assert words - not_keys <= all_keys().keys()
  assert not _REASONS.keys() & all_keys().keys()
  assert not [key for key in all_keys() if key.startswith(tuple(_PREFIXES))]
