"""A run -> a Hugging Face folder -> a run: the same bits, or one clear error and nothing written."""

from __future__ import annotations

import errno
import fcntl
import json
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from tests.support import hf_folders
from tests.support.seeds import few

from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.state_backup import RunContext
from trainer.config.errors import ConfigError
from trainer.config.schema import CheckpointSection, Config
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels
from trainer.tools import export_hf
from trainer.weights import export, sources
from trainer.weights import safetensors as own_format
from trainer.world import SINGLE_WORLD

DTYPES = ["float32", "bfloat16", "float16"]


def assert_same_bits(found, expected):
  assert found.keys() == expected.keys()
  for name, tensor in expected.items():
    assert found[name].dtype == tensor.dtype and found[name].tobytes() == tensor.tobytes(), name


FEW = [i for i, name in enumerate(hf_folders.MODELS) if name in ("qwen3-tied", "qwen3-moe-layers")]


@pytest.mark.parametrize("number", few(FEW, range(len(hf_folders.MODELS))), ids=list(hf_folders.MODELS))
def test_every_family_comes_back_with_the_same_bits(tmp_path, number):
  import transformers  # here, as in hf_folders

  name = list(hf_folders.MODELS)[number]
  layers = 11 if number == 0 else 2  # two digits: "10" sorts before "2"
  cfg = hf_folders.model(name, base_num_decoder_layers=layers)
  tensors = hf_folders.write_folder(tmp_path / "hf", cfg, DTYPES[number % 3], shards=1 + number % 2)
  params = jax.tree.map(lambda x: x.astype(DTYPES[number % 3]), hf_folders.random_params(cfg))
  hf_folders.write_run(tmp_path / "run", Config(model=cfg), params)
  source = sources.open_source(str(tmp_path / "run"))
  export.export(source, str(tmp_path / "back"), shard_bytes=1 if number % 2 else 10**9)
  assert_same_bits(hf_folders.read_folder(tmp_path / "back"), tensors)
  if cfg.num_experts == 1:
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), params)
    loaded = sources.open_source(str(tmp_path / "hf")).load(abstract)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
  found = transformers.AutoConfig.from_pretrained(tmp_path / "back")
  expected = transformers.AutoConfig.from_pretrained(tmp_path / "hf")
  # transformers takes 1 and 2 for Llama's ends where a folder names none.
  differ = {key for key, value in expected.to_dict().items() if found.to_dict().get(key) != value}
  assert differ <= {"bos_token_id", "eos_token_id", "_name_or_path"}
  assert str(found.dtype).endswith(DTYPES[number % 3])


def test_experts_start_with_an_even_load_and_are_read_by_shards(tmp_path):
  """Hugging Face has no load. It adds up to k, because a step keeps this sum."""
  cfg = hf_folders.model("qwen3-moe")
  hf_folders.write_folder(tmp_path / "hf", cfg)
  mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
  placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "a", "b"))
  abstract = jax.eval_shape(lambda: hf_folders.random_params(cfg))

  def shard(leaf):
    where = placed if leaf.ndim == 4 and leaf.shape[1] % 2 == 0 else jax.sharding.NamedSharding(mesh, jax.P())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

  loaded = sources.open_source(str(tmp_path / "hf")).load(jax.tree.map(shard, abstract))
  assert loaded["layers"]["feed_forward"]["gate"].sharding == placed
  load = loaded["layers"]["feed_forward"].pop("load")
  np.testing.assert_array_equal(load, np.full((3, 12), 3 / 12, np.float32))
  expected = hf_folders.random_params(cfg)
  expected["layers"]["feed_forward"].pop("load")
  jax.tree.map(np.testing.assert_array_equal, loaded, expected)


def test_a_model_with_a_routed_bias_is_refused_by_an_export_and_by_a_run_without_the_bias(tmp_path):
  cfg = hf_folders.model("qwen3-moe", routed_bias_update_rate=0.01)
  hf_folders.write_run(tmp_path / "run", Config(model=cfg), hf_folders.random_params(cfg))
  source = sources.open_source(str(tmp_path / "run"))
  with pytest.raises(ConfigError, match=r"routed_bias_update_rate=0\.01, and Qwen3-MoE has no bias"):
    export.export(source, str(tmp_path / "back"))
  assert not (tmp_path / "back").exists()
  source.require_model(cfg)
  with pytest.raises(ConfigError, match=r"routed_bias_update_rate=0\.0, there 0\.01"):
    source.require_model(hf_folders.model("qwen3-moe"))


