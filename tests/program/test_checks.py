"""What a witness compares: each array of each kind of layer, in the sums of a share and in the state."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tests.support.elastic_harness import TINY

from trainer.checkpoint.arrays import state_tree
from trainer.config import load
from trainer.config.faults import Fault
from trainer.elastic.flips import Flips
from trainer.program import program
from trainer.program.checks import Checks
from worlds.exchange import Part

KINDS = (
  *("embedding", "final_norm", "lm_head", "layers.1.feed_forward.router", "layers.1.feed_forward.load"),
  *(f"layers.0.attention{name}" for name in ("_norm", ".query", ".key", ".value", ".out", ".query_norm", ".key_norm")),
  *(f"layers.{layer}.feed_forward{name}" for layer in (0, 1) for name in ("_norm", ".gate", ".up", ".down")),
)


@pytest.fixture(scope="module")
def compared() -> tuple[Checks, Any, Any]:
  """(what a witness compares of a slice of two devices, its gradients, its state)."""
  config = load(["configs/base.yml", *TINY.split(), "scan_layers=false"])  # a dense layer, and one with experts
  config = config.with_values(base_num_decoder_layers=2, decoder_sparse_step=2, num_experts=2, base_moe_mlp_dim=16)
  abstract = program.build(config, [jax.devices()[:2]], 1)
  one = jax.jit(lambda: jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), abstract.state))
  state = jax.device_put(one(), jax.tree.map(lambda leaf: leaf.sharding, abstract.state))
  sums: Any = types.SimpleNamespace(parts=[Part(abstract.state.params)])
  return abstract.compile_checks(sums), state.params, state


@pytest.mark.parametrize("bit", [0, 31])
def test_a_flip_of_each_array_is_found_and_named_and_one_bit_is_counted(compared, bit):
  """On each of two devices: an even number of devices must not hide the sign."""
  checks, grads, state = compared
  share = lambda tree: checks.read_share(checks.of_share((0.0, 0.0, 1.0), [Part(tree)]))
  of_state = lambda state: checks.read_state(checks.of_state(state))
  number = lambda state: checks.number(checks.of_state(state))
  assert [kind for kind in KINDS if not any(name.startswith(kind) for name in share(grads))] == []
  for tree, digests in ((grads, share), (state, of_state)):
    right = digests(tree)
    for name, flipped in each_flipped(tree, bit):
      found = digests(flipped)
      assert {array for array in right if right[array] != found[array]} == {name}
      assert abs(right[name][1] - found[name][1]) <= 1, f"{name}: at least so many bits differ"
  assert all(number(flipped) != number(state) for _, flipped in each_flipped(state, bit))


def each_flipped(tree: Any, bit: int) -> Iterator[tuple[str, Any]]:
  """(name, the tree with one bit of this array flipped), for each array."""
  leaves, structure = jax.tree.flatten(tree)
  flips = lambda: Flips([Fault("flip_weight", 1, 0, bit=bit)], state_tree.flatten)
  for index, name in enumerate(state_tree.flatten(tree)):
    (flipped,) = flips()([leaves[index]])
    yield name, jax.tree.unflatten(structure, [*leaves[:index], flipped, *leaves[index + 1 :]])
