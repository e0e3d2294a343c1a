"""The two guides for elastic runs on Pathways, repeated with the real command, simulated slices and a smaller model."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from tests.support import guide_awk

SHRUNK = (
  "override_model_config=true base_num_decoder_layers=1 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=1 "
  "base_mlp_dim=32 head_dim=8 vocab_size=64 dtype=float32 num_slices=3 devices_per_slice=1 enable_report=false "
  "enable_tensorboard=false"
)
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}


def trainer(directory, name, *keys):
  """log.txt of a run that must end with 0."""
  places = [f"base_output_directory={directory}", f"run_name={name}", f"jax_cache_dir={directory}/cache"]
  command = [sys.executable, "-m", "trainer", "configs/base.yml", *" ".join(keys).split(), *SHRUNK.split(), *places]
  done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=ENVIRONMENT)
  assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
  return (directory / name / "log.txt").read_text()


@pytest.mark.timeout(900)
def test_a_restore_on_a_fixed_mesh_rewinds_to_the_last_checkpoint(tmp_path):
  """The flags of the guide, except for the model size, the number of steps and the injected fault."""
  flags = """model_name=qwen3-0.6b dataset_type=synthetic per_device_batch_size=1 max_target_length=32 attention=flash
    remat_policy=full steps=160 enable_checkpointing=true checkpoint_period=100 enable_single_controller=True
    elastic_enabled=true elastic_timeout_seconds=300 elastic_max_retries=10"""
  log = trainer(tmp_path, "elastic-qwen3", flags, "elastic_backup_kind=checkpoint fault_injection=slice_down@150:1")
  directory = re.escape(f"{tmp_path}/elastic-qwen3/checkpoints/100")
  sequence = [
    r"Elastic utils: Elastic training enabled\.",
    r"Elastic Retry Enabled",
    r"completed step: 8, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, loss: \d+\.\d{3}, .*",
    r"completed step: 9, seconds: .*",
    r"completed step: 149, .*",
    r"Slice down event detected\. Retrying\.",
    rf"Found commit_success file\. Keeping {directory}/\.",
    r"Elastic attempt 2 out of 10",
    rf"Restoring checkpoint from {directory}\.",
    r"completed step: 101, .*",
    r"completed step: 160, .*",
  ]
  found = re.search("^" + "$(?:.|\n)*?^".join(sequence) + "$", log, re.MULTILINE)
  assert found, log
  rewind = found[0].split("Slice down event detected. Retrying.")[1]
  between = [line for line in rewind.split("completed step: 101")[0].splitlines() if line.startswith("completed")]
  assert between == []


@pytest.mark.timeout(900)
def test_three_slices_two_and_three_again(tmp_path):
  """The flags of the other guide with fewer steps and without checkpoints. The awk script is unchanged."""
  flags = """per_device_batch_size=4 enable_checkpointing=false remat_policy=full global_parameter_scale=8 steps=300
    max_target_length=32 use_iota_embed=true reuse_example_batch=1 dataset_type=synthetic attention=flash
    gcs_metrics=True enable_pathways_goodput=True"""
  faults = "fault_injection=slice_down@20:1,slice_up@30:1"
  keys = "elastic_enabled=true elastic_min_slice_count=2 elastic_min_resize_interval_seconds=0 log_period=100"
  trainer(tmp_path, "pathways-user", flags, keys, faults)
  lines = guide_awk.slice_count_changes(tmp_path / "pathways-user" / "log.txt")
  assert len(lines) == 2
  assert re.fullmatch(r"Step: \d+, Old Slice Count: 3, New Slice Count: 2", lines[0])
  assert re.fullmatch(r"Step: \d+, Old Slice Count: 2, New Slice Count: 3", lines[1])
