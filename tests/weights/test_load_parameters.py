"""A run that starts from published weights, or from another run's checkpoint: load_parameters_path."""

from __future__ import annotations

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support import hf_folders
from tests.support.command import Run
from tests.support.hf_folders import RUN_KEYS, RUN_SIZES

from input_pipeline.loader import make_loader
from trainer.config import load
from trainer.config.schema import ModelSection
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels
from trainer.weights import sources

# test_evaluate.py has the same optimizer, whose compiled program it shares. Each step changes the loss.
KEYS = [*RUN_KEYS, "dataset_type=synthetic", "opt_type=sgd", "learning_rate=1", "checkpoint_period=3", "steps=4"]


@pytest.fixture
def make(server, compiled, tmp_path):
  def run(name, *keys):
    return Run(tmp_path / name, [*KEYS, compiled, *keys], server.start)

  return run


def first_loss(run: Run) -> float:
  """The loss of the step that the first parameters compute, as metrics.jsonl has it."""
  lines = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
  return next(line["loss"] for line in lines if line.get("step") == 1 and "loss" in line)


@functools.cache
def model_and_logits():
  """The functions of the model, and its logits as a function that is compiled once."""
  model = DecoderFunctions(ModelSection(**{**RUN_SIZES, "remat_policy": "none"}), Kernels(dot_product))
  return model, jax.jit(lambda params, *inputs: model.merge(params).logits(*inputs))


def expected_loss(run: Run, place, rows: int = 4) -> float:
  """The loss of the parameters at `place` on the batch of step 1, of so many rows, from all logits."""
  config = load(run.argv()[0:], check_paths=False)
  model, logits_of = model_and_logits()
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), model.abstract())
  params = sources.open_source(str(place)).load(abstract)
  batch = make_loader(config.data, vocab_size=258, global_batch_size=rows, split="train").batch(0, np.arange(rows))
  logits = logits_of(params, batch.tokens, batch.positions, batch.segment_ids)
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(batch.targets)[..., None], axis=-1)[..., 0]
  return float(jnp.sum(losses * batch.weights) / jnp.sum(batch.weights))


@pytest.mark.slow
def test_a_run_starts_from_a_hugging_face_folder_and_a_resume_ignores_it(make, tmp_path):
  """Also on one slice of two, after the loss of the other before anything was saved."""
  hf = tmp_path / "hf"
  hf_folders.write_folder(hf, hf_folders.model("qwen3", **RUN_SIZES))
  run = make("a", f"load_parameters_path={hf}", "fault_injection=slice_down@1:1:restore", "elastic_enabled=true")
  assert run.start().wait(240) == 0, run.printed[-4000:]
  assert f"The parameters are those of {hf}" in run.printed
  assert first_loss(run) == pytest.approx(expected_loss(run, hf), rel=1e-5)
  shutil.rmtree(hf)
  assert run.start("steps=5", "fault_injection=").wait(240) == 0, run.printed[-4000:]
  # Another run starts from the parameters of a checkpoint that is not its last one.
  older = f"{run.directory}@3"
  other = make("b", f"load_parameters_path={older}", "steps=1")
  assert other.start().wait(240) == 0, other.printed[-4000:]
  assert first_loss(other) == pytest.approx(expected_loss(other, older), rel=1e-5)
  assert expected_loss(other, run.directory) != pytest.approx(expected_loss(other, older), rel=1e-5)


def test_parameters_that_do_not_fit_are_refused_before_a_folder_exists(make, tmp_path):
  hf_folders.write_folder(
    tmp_path / "hf", hf_folders.model("llama3.1", **{**RUN_SIZES, "use_qk_norm": False, "rope_max_timescale": 5e5})
  )
  run = make("a", f"load_parameters_path={tmp_path / 'hf'}")
  assert run.start().wait(240) == 2
  assert "use_qk_norm=True, there False; rope_max_timescale=1000000.0, there 500000.0; rope_type=" in run.printed
  assert "Set model_name, or these keys" in run.printed and not run.directory.exists()
  assert run.start(f"load_parameters_path={tmp_path / 'none'}").wait(240) == 2
  assert "there is no such folder" in run.printed and not run.directory.exists()


def test_the_tokenizer_beside_the_parameters_serves_the_data(tmp_path):
  (tmp_path / "tokenizer.json").write_text("{}")
  argv = ["configs/base.yml", f"load_parameters_path={tmp_path}"]
  data = load(argv, check_paths=False).data
  assert data.tokenizer_type == "bpe" and data.tokenizer_path == f"{tmp_path}/tokenizer.json"
  assert load([*argv, "tokenizer_type=byte"], check_paths=False).data.tokenizer_path == ""
