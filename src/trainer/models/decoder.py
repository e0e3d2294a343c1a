"""The decoder of Qwen3 and Llama. One module serves both: they differ only in configuration values."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from trainer.config.schema import ModelSection
from trainer.kernels import remat
from trainer.kernels.cross_entropy import head_logits
from trainer.models import rope
from trainer.models.experts import Experts
from trainer.models.layers import Attention, FeedForward, Kernels, RMSNorm, normal_param
from trainer.parallel import zigzag
from trainer.parallel.grad_reduce import GradReduce
from trainer.parallel.mesh import CONTEXT, FSDP, TENSOR
from trainer.parallel.sharding import constrain, manual_over_fsdp, num_shards, of_all_slices, on_shards

# A nested dict of arrays. With scan_layers, `layers` holds arrays stacked on a leading dim L; else {"0": .., "1": ..}.
Params = dict[str, Any]

# Largest standard deviation of a fresh model's logits. Half its square, 0.04, is what they add to the loss ln(V).
_HEAD_STD = 0.28


class DecoderLayer(nnx.Module):
  """Pre-norm residual layer: x + attention(norm(x)), then + feed_forward(norm(x)).

  The feed-forward is dense or a mixture of experts. keys: random keys for both parts.
  """

  def __init__(self, cfg: ModelSection, kernels: Kernels, index: int, *, keys: jax.Array) -> None:
    # Matrices that write to the residual stream start smaller, so that its variance does not grow with depth (GPT-2).
    out_std = cfg.initializer_range / (2 * cfg.num_decoder_layers) ** 0.5
    self.attention_norm = RMSNorm(cfg.emb_dim, cfg)
    self.attention = Attention(cfg, kernels, out_std, keys=keys[: Attention.KEYS])
    self.feed_forward_norm = RMSNorm(cfg.emb_dim, cfg)
    kind = Experts if cfg.has_experts(index) else FeedForward
    self.feed_forward = kind(cfg, kernels, out_std, keys=keys[Attention.KEYS :][: kind.KEYS])

  def __call__(self, x_BTD: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    x_BTD = checkpoint_name(constrain(x_BTD, "batch", "length", "embed"), "decoder_layer_input")
    with jax.named_scope("attention"):
      x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), cos, sin, segment_ids_BT)
    with jax.named_scope("feed_forward"):
      return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD), segment_ids_BT)


class Decoder(nnx.Module):
  """Token embedding, L layers, final norm and output head, with weights drawn from `key`.

  The training step does not keep this module. It keeps the weights as `Params` and builds the module inside the traced
  function (see `DecoderFunctions.merge`).
  """

  def __init__(self, cfg: ModelSection, kernels: Kernels, *, key: jax.Array) -> None:
    V, D, L = cfg.vocab_size, cfg.emb_dim, cfg.num_decoder_layers
    # Split once for all weights: on a CPU each split takes a tenth of a second to compile.
    each = Attention.KEYS + (Experts.KEYS if cfg.num_experts > 1 else FeedForward.KEYS)
    keys = jax.random.split(key, 2 + L * each)
    embedding_key, head_key, layer_keys = keys[0], keys[1], keys[2:].reshape(L, each)
    tied = cfg.logits_via_embedding
    self.embedding = normal_param(embedding_key, (V, D), ("vocab", "table_embed"), cfg.initializer_range, cfg)
    make_layer = lambda index, keys: DecoderLayer(cfg, kernels, index, keys=keys)
    if cfg.scan_layers:
      self.layers = nnx.vmap(functools.partial(make_layer, 0))(layer_keys)
    else:
      self.layers = nnx.Dict({str(i): make_layer(i, layer_keys[i]) for i in range(L)})
    self.final_norm = RMSNorm(D, cfg, scale=_tied_norm_scale(cfg) if tied else 1.0)
    if not tied:
      head_std = min(cfg.initializer_range, _HEAD_STD / D**0.5)
      self.lm_head = normal_param(head_key, (V, D), ("vocab", "head_embed"), head_std, cfg)
    self.cfg = cfg
    self.zigzag = kernels.zigzag

  def hidden_and_head(
    self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array, reduce: GradReduce | None = None
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the residual stream after the final norm, [B, T, D] in cfg.dtype, and the output head, [V, D].

    The head has weight_dtype; in a tied model it is the embedding table. Segment id 0 is padding.

    reduce: sums the gradients of all weights but the final norm over slices. The gradients of the head are known first.
    They travel in L parts, each with the gradients of one layer.
    """
    name = "embedding" if self.cfg.logits_via_embedding else "lm_head"
    head = getattr(self, name)
    weights, layer_axes = self.layer_weights()
    axes = {"layers": layer_axes, "head": head.get_metadata("axes")}
    totals: Params = {"layers": None, "head": None}
    if reduce is not None:
      totals = {"layers": reduce.totals["layers"], "head": reduce.totals[name]}

    tokens_BT, positions_BT, segment_ids_BT = self.arranged(tokens_BT, positions_BT, segment_ids_BT)
    rows = (self.embed(tokens_BT, reduce), *self.positions(positions_BT, segment_ids_BT))
    run = functools.partial(self._run_layers, reduce)
    x_BTD, head_total = manual_over_fsdp(run, weights, totals, axes, rows)
    head_VD = head[...]
    if reduce is not None:
      head_VD = reduce.attach(head_VD, head_total, is_sum=True, adds_totals=False)
    return self.normed(x_BTD), head_VD

  def arranged(self, *arrays_BT: jax.Array) -> Sequence[jax.Array]:
    """Returns the arrays of a batch in the order of positions that the layers expect."""
    return [zigzag.spread(self.zigzag, array) for array in arrays_BT]

  def normed(self, x_BTD: jax.Array) -> jax.Array:
    """Returns the stream after the last layer with the final norm, in natural order."""
    return self.final_norm(zigzag.restored(self.zigzag, x_BTD))

  def embed(self, tokens_BT: jax.Array, reduce: GradReduce | None = None) -> jax.Array:
    """Returns the residual stream before the layers, [B, T, D] in cfg.dtype, of `arranged` tokens.

    reduce: see `hidden_and_head`.
    """
    return constrain(self._embed(tokens_BT, reduce), "batch", "length", "embed")

  def positions(self, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, ...]:
    """Returns what every layer must know about the rows besides the stream: cos, sin and the segment ids."""
    return (*rope.cos_sin_tables(positions_BT, rope.inverse_frequencies(self.cfg)), segment_ids_BT)

  def layer_weights(self) -> tuple[Params, Params]:
    """Returns the weights of all layers, and their logical axes."""
    state = nnx.state(self.layers)
    return nnx.to_pure_dict(state), _logical_axes(state)

  def run_layer(
    self, layer: DecoderLayer, x_BTD: jax.Array, weights: Params, positions: Sequence[jax.Array]
  ) -> jax.Array:
    """Returns the stream after one layer with these weights. `layer`: of `self.layers`, for its structure.

    A derivative keeps what remat_policy names.
    """
    graphdef, state = nnx.split(layer)
    apply = lambda x, weights: nnx.merge(graphdef, _like(state, weights))(x, *positions)
    use_remat, policy = remat.checkpoint_policy(self.cfg)
    if use_remat:
      # Outside a scan, common-subexpression elimination could undo the recomputation; inside a scan it cannot.
      apply = jax.checkpoint(apply, policy=policy, prevent_cse=not self.cfg.scan_layers)
    return apply(x_BTD, weights)

  def _run_layers(
    self, reduce: GradReduce | None, weights: Params, totals: Params, rows: Any
  ) -> tuple[jax.Array, jax.Array | None]:
    """Returns the residual stream after all layers, and the totals of the head.

    rows: the stream before the layers, cos, sin and segment ids. Layer i reduces part i of the head's gradient.
    """
    x_BTD, *positions = rows
    L = self.cfg.num_decoder_layers

    def run_layer(layer: DecoderLayer, x: jax.Array, weights: Params, total: Any, part: Any) -> tuple[jax.Array, Any]:
      if reduce is not None:
        weights, part = reduce.attach((weights, part), (total, part), adds_totals=reduce.adds_totals)
      return self.run_layer(layer, x, weights, positions), part

    parts = jax.tree.map(lambda head: _split(head, L), totals["head"])
    if self.cfg.scan_layers:
      body = lambda x, layer: run_layer(self.layers, x, *layer)
      x_BTD, parts = jax.lax.scan(body, x_BTD, (weights, totals["layers"], parts))
    else:
      done = []
      for i in range(L):
        total = None if reduce is None else totals["layers"][str(i)]
        x_BTD, part = run_layer(
          self.layers[str(i)], x_BTD, weights[str(i)], total, jax.tree.map(operator.itemgetter(i), parts)
        )
        done.append(part)
      parts = jax.tree.map(lambda *arrays: jnp.stack(arrays), *done)
    return x_BTD, jax.tree.map(_join, totals["head"], parts)

  def logits(self, tokens_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] in float32, for tests and sampling. Training never holds all of them (cross_entropy)."""
    x_BTD, _ = self.hidden_and_head(tokens_BT, positions_BT, segment_ids_BT)
    return self.head_logits(x_BTD)

  def head_logits(self, x: jax.Array) -> jax.Array:
    """Returns the logits [..., V] in float32 of the stream [..., D] after the final norm."""
    head_VD = self.embedding if self.cfg.logits_via_embedding else self.lm_head
    return head_logits(x, head_VD[...])

  def _rows_are_smaller(self, reduce: GradReduce, tokens: int, vocab: int) -> bool:
    """Returns whether a device sends less for the gradients of the looked-up rows than for its shard of the table.

    fsdp divides both: the width of the rows, and the table. context divides the tokens. tensor and context divide the
    rows of the table.
    """
    table = vocab / num_shards(*_axes_of_rows(vocab // num_shards(FSDP)))
    return reduce.rows_are_smaller(tokens / num_shards(CONTEXT), table, jnp.dtype(self.cfg.dtype))

  def _embed(self, tokens_BT: jax.Array, reduce: GradReduce | None) -> jax.Array:
    dtype = jnp.dtype(self.cfg.dtype)
    table_VD, iota = self.embedding[...], self.cfg.use_iota_embed
    # The gradients of the table are the last of the backward pass, and nothing hides their way to the other slices. The
    # rows of the batch's tokens are usually far smaller than the table.
    by_rows = reduce is not None and not iota and self._rows_are_smaller(reduce, tokens_BT.size, len(table_VD))
    if reduce is not None:
      # Totals of a tied table are added with the gradient of the head, which is ready early.
      adds = reduce.adds_totals and not self.cfg.logits_via_embedding
      table_VD = reduce.attach(table_VD, reduce.totals["embedding"], is_sum=by_rows, adds_totals=adds)
    # Gather over tensor and context first. With the constraint of the lookup alone, the compiler gathers the whole
    # table on every chip. With none, the processes of a slice of CPUs may wait for each other for ever (iota and an odd
    # vocabulary).
    divides = len(table_VD) % num_shards(FSDP) == 0
    axes = ("table_vocab", "embed") if divides else ("lookup_vocab", "lookup_embed")
    table_VD = constrain(table_VD, *axes)
    if iota:
      one_hot = tokens_BT[..., None] == jnp.arange(self.cfg.vocab_size, dtype=tokens_BT.dtype)
      return jnp.einsum("btv,vd->btd", one_hot.astype(dtype), table_VD.astype(dtype))
    # Each chip looks up its own columns of the table for all tokens of the slice. Then the rows move to the chips that
    # hold their tokens. This exchanges the chip's shard of the table and the chip's own activations. With a sharded
    # vocabulary (the layout of the head) each chip would send the activations of all chips, in both directions.
    table_VD = constrain(table_VD, "lookup_vocab", "lookup_embed")
    tokens_BT = constrain(tokens_BT, "lookup_batch", "lookup_length")
    rows_BTD = _lookup(table_VD, tokens_BT, dtype.name, by_rows)
    return constrain(rows_BTD, "lookup_batch", "lookup_length", "lookup_embed")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table_VD: jax.Array, tokens_BT: jax.Array, dtype: str, all_slices: bool) -> jax.Array:
  """Returns rows of the table, [B, T, D] in `dtype`. The gradient is accumulated in float32, one sequence at a time.

  In bfloat16, thousands of rows of a frequent token would add up to only a fraction of their sum. One sequence at a
  time, because the TPU compiler sorts the tokens of a scatter: for a whole batch, compiling the sort takes longer than
  compiling anything else in the step.

  all_slices: the gradient is the sum over all slices, which exchange their rows.
  """
  return jnp.take(table_VD, tokens_BT, axis=0).astype(dtype)


def _lookup_backward(
  dtype: str, all_slices: bool, saved: tuple[jax.Array, jax.Array], g_BTD: jax.Array
) -> tuple[jax.Array, None]:
  table_VD, tokens_BT = saved
  if all_slices:
    tokens_BT = of_all_slices(tokens_BT, "lookup_batch", "lookup_length")
    g_BTD = of_all_slices(g_BTD, "lookup_batch", "lookup_length", "lookup_embed")
  zeros = constrain(jnp.zeros(table_VD.shape, jnp.float32), "lookup_vocab", "lookup_embed")
  add = lambda grads, row: (grads.at[row[0]].add(row[1].astype(jnp.float32)), None)
  grads_VD, _ = jax.lax.scan(add, zeros, (tokens_BT, g_BTD))
  return grads_VD.astype(table_VD.dtype), None


_lookup.defvjp(lambda *given: (_lookup(*given), given[:2]), _lookup_backward)


def _tied_norm_scale(cfg: ModelSection) -> float:
  """Initial scale of a tied model's final norm: the largest up to 1 at which the first loss is ln(V) within 0.1.

  A larger scale trains better. Two limits: the logits have the standard deviation
  scale * sqrt(D) * std, as with an untied head; and the input token gets the logit scale * D * std * share, because its
  own embedding is a share of the residual stream. With e^logit = 1 + V / 40 this adds 0.025 to the loss.
  """
  D, std = cfg.emb_dim, cfg.initializer_range
  own_logit = D * std * _embedding_share(cfg)
  return min(1.0, _HEAD_STD / (D**0.5 * std), math.log1p(cfg.vocab_size / 40) / own_logit)


def _embedding_share(cfg: ModelSection) -> float:
  """Cosine of the angle between a fresh model's final residual stream and the embedding of the input token.

  Only the feed-forward outputs are counted, which together have F * E[(silu(gate) * up)^2] / 2 times the variance of
  the embedding. Attention averages over positions and adds little.
  """
  sigma = cfg.emb_dim**0.5 * cfg.initializer_range  # standard deviation of gate and up
  gate = sigma * np.linspace(-6, 6, 1001)
  density = np.exp(-np.square(gate / sigma) / 2)
  # A token's experts have weights that add up to at most 1: their outputs together vary most if one has all of it.
  width = cfg.moe_mlp_dim if cfg.num_experts > 1 else cfg.mlp_dim
  squared_silu = np.average(np.square(gate / (1 + np.exp(-gate))), weights=density)
  return float(1 / np.sqrt(1 + width * squared_silu * sigma**2 / 2))


class DecoderFunctions:
  """The decoder as pure functions of `Params`, for the training step, the sampler and the converter."""

  def __init__(self, cfg: ModelSection, kernels: Kernels) -> None:
    self.kernels = kernels
    self.cfg = cfg
    self._build = functools.partial(Decoder, cfg, kernels)
    self._graphdef, self._state = nnx.split(nnx.eval_shape(lambda: self._build(key=jax.random.key(0))))

  def init(self, key: jax.Array) -> Params:
    return nnx.to_pure_dict(nnx.state(self._build(key=key)))

  def abstract(self) -> Params:
    """Returns the shape and dtype of every weight (ShapeDtypeStruct)."""
    return nnx.to_pure_dict(self._state)

  def logical_axes(self) -> Params:
    """Returns the logical axes of the dims of every weight. The first dim of stacked layers is "layers"."""
    return _logical_axes(self._state)

  def merge(self, params: Params) -> Decoder:
    """Returns the module with these weights. Call it inside a traced function."""
    return nnx.merge(self._graphdef, _like(self._state, params))


def _split(array: jax.Array, parts: int) -> jax.Array:
  """Returns an array [V, D] as [parts, ceil(V / parts), D], padded with zeros. Each device splits its own rows."""

  def run(array: jax.Array) -> jax.Array:
    padded = jnp.pad(array, ((0, -len(array) % parts), (0, 0)))
    return padded.reshape(parts, -1, array.shape[1])

  axes = _axes_of_rows(len(array))
  return on_shards(axes, run, PartitionSpec(axes), PartitionSpec(None, axes), array)


def _join(array: jax.Array, parts: jax.Array) -> jax.Array:
  """Returns the array of the shape of `array` [V, D] that `_split` has split into `parts`."""
  run = lambda array, parts: parts.reshape(-1, parts.shape[-1])[: len(array)]
  axes = _axes_of_rows(len(array))
  return on_shards(axes, run, (PartitionSpec(axes), PartitionSpec(None, axes)), PartitionSpec(axes), array, parts)


def _axes_of_rows(rows: int) -> tuple[str, ...]:
  """Returns the mesh axes besides fsdp that shard `rows` rows of a head: see sharding.PARAMETER_RULES."""
  axes: tuple[str, ...] = ()
  for axis in (TENSOR, CONTEXT):
    if rows % num_shards(*axes, axis) == 0:
      axes += (axis,)
  return axes


def _like(state: Any, weights: Params) -> Any:
  """Returns an nnx state with the structure of `state` and these weights."""
  return jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(weights))


def _logical_axes(state: Any) -> Params:
  """Returns the logical axes of the dims of every weight. The first dim of stacked layers is "layers"."""

  def axes(variable: Any) -> tuple[str, ...]:
    declared = variable.get_metadata()["axes"]
    return ("layers",) * (len(variable.shape) - len(declared)) + declared

  return nnx.to_pure_dict(jax.tree.map(axes, state, is_leaf=lambda x: isinstance(x, nnx.Variable)))
