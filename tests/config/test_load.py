"""Precedence of values, model files, spelling of keys and values, and every mistake in them."""

from __future__ import annotations

import jax
import pytest

from trainer.config import Config, ConfigError, load
from trainer.config.cli import print_config
from trainer.config.config_files import package_root
from trainer.config.keys import preflight_options
from trainer.config.load import load_with_origins
from trainer.config.schema import PreflightOptions


@pytest.fixture
def write(tmp_path, monkeypatch):
  """write(name, text) puts a file below an empty working directory and returns its name."""
  monkeypatch.chdir(tmp_path)

  def put(name: str, text: str) -> str:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    return name

  return put


def failure(*argv: str) -> str:
  with pytest.raises(ConfigError) as caught:
    load(list(argv))
  message = str(caught.value)
  if " mistakes in the configuration" not in message:
    assert len(message.splitlines()) <= 4, message
    assert len(message) < 600, message
  assert "pydantic" not in message, message
  return message


def test_an_empty_file_is_an_accident(write):
  """It trained 1,000 steps of the default model."""
  for text in ("", "# nothing\n"):
    with pytest.raises(ConfigError, match=r"empty.yml: has no keys.\n.*or {} for the defaults"):
      load([write("empty.yml", text)])
  assert load([write("empty.yml", "{}")]).flat() == Config().flat() | {"run_name": "empty"}


def test_base_yml_is_the_defaults():
  assert load(["configs/base.yml"]).flat() == Config().flat() | {"run_name": "base"}


def test_precedence_from_parents_to_the_command_line(write):
  write("models/m.yml", "head_dim: 32\nvocab_size: 100\n")
  write("conf/grandparent.yml", "steps: 1\nlog_period: 1\neval_steps: 1\nprofiler_steps: 1\nhead_dim: 32\n")
  write("conf/parent.yml", "base_config: grandparent.yml\nlog_period: 2\neval_steps: 2\nprofiler_steps: 2\n")
  child = write(
    "conf/child.yml", "base_config: parent.yml\neval_steps: 3\nprofiler_steps: 3\nmodel_name: ../models/m.yml\n"
  )
  config = load([child, "profiler_steps=4"])
  assert config.run.steps == 1
  assert config.observe.log_period == 2
  assert config.observe.eval_steps == 3
  assert config.observe.profiler_steps == 4
  assert (config.model.head_dim, config.model.vocab_size) == (32, 100)
  assert config.run.run_name == "child"


def test_a_choice_removes_keys_of_lower_precedence_that_it_disables(write):
  """A user who turns evaluation off need not know the YAML's eval_interval, and cannot remove that line."""
  quickstart = load(["configs/quickstart.yml", "eval_steps=0"])
  assert (quickstart.observe.eval_steps, quickstart.observe.eval_interval) == (0, -1)
  parent = write("parent.yml", "lr_schedule_type: wsd\nwsd_decay_steps_fraction: 0.2\nadam_b2: 0.9\n")
  child = write("child.yml", f"base_config: {parent}\nlr_schedule_type: constant\n")
  assert load([child]).optimizer.wsd_decay_steps_fraction == Config().optimizer.wsd_decay_steps_fraction
  assert load([child, "opt_type=sgd"]).optimizer.adam_b2 == Config().optimizer.adam_b2
  # Both values come from the same file or command, so the user can remove one.
  for argv in ([parent, "opt_type=sgd", "adam_b2=0.9"], [write("both.yml", "opt_type: sgd\nadam_b2: 0.9\n")]):
    with pytest.raises(ConfigError, match=r"adam_b2=0\.9: has an effect only with opt_type=adamw or muon"):
      load(argv)


def test_restated_defaults_of_base_yml_do_not_conflict_with_a_model():
  config = load(["configs/base.yml", "model_name=qwen3-0.6b"])
  assert config.model.base_emb_dim == 1024
  assert config.model.logits_via_embedding
  assert config.model.rope_max_timescale == 1e6


