"""The mixture of experts of Qwen3-MoE: a router, and experts that compute only the tokens that it sends them.

No token is dropped, and nothing depends on other micro-batches: assignments are sorted by expert and position, and a
token's results are added in the order of its choices. So a share has the same bits on every slice.

The load of the experts, which the balance loss needs, belongs to the whole batch. It is a weight whose gradient is the
number of tokens that chose each expert. Whatever sums gradients over micro-batches, shares and slices sums it too. The
optimizer's step replaces the load by these counts (`take_loads`), so the loss uses the load of the step before. This
loss is a sum over tokens, like the loss of the model: no division of the batch changes it. It becomes a mean over the
tokens, whatever weights their targets have (`scale_loads`).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer.config.schema import ModelSection
from trainer.kernels import grouped_matmul, projection
from trainer.models.layers import Kernels, normal_param, swiglu
from trainer.parallel import sharding
from trainer.parallel.expert_shards import ExpertShards
from trainer.parallel.mesh import TENSOR
from trainer.parallel.sharding import constrain

Params = dict[str, Any]

# The metrics of a step: the largest and the smallest load of an expert of any layer, relative to an even one, and the
# mean entropy of the loads of a layer, relative to the entropy of even loads.
METRICS = ("router_load_max", "router_load_min", "router_entropy")


class Experts(nnx.Module):
  """E SwiGLU feed-forwards. Each token takes the sum of k of them, weighted by the router (Qwen3-MoE)."""

  KEYS = 4
  ROUTER_AXES = ("embed", "experts")
  UP_AXES = ("experts", "embed", "mlp")
  DOWN_AXES = ("experts", "mlp", "embed")

  def __init__(self, cfg: ModelSection, kernels: Kernels, out_std: float, *, keys: jax.Array) -> None:
    E, D, F = cfg.num_experts, cfg.emb_dim, cfg.moe_mlp_dim
    router_key, gate_key, up_key, down_key = keys
    self.router = normal_param(router_key, (D, E), self.ROUTER_AXES, cfg.initializer_range, cfg)
    self.gate = normal_param(gate_key, (E, D, F), self.UP_AXES, cfg.initializer_range, cfg)
    self.up = normal_param(up_key, (E, D, F), self.UP_AXES, cfg.initializer_range, cfg)
    self.down = normal_param(down_key, (E, F, D), self.DOWN_AXES, out_std, cfg)
    # Mean number of choices per token that fell on each expert in the last step. They add up to k.
    self.load = nnx.Param(jnp.full((E,), cfg.num_experts_per_tok / E, jnp.float32), axes=("load",))
    if cfg.routed_bias_update_rate > 0:  # counted in updates: a whole number for each expert
      self.routed_bias = nnx.Param(jnp.zeros((E,), jnp.float32), axes=("load",))
    self.cfg = cfg
    self.kernels = kernels

  def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Returns [B, T, D] in the dtype of x. Tokens of segment 0 are padding and do not count for the balance."""
    cfg, project = self.cfg, self.kernels.project
    # The router is never quantized.
    route = dataclasses.replace(project, function=projection.PLAIN.function, prepare_input=lambda x: x)
    logits = constrain(route(x_BTD, self.router[...], self.ROUTER_AXES), "batch", "length", "experts")
    bias = cfg.routed_bias_update_rate * self.routed_bias[...] if cfg.routed_bias_update_rate > 0 else None
    probs_BTE, scores, chosen = choose(cfg, logits, bias)
    weights = tuple(project.to_gather(w[...], x_BTD.dtype) for w in (self.gate, self.up, self.down))
    shards = ExpertShards(cfg.num_experts, self.kernels.expert_parallelism, project.first_stage)
    compute = functools.partial(_run, self.kernels, shards)
    run = lambda given, weights: shards.run(compute, given, weights, (self.UP_AXES, self.UP_AXES, self.DOWN_AXES))
    out = project.gathering(run)((x_BTD, chosen, scores.astype(x_BTD.dtype)), weights)
    layers = sum(map(cfg.has_experts, range(cfg.num_decoder_layers)))  # the loss is a mean over layers with experts
    strength = cfg.load_balance_loss_weight * cfg.num_experts / layers
    out = _balanced(out, probs_BTE, chosen, self.load[...], segment_ids_BT != 0, strength)
    return checkpoint_name(constrain(out, "batch", "length", "embed"), "mlpwo")


