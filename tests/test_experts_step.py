"""The step of a mixture of experts against itself: no mesh, accumulation or layout of layers may change it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests import test_step
from tests.test_step import ROWS, T, assert_close, config, packed_batch

from trainer.models import experts

EXPERTS, K = 4, 2
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": K, "base_moe_mlp_dim": 16, "load_balance_loss_weight": 0.1}
# On eight devices of fsdp, four experts are stored in parts.
MESHES = test_step.MESHES | {
  "shared, tensor": ((2, 4), {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}),
  "shared in groups, context": ((1, 8), {"ici_expert_parallelism": 2, "ici_context_parallelism": 2}),
  "shared in groups, in parts": ((1, 8), {"ici_expert_parallelism": 2}),
}


@functools.cache
def reference():
  return test_step.run(config(model=MOE))


def load(params) -> np.ndarray:
  """[L, E]"""
  return np.asarray(params["layers"]["feed_forward"]["load"])


def assert_same_as_one_device(got) -> None:
  assert_close(got, reference(), 5e-6)
  np.testing.assert_allclose(load(got[1].params), load(reference()[1].params), rtol=1e-6)
  for ours, theirs in zip(got[0], reference()[0], strict=True):
    for key in experts.METRICS:
      assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.parametrize("name", ["all", "fsdp", *(name for name in MESHES if name.startswith("shared"))])
def test_sharded_equals_unsharded(name):
  where, parallelism = MESHES[name]
  cfg = config(model=MOE, data={"per_device_batch_size": ROWS / math.prod(where)}, parallelism=parallelism)
  built = test_step.compiled(cfg, where)
  lowered = built.program.lower().as_text(debug_info=True)
  assert ("one_of_2_parts" in lowered) == name.startswith("shared")
  assert ("feed_forward/all_to_all" in lowered) == name.endswith("in parts")
  assert_same_as_one_device(test_step.two_steps(cfg, built))


def test_three_of_four_slices_train_on_the_same_batch():
  """In two micro-batches, the second with padding: the load of the experts is that of the whole batch."""
  cfg = config(model=MOE, data={"per_device_batch_size": ROWS / 8})
  built = test_step.compiled(cfg, (3, 2), total=4)
  assert built.program.plan.micro_batches == 2
  assert_same_as_one_device(test_step.two_steps(cfg, built))


@functools.cache
def sums():
  """Of the first batch, on the initial weights."""
  cfg = config(model=MOE)
  params = jax.tree.map(jnp.asarray, test_step.fresh(cfg).params)
  batch = jax.tree.map(lambda x: x.reshape(1, -1, T), packed_batch())
  return params, test_step.gradient_program(cfg.model_dump_json())(params, batch)


def test_every_token_that_is_not_padding_counts_k_times_in_each_layer():
  counts = load(sums()[1].grads)
  assert counts.shape == (2, EXPERTS)
  np.testing.assert_array_equal(counts.sum(axis=-1), K * np.count_nonzero(packed_batch().segment_ids))


def test_the_step_puts_the_counts_in_the_place_of_the_load():
  """They are no gradients: they count neither for the norm nor for the optimizer."""
  params, found = sums()
  grads, counts = experts.split_loads(found.grads)
  assert not load(grads).any() and len(counts) == 1
  after, metrics = experts.take_loads(params, counts)
  shares = load(found.grads) / load(found.grads).sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(load(after), shares * load(params).sum(axis=-1, keepdims=True), rtol=1e-6)
  assert float(metrics["router_load_max"]) == pytest.approx(EXPERTS * shares.max())
  assert float(metrics["router_load_min"]) == pytest.approx(EXPERTS * shares.min())
  entropy = -(shares * np.log(shares)).sum(axis=-1) / np.log(EXPERTS)
  assert float(metrics["router_entropy"]) == pytest.approx(entropy.mean())


def test_a_batch_without_tokens_keeps_the_load():
  params = sums()[0]
  after, _ = experts.take_loads(params, [jnp.zeros((2, EXPERTS))])
  np.testing.assert_array_equal(load(after), load(params))


def test_a_dense_model_has_no_loads():
  params = {"layers": {"feed_forward": {"gate": jnp.ones(3)}}}
  assert experts.split_loads(params) == (params, [])
  assert experts.take_loads(params, []) == (params, {})
