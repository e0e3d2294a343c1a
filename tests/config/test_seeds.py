"""The commands of other systems' guides: every key has its meaning here or is refused with the reason."""

from __future__ import annotations

import re

import pytest

from trainer.config import ConfigError, answers, load
from trainer.config.keys import SWITCHES, all_keys
from trainer.config.schema import ACTIVATIONS, SERVICES, PreflightOptions

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


def failure(*arguments: str) -> str:
  with pytest.raises(ConfigError) as caught:
    load(["configs/base.yml", *arguments])
  return str(caught.value)


@pytest.mark.usefixtures("gcsfs")
@pytest.mark.parametrize("command", [ELASTIC_GUIDE, PATHWAYS_GUIDE, EMERGENCY_GUIDE, EMERGENCY_GUIDE + EMERGENCY_FLAGS])
def test_commands_of_the_guides_load_and_every_key_arrives(command, tmp_path):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "a.txt").write_text("text")
  arguments = command.format(data=tmp_path / "data", ramdisk=tmp_path / "ramdisk").split()
  flat = load(["configs/base.yml", *arguments]).flat()
  for argument in arguments:
    name, _, text = argument.partition("=")
    if name in SWITCHES:
      assert SWITCHES[name] in flat["services"]
      continue
    default = all_keys()[name].default
    assert str(flat[name]).lower() == (str(float(text)) if isinstance(default, float) else text.lower())


@pytest.mark.usefixtures("gcsfs")
def test_the_model_of_the_pathways_guide_is_eight_times_as_large():
  model = load(["configs/base.yml", *PATHWAYS_GUIDE.split()]).model
  assert (model.num_query_heads, model.mlp_dim) == (16, 3072)
  assert (model.emb_dim, model.num_decoder_layers) == (1024, 16)


# ---- MaxText

REFUSED = "hardware=cpu dcn_expert_parallelism=2 mesh_axes=['data'] model.emb_dim=4 --logical-axis-rules=[]"


@pytest.mark.parametrize("argument", REFUSED.split())
def test_keys_of_maxtext_without_meaning_are_refused_with_a_reason(argument):
  first, remedy = failure(argument).splitlines()
  assert "this is a key of MaxText, not of this program" in first
  assert len(remedy) > 10


def test_answers_name_only_keys_that_exist_and_hide_no_key():
  texts = [*answers.all_keys().values(), *answers.tables()["values"].values()]
  words = {word for text in texts for word in re.findall(r"[a-z]\w*_\w+", text)}
  values = {choice for key in all_keys().values() for choice in key.choices}
  words -= {"ici_", "xla_dump_to", *ACTIVATIONS, *PreflightOptions.model_fields, *SERVICES}
  assert words - values <= all_keys().keys()
  assert not [name for name in all_keys() if answers.remedy_for_key(name)]
  assert {row.partition("=")[0] for row in answers.tables()["values"]} <= all_keys().keys()


@pytest.mark.parametrize(
  ("argument", "words"),
  [
    ("remat_policy=minimal_flash", "Use remat_policy=minimal_with_context"),
    ("tokenizer_type=sentencepiece", "Use tokenizer_type=bpe with tokenizer_path=FILE"),
    ("packing=true", "Use packing=split or best_fit"),
    ("dataset_type=c4_mlperf", "Give files with dataset_type=grain grain_train_files=FILES"),
    ("max_num_checkpoints_to_keep=None", "set checkpoint_keep_period=1"),
    ("steps=-1", "learning_rate_schedule_steps=-1 then follows it"),
    ("eval_steps=-1", "Give the number of batches"),
    ("vocab_size=None", "To use the default, 32000, remove the key"),
    ("dataset_path=[a,b]", "not a list. Several text files go into one folder"),
  ],
)
def test_values_of_maxtext_without_meaning_are_refused_with_what_to_use(argument, words):
  assert words in failure(argument)


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("learning_rate_schedule_steps=-1", -1),
    ("quantization=None", ""),
    ("tokenizer_path=None", ""),
    ("remat_policy=none", "none"),
    ("sample_prompt=[a, b]", "[a, b]"),
  ],
)
def test_values_of_maxtext_for_not_set_are_accepted(argument, value):
  assert load(["configs/base.yml", argument]).flat()[argument.partition("=")[0]] == value


def test_lists_in_yaml_are_answered_by_their_key(tmp_path):
  config = tmp_path / "c.yml"
  config.write_text("mesh_axes: ['data']\ndataset_path: [a, b]\nmodel:\n  head_dim: 4\ntrainable_parameters_mask: []\n")
  with pytest.raises(ConfigError) as caught:
    load([str(config)])
  message = str(caught.value)
  assert message.startswith("4 mistakes")
  assert "mesh_axes" in message and "Sharding follows one table" in message
  assert "line 2: dataset_path holds a list or a mapping, and a key has one value" in message
  assert "line 3: model holds a list or a mapping" in message


@pytest.mark.parametrize(
  ("keys", "expected"),
  [
    (["enable_diloco=true", "checkpoint_period=72"], (36, 0.3, 0.9)),
    (["enable_diloco=true", "diloco_sync_period=10", "diloco_outer_lr=0.7"], (10, 0.7, 0.9)),
    (["diloco_sync_period=10", "--diloco_outer_momentum", "0.5"], (10, 1.0, 0.5)),
    (["enable_diloco=false", "diloco_sync_period=10"], (1, 1.0, 0.0)),
    (["enable_diloco=true", "local_steps=20", "outer_momentum=0"], (20, 0.3, 0.0)),
  ],
)
def test_keys_of_maxtext_s_diloco_are_the_keys_of_local_steps(keys, expected):
  optimizer = load(["configs/base.yml", *keys]).optimizer
  assert (optimizer.local_steps, optimizer.outer_learning_rate, optimizer.outer_momentum) == expected
