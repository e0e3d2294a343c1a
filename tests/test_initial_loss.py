"""A fresh model knows nothing: its loss is ln(V), for every model that is shipped."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from trainer.config.schema import ModelSection
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels

MODELS = sorted((Path(__file__).parent.parent / "configs" / "models").glob("*.yml"))
# Shrunk in depth and width. 512 wide with the small vocabulary, because a tied head's loss would grow with the width if
# it were wrong; with the model's own it is the vocabulary's size that is looked at, and random weights take time.
SHRUNK = {
  "base_num_decoder_layers": 2,
  "base_emb_dim": 512,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 256,
  "head_dim": 32,
  "dtype": "float32",
}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
@pytest.mark.parametrize("vocab", [None, 256], ids=["own-vocabulary", "bytes"])
def test_the_loss_of_a_fresh_model_is_that_of_guessing(path, vocab):
  values = yaml.safe_load(path.read_text()) | SHRUNK | ({"vocab_size": vocab} if vocab else {"base_emb_dim": 64})
  cfg = ModelSection(**values)
  model = DecoderFunctions(cfg, Kernels(dot_product))
  T = 64
  tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (2, T + 1))

  @jax.jit
  def loss(key):
    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    logits = model.merge(model.init(key)).logits(jnp.asarray(tokens[:, :-1]), positions, jnp.ones((2, T), jnp.int32))
    picked = jnp.take_along_axis(logits, jnp.asarray(tokens[:, 1:])[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

  assert abs(float(loss(jax.random.key(0))) - math.log(cfg.vocab_size)) < 0.1
