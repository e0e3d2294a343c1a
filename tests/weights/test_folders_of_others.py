"""Hugging Face folders as other programs write them, and paths as people write them."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors.numpy
from tests.support import hf_folders

from input_pipeline import tokenizer
from input_pipeline.tokenizer import train_bpe
from trainer.cluster.launched import shared_token
from trainer.config import cli
from trainer.config.load import load
from trainer.config.schema import Config
from trainer.tools import evaluate, export_hf, report
from trainer.weights import hf_config, sources

OLD_FIELDS = {
  "fields of generation": {"max_length": 20, "temperature": 0.7, "top_p": 0.9, "do_sample": True, "num_beams": 1},
  "fields of old versions": {
    "max_sequence_length": 2048,
    "id2label": {"0": "A"},
    "pruned_heads": {},
    "is_decoder": False,
  },
  "nothing is quantized": {"quantization_config": None, "architectures": None},
  "the first Llama": {"architectures": ["LLaMAForCausalLM"], "pad_token_id": -1},
  "a model without its head": {"architectures": ["LlamaModel"], "rope_scaling": None, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("fields", OLD_FIELDS.values(), ids=list(OLD_FIELDS))
def test_fields_that_do_not_change_the_model_are_read(fields):
  import transformers  # here, as in hf_folders

  config = hf_folders.transformers_config(hf_folders.model("llama3")).to_diff_dict()
  assert hf_config.keys(config | fields, "x") == hf_config.keys(config, "x")
  for kind in (transformers.GenerationConfig, transformers.PretrainedConfig):
    assert hf_config.keys({**kind().to_dict(), **config}, "x") == hf_config.keys(config, "x")


@pytest.mark.parametrize("change", ["only the head", "no prefix", "buffers"])
def test_names_that_other_programs_give_are_read(tmp_path, change):
  tensors = hf_folders.write_folder(tmp_path / "hf", hf_folders.model("qwen3-tied"), shards=1)
  match change:
    case "only the head":
      found = {name.replace("model.embed_tokens", "lm_head"): tensor for name, tensor in tensors.items()}
    case "no prefix":
      found = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    case "buffers":
      names = ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq", "rotary_emb.cos_cached")
      found = tensors | {f"model.{name}": np.ones(8, np.float32) for name in names}
  safetensors.numpy.save_file(found, tmp_path / "hf" / "model.safetensors")
  stored = sources.open_source(str(tmp_path / "hf")).stored
  assert {x.weight.theirs[0]: x.tensors[0].array().tobytes() for x in stored.values()} == {
    name: tensor.tobytes() for name, tensor in tensors.items()
  }


def test_a_home_folder_is_found_wherever_a_path_is_given(tmp_path, monkeypatch, capsys):
  """No folder ~ is made in the current folder, where a shell has not replaced ~."""
  monkeypatch.setenv("HOME", str(tmp_path))
  current = tmp_path / "current"
  current.mkdir()
  monkeypatch.chdir(current)
  cfg = hf_folders.model("qwen3", vocab_size=300)
  (tmp_path / "hf").mkdir()
  (tmp_path / "hf" / "tokenizer.json").write_text(train_bpe(["a text"], 300))
  config = Config(model=cfg, data={"tokenizer_type": "bpe", "tokenizer_path": "~/hf/tokenizer.json"})
  hf_folders.write_run(tmp_path / "run", config, hf_folders.random_params(cfg))
  (tmp_path / "run" / "config.yml").write_text(cli.print_config(config))
  assert export_hf.main(["~/run", "~/back"]) == 0
  (tmp_path / "token").write_text("a" * 64)
  assert shared_token("~/token", {})
  data = load(["~/run/config.yml", "dataset_type=synthetic", "tokenizer_path=~/hf", "run_name=new"]).data
  tokens = [tokenizer.load_bpe(path) for path in (data.tokenizer_path, "~/hf/tokenizer.json")]
  assert tokens[0].fingerprint == tokens[1].fingerprint
  keys = ["configs/base.yml", "dataset_type=synthetic", "load_parameters_path=~/back", "run_name=new"]
  assert load(keys).data.tokenizer_path == "~/back/tokenizer.json"
  assert sources.open_source(load(keys).run.load_parameters_path).stored
  for module in (report, evaluate):
    assert module.main(["~/none"]) == 2
    assert f"{tmp_path}/none" in capsys.readouterr().err
  assert not list(current.iterdir())