def test_an_edited_copy_of_base_yml_conflicts_only_where_it_was_edited(write):
  text = (package_root() / "configs/base.yml").read_text()
  copy = write("copy.yml", text.replace("vocab_size: 32000", "vocab_size: 4096"))
  assert load([copy]).model.vocab_size == 4096
  message = failure(copy, "model_name=qwen3-0.6b")
  assert "vocab_size=4096 (copy.yml line" in message
  assert "head_dim" not in message


def test_a_default_value_in_the_users_own_yaml_is_a_choice(write):
  own = write("own.yml", f"model_name: qwen3-0.6b\nhead_dim: {Config().model.head_dim}\n")
  assert "head_dim=64 (own.yml line 2) instead of 128" in failure(own)
  assert load([own, "override_model_config=true"]).model.head_dim == 64


@pytest.mark.parametrize("given", ["head_dim=64", "model.head_dim=64"])
def test_command_line_against_the_model_is_a_conflict_unless_overridden(given):
  message = failure("configs/base.yml", "model_name=qwen3-0.6b", given)
  assert "head_dim=64 (command line) instead of 128" in message
  assert "override_model_config=true" in message
  config = load(["configs/base.yml", "model_name=qwen3-0.6b", given, "override_model_config=true"])
  assert (config.model.head_dim, config.model.base_emb_dim) == (64, 1024)


def test_a_user_can_define_a_model_in_a_yaml_file(write):
  write("m/mine.yml", "base_emb_dim: 96\nbase_num_query_heads: 6\nbase_num_kv_heads: 2\n")
  assert load(["configs/base.yml", "model_name=m/mine.yml"]).model.base_emb_dim == 96
  write("m/wider.yml", "base_config: mine.yml\nbase_emb_dim: 192\n")
  wider = load(["configs/base.yml", "model_name=m/wider.yml"]).model
  assert (wider.base_emb_dim, wider.base_num_query_heads) == (192, 6)
  write("m/other.yml", "base_emb_dim: 96\nsteps: 3\n")
  assert "steps is not a key of the model" in failure("configs/base.yml", "model_name=m/other.yml")


def test_spelling_of_values():
  words = ["learning_rate=1e-3", "elastic_enabled=True", "enable_checkpointing=FALSE", "run_name=007", "steps=2e3"]
  words += ["remat_policy=none", "sample_prompt=def f(x): # 'a=b'", "eval_interval=-1", "profiler=", "dtype=Float32"]
  config = load(["configs/base.yml", *words])
  assert config.optimizer.learning_rate == 1e-3
  assert config.elastic.elastic_enabled is True
  assert config.checkpoint.enable_checkpointing is False
  assert config.model.remat_policy == "none"
  assert config.run.run_name == "007"
  assert config.run.steps == 2000
  assert config.observe.sample_prompt == "def f(x): # 'a=b'"
  assert config.observe.profiler == ""
  assert config.model.dtype == "float32"


def test_preflight_has_options_that_are_written_like_keys():
  words = ["a.yml", "compile_topology=", "--compile-topology-num-slices=1", "steps=5"]
  options, others = preflight_options(words)
  assert others == ["a.yml", "steps=5"]
  assert options == PreflightOptions()
  with pytest.raises(ConfigError, match="compile_topology_num_slices must be at least 1 and at most 511"):
    preflight_options(["compile_topology_num_slices=512"])


@pytest.mark.parametrize("name", ["enable_wandb", "weight_decay_mask", "scan_unroll", "elastic_numerics", "nnodes"])
def test_keys_of_earlier_commits_and_of_launchers_are_unknown(write, name):
  for argv in (["configs/base.yml", f"{name}=1"], [write("a.yml", f"{name}: 1")]):
    assert f"{name} (" in failure(*argv) and "there is no such key" in failure(*argv)


