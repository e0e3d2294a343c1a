"""Continues sequences of token ids: one pass over the prompts, then one token of every row at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from trainer.models import cached
from trainer.models.decoder import DecoderFunctions, Params

_LENGTHS = 64  # prompts and caches have multiples of this length, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
  """How a token is chosen: temperature 0 is the most likely one; top_k=0 and top_p=1 leave out no token."""

  temperature: float = 0.7
  top_k: int = 0
  top_p: float = 1.0
  seed: int = 0


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

  params: on one device. prompts: none is empty. Only ids below `vocab_size` are chosen. Deterministic.
  """
  model, params = model.stacked(params)
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  length = _rounded(max(map(len, prompts)))
  padded = np.zeros((len(prompts), length), np.int32)
  for row, prompt in zip(padded, prompts):
    row[: len(prompt)] = prompt
  cache = cached.empty(model.cfg, len(prompts), _rounded(length + tokens))
  run = jax.jit(functools.partial(_next, model, vocab_size, sampling), donate_argnums=4)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), padded.shape)
  ids, cache = run(params, padded, positions, lengths - 1, cache, 0)
  ended = np.zeros(len(prompts), bool)
  first = np.zeros_like(lengths)
  for i in range(tokens):
    now = ids
    if i + 1 < tokens:  # the next token is computed while this one is read
      ids, cache = run(params, now[:, None], (lengths + i)[:, None], first, cache, i + 1)
    found = np.asarray(now)
    ended |= np.isin(found, list(stop))
    if ended.all():
      return
    yield [None if over else int(id) for id, over in zip(found, ended)]


def _rounded(length: int) -> int:
  return -(-length // _LENGTHS) * _LENGTHS


def _next(
  model: DecoderFunctions,
  vocab_size: int,
  sampling: Sampling,
  params: Params,
  tokens_BT: jax.Array,
  positions_BT: jax.Array,
  wanted_B: jax.Array,
  cache: cached.Cache,
  number: jax.Array,
) -> tuple[jax.Array, cached.Cache]:
  """Returns token `number` of every row, int32 [B], and the cache."""
  logits_BV, cache = cached.logits(model, params, tokens_BT, positions_BT, wanted_B, cache)
  logits_BV = logits_BV[:, :vocab_size]
  if sampling.temperature == 0:
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), cache
  key = jax.random.fold_in(jax.random.key(sampling.seed), number)
  kept = _likely(logits_BV / sampling.temperature, sampling)
  return jax.random.categorical(key, kept).astype(jnp.int32), cache


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
