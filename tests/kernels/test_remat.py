"""What each remat policy saves of a layer, read from the program that JAX builds."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from tests.support.seeds import few

from trainer.config.schema import ACTIVATIONS, ModelSection
from trainer.kernels import remat

EXPECTED = {
  "full": "",
  "save_out_proj": "out_proj",
  "save_qkv_proj": "query_proj key_proj value_proj",
  "save_dot_except_mlp": "query_proj key_proj value_proj out_proj",
  "save_dot_except_mlpwi": "query_proj key_proj value_proj out_proj mlpwo",
  "save_dot_with_context_except_mlp": "query_proj key_proj value_proj context out_proj",
  "minimal": "query_proj key_proj value_proj out_proj mlpwi_0 mlpwi_1 mlpwo",
  "minimal_with_context": "query_proj key_proj value_proj context out_proj mlpwi_0 mlpwi_1 mlpwo",
  "qkv_proj_offloaded": "query_proj key_proj value_proj",
  "minimal_offloaded": "query_proj key_proj value_proj out_proj mlpwi_0 mlpwi_1 mlpwo",
}
# Every activation of the toy layer has a different size, which identifies it among the residuals.
SIZES = {name: 11 + i for i, name in enumerate(ACTIVATIONS)}


def layer(x, matrices):
  """A chain of nonlinear maps. The outputs have the names and sizes of SIZES, and the backward pass needs each one."""
  for name in ACTIVATIONS:
    x = jnp.sin(checkpoint_name(x @ matrices[name], name))
  return x


def saved(cfg):
  """Returns the names of the activations that the backward pass of one layer keeps."""
  use, policy = remat.checkpoint_policy(cfg)
  assert use
  sizes = [7, *SIZES.values()]
  matrices = {name: jnp.ones((sizes[i], sizes[i + 1])) for i, name in enumerate(ACTIVATIONS)}
  _, pull = jax.vjp(lambda x: jax.checkpoint(layer, policy=policy)(x, matrices), jnp.ones((3, 7)))
  kept = {leaf.shape[-1] for leaf in jax.tree.leaves(pull) if leaf.ndim == 2 and leaf.shape[0] == 3}
  return {name for name, size in SIZES.items() if size in kept}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_policy_saves_the_names_of_its_table(name):
  cfg = ModelSection(remat_policy=name)
  assert saved(cfg) == set(EXPECTED[name].split())
  assert set(remat.saved_names(cfg).host) == (set(EXPECTED[name].split()) if name.endswith("offloaded") else set())


def test_offloaded_activations_are_in_pinned_host_memory():
  _, policy = remat.checkpoint_policy(ModelSection(remat_policy="qkv_proj_offloaded"))
  matrices = {name: jnp.ones((8, 8)) for name in ACTIVATIONS}
  run = lambda x: jax.checkpoint(layer, policy=policy)(x, matrices).sum()
  text = str(jax.make_jaxpr(jax.grad(run))(jnp.ones((3, 8))))
  assert text.count("device_put") == 2 * 3  # to the host and back, for each of three


def gradients(layer):
  keys = jax.random.split(jax.random.key(0), len(ACTIVATIONS))
  matrices = {name: jax.random.normal(key, (8, 8)) for name, key in zip(ACTIVATIONS, keys, strict=True)}
  x = jax.random.normal(jax.random.key(1), (3, 8))
  return jax.jit(jax.grad(lambda m: layer(x, m).sum()))(matrices)


without_policy = functools.cache(lambda: gradients(layer))


@pytest.mark.parametrize("name", few(["full", "minimal_with_context"], EXPECTED))
def test_gradients_do_not_depend_on_the_policy(name):
  _, policy = remat.checkpoint_policy(ModelSection(remat_policy=name))
  found = gradients(jax.checkpoint(layer, policy=policy))
  for a, b in zip(*map(jax.tree.leaves, (without_policy(), found)), strict=True):
    assert jnp.allclose(a, b, rtol=1e-5, atol=1e-6)
