"""Generation with a cache of keys and values gives what the whole model gives."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tests.input_pipeline.test_tokenizer import saved_model
from tests.support import hf_folders
from tests.support.seeds import few

from input_pipeline.tokenizer import load_bpe
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.tools import generate
from trainer.weights import generation
from trainer.weights.generation import Sampling
from trainer.weights.model import Model

PROMPTS = [[5, 9, 2], list(range(40)), [7]]


# For a model with experts, test_against_transformers.py compares the texts of generate and of transformers.
@pytest.fixture(scope="module", params=few(["qwen3"], ["qwen3", "qwen3-moe-layers"]))
def model(request, tmp_path_factory) -> Model:
  cfg = hf_folders.model(request.param, vocab_size=258)
  run = tmp_path_factory.mktemp("run")
  hf_folders.write_run(run, Config(model=cfg), hf_folders.random_params(cfg))
  return dataclasses.replace(Model.from_run(str(run)), stop=frozenset())


def greedy(model: Model, prompts: list[list[int]], tokens: int) -> list[list[int]]:
  """The continuations, each from the logits of the whole sequence at every token."""
  run = jax.jit(lambda params, *batch: model.functions.merge(params).logits(*batch))

  def continuation(prompt: list[int]) -> list[int]:
    padded, length = np.zeros((1, 64), np.int32), len(prompt)
    padded[0, :length] = prompt
    positions = np.arange(64, dtype=np.int32)[None]
    for i in range(length, length + tokens):
      padded[0, i] = np.argmax(run(model.params, padded, positions, np.ones_like(padded))[0, i - 1])
    return padded[0, length : length + tokens].tolist()

  return [continuation(prompt) for prompt in prompts]


def test_greedy_text_of_a_batch_is_that_of_the_whole_model(model):
  steps = list(model.stream(PROMPTS, 20, Sampling(temperature=0)))
  rows = [[step[i] for step in steps] for i in range(len(PROMPTS))]
  assert rows == greedy(model, PROMPTS, 20)
  # The second row ends before its third token, and the text when all rows have ended.
  stop = frozenset([rows[1][2], rows[0][5], rows[2][5]])
  sampling = Sampling(temperature=0)
  functions, params = model.functions, model.params
  ended = list(generation.stream(functions, params, PROMPTS, 20, vocab_size=258, stop=stop, sampling=sampling))
  for i, row in enumerate(rows):
    length = next(n for n, id in enumerate(row) if id in stop)
    assert [step[i] for step in ended] == row[:length] + [None] * (len(ended) - length)


def test_top_k_and_top_p_leave_out_unlikely_tokens():
  logits = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
  kept = lambda **keys: np.isfinite(generation._likely(jax.numpy.asarray(logits), Sampling(**keys)))[0].tolist()
  assert kept() == [True] * 4
  assert kept(top_k=2) == [True, True, False, False]
  assert kept(top_p=0.7) == [True, True, False, False]
  assert kept(top_p=0.1) == [True, False, False, False]
  assert kept(top_k=3, top_p=0.99) == [True, True, True, False]


def test_the_command_streams_a_text_and_takes_a_file(tmp_path, capsys):
  cfg = hf_folders.model("qwen3", vocab_size=258)
  hf_folders.write_run(tmp_path / "run", Config(model=cfg), hf_folders.random_params(cfg))
  argv = [f"{tmp_path / 'run'}@5", "--tokens", "8", "--temperature", "0"]
  assert generate.main([*argv, "def f("]) == 0
  first = capsys.readouterr()
  assert first.out.startswith("def f(") and len(first.out) > 8 and "tokens/s" in first.err
  (tmp_path / "prompts").write_text("def f(\nclass\n")
  assert generate.main([*argv, "--prompts", str(tmp_path / "prompts")]) == 0
  assert capsys.readouterr().out.startswith(f"--- {first.out.rstrip()}")
  assert generate.main([argv[0], "x", "--tokens", "9999999"]) == 2
  assert "max_position_embeddings=4096" in capsys.readouterr().err
  assert generate.main([str(tmp_path), "x"]) == 2


def test_a_prompt_without_any_token_is_refused(tmp_path):
  model = SimpleNamespace(tokenizer=load_bpe(saved_model(tmp_path, "BPE without unk")))
  assert Model.encode(model, "ab") == [0, 3, 4] and Model.encode(model, "") == [0]
  with pytest.raises(ConfigError, match="'\u043c\u0438\u0440': the tokenizer of the model has no token for it"):
    Model.encode(model, "\u043c\u0438\u0440")
