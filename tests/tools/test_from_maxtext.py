"""A configuration of MaxText becomes ours, or every key that cannot is named with the reason."""

from __future__ import annotations

import pytest
import yaml

from trainer.config.keys import accepted
from trainer.config.load import load
from trainer.tools import from_maxtext

GOOD = """
base_config: "base.yml"
run_name: "mine"
base_output_directory: "gs://my-bucket/runs"
model_name: "qwen3-0.6b"
dataset_type: "grain"
grain_train_files: "gs://my-bucket/data/*.arecord"
grain_worker_count: 4
num_slices: -1
steps: 1000
per_device_batch_size: 4
max_target_length: 2048
cosine_learning_rate_final_fraction: 0.05
learning_rate: 3.e-4
adam_eps_root: 0.
mlp_activations: ["silu", "linear"]
mlp_activations_limit: -1.0
sliding_window_size: 0
dropout_rate: 0.0
ici_fsdp_parallelism: 16
enable_goodput_recording: false
dcn_data_parallelism: -1
sharding_tolerance: 0.02
matmul_precision: default
monitor_goodput: true
enable_data_shuffling: true
metrics_file: ""
"""


def test_keys_are_kept_renamed_or_left_out(tmp_path, capsys):
  (tmp_path / "theirs.yml").write_text(GOOD)
  assert from_maxtext.main([str(tmp_path / "theirs.yml")]) == 0
  printed = capsys.readouterr()
  kept = yaml.safe_load(printed.out)
  given = yaml.safe_load(GOOD)
  ours = {"base_config", "learning_rate_final_fraction"} | (given.keys() & accepted().keys())
  assert kept.keys() == ours and kept["learning_rate_final_fraction"] == 0.05 and kept["num_slices"] == 0
  left = {line.split(":")[1].strip() for line in printed.err.splitlines()}
  assert all(line.startswith("left out: ") for line in printed.err.splitlines())
  assert left == given.keys() - kept.keys() - {"cosine_learning_rate_final_fraction"}
  (tmp_path / "mine.yml").write_text(printed.out)
  assert load([str(tmp_path / "mine.yml")], check_paths=False).optimizer.learning_rate_final_fraction == 0.05


@pytest.mark.parametrize(("policy", "custom"), [("custom", "mlpwo=offload"), ("full", "")])
def test_what_becomes_of_an_activation(tmp_path, capsys, policy, custom):
  (tmp_path / "theirs.yml").write_text(f"run_name: mine\nremat_policy: {policy}\nmlpwo: offload\n")
  assert from_maxtext.main([str(tmp_path / "theirs.yml")]) == 0
  printed = capsys.readouterr()
  assert (printed.err == "") == bool(custom)
  (tmp_path / "mine.yml").write_text(printed.out)
  assert load([str(tmp_path / "mine.yml")], check_paths=False).model.custom_remat == custom


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("dropout_rate: 0.1", "cannot be kept: dropout_rate: =0.1: There is no dropout"),
    ("enable_data_shuffling: false", "enable_data_shuffling: =false: Examples are always shuffled"),
    ("mlp_activations: ['gelu']", "mlp_activations: =['gelu']: The feed-forward is SwiGLU"),
    ("attention_type: local_sliding", "Attention is global and causal"),
    ("base_config: other.yml", "other.yml is a file of MaxText. Convert it too"),
    ("opt_type: adam_pax", "opt_type=adam_pax (FILE): opt_type has no such value"),
    ("no_such_key: 3", "no_such_key: =3: no such key is known"),
    ("model_name: gpt-oss-20b", "error: model_name=gpt-oss-20b"),
    ("matmul_precision: highest", "Set the environment variable JAX_DEFAULT_MATMUL_PRECISION"),
    ("grad_dtype: bfloat16", "Gradients are summed in float32"),
  ],
)
def test_a_key_that_changes_the_numbers_is_an_error(tmp_path, capsys, line, message):
  (tmp_path / "theirs.yml").write_text(f"run_name: mine\n{line}\n")
  assert from_maxtext.main([str(tmp_path / "theirs.yml")]) == 2
  assert message in capsys.readouterr().err
  assert from_maxtext.main([str(tmp_path / "none.yml")]) == 2


@pytest.mark.parametrize("value", ["!!python/object:os.system x", "2024-13-45"])
def test_a_value_that_yaml_cannot_read_is_refused_in_one_line(tmp_path, capsys, value):
  (tmp_path / "theirs.yml").write_text(f"steps: {value}\n")
  assert from_maxtext.main([str(tmp_path / "theirs.yml")]) == 2
  err = capsys.readouterr().err
  assert err.startswith(f"error: {tmp_path}/theirs.yml: a value cannot be read: ") and err.count("\n") == 1
