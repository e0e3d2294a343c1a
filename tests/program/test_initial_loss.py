"""The loss of a fresh model is ln(V), for every shipped model."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from tests.support.seeds import few

from trainer.config.schema import ModelSection
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels

FOLDER = Path(__file__).parents[2] / "configs" / "models"
MODELS = sorted(FOLDER.glob("*.yml"))
SHRUNK = {
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 256,
  "head_dim": 32,
  "dtype": "float32",
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "base_moe_mlp_dim": 64}
# Wide with 256 tokens: the loss of a wrongly scaled tied head grows with the width. Narrow with the model's own
# vocabulary, where only the size of the vocabulary matters and most of the time goes into random weights.
WIDTH = {"own-vocabulary": 32, "bytes": 512}


# Every model with few tokens, and one model of each vocabulary with all of its tokens.
CASES = [(path.stem, "bytes") for path in MODELS]
CASES += [(name, "own-vocabulary") for name in ("llama2-7b", "llama3.2-1b", "qwen3-14b")]


# A model of each family, and the largest vocabulary.
FEW = [(name, "bytes") for name in ("llama2-7b", "qwen3-0.6b", "qwen3-235b-a22b")]
FEW += [("qwen3-14b", "own-vocabulary")]


@pytest.mark.parametrize(("name", "vocabulary"), few(FEW, CASES))
def test_the_loss_of_a_fresh_model_is_that_of_guessing(name, vocabulary):
  path = FOLDER / f"{name}.yml"
  values = yaml.safe_load(path.read_text()) | SHRUNK | {"base_emb_dim": WIDTH[vocabulary]}
  values |= EXPERTS if "num_experts" in values else {}
  cfg = ModelSection(**values | ({"vocab_size": 256} if vocabulary == "bytes" else {}))
  assert abs(fresh_loss(cfg.model_dump_json()) - math.log(cfg.vocab_size)) < 0.1


@functools.cache  # sizes of one family have equal configurations once they are shrunk
def fresh_loss(model_section: str) -> float:
  """The loss of a newly initialised model on random tokens; model_section: JSON."""
  cfg = ModelSection.model_validate_json(model_section)
  model = DecoderFunctions(cfg, Kernels(dot_product))
  T = 64
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, T + 1))

  @jax.jit
  def loss(key):
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    logits = model.merge(model.init(key)).logits(jnp.asarray(tokens[:, :-1]), positions, jnp.ones((2, T), jnp.int32))
    picked = jnp.take_along_axis(logits, jnp.asarray(tokens[:, 1:])[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

  return float(loss(jax.random.key(0)))