def test_older_readers_find_their_fields(tmp_path):
  """vLLM, SGLang and llama.cpp of 2025 read rope_theta, rope_scaling, torch_dtype and head_dim."""
  config = hf_folders.model("llama3.2")
  run = tmp_path / "run"
  hf_folders.write_run(run, Config(model=config), hf_folders.random_params(config))
  assert export_hf.main([f"{run}@5", str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
  found = json.loads((tmp_path / "hf" / "config.json").read_text())
  scaling = found["rope_scaling"]
  assert scaling["rope_type"] == "llama3" and scaling["factor"] == 32.0
  assert found["rope_parameters"] == {**scaling, "rope_theta": found["rope_theta"]}
  assert found["torch_dtype"] == found["dtype"] == "bfloat16" and found["head_dim"] == 16
  assert found["max_position_embeddings"] == 4096  # as the run has set it
  expected = hf_folders.to_hugging_face(hf_folders.random_params(config), config)
  expected = {name: value.astype(jnp.bfloat16) for name, value in expected.items()}
  assert_same_bits(hf_folders.read_folder(tmp_path / "hf"), expected)


def edit_config(**fields):
  def change(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

  return change


def edit_tensors(change):
  def rewrite(folder):
    tensors = hf_folders.read_folder(folder)
    change(tensors)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")

  return rewrite


def edit_bytes(change):
  def rewrite(folder):
    path = folder / "model.safetensors"
    path.write_bytes(change(path.read_bytes()))

  return rewrite


def with_index(places):
  def rewrite(folder):
    names = dict.fromkeys(hf_folders.read_folder(folder), "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names | places}))

  return rewrite


def renamed(name):
  return lambda folder: (folder / "model.safetensors").rename(folder / name)


NORM = "model.norm.weight"
WRONG = {
  "another architecture": (edit_config(architectures=["MistralForCausalLM"]), "Only Qwen3ForCausalLM"),
  "an unknown field": (edit_config(logit_scale=2.0), "unknown fields logit_scale"),
  "a bias": (edit_config(attention_bias=True), "attention_bias=True"),
  "pairs of neighbours are rotated": (edit_config(rope_interleaved=True), "rope_interleaved=True"),
  "quantized": (edit_config(quantization_config={"quant_method": "gptq"}), "quantized with gptq. .* dequantize"),
  "another rope": (edit_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e6}), "rope_type=yarn"),
  "sliding windows": (edit_config(layer_types=["sliding_attention"] * 3), "sliding_attention"),
  "more layers": (edit_config(num_hidden_layers=4), r"model\.layers\.3\..* is missing"),
  "a missing head": (edit_tensors(lambda x: x.pop("lm_head.weight")), "say so in config.json: tie_word_embeddings"),
  "a missing tensor": (edit_tensors(lambda x: x.pop(NORM)), f"{NORM} is missing"),
  "another shape": (edit_tensors(lambda x: x.update({NORM: x[NORM][:-1]})), r"shape \(63,\).* \(64,\)"),
  "another type": (edit_tensors(lambda x: x.update({NORM: x[NORM].astype(np.int8)})), "is I8, as in a quantized model"),
  "truncated": (edit_bytes(lambda data: data[:-1]), "truncated"),
  "a damaged header": (edit_bytes(lambda data: data[:20] + b"\0" + data[21:]), "header cannot be read"),
  "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "Save the model as safetensors"),
  "weights of torch": (renamed("pytorch_model.bin"), "It has pytorch_model.bin. Save the model as safetensors: "),
  "an adapter": (renamed("adapter_model.safetensors"), "has an adapter: merge it"),
  "an index with a file that lacks": (with_index({"a": "b.safetensors"}), "b.safetensors, which .* is missing"),
  "a file outside": (with_index({"a": "../b.safetensors"}), "no weight_map"),
}


EXPERT, ROUTER = "model.layers.1.mlp.experts.7.up_proj.weight", "model.layers.1.mlp.gate.weight"
WRONG_EXPERTS = {
  "a missing expert": (edit_tensors(lambda x: x.pop(EXPERT)), f"{EXPERT} is missing"),
  "an extra expert": (
    edit_tensors(lambda x: x.update({EXPERT.replace("7", "12"): x[EXPERT]})),
    r"no place for 1 tensors: model\.layers\.1\.mlp\.experts\.12\.up_proj",
  ),
  "an expert of another shape": (
    edit_tensors(lambda x: x.update({EXPERT: np.ascontiguousarray(x[EXPERT].T)})),
    rf"{EXPERT} has shape \(64, 40\).* \(40, 64\)",
  ),
  "an expert of another type": (
    edit_tensors(lambda x: x.update({EXPERT: x[EXPERT].astype(np.float16)})),
    rf"{EXPERT} is float16, and .*experts\.0\.up_proj\.weight is float32",
  ),
  "fewer experts": (edit_config(num_local_experts=11), r"\(12, 64\), and its config.json says \(11, 64\)"),
  "more choices than experts": (edit_config(num_experts_per_tok=13), "num_experts=12 with num_experts_per_tok=13"),
  "a shared expert": (edit_config(shared_expert_intermediate_size=8), "unknown fields shared_expert_intermediate_size"),
}


@pytest.mark.parametrize("fault", WRONG | WRONG_EXPERTS)
def test_a_wrong_folder_is_one_error(tmp_path, fault):
  change, message = (WRONG | WRONG_EXPERTS)[fault]
  name = "qwen3-moe" if fault in WRONG_EXPERTS else "qwen3"
  hf_folders.write_folder(tmp_path / "hf", hf_folders.model(name), shards=1)
  change(tmp_path / "hf")
  with pytest.raises(ConfigError, match=message) as caught:
    sources.open_source(str(tmp_path / "hf"))
  assert "\n" not in str(caught.value)


@pytest.fixture
def run(tmp_path):
  cfg = hf_folders.model("qwen3")
  hf_folders.write_run(tmp_path / "run", Config(model=cfg), hf_folders.random_params(cfg))
  return tmp_path / "run"


def test_a_full_disk_leaves_nothing(tmp_path, run, monkeypatch, capsys):
  def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")

  before = sorted(tmp_path.iterdir())
  monkeypatch.setattr(own_format, "write", full)
  assert export_hf.main([str(run), str(tmp_path / "back")]) == 2
  assert "No space left" in capsys.readouterr().err
  assert sorted(tmp_path.iterdir()) == before


def no_locks(*_):
  raise OSError(errno.ENOLCK, "No locks available")


def two_steps(folder):
  """(the steps 1 and 2 of a run, what deletes step 1 as the retention of the living run does)."""
  cfg = hf_folders.model("qwen3", base_num_decoder_layers=1)
  for step in (1, 2):
    hf_folders.write_run(folder, Config.model_validate({"model": cfg}), hf_folders.random_params(cfg, step), step)
  retention = Persistent(str(folder / "checkpoints"), CheckpointSection(), RunContext(SINGLE_WORLD))
  return cfg, lambda: retention._delete("1")


def test_retention_leaves_a_checkpoint_while_another_process_reads_it(tmp_path):
  cfg, delete = two_steps(tmp_path / "run")
  source = sources.open_source(f"{tmp_path}/run@1")
  assert not delete()
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = DecoderFunctions(cfg, Kernels(None)).abstract()
  source.load(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), abstract))
  assert delete() and not (tmp_path / "run" / "checkpoints" / "1").exists()


