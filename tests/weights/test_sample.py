"""The sample at the end of a run: made by any model, whatever mesh it was trained on."""

from __future__ import annotations

import types

import jax
import numpy as np

from input_pipeline.tokenizer import ByteTokenizer
from trainer.config.schema import Config
from trainer.run.plugins import Completed
from trainer.weights import sample as generate

T = 128


def config(**parallelism) -> Config:
  model = {"base_emb_dim": 32, "base_num_decoder_layers": 2, "base_num_query_heads": 4, "base_num_kv_heads": 4}
  model |= {"base_mlp_dim": 64, "head_dim": 8, "vocab_size": 264, "dtype": "float32", "attention": "flash"}
  return Config.model_validate(
    {
      "model": model,
      "data": {"max_target_length": T, "per_device_batch_size": 1},
      "observe": {"sample_prompt": "def f("},
      "parallelism": parallelism,
    }
  )


def end_of_run(tokenizer, process_count: int = 1) -> list[str]:
  """The log lines of the plug-in."""
  said: list[str] = []
  run = types.SimpleNamespace(
    config=config(),
    data=types.SimpleNamespace(train=types.SimpleNamespace(tokenizer=tokenizer)),
    cluster=types.SimpleNamespace(world=types.SimpleNamespace(size=process_count), saves_in_storage=lambda: True),
    log=types.SimpleNamespace(line=said.append, warning=said.append),
    events=types.SimpleNamespace(emit=lambda kind, **fields: said.append(kind)),
  )
  prog = types.SimpleNamespace(model=None, mesh=types.SimpleNamespace(devices=np.array(jax.devices()[:1])))
  plugin = generate.Sample(run.config, run.data)
  plugin.run = run
  plugin.completed(Completed(7, {}, prog, lambda work, name: work()))
  return said


def test_a_sample_that_one_device_cannot_hold_is_a_warning(monkeypatch):
  """A long run on many chips must not end with exit code 1 because one chip is too small for the model."""

  def out_of_memory(*args, **kwargs):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

  monkeypatch.setattr(generate, "continue_text", out_of_memory)
  _, said = end_of_run(ByteTokenizer())
  assert said.startswith("no sample") and "one device" in said and "out of memory" in said
