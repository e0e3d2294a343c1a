"""Zigzag order over the mesh axis context: the moves between both orders, and a step whose layers work in it."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from tests.kernels.test_attention import mesh_of
from tests.program.test_share_sums import compile_sums, sums

from trainer.kernels import attention
from trainer.kernels.attention_xla import dot_product
from trainer.parallel import zigzag


def in_zigzag(name, shape: attention.Shape) -> attention.AttentionKernel:
  """Attention by definition that expects zigzag order, as the kernel for TPUs does."""

  mesh = shape.mesh

  def function(*arrays: jax.Array) -> jax.Array:
    return zigzag.spread(mesh, dot_product(*(zigzag.restored(mesh, array) for array in arrays)))

  return attention.AttentionKernel(name, "for a test", function, mesh)


@pytest.mark.parametrize("shape", [(1, 1, 1, 2), (1, 2, 1, 3), (1, 2, 1, 4), (1, 1, 1, 7)], ids=str)
def test_both_orders(shape):
  mesh, context = mesh_of(*shape), shape[-1]
  x = np.arange(4 * 4 * context * 3).reshape(4, 4 * context, 3)
  spread = jax.jit(functools.partial(zigzag.spread, mesh))(x)
  places = zigzag.positions(context, 4 * context)
  np.testing.assert_array_equal(spread, x[:, places])
  np.testing.assert_array_equal(jax.jit(functools.partial(zigzag.restored, mesh))(spread), x)
  np.testing.assert_array_equal(zigzag.gathered(mesh, x[:, places]), x)
  work = (places + 1).reshape(context, -1).sum(axis=1)  # keys that the queries of each device see
  assert len(set(work.tolist())) == 1
  assert zigzag.spread(None, x) is zigzag.restored(None, x) is zigzag.gathered(None, x) is x


@pytest.mark.soak
def test_the_sums_of_a_share_in_several_programs_in_zigzag_order(monkeypatch):
  """And of two micro-batches: the first one takes the derivative that a step in one program takes. The tables are tied:
  the first and the last program add to the same gradient."""
  given = {"parallelism": {"ici_context_parallelism": 2}, "optimizer": {"gradient_accumulation_steps": 2}, "devices": 2}
  given["model"] = {"logits_via_embedding": True}
  scalars, grads = sums(compile_sums(stages=1, **given))
  monkeypatch.setattr(attention, "choose", in_zigzag)
  own_scalars, own_grads = sums(compile_sums(stages=2, **given))
  np.testing.assert_allclose(own_scalars, scalars, rtol=1e-6)
  np.testing.assert_allclose(own_grads, grads, rtol=0, atol=1e-6 * np.abs(grads).max())
