"""Matmuls of activations with weights on a CPU: their derivatives, and what they keep for them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.kernels import projection

AXES = ("embed", "heads", "head_dim")


@pytest.mark.parametrize("width", [4, 32])  # narrower and wider than x: another operand is transposed
def test_the_derivative_on_a_cpu_is_the_derivative_of_jax(width):
  x = jax.random.normal(jax.random.key(0), (2, 8, 16))
  w = jax.random.normal(jax.random.key(1), (16, 2, width // 2))
  results = []
  for platform in ("cpu", "tpu"):
    project = functools.partial(projection.choose(platform, ""), axes=AXES)
    out, pull = jax.vjp(project, x, w)
    results.append((out, *pull(jnp.cos(out))))
  for ours, plain in zip(*results, strict=True):
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def test_matmuls_with_one_input_keep_it_once():
  project = projection.choose("cpu", "")

  def layer(x, weights):
    return x + jnp.concatenate(project.project_each(jnp.sin(x), [(w, AXES) for w in weights]), axis=-1), None

  weights = [jnp.ones((3, 16, width)) for width in (8, 4, 4)]
  _, pull = jax.vjp(lambda x: jax.lax.scan(layer, x, weights)[0], jnp.ones((2, 8, 16)))
  stacked = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == (3, 2, 8, 16)]
  assert len(stacked) == 2  # cos(x), and sin(x) for all three matmuls
