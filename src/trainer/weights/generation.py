"""Continues sequences of token ids: one pass over the prompts, then one token of every row at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.errors import ConfigError
from trainer.models.decoder import DecoderFunctions, Params
from trainer.weights import cached

_LEAST_TEMPERATURE = 1e-4  # logits that are divided by less may become infinite
_LENGTHS = 64  # longer prompts and caches have multiples of it, shorter ones a power of 2: few programs are compiled


@dataclass(frozen=True)
class Sampling:
  """How a token is chosen: temperature 0 is the most likely one; top_k=0 and top_p=1 leave out no token."""

  temperature: float = 0.7
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0

  def __post_init__(self) -> None:
    if not (self.temperature == 0 or _LEAST_TEMPERATURE <= self.temperature <= 100):
      raise ConfigError(
        f"temperature={self.temperature}: must be 0, for the most likely token, or {_LEAST_TEMPERATURE:g} to 100.\n"
        "Choose for example 0.7."
      )
    if self.top_k < 0 or not 0 < self.top_p <= 1:
      raise ConfigError(
        f"top_k={self.top_k}, top_p={self.top_p}: top_k must be at least 0, and top_p above 0 and at most 1.\n"
        "Choose top_k=0 and top_p=1 to leave out no token."
      )
    if not -(2**31) <= self.seed < 2**32:  # JAX would drop higher bits in silence
      raise ConfigError(f"seed={self.seed}: must be a whole number of at most 32 bits.\nChoose a smaller one.")


DEFAULT = Sampling()


def stream(
  model: DecoderFunctions,
  params: Params,
  prompts: Sequence[Sequence[int]],
  tokens: int,
  *,
  vocab_size: int,
  stop: frozenset[int] = frozenset(),
  sampling: Sampling = DEFAULT,
) -> Iterator[list[int | None]]:
  """Yields at most `tokens` times the next token of each prompt; None after a token of `stop`, which is not yielded.

  params: on one device. prompts: not empty. Only ids below `vocab_size` are chosen. Deterministic.
  """
  length = _rounded(max(map(len, prompts)))
  starts = np.array([length - len(prompt) for prompt in prompts], np.int32)
  padded = np.zeros((len(prompts), length), np.int32)
  for row, start, prompt in zip(padded, starts, prompts):
    row[start:] = prompt
  cache = cached.empty(model.cfg, len(prompts), _rounded(length + tokens))
  run = functools.partial(_next, model, vocab_size, sampling, params, starts)
  ids, new = run(padded, 0, 0, cache)
  cache = cached.extended(cache, new, 0)
  ended = np.zeros(len(prompts), bool)
  for i in range(tokens):
    now = ids
    if i + 1 < tokens:  # the next token is computed while this one is read
      ids, new = run(now[:, None], length + i, i + 1, cache)
      cache = cached.extended(cache, new, length + i)
    found = np.asarray(now)
    ended |= np.isin(found, list(stop))
    if ended.all():
      return
    yield [None if over else int(id) for id, over in zip(found, ended)]


def _rounded(length: int) -> int:
  if length < _LENGTHS:
    return max(8, 1 << (length - 1).bit_length())
  return -(-length // _LENGTHS) * _LENGTHS


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _next(
  model: DecoderFunctions,
  vocab_size: int,
  sampling: Sampling,
  params: Params,
  starts_B: jax.Array,
  tokens_BT: jax.Array,
  slot: jax.Array,
  number: jax.Array,
  cache: cached.Cache,
) -> tuple[jax.Array, cached.Cache]:
  """Returns token `number` of every row, int32 [B], and its keys and values. The rest: see `cached.logits`."""
  logits_BV, new = cached.logits(model, params, tokens_BT, starts_B, slot, cache)
  logits_BV = logits_BV[:, :vocab_size]
  if sampling.temperature == 0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), new
  key = jax.random.fold_in(jax.random.key(sampling.seed), number)
  kept = _likely(logits_BV / sampling.temperature, sampling)
  return jax.random.categorical(key, kept).astype(jnp.int32), new


def _likely(logits_BV: jax.Array, sampling: Sampling) -> jax.Array:
  """Returns the logits, -inf for tokens that top_k or top_p leave out."""
  if 0 < sampling.top_k < logits_BV.shape[1]:
    least = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
    logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
  if sampling.top_p < 1:
    ordered = jnp.sort(logits_BV, axis=-1, descending=True)
    shares = jax.nn.softmax(ordered)
    inside = jnp.cumsum(shares, axis=-1) - shares < sampling.top_p  # the most likely token is always inside
    least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    logits_BV = jnp.where(logits_BV < least, -jnp.inf, logits_BV)
  return logits_BV
