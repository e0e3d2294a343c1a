"""Rotary position embeddings, with Llama 3.1's frequency scaling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.schema import ModelSection


def inverse_frequencies(cfg: ModelSection) -> np.ndarray:
  """Angular frequencies, float32 [H/2]: theta^(-2i/H), scaled for rope_type=llama3.

  The llama3 rule (Llama 3.1 release, `apply_scaling` in meta-llama/llama-models): a frequency whose wavelength is
  longer than original_length/low_freq_factor is divided by the factor, one shorter than
  original_length/high_freq_factor is kept, and those between are interpolated.
  """
  exponents = np.arange(0, cfg.head_dim, 2, dtype=np.float32) / np.float32(cfg.head_dim)
  frequencies = (1.0 / cfg.rope_max_timescale**exponents).astype(np.float32)
  if cfg.rope_type == "default":
    return frequencies
  original = cfg.rope_original_max_position_embeddings
  low, high = cfg.rope_low_freq_factor, cfg.rope_high_freq_factor
  wavelengths = 2 * math.pi / frequencies
  smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
  return ((1 - smooth) * frequencies / cfg.rope_scaling_factor + smooth * frequencies).astype(np.float32)


def cos_sin_tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of shape [B, T, 1, H], float32, for integer `positions` [B, T]; the second half repeats the first.

  float32 because bfloat16 cannot tell position 257 from 256.
  """
  angles = positions.astype(jnp.float32)[..., None, None] * np.tile(frequencies, 2)
  return jnp.cos(angles), jnp.sin(angles)


# x [.., H] -> (-second half, first half), float32
RotateHalf = Callable[[jax.Array], jax.Array]


def rotate_half_by_reversal(x: jax.Array) -> jax.Array:
  """The halves of the last dim, exchanged and the second negated, in float32.

  Reversing a dim of two fuses with the arithmetic around it; splitting and concatenating are passes over memory.
  """
  halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
  exchanged = jax.lax.rev(halves, (halves.ndim - 2,)) * np.array([[-1.0], [1.0]], np.float32)
  return exchanged.reshape(x.shape)


def rotate_half_by_matmul(x: jax.Array) -> jax.Array:
  """`rotate_half_by_reversal` to the last bit, as a product with a permutation matrix.

  On a TPU the halves of a head are halves of a vector register, and moving them takes longer than the product. It is
  exact: each of its sums has one term.
  """
  half = x.shape[-1] // 2
  permutation = np.zeros((2 * half, 2 * half), np.float32)
  permutation[np.arange(half) + half, np.arange(half)] = -1.0
  permutation[np.arange(half), np.arange(half) + half] = 1.0
  # Products of bfloat16 with 1 are exact as they are; the matrix unit would round float32 to bfloat16.
  precision = jax.lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  return jnp.matmul(x, permutation.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def choose_rotate_half(platform: str) -> RotateHalf:
  """How to exchange halves on a platform ("cpu", "gpu", "tpu")."""
  return rotate_half_by_matmul if platform == "tpu" else rotate_half_by_reversal


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rotate(
  x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, rotate_half: RotateHalf = rotate_half_by_reversal
) -> jax.Array:
  """x rotated by its position's angles, same shape and dtype; pairs are (i, i + H/2) as in Hugging Face's weights.

  No gradient goes to `cos` and `sin`.
  """
  return (x_BTNH.astype(jnp.float32) * cos + rotate_half(x_BTNH) * sin).astype(x_BTNH.dtype)


def _forward(
  x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, rotate_half: RotateHalf
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return rotate(x_BTNH, cos, sin, rotate_half), (cos, sin)


def _backward(
  rotate_half: RotateHalf, tables: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None, None]:
  """The transpose of a rotation is the rotation by the opposite angle."""
  cos, sin = tables
  return (g.astype(jnp.float32) * cos - rotate_half(g) * sin).astype(g.dtype), None, None


rotate.defvjp(_forward, _backward)
