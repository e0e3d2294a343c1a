"""Inputs of attention, its plain numpy oracle, and comparisons of outputs and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ("out", "dq", "dk", "dv")


def inputs(b, t, n, k, h, dtype=jnp.float32, documents=3, seed=0):
  """Returns (q, k, v, segment ids, dout): random values; each row has `documents` segments and ends in padding (0)."""
  rng = np.random.default_rng(seed)
  q, key, value, dout = (jnp.asarray(rng.normal(size=(b, t, m, h)), dtype) for m in (n, k, k, n))
  ids = np.sort(rng.integers(1, documents + 1, (b, t)), axis=1)
  ids[:, t - t // 8 :] = 0
  return q, key, value, jnp.asarray(ids, jnp.int32), dout


def with_grads(attention):
  """Returns a function (q, k, v, ids, dout) -> (out, dq, dk, dv)."""

  def run(q, key, value, ids, dout):
    out, pull = jax.vjp(lambda *a: attention(*a, ids, ids), q, key, value)
    return out, *pull(dout)

  return run


def exact(q, key, value, ids, dout):
  """Returns (out, dq, dk, dv) in float64, from the definition of attention, with repeated key heads."""
  q, key, value, dout = (np.asarray(x, np.float64) for x in (q, key, value, dout))
  ids = np.asarray(ids)
  b, t, n, h = q.shape
  groups = n // key.shape[2]
  keys, values = np.repeat(key, groups, 2), np.repeat(value, groups, 2)
  seen = np.tril(np.ones((t, t), bool)) & (ids[:, :, None] == ids[:, None, :])
  scores = np.where(seen[:, None], np.einsum("btnh,bsnh->bnts", q, keys) * h**-0.5, -np.inf)
  p = np.exp(scores - scores.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  dp = np.einsum("btnh,bsnh->bnts", dout, values)
  ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * h**-0.5
  merge = lambda x: x.reshape(b, t, n // groups, groups, h).sum(3)
  return (
    np.einsum("bnts,bsnh->btnh", p, values),
    np.einsum("bnts,bsnh->btnh", ds, keys),
    merge(np.einsum("bnts,btnh->bsnh", ds, q)),
    merge(np.einsum("bnts,btnh->bsnh", p, dout)),
  )


def assert_close(got, want, tolerance):
  """Asserts that no element differs by more than `tolerance` times the largest value of the expected array."""
  for name, a, b in zip(NAMES, got, want, strict=True):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, f"{name}: {a.shape} is not {b.shape}"
    error = np.abs(a - b) / (np.abs(b).max() or 1)
    assert error.max() <= tolerance, (
      f"{name}: largest error {error.max():.2e}, mean {error.mean():.2e} > {tolerance:.0e}"
    )