def choose(
  cfg: ModelSection, logits_E: jax.Array, bias_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the probabilities of the experts [..., E], and the scores and numbers of those chosen [..., k].

  bias_E: added to the logits [..., E] only to decide which experts are chosen.
  """
  logits_E = logits_E.astype(jnp.float32)
  probs_E = jax.nn.softmax(logits_E, axis=-1)
  if bias_E is None:
    scores, chosen = jax.lax.top_k(probs_E, cfg.num_experts_per_tok)
  else:
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(logits_E + bias_E), cfg.num_experts_per_tok)
    scores = jnp.take_along_axis(probs_E, chosen, axis=-1)
  if cfg.norm_topk_prob:
    scores = scores / jnp.sum(scores, axis=-1, keepdims=True)
  return probs_E, scores, chosen


def _run(
  kernels: Kernels,
  shards: ExpertShards,
  given: tuple[jax.Array, ...],
  weights: tuple[jax.Array, ...],
  gather: Callable[[jax.Array, tuple[str, ...]], jax.Array],
) -> jax.Array:
  """Returns the output of the experts [B, T, D] for x [B, T, D], chosen experts and scores [B, T, k].

  weights: the device's shards of gate, up and down. gather: see `ExpertShards.run`.
  """
  x_BTD, chosen_BTk, scores_BTk = given
  gate_EDF, up_EDF, down_EFD = weights
  # One matmul for both reads the rows once, and the gradients of the rows need no sum. They are joined as shards.
  joined_EDF = gather(jnp.concatenate([gate_EDF, up_EDF], axis=-1), Experts.UP_AXES)
  down_EFD = gather(down_EFD, Experts.DOWN_AXES)
  shares = len(down_EFD) < shards.experts
  dtype = jnp.dtype(kernels.project.gather_dtype or x_BTD.dtype)
  if shares:
    chosen_BTk = shards.numbered(shards.gather_tokens(chosen_BTk, chosen_BTk.dtype))
    x_BTD, scores_BTk = (shards.gather_tokens(array, dtype) for array in (x_BTD, scores_BTk))
  out = _compute(kernels, x_BTD, chosen_BTk, scores_BTk, joined_EDF, down_EFD, shards.experts)
  if sharding.num_shards(TENSOR) > 1:
    out = jax.lax.psum(out, TENSOR)
  return shards.scatter_tokens(out, dtype) if shares else out


def _compute(
  kernels: Kernels,
  x_BTD: jax.Array,
  chosen_BTk: jax.Array,
  scores_BTk: jax.Array,
  joined_EDF: jax.Array,
  down_EFD: jax.Array,
  E: int,
) -> jax.Array:
  """Returns the sum of the results of the first experts of E, as many as there are weights.

  With one shard of F, it is a term of the sum over shards.
  """
  k, D = chosen_BTk.shape[-1], x_BTD.shape[-1]
  order, back, sizes = _sorted_by_expert(chosen_BTk.reshape(-1), E)
  places = back.reshape(-1, k).T
  rows = _rows_of(x_BTD.reshape(-1, D), order, places)
  given, multiply = len(down_EFD), kernels.grouped_matmul
  if given < E:
    multiply, sizes = grouped_matmul.with_rows_behind(multiply, E // given), sizes[:given]
  gate, up = jnp.split(multiply(rows, joined_EDF, sizes), 2, axis=-1)
  gate, up = checkpoint_name(gate, "mlpwi_0"), checkpoint_name(up, "mlpwi_1")
  # The score is multiplied before the last matmul, which is linear: so no derivative needs the results of this matmul.
  hidden = _scored(gate, up, _permute(scores_BTk.reshape(-1), order, back))
  return _sums_of(multiply(hidden, down_EFD, sizes), order, places).reshape(x_BTD.shape)


@functools.partial(jax.checkpoint, prevent_cse=False)
def _scored(gate: jax.Array, up: jax.Array, scores: jax.Array) -> jax.Array:
  """Returns swiglu(gate, up) [M, F] times scores [M]. The derivative keeps only the inputs."""
  return swiglu(gate, up) * scores[:, None]


def _sorted_by_expert(experts: jax.Array, E: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the order of the assignments `experts` [M] by expert and position, its inverse, and the sizes [E].

  One sort of one array: the TPU compiler needs minutes for a stable sort of pairs.
  """
  M = len(experts)
  assert M * E < 2**31, (M, E)
  positions = jnp.arange(M, dtype=jnp.int32)
  order = jnp.sort(experts * M + positions) % M
  is_expert = experts[:, None] == jnp.arange(E, dtype=experts.dtype)
  earlier = jnp.cumsum(is_expert, axis=0, dtype=jnp.int32)
  sizes = earlier[-1]
  back = jnp.take_along_axis(earlier - 1 + jnp.cumsum(sizes) - sizes, experts[:, None], axis=1)[:, 0]
  return order, back, sizes


@jax.custom_vjp
def _rows_of(x: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
  """Returns the row of x [M / k, D] for each of the M assignments, in their `order` [M].

  places: int32 [k, M / k], where an assignment is in this order. The derivative is `_sums_of`, and the other way round.
  """
  return x[order // len(places)]


@jax.custom_vjp
def _sums_of(rows: jax.Array, order: jax.Array, places: jax.Array) -> jax.Array:
  """Returns the sum of the k rows of each token [M / k, D], in the order of its choices, for `rows` [M, D] in `order`.

  It reads rows instead of adding to them. The TPU compiler needs more than ten times the cycles of additions for a sum
  over a dim of an array.
  """
  parts = (rows[choice].astype(jnp.float32) for choice in places)
  return functools.reduce(operator.add, parts).astype(rows.dtype)


_rows_of.defvjp(
  lambda x, *indices: (_rows_of(x, *indices), indices), lambda indices, g: (_sums_of(g, *indices), None, None)
)
_sums_of.defvjp(
  lambda rows, *indices: (_sums_of(rows, *indices), indices), lambda indices, g: (_rows_of(g, *indices), None, None)
)


@jax.custom_vjp
def _permute(x: jax.Array, order: jax.Array, back: jax.Array) -> jax.Array:
  """Returns x[order]. `back` is the inverse permutation: the derivative reads rows instead of adding to them."""
  return x[order]


_permute.defvjp(lambda x, order, back: (_permute(x, order, back), back), lambda back, g: (g[back], None, None))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _balanced(
  out: jax.Array, probs_BTE: jax.Array, chosen_BTk: jax.Array, load: jax.Array, real_BT: jax.Array, strength: float
) -> jax.Array:
  """Returns `out`. The derivative adds the gradient of the balance loss, sum(strength * load * probs) over real tokens.

  The gradient of `load` is not the derivative: it counts the real tokens that chose each expert.
  """
  return out


def _balanced_backward(strength: float, saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array | None, ...]:
  chosen_BTk, load, real_BT = saved
  real = real_BT.astype(jnp.float32)[..., None]
  is_chosen = chosen_BTk[..., None] == jnp.arange(len(load), dtype=chosen_BTk.dtype)
  counts = jnp.sum(jnp.where(is_chosen, real[..., None], 0.0), axis=(0, 1, 2))
  return g, strength * load * real, None, counts, None


_balanced.defvjp(lambda out, probs, chosen, load, real, strength: (out, (chosen, load, real)), _balanced_backward)


def scale_loads(params: Params, mean_weight: Any) -> Params:
  """Returns the weights with which the gradients of a step are computed. mean_weight: the sum of the target weights of
  the whole batch, divided by the number of its tokens without padding.

  The step divides all sums by the sum of the target weights. With these loads, it divides the sum of the balance loss
  by the number of tokens.
  """
  return _map_experts(lambda layer: layer | {"load": layer["load"] * mean_weight}, params)


def only_loads(tree: Any) -> Params:
  """Returns the loads of a tree of weights or gradients, nested as in the tree."""
  if not isinstance(tree, dict):
    return {}
  if "load" in tree and "router" in tree:
    return {"load": tree["load"]}
  return {name: loads for name, value in tree.items() if (loads := only_loads(value))}


def pop_expert_counts(grads: Params) -> tuple[Params, list[jax.Array]]:
  """Returns the gradients with zeros in place of the experts' counts, and these counts, [E] or [L, E] each."""
  counts: list[jax.Array] = []

  def take(layer: Params) -> Params:
    counts.append(layer["load"])
    return layer | {"load": jnp.zeros_like(layer["load"])}

  return _map_experts(take, grads), counts


def take_loads(params: Params, counts: list[jax.Array]) -> tuple[Params, dict[str, jax.Array]]:
  """Returns the weights with the loads of the experts from `counts`, see `pop_expert_counts`, and the step's METRICS.

  A routed bias rises by 1 for experts with less than the mean load and falls by 1 for experts with more. Without
  experts, returns the weights and {}.
  """
  left, shares = iter(counts), []

  def replace(layer: Params) -> Params:
    count, load = next(left), layer["load"]
    total, k = (jnp.sum(array, axis=-1, keepdims=True) for array in (count, load))
    load = jnp.where(total > 0, count / jnp.maximum(total, 1.0) * k, load)
    shares.append((load / k).reshape(-1, load.shape[-1]))
    changed = {"load": load}
    if "routed_bias" in layer:
      changed["routed_bias"] = layer["routed_bias"] + jnp.sign(total / count.shape[-1] - count)
    return layer | changed

  params = _map_experts(replace, params)
  if not shares:
    return params, {}
  all_shares = jnp.concatenate(shares)
  experts = all_shares.shape[-1]
  entropy = -jnp.sum(jax.scipy.special.xlogy(all_shares, all_shares), axis=-1) / jnp.log(jnp.float32(experts))
  values = (jnp.max(all_shares) * experts, jnp.min(all_shares) * experts, jnp.mean(entropy))
  return params, dict(zip(METRICS, values, strict=True))


def _map_experts(change: Callable[[Params], Params], tree: Any) -> Any:
  """Returns a tree of weights with change(weights) for the weights of every mixture of experts."""
  if not isinstance(tree, dict):
    return tree
  if "load" in tree and "router" in tree:
    return change(tree)
  return {name: _map_experts(change, value) for name, value in tree.items()}
