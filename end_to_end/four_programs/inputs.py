"""Makes the inputs of all programs: a Hugging Face folder with random weights, and token ids."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from end_to_end.four_programs import common
from tests.support import hf_folders

from trainer.config.schema import ModelSection

VOCABULARY = 1024
SIZES = {
  "base_emb_dim": 128,
  "base_num_decoder_layers": 4,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 448,
  "head_dim": 32,
  "vocab_size": VOCABULARY,
  "dtype": "float32",
  "initializer_range": 0.05,
}
MODELS = {
  "qwen3": {"use_qk_norm": True, "rope_max_timescale": 1e6, "logits_via_embedding": True},
  "llama": {
    "use_qk_norm": False,
    "rope_max_timescale": 500000.0,
    "rope_type": "llama3",
    "normalization_layer_epsilon": 1e-5,
  },
  "qwen3-moe": {
    "use_qk_norm": True,
    "rope_max_timescale": 1e7,
    "base_num_decoder_layers": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 128,
  },
}


def make(folder: Path, work: common.Work) -> None:
  """Fills the new folder `folder`."""
  section = ModelSection(**(SIZES | MODELS[work.model]), load_balance_loss_weight=work.balance)
  hf_folders.write_folder(folder / "model", section, shards=1)
  common.write(folder, work, text(work.schedule_steps * work.rows, work.length + 1))


def text(rows: int, length: int) -> np.ndarray:
  """Token ids [rows, length] of a random language: 8 tokens can follow each token, the first ones more often."""
  random = np.random.default_rng(63)
  follow = random.integers(VOCABULARY, size=(VOCABULARY, 8))
  share = 1 / np.arange(1, 9)
  tokens = np.empty((rows, length), np.int32)
  tokens[:, 0] = random.integers(VOCABULARY, size=rows)
  for i in range(1, length):
    tokens[:, i] = follow[tokens[:, i - 1], random.choice(8, size=rows, p=share / share.sum())]
  return tokens