@pytest.mark.parametrize("moment", ["before it is verified", "while it is read"])
def test_a_checkpoint_that_is_deleted_while_it_is_read_is_replaced_by_the_next_one(
  tmp_path, monkeypatch, capsys, moment
):
  """On a file system without locks. A step that was named is not replaced: the reason is one line."""
  monkeypatch.setattr(fcntl, "flock", no_locks)
  run, back = tmp_path / "run", tmp_path / "back"
  _, delete = two_steps(run)
  (run / "checkpoints" / "2").rename(tmp_path / "2")  # not written yet
  place, name = (Persistent, "verified") if moment == "before it is verified" else (export, "_write_shards")
  real = getattr(place, name)

  def deleted(*args):
    monkeypatch.setattr(place, name, real)
    assert delete()
    (tmp_path / "2").rename(run / "checkpoints" / "2")
    return real(*args)

  monkeypatch.setattr(place, name, deleted)
  assert export_hf.main([str(run), str(back)]) == 0
  assert json.loads((back / "trainer_export.json").read_text())["from"] == f"{run}@2"
  warned = (
    f"{run}@1: retention has deleted this checkpoint while it was read. Reading the newest one."
    in capsys.readouterr().err
  )
  assert warned == (moment == "while it is read")
  if warned:
    (run / "checkpoints" / "2").rename(tmp_path / "2")
    two_steps(run)
    (run / "checkpoints" / "2").rename(tmp_path / "3")
    monkeypatch.setattr(place, name, deleted)
    assert export_hf.main([f"{run}@1", str(tmp_path / "other")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {run}@1: retention has deleted this checkpoint while it was read. Name a step that")
    assert not (tmp_path / "other").exists()


def test_a_kill_leaves_no_folder_and_the_same_command_completes(server, tmp_path, run):
  target = tmp_path / "new"
  process = server.run("trainer.tools.export_hf", [str(run), str(target)], {}, tmp_path / "printed.txt")
  work = tmp_path / "new.unfinished"
  while not work.exists() and process.poll() is None:
    time.sleep(0.001)
  process.send_signal(signal.SIGKILL)
  assert process.wait(60) == -signal.SIGKILL
  assert not target.exists() and work.exists()
  assert export_hf.main([str(run), str(target)]) == 0
  assert target.exists() and not work.exists()
