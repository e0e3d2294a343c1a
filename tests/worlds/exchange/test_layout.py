"""Flat buffers of sharded pytrees, and back."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.support.exchange_members import members, same_bits

from worlds.exchange import FlatLayout, Part, plan


def mesh(first=0):
  return Mesh(np.array(jax.devices()[first : first + 4]).reshape(2, 2), ("fsdp", "tensor"))


def tree(seed=0, first=0):
  """Arrays on 4 devices: sharded over both axes, over one, replicated, empty, scalars."""
  random = np.random.default_rng(seed)

  def array(shape, *spec):
    values = random.standard_normal(shape).astype(np.float32)
    return jax.device_put(values, NamedSharding(mesh(first), PartitionSpec(*spec)))

  return {
    "both": array((3, 8, 6), None, "fsdp", "tensor"),
    "aligned": array((4, 32), None, "tensor"),
    "one": array((6, 5), "tensor"),
    "all_in_one_dim": array((8,), ("fsdp", "tensor")),
    "replicated": array((7,)),
    "empty": array((0, 4), None, "fsdp"),
    "loss": array(()),
    "scalars": (array((1,)), array(())),
  }


SIZE = 3 * 8 * 6 + 4 * 32 + 6 * 5 + 8 + 7 + 1 + 1 + 1


def assert_equal(a, b):
  def check(x, y):
    assert x.sharding == y.sharding and x.dtype == y.dtype
    assert same_bits(np.asarray(x), np.asarray(y))
    for mine, other in zip(x.addressable_shards, y.addressable_shards, strict=True):
      assert mine.device == other.device and same_bits(np.asarray(mine.data), np.asarray(other.data))

  jax.tree.map(check, a, b)


def test_a_tree_comes_back_from_its_flat_buffer():
  values = tree()
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), values)
  layout = FlatLayout(abstract)
  assert layout.size == SIZE  # a replicated shard counts once
  flat = layout.to_host([Part(values)]).read(0, SIZE).copy()
  everything = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(values)])
  np.testing.assert_array_equal(np.sort(flat), np.sort(everything))
  assert_equal(layout.to_device(flat), values)


def test_other_types_and_other_shardings_are_refused():
  with pytest.raises(AssertionError, match="sums are float32"):
    FlatLayout({"x": jnp.zeros(3, jnp.bfloat16)})
  values = tree()
  with pytest.raises(AssertionError, match="not NamedSharding"):
    FlatLayout(values).to_host([Part(values | {"both": jax.device_put(values["both"], values["loss"].sharding)})])


def test_device_arrays_are_summed_over_members(monkeypatch):
  """Two slices of 4 devices: sums of trees go through host copies and come back with the shardings of each slice."""
  monkeypatch.setattr(plan, "PART", 16)
  own = [tree(seed=2), tree(seed=3, first=4)]
  layouts = [FlatLayout(values) for values in own]

  def reduce(exchange, member):
    out = np.empty(SIZE, np.float32)
    exchange.reduce("s", {member: layouts[member].to_host([Part(own[member])])}, {0: [0], 1: [1]}, out)
    return layouts[member].to_device(out)

  with members(2) as those:
    totals = those.call(reduce)
  expected = jax.tree.map(lambda x, y: np.asarray(x) + np.asarray(y), *own)
  for total, values in zip(totals, own, strict=True):
    assert_equal(total, jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), expected, values))


def test_a_member_whose_arrays_are_of_numpy_starts_without_jax():
  command = "import sys, worlds.join, worlds.supervisor; sys.exit('jax' in sys.modules)"
  assert subprocess.run([sys.executable, "-c", command]).returncode == 0
