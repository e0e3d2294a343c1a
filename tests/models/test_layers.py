"""Derivatives of layers that are written by hand, compared with those of JAX and with exact numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.models import rope
from trainer.models.layers import rms_norm, rotated_rms_norm, swiglu, swiglu_matmul

B, T, N, H, EPSILON = 2, 24, 3, 16, 1e-6
halves = pytest.mark.parametrize("rotate_half", [rope.rotate_half_by_reversal, rope.rotate_half_by_matmul])


def arrays(dtype: str) -> tuple[jax.Array, ...]:
  """x and a gradient [B, T, N, H] in `dtype`, scale [H], cos and sin [B, T, 1, H]."""
  keys = jax.random.split(jax.random.key(0), 3)
  x, g = (3 * jax.random.normal(key, (B, T, N, H)).astype(dtype) for key in keys[:2])
  scale = 1 + 0.3 * jax.random.normal(keys[2], (H,))
  positions = jnp.arange(B * T).reshape(B, T)
  return x, g, scale, *rope.cos_sin_tables(positions, 100.0 ** -(np.arange(0, H, 2, dtype=np.float32) / H))


@halves
def test_value_and_gradients_are_those_of_norm_and_rotation(rotate_half):
  x, g, scale, cos, sin = arrays("float32")
  together = lambda x, scale: rotated_rms_norm(x, scale, cos, sin, EPSILON, rotate_half)
  apart = lambda x, scale: rope.rotate(rms_norm(x, scale, EPSILON), cos, sin, rotate_half)
  for function in (lambda f: f(x, scale), lambda f: jax.vjp(f, x, scale)[1](g)):
    for ours, theirs in zip(jax.tree.leaves(function(together)), jax.tree.leaves(function(apart)), strict=True):
      np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@halves
def test_bfloat16_is_rounded_once(rotate_half):
  x, _, scale, cos, sin = (np.asarray(array) for array in arrays("bfloat16"))
  exact = x.astype(np.float64)
  exact = exact / np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + EPSILON) * scale
  first, second = np.split(exact, 2, axis=-1)
  exact = exact * cos + np.concatenate([-second, first], axis=-1) * sin
  ours = np.asarray(rotated_rms_norm(x, scale, cos, sin, EPSILON, rotate_half), np.float64)
  spacing = 2.0 ** (np.floor(np.log2(abs(exact))) - 7)  # of bfloat16 numbers
  assert (abs(ours - exact) <= 0.5 * spacing + 1e-5).all()


def swiglu_arrays(dtype: str) -> tuple[jax.Array, ...]:
  """gate and up [B, T, F], w [F, D], and a gradient [B, T, D], in `dtype`, where F = 2 H and D = H."""
  shapes = (B, T, 2 * H), (B, T, 2 * H), (2 * H, H), (B, T, H)
  keys = jax.random.split(jax.random.key(1), len(shapes))
  return tuple(2 * jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint])
def test_swiglu_and_its_matmul_have_the_gradients_of_jax(wrap):
  *given, g = swiglu_arrays("float32")
  together = wrap(lambda gate, up, w: swiglu_matmul(gate, up, w, jnp.matmul))
  apart = lambda gate, up, w: swiglu(gate, up) @ w
  np.testing.assert_array_equal(together(*given), apart(*given))
  for ours, theirs in zip(jax.vjp(together, *given)[1](g), jax.vjp(apart, *given)[1](g), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_gradients_of_swiglu_in_bfloat16_are_as_close_to_exact_ones_as_those_of_jax():
  *given, g = swiglu_arrays("bfloat16")
  gate, up, w, exact_g = (np.asarray(array, np.float64) for array in (*given, g))
  sigmoid = 1 / (1 + np.exp(-gate))
  dhidden = exact_g @ w.T
  rows = lambda array: array.reshape(B * T, -1)
  exact = (
    dhidden * up * (sigmoid + gate * sigmoid * (1 - sigmoid)),
    dhidden * gate * sigmoid,
    rows(gate * sigmoid * up).T @ rows(exact_g),
  )
  together = jax.vjp(lambda *given: swiglu_matmul(*given, jnp.matmul), *given)[1](g)
  apart = jax.vjp(lambda gate, up, w: swiglu(gate, up) @ w, *given)[1](g)
  for ours, theirs, true in zip(together, apart, exact, strict=True):
    error = lambda array, true=true: np.linalg.norm(np.asarray(array, np.float64) - true) / np.linalg.norm(true)
    assert error(ours) < 1.2 * error(theirs) < 0.012