def test_switches_of_maxtext_change_the_services_below_them(write):
  services = lambda *argv: load([*argv], check_paths=False).observe.services
  mine = write("mine.yml", "services: wandb\ngcs_metrics: True\n")
  child = write("child.yml", f"base_config: {mine}\nenable_tensorboard: true\n")
  assert services(mine) == "wandb,gcs_metrics"
  assert services(child, "gcs_metrics=false") == "wandb,tensorboard"
  assert services(child, "services=tensorboard") == "tensorboard"
  assert services("configs/base.yml", "enable_tensorboard=false", "--enable-goodput-recording=True") == "goodput"
  assert services("configs/base.yml", "services=") == ""
  _, origins = load_with_origins([child, "gcs_metrics=false"], check_paths=False)
  assert origins["services"] == "enable_tensorboard=true (child.yml line 2), gcs_metrics=false (command line)"
  assert "Did you mean wandb?" in failure("configs/base.yml", "services=tensorboard,wand")


def test_values_of_a_model_come_from_its_file(write):
  file = write("m.yml", "rope_type: llama3\nrope_original_max_position_embeddings: 24\n")
  mine = write("mine.yml", f"model_name: {file}\n")
  assert load([mine]).model.rope_original_max_position_embeddings == 24
  assert load([write("printed.yml", print_config(load([mine])))]).model == load([mine]).model
  assert "rope_low" not in print_config(load([mine]))
  write("m.yml", "rope_type: llama3\nrope_high_freq_factor: 1\n")
  assert "must be above rope_low_freq_factor" in failure(mine)
  write("m.yml", f"scan_layers: false\nmlp_only_layers: '{'9' * 5000}'\n")
  assert "9...: 1 of these are no layers of this model" in failure(mine)


@pytest.mark.parametrize("words", ["query_proj=device mlpwo=offload", "custom_remat=mlpwo=offload,query_proj=device"])
def test_an_activation_is_a_key_as_in_maxtext(words):
  config = load(["configs/base.yml", "remat_policy=custom", "custom_remat=mlpwo=remat", *words.split()])
  assert config.model.activations == {"decoder_layer_input": "device", "query_proj": "device", "mlpwo": "offload"}


