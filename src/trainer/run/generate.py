"""Sampling from a trained model, for a person to read. Slow: each token runs the model on the whole window."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.schema import Config
from trainer.data.tokenizer import Tokenizer
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions, Params
from trainer.program import Program
from trainer.run.session import Session

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


def sample(config: Config, session: Session, prog: Program, params: Params, step: int) -> None:
  """Prints the trained model's continuation of sample_prompt, so that a person sees what it has learned.

  The run is complete without it: if one device cannot hold the model, the log has a warning.
  """
  tokenizer = session.data.train.tokenizer
  if not config.observe.sample_prompt or not session.cluster.coordination.saves_in_storage():
    return
  if tokenizer is None or session.cluster.world.size > 1:
    reason = "the data have no tokenizer" if tokenizer is None else "the weights are spread over processes"
    session.log.warning(f"no sample is made of sample_prompt: {reason}")
    return
  start = time.monotonic()
  try:
    with session.watchdog.during("sample"):
      text = continue_text(
        prog.model,
        jax.device_put(params, prog.mesh.devices.flat[0]),
        tokenizer,
        config.observe.sample_prompt,
        tokens=config.observe.sample_tokens,
        seed=config.run.init_weights_seed,
      )
  except jax.errors.JaxRuntimeError as error:
    session.log.warning(f"no sample is made of sample_prompt, one device must hold the whole model for it: {error}")
    return
  session.log.line(f"--- sample after step {step} ---\n{config.observe.sample_prompt}{text}\n--- end of sample ---")
  session.events.emit(
    "sample", step=step, seconds=time.monotonic() - start, prompt=config.observe.sample_prompt, text=text
  )
