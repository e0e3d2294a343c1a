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
  """Returns angular frequencies theta^(-2i/H), float32 [H/2], scaled for rope_type=llama3.

  The llama3 rule (Llama 3.1 release, `apply_scaling` in meta-llama/llama-models) depends on the wavelength of a
  frequency. Above original_length/low_freq_factor, divide the frequency by the factor. Below
  original_length/high_freq_factor, keep it. In between, interpolate.
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
  """Returns (cos, sin), float32 [B, T, 1, H], for integer `positions` [B, T]. The second half repeats the first half.

  float32, because bfloat16 rounds position 257 to 256.
  """
  angles = positions.astype(jnp.float32)[..., None, None] * np.tile(frequencies, 2)
  # Without the barrier, XLA moves the cosines and sines into the loop over layers and computes them again in each one.
  return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


# x [.., H] -> (-second half, first half), float32.
RotateHalf = Callable[[jax.Array], jax.Array]


def rotate_half_by_reversal(x: jax.Array) -> jax.Array:
  """Returns (-second half, first half) of the last dim in float32, by reversing a dim of size two.

  The compiler fuses a reversal with the arithmetic around it. Splitting and concatenating are extra passes over memory.
  """
  halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)
  rotated = jax.lax.rev(halves, (halves.ndim - 2,)) * np.array([[-1.0], [1.0]], np.float32)
  return rotated.reshape(x.shape)


def rotate_half_by_matmul(x: jax.Array) -> jax.Array:
  """Returns what `rotate_half_by_reversal` returns, bit for bit for finite x, as a product with a permutation matrix.

  On a TPU the halves of a head are halves of a vector register, and moving them takes longer than the product. The
  product is exact, because each of its sums has one term.
  """
  half = x.shape[-1] // 2
  permutation = np.zeros((2 * half, 2 * half), np.float32)
  permutation[np.arange(half) + half, np.arange(half)] = -1.0
  permutation[np.arange(half), np.arange(half) + half] = 1.0
  # A bfloat16 times 1 is exact in the default precision. float32 needs HIGHEST, else the TPU rounds it to bfloat16.
  precision = jax.lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
  return jnp.matmul(x, permutation.astype(x.dtype), precision=precision, preferred_element_type=jnp.float32)


def choose_rotate_half(platform: str) -> RotateHalf:
  """Returns the fastest way to rotate halves on a platform ("cpu", "gpu", "tpu")."""
  return rotate_half_by_matmul if platform == "tpu" else rotate_half_by_reversal


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def rotate(
  x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, rotate_half: RotateHalf = rotate_half_by_reversal
) -> jax.Array:
  """Returns x rotated by the angles of its positions, in the same shape and dtype.

  Dims i and i + H/2 form a pair, as in Hugging Face's weights. `cos` and `sin` get no gradient.
  """
  return (x_BTNH.astype(jnp.float32) * cos + rotate_half(x_BTNH) * sin).astype(x_BTNH.dtype)


def rotate_back(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, rotate_half: RotateHalf) -> jax.Array:
  """Returns x rotated by the opposite angles, in the same shape and dtype: the transpose of `rotate`."""
  return (x_BTNH.astype(jnp.float32) * cos - rotate_half(x_BTNH) * sin).astype(x_BTNH.dtype)


def _backward(
  rotate_half: RotateHalf, tables: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None, None]:
  return rotate_back(g, *tables, rotate_half), None, None


rotate.defvjp(lambda x, cos, sin, rotate_half: (rotate(x, cos, sin, rotate_half), (cos, sin)), _backward)
