"""Sums over slices inside the backward pass: which of them are rounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from trainer.parallel.grad_reduce import GradReduce
from trainer.parallel.mesh import DATA


def test_counts_of_tokens_are_exact_and_gradients_are_rounded():
  """301 + 302 tokens were 600."""
  mesh = Mesh(np.array(jax.devices()[:2]), (DATA,))

  def sums(of_slice):
    weights = {"load": jnp.zeros(2), "up": jnp.zeros(2)}

    def loss(totals):
      attached = GradReduce(totals, "bfloat16", False).attach(weights, totals, adds_totals=False)
      return sum(jnp.sum(one * of_slice[0]) for one in attached.values())

    return jax.grad(loss)(weights)

  specs = {"in_specs": PartitionSpec(DATA), "out_specs": PartitionSpec()}
  summed = jax.jit(jax.shard_map(sums, mesh=mesh, check_vma=False, **specs))
  found = summed(jnp.array([[301.0, 1.0], [302.0, 258.0]]))
  assert found["load"].tolist() == [603, 259]
  assert found["up"].tolist() == [600, 260]
