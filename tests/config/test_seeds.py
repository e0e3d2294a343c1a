"""The commands of other systems' guides: every key has its meaning here or is refused with the reason."""

from __future__ import annotations

import re

import pytest

from trainer.config import ConfigError, load
from trainer.config.answers import all_answers, answer_for, tables
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


# ---- launchers

# What the guides give to xpk, gcluster, torchrun and Ray, by the word that the answer must contain.
LAUNCHER_OPTIONS = {
  "xpk": "elastic_slices=1 max_slice_restarts=10 tpu_type=v5e-16 docker_image=x workload=w project=p zone=z "
  "ramdisk_directory=r mtc_enabled mtc_enabled=true enable_mtc mtc_gcs_bucket=b mtc_ramdisk_size=1 mtc_new_option=1 "
  "cluster_cpu_machine_type=m gke_version=1 enable_gcsfuse_csi_driver command=c force "
  "custom_pathways_proxy_server_args=a",
  "gcluster": "pathways_elastic_slices=1 pathways_max_slice_restarts=1 pathways_gcs_location=l compute_type=v6e-16 "
  "gke_mtc_enabled gke_mtc_ramdisk_dir=d base_image=i restarts=1 grace_period=30s",
  "torchrun": "nnodes=1:4 nproc_per_node=4 rdzv_id=job123 rdzv_backend=c10d rdzv_endpoint=master:29500 max_restarts=3 "
  "monitor_interval=5 standalone rdzv_last_call_timeout=5",
  "Ray": "num_workers=4 use_tpu=true topology=4x4 accelerator_type=TPU-V6E resources_per_worker=x max_failures=3 "
  "num_to_keep=2 storage_path=s ScalingConfig=x min_workers=2 max_workers=4 checkpoint_score_attribute=loss",
}


@pytest.mark.parametrize("hyphens", [False, True])
@pytest.mark.parametrize(
  ("launcher", "option"), [(name, option) for name, options in LAUNCHER_OPTIONS.items() for option in options.split()]
)
def test_an_option_of_a_launcher_is_answered_however_it_is_hyphenated(launcher, option, hyphens):
  name, equals, value = option.partition("=")
  given = f"--{name.replace('_', '-') if hyphens else name}{equals}{value}"
  first, remedy = failure(given).splitlines()
  assert launcher in first
  assert "not of this program" in first
  assert len(remedy) > 20


def test_an_option_of_a_launcher_with_its_value_as_an_argument_of_its_own():
  assert len(failure("--nnodes", "1:4").splitlines()) == 2
  assert failure("--nnodes", "1:4", "stepz=3").startswith("2 mistakes")


def test_a_key_with_hyphens_is_the_key():
  assert load(["configs/base.yml", "--checkpoint-period=5", "max-target-length=64"]).checkpoint.checkpoint_period == 5


def test_the_name_of_a_gke_cluster_is_recognized():
  assert "name of a GKE cluster" in failure("--cluster=my-gke-cluster")
  assert "Did you mean simulated?" in failure("cluster=simulatd")


# ---- MaxText

REFUSED = """
hardware=cpu skip_jax_distributed_system=true monitor_goodput=true use_truncation=true
dcn_expert_parallelism=2 dataset_name=c4/en hf_path=allenai/c4 hf_access_token=x grain_worker_count=4
cosine_learning_rate_final_fraction=0.1 decoder_block=llama2 enable_multi_tier_checkpointing=true
multi_tier_checkpointing_backup_interval_minutes=30 metrics_file=m.txt compiled_trainstep_file=x
logits_dot_in_fp32=true sa_block_q=512 capacity_factor=1 ici_sequence_parallelism=2 save_checkpoint_on_completion=true
adamw_mask=x skip_step_on_spikes=true use_vertex_tensorboard=true checkpoint_storage_use_zarr3=true rope_use_scale=true
grain_use_elastic_iterator=true collect_stack_trace=true enable_dropout=false use_qwix_quantization=true
mesh_axes=['data'] logical_axis_rules=[] trainable_parameters_mask=[] enable_jax_profiler=true qkv_proj=device
mlpwi=device kv_proj=remat attention_out=device emb_dim=4 megablox=true engram_layers=[] use_mrope=true
num_channels_for_vit=3 distill_alpha=1 inference_server=x num_pipeline_microbatches=4
wi_tile_fwd_mlp_dim=1 ici_context_usp_ulysses_parallelism=2 eval_start_step=2 shardy=true enable_nnx=true
"""