def test_loading_creates_nothing(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  load(["configs/base.yml", "base_output_directory=out", "run_name=r", "dataset_cache_directory=cache"])
  assert list(tmp_path.iterdir()) == []


def test_unknown_keys_get_the_nearest_name(write):
  assert "Did you mean learning_rate?" in failure("configs/base.yml", "learning_rat=1e-3")
  assert "Did you mean checkpoint_period?" in failure("configs/base.yml", "checkpoint.perod=5")
  message = failure(write("typo.yml", "steps: 5\n\nlearningrate: 1\n"))
  assert "learningrate (typo.yml line 3)" in message
  assert "Did you mean learning_rate?" in message


@pytest.mark.parametrize(
  ("argument", "words"),
  [
    ("steps=abc", "steps=abc (command line): steps must be a whole number"),
    ("steps=" + 5000 * "9", "must be"),
    ("init_weights_seed=4294967296", "must be at least -2147483648 and at most 4294967295"),
    ("data_shuffle_seed=18446744073709551616", "and at most 18446744073709551615"),
    ("learning_rate=nan", "must be a finite number"),
    ("learning_rate=-1", "must be at least 0"),
    ("per_device_batch_size=0", "must be above 0"),
    ("elastic_enabled=yes", "must be true or false"),
    ("attention=flsh", "Did you mean flash? Choices: autoselected, dot_product, flash"),
    ("dataset_type=c4_mlperf", "grain_train_files=FILES.\nChoices: synthetic, text, grain, tfds, hf"),
  ],
)
def test_wrong_values_name_value_and_rule(argument, words):
  message = failure("configs/base.yml", argument)
  assert argument[:20] in message or argument.startswith(("learning_rate=-", "per_", "eval_", "steps=1e30"))
  assert words in message


def test_the_largest_values_are_accepted():
  seeds = ["init_weights_seed=4294967295", "data_shuffle_seed=-9223372036854775808"]
  config = load(["configs/base.yml", "steps=2147483647", *seeds])
  assert config.run.steps == 2**31 - 1
  assert jax.random.key_data(jax.random.key(config.run.init_weights_seed)).tolist() == [0, 2**32 - 1]


def test_wrong_values_in_yaml_name_file_and_line(write):
  assert "steps=many (x.yml line 2): steps must be a whole number" in failure(
    write("x.yml", "run_name: a\nsteps: many\n")
  )
  assert "steps= (x.yml line 1)" in failure(write("x.yml", "steps:\n"))
  assert "steps=0 (x.yml line 1)" in failure(write("x.yml", "steps: 0\n"))


def test_broken_yaml_names_the_line(write):
  assert "x.yml line 2: not valid YAML" in failure(write("x.yml", "steps: 5\n  log_period: 3: 4\n"))
  assert "steps is given twice: x.yml line 1 and line 3" in failure(write("x.yml", "steps: 5\n\nsteps: 6\n"))
  assert "steps is given twice" in failure(write("x.yml", "steps: 5\nrun.steps: 6\n"))
  assert "model holds a list or a mapping" in failure(write("x.yml", "model:\n  head_dim: 4\n"))
  assert "the key is a list" in failure(write("x.yml", "? [steps]\n: 5\n"))
  assert "another document" in failure(write("x.yml", "steps: 5\n---\nsteps: 6\n"))
  assert "flat mapping" in failure(write("x.yml", "- steps\n"))
  assert "nested too deep" in failure(write("x.yml", "steps: " + 1100 * "[" + 1100 * "]"))


def test_a_missing_file_is_reported_with_similar_names(write):
  write("runs/first.yml", "steps: 5\n")
  assert "Did you mean runs/first.yml?" in failure("runs/frst.yml")
  assert "first argument must be a config file" in failure()
  assert "first argument must be a config file" in failure("steps=5")
  assert "this is a folder" in failure("runs")
  assert "there is no such base_config" in failure(write("x.yml", "base_config: gone.yml\n"))
  assert "leads back to itself" in failure(write("x.yml", "base_config: x.yml\n"))
  assert "Did you mean qwen3-0.6b?" in failure("configs/base.yml", "model_name=qwen-0.6b")
  assert "there is no such model file" in failure("configs/base.yml", "model_name=models/gone.yml")


def test_all_independent_mistakes_of_files_and_command_line_are_reported(write):
  write("parent.yml", "steps: many\n")
  child = write("child.yml", "base_config: parent.yml\nlog_period: 0\nlerning_rate: 1\nmesh_axes: [a]\n")
  message = failure(child, "attention=flsh")
  words = ["log_period=0 (child.yml line 2)", "lerning_rate (child.yml line 3)", "mesh_axes (child.yml line 4)"]
  words += ["steps=many (parent.yml line 1)", "attention=flsh (command line)"]
  assert message.startswith("5 mistakes in the configuration:")
  assert all(word in message for word in words), message


def test_arguments_that_are_not_assignments():
  assert "Write steps=VALUE" in failure("configs/base.yml", "steps")
  assert "expected key=value" in failure("configs/base.yml", "stepping")
  for words in ("--steps=5", "--steps 5", "steps = 5", "steps =5", "steps 5"):
    config = load(["configs/base.yml", *words.split(), "--learning-rate", "1e-4"])
    assert (config.run.steps, config.optimizer.learning_rate) == (5, 1e-4)
  assert load(["configs/base.yml", "steps=5", "steps=6"]).run.steps == 6
  once = lambda words: load(["configs/base.yml", *words.split()], repeats=False)
  assert once("steps=5 run.steps=5").run.steps == 5  # launchers repeat what they check
  for words in ("steps=5 steps=6", "steps=5 run.steps=6", "--steps 5 steps=6"):
    with pytest.raises(ConfigError, match=r"steps is given twice, first with 5.\nRemove one"):
      once(words)
  assert "steps=x" in failure("configs/base.yml", "steps=x", "steps=6")
  for argument in ("--print-config=1", "print_config=true"):
    assert f"{argument}: --print-config takes no value" in failure("configs/base.yml", argument)
  assert "belongs in a YAML file" in failure("configs/base.yml", "base_config=x.yml")
