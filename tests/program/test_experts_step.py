"""The step of a mixture of experts against itself: no mesh, accumulation or layout of layers may change it."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.program import test_step
from tests.program.test_step import ROWS, T, assert_close, config, packed_batch
from tests.support.seeds import few

from input_pipeline.batch import Batch
from trainer.kernels.attention_xla import dot_product
from trainer.models import experts
from trainer.models.layers import Kernels
from trainer.program import program
from trainer.program.state import TrainState

EXPERTS, K = 4, 2
MOE = {"num_experts": EXPERTS, "num_experts_per_tok": K, "base_moe_mlp_dim": 16, "load_balance_loss_weight": 0.1}
BIASED = MOE | {"routed_bias_update_rate": 0.5}
# On eight devices of fsdp, four experts are stored in parts.
MESHES = test_step.MESHES | {
  "shared, tensor": ((2, 4), {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}),
  "shared in groups, context": ((1, 8), {"ici_expert_parallelism": 2, "ici_context_parallelism": 2}),
  "shared in groups, in parts": ((1, 8), {"ici_expert_parallelism": 2}),
}
SHARED = [name for name in MESHES if name.startswith("shared")]


@functools.cache
def on_one_device():
  return test_step.compiled(config(model=BIASED))


@functools.cache
def reference():
  return test_step.two_steps(config(model=BIASED), on_one_device())


def load(params) -> np.ndarray:
  """[L, E]"""
  return np.asarray(params["layers"]["feed_forward"]["load"])


def routed_bias(params) -> np.ndarray:
  """[L, E]"""
  return np.asarray(params["layers"]["feed_forward"]["routed_bias"])


def assert_same_as_one_device(got) -> None:
  """The bias of the router, which is counted, has the same bits."""
  assert_close(got, reference(), 5e-6)
  np.testing.assert_array_equal(routed_bias(got[1].params), routed_bias(reference()[1].params))
  moved = routed_bias(got[1].params) - routed_bias(test_step.fresh(config(model=BIASED)).params)
  assert set(np.unique(moved.round(5))) <= {-2, -1, 0, 1, 2} and moved.any()
  np.testing.assert_allclose(load(got[1].params), load(reference()[1].params), rtol=1e-6)
  for ours, theirs in zip(got[0], reference()[0], strict=True):
    for key in experts.METRICS:
      assert ours[key] == pytest.approx(theirs[key], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", few([SHARED[-1]], ["all", "fsdp", "fsdp-across", *SHARED]))
def test_sharded_equals_unsharded(name):
  where, parallelism = MESHES[name]
  cfg = config(model=BIASED, data={"per_device_batch_size": ROWS / math.prod(where)}, parallelism=parallelism)
  prog = program.build(cfg, test_step.slices(where), where[0])
  traced = prog.lower()
  lowered = traced.as_text(debug_info=True)
  assert ("one_of_2_parts" in lowered) == name.startswith("shared")
  assert ("feed_forward/all_to_all" in lowered) == (name.endswith("in parts") or name == "fsdp")
  built = test_step.Compiled(prog, traced.compile(compiler_options=dict(prog.compiler_options)))
  assert_same_as_one_device(test_step.two_steps(cfg, built))


# (slices, devices of each), rows per device, gradient_accumulation_steps, slices of the whole run. Three of four slices
# have two micro-batches, the second with padding: the load of the experts is that of the whole batch.
DIVISIONS = (((1, 1), ROWS / 4, 4, 1), ((3, 1), ROWS / 4, 1, 4))


@pytest.mark.slow
@pytest.mark.parametrize("where, rows, accumulation, total", few(DIVISIONS[1:], DIVISIONS))
def test_every_division_of_the_batch_gives_the_same_step(where, rows, accumulation, total):
  divided = {"data": {"per_device_batch_size": rows}, "optimizer": {"gradient_accumulation_steps": accumulation}}
  cfg = config(model=BIASED, **divided)
  built = test_step.compiled(cfg, where, total)
  assert built.program.plan.rounds == (2 if total == 4 else accumulation)
  assert_same_as_one_device(test_step.two_steps(cfg, built))
  assert_masked_step(cfg, built, 1)


def test_the_routed_bias_changes_the_choice_and_not_the_weights_of_the_experts():
  cfg = config(model=BIASED).model
  layer = experts.Experts(cfg, Kernels(dot_product), 0.1, keys=jax.random.split(jax.random.key(0), 4))
  layer.router[...] *= 20
  bias = np.array([3.0, 0.0, -3.0, 1.0], np.float32)
  layer.routed_bias[...] = jnp.asarray(bias)
  x = np.random.default_rng(0).normal(size=(2, 16, cfg.emb_dim)).astype(np.float32)
  got = np.asarray(layer(jnp.asarray(x, cfg.dtype), jnp.ones((2, 16), jnp.int32)), np.float32)
  gate, up, down, router = (np.asarray(w[...], np.float64) for w in (layer.gate, layer.up, layer.down, layer.router))
  logits = x @ router
  chosen = np.argsort(-(logits + cfg.routed_bias_update_rate * bias))[..., :K]
  assert (np.sort(chosen) != np.sort(np.argsort(-logits)[..., :K])).any()
  weights = np.take_along_axis(np.exp(logits), chosen, axis=-1)
  weights /= weights.sum(axis=-1, keepdims=True)
  hidden = np.einsum("btd,edf->btef", x, gate)
  hidden = hidden / (1 + np.exp(-hidden)) * np.einsum("btd,edf->btef", x, up)
  outputs = np.take_along_axis(np.einsum("btef,efd->bted", hidden, down), chosen[..., None], axis=2)
  want = (outputs * weights[..., None]).sum(axis=2)
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@functools.cache
def sums():
  """Of the first batch, on the initial weights."""
  cfg = config(model=MOE)
  params = jax.tree.map(jnp.asarray, test_step.fresh(cfg).params)
  batch = jax.tree.map(lambda x: x.reshape(1, -1, T), packed_batch())
  return params, test_step.gradient_program(cfg.model_dump_json())(params, batch)


def uneven_state(cfg) -> TrainState:
  """A state in which the experts have different loads, without which the balance loss has no gradient."""
  state = test_step.fresh(cfg)
  return dataclasses.replace(state, params=experts.scale_loads(state.params, np.float32([2.0, 1.0, 0.5, 0.5])))


def masked_batch() -> Batch:
  """A batch of which about a tenth of the targets count."""
  batch = packed_batch()
  return batch._replace(weights=batch.weights * (np.random.default_rng(0).random(batch.weights.shape) < 0.1))


@functools.cache
def masked_gradients() -> tuple[list[np.ndarray], list[np.ndarray]]:
  """The means of the losses of the model over the targets of `masked_batch` plus those of the balance loss over its
  tokens: the gradient of a step, computed from two sums; and the same from shares of slices that exchange their sums.
  """
  cfg, batch = config(model=BIASED), masked_batch()
  params, program_ = uneven_state(cfg).params, test_step.gradient_program(cfg.model_dump_json())

  def sums_of(params, batch) -> list[np.ndarray]:
    grads = program_(jax.tree.map(jnp.asarray, params), jax.tree.map(lambda x: x.reshape(1, -1, T), batch)).grads
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(experts.pop_expert_counts(grads)[0])]

  tokens, weight = np.count_nonzero(batch.segment_ids), batch.weights.sum(dtype=np.float64)
  both, balance = sums_of(params, batch), sums_of(params, batch._replace(weights=0 * batch.weights))
  halves = [test_step.with_padding(Batch(*(x[part] for x in batch))) for part in (slice(8), slice(8, None))]
  scaled = experts.scale_loads(params, np.float32(weight / tokens))
  shares = [sum(parts) / weight for parts in zip(*(sums_of(scaled, half) for half in halves))]
  return [(a - b) / weight + b / tokens for a, b in zip(both, balance, strict=True)], shares


def assert_masked_step(cfg, built: test_step.Compiled, factor: float) -> None:
  """A step on `masked_batch` with its weights times a factor has the expected gradient, whatever the factor."""
  batch = masked_batch()
  metrics, after = test_step.one_step(
    uneven_state(cfg), built, batch._replace(weights=np.float32(factor) * batch.weights)
  )
  expected, _ = masked_gradients()
  norm = math.sqrt(sum((grad**2).sum() for grad in expected))
  assert metrics["grad_norm"] == pytest.approx(norm if factor else 0, rel=1e-5)
  clipped = min(1.0, cfg.optimizer.gradient_clipping_threshold / norm) if factor else 0
  momentum = [leaf / (1 - cfg.optimizer.adam_b1) for leaf in jax.tree.leaves(after.opt_state[0].mu)]
  for grad, found in zip(expected, momentum, strict=True):
    np.testing.assert_allclose(found, clipped * grad, rtol=0, atol=2e-5 * np.abs(grad).max())


@pytest.mark.parametrize("factor", [1, 1e-4, 0])
def test_the_balance_loss_is_a_mean_over_tokens_whatever_weights_their_targets_have(factor):
  assert_masked_step(config(model=BIASED), on_one_device(), factor)


def test_shares_have_the_balance_loss_of_the_whole_batch():
  for grad, shares in zip(*masked_gradients(), strict=True):
    np.testing.assert_allclose(shares, grad, rtol=0, atol=2e-5 * np.abs(grad).max())


def test_every_token_that_is_not_padding_counts_k_times_in_each_layer():
  counts = load(sums()[1].grads)
  assert counts.shape == (2, EXPERTS)
  np.testing.assert_array_equal(counts.sum(axis=-1), K * np.count_nonzero(packed_batch().segment_ids))


def test_the_step_puts_the_counts_in_the_place_of_the_load():
  """They are no gradients: they count neither for the norm nor for the optimizer."""
  params, found = sums()
  grads, counts = experts.pop_expert_counts(found.grads)
  assert not load(grads).any() and len(counts) == 1
  after, metrics = experts.take_loads(params, counts)
  shares = load(found.grads) / load(found.grads).sum(axis=-1, keepdims=True)
  np.testing.assert_allclose(load(after), shares * load(params).sum(axis=-1, keepdims=True), rtol=1e-6)
  assert float(metrics["router_load_max"]) == pytest.approx(EXPERTS * shares.max())
  assert float(metrics["router_load_min"]) == pytest.approx(EXPERTS * shares.min())
  entropy = -(shares * np.log(shares)).sum(axis=-1) / np.log(EXPERTS)
  assert float(metrics["router_entropy"]) == pytest.approx(entropy.mean())