@pytest.mark.parametrize("argument", REFUSED.split())
def test_keys_of_maxtext_without_meaning_are_refused_with_a_reason(argument):
  first, remedy = failure(argument).splitlines()
  assert "this is a key of MaxText, not of this program" in first
  assert len(remedy) > 10


def test_refusals_name_only_keys_that_exist_and_hide_no_key():
  texts = [answer.remedy for answer in all_answers().values()]
  texts += tables()["values"].values()
  words = {word for text in texts for word in re.findall(r"[a-z]\w*_\w+", text)}
  values = {choice for key in all_keys().values() for choice in key.choices}
  words -= {"ici_", "xla_dump_to", "hlo_file", *ACTIVATIONS, *PreflightOptions.model_fields, *SERVICES}
  assert words - values <= all_keys().keys()
  assert not [name for name in all_keys() if answer_for(name)]
  assert {row.partition("=")[0] for row in tables()["values"]} <= all_keys().keys()


def test_each_name_of_other_programs_is_written_once():
  rows = [names for group in tables()["names"] for names in group["remedies"]]
  names = [name.partition("=")[0] for row in (*rows, *tables()["renamed"]) for name in row.split()]
  assert len(names) == len(set(names)) > 800
  assert answer_for("mtc_data_parallelism").what == "a key of MaxText"  # and not of xpk, which has mtc_*
  assert not answer_for("context_parallel_size").changes_numbers("2")  # MaxText derives it, so its dumps have it


@pytest.mark.parametrize(
  ("argument", "words"),
  [
    ("remat_policy=minimal_flash", "Use remat_policy=minimal_with_context"),
    ("attention=minimal_flash", "Use attention=flash and remat_policy=minimal_with_context"),
    ("attention=cudnn_flash_te", "Use attention=flash"),
    ("tokenizer_type=sentencepiece", "Use tokenizer_type=bpe with tokenizer_path=FILE"),
    ("tokenizer_type=huggingface", "Use tokenizer_type=bpe with tokenizer_path=FILE"),
    ("tokenizer_type=tiktoken", "Use tokenizer_type=bpe with tokenizer_path=FILE"),
    ("packing=true", "Use packing=split or best_fit"),
    ("grain_file_type=tfrecord", "Convert the files to ArrayRecord or Parquet once"),
    ("dataset_type=c4_mlperf", "Give files with dataset_type=grain grain_train_files=FILES"),
    ("opt_type=adam_pax", "Use opt_type=adamw"),
    ("rope_type=llama3.1", "Use rope_type=llama3"),
    ("rope_type=yarn", "other scalings are not supported"),
    ("quantization=fp8_gpu", "Use quantization=fp8"),
    ("profiler=nsys", "Use profiler=xplane"),
    ("max_num_checkpoints_to_keep=None", "set checkpoint_keep_period=1"),
    ("num_slices=-1", "num_slices must be at least 0"),
    ("steps=-1", "learning_rate_schedule_steps=-1 then follows it"),
    ("eval_steps=-1", "Give the number of batches"),
    ("vocab_size=None", "To use the default, 32000, remove the key"),
    ("base_output_directory=None", "To use the default, runs, remove the key"),
    ("dataset_path=[a,b]", "not a list. Several text files go into one folder"),
    ("steps=[5]", "not a list"),
    ("remat_policy=['full']", "not a list"),
  ],
)
def test_values_of_maxtext_without_meaning_are_refused_with_what_to_use(argument, words):
  assert words in failure(argument)


@pytest.mark.parametrize(
  ("argument", "value"),
  [
    ("learning_rate_schedule_steps=-1", -1),
    ("elastic_min_slice_count=-1", -1),
    ("quantization=None", ""),
    ("quantization=none", ""),
    ("profiler=null", ""),
    ("mu_dtype=None", ""),
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
