"""Rotary position embeddings, with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

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


def tables(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """(cos, sin) of shape [B, T, 1, H/2], float32, for integer `positions` [B, T].

  float32 because bfloat16 cannot tell position 257 from 256.
  """
  angles = positions.astype(jnp.float32)[..., None, None] * frequencies
  return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """x rotated by its position's angles, same shape and dtype; pairs are (i, i + H/2) as in Hugging Face's weights."""
  first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
  rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
  return rotated.astype(x_BTNH.dtype)
