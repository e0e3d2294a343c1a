"""Sampling from a trained model, for a person to read. Slow: each token runs the model on the whole window."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trainer.data.tokenizer import Tokenizer
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions, Params

_WINDOW = 256


def continue_text(
  model: DecoderFunctions,
  params: Params,
  tokenizer: Tokenizer,
  prompt: str,
  *,
  tokens: int,
  temperature: float = 0.7,
  seed: int = 0,
) -> str:
  """The text of `tokens` tokens sampled after `prompt` at `temperature` (0: always the most likely token).

  The model sees the last 256 tokens, or the prompt if it is longer. `params` must be on one device. Deterministic.
  """
  # The training attention may work only with the mesh, length and batch size of training.
  model = model.with_attention(dot_product)
  history = list(tokenizer.encode(prompt))
  window = max(len(history), min(_WINDOW, len(history) + tokens))

  @jax.jit
  def next_token(params: Params, window_T: jax.Array, length: jax.Array, key: jax.Array) -> jax.Array:
    positions = jnp.arange(window_T.shape[0], dtype=jnp.int32)
    segments = (positions < length).astype(jnp.int32)
    logits = model.merge(params).logits(window_T[None], positions[None], segments[None])[0, length - 1]
    logits = logits[: tokenizer.vocab_size]
    if temperature == 0:
      return jnp.argmax(logits)
    return jax.random.categorical(key, logits / temperature)

  begin = len(history)
  for i in range(tokens):
    recent = history[-window:]
    padded = np.zeros(window, np.int32)
    padded[: len(recent)] = recent
    key = jax.random.fold_in(jax.random.key(seed), i)
    history.append(int(next_token(params, padded, len(recent), key)))
  return tokenizer.decode(history[begin:])
