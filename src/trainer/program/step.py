"""The training step as pure functions: per-slice sums of gradients, then one optimizer update.

`loss_and_grads` never depends on another slice: it returns sums over this slice's tokens, and their weight. The slices
exchange these sums once per step. A single controller does so inside the backward pass: `reduced_loss_and_grads`
returns the sums over all slices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from input_pipeline.batch import Batch
from trainer.config.errors import ConfigError
from trainer.config.schema import OptimizerSection
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.models import experts
from trainer.models.decoder import DecoderFunctions, Params
from trainer.parallel.grad_reduce import GradReduce
from trainer.parallel.mesh import DATA, FSDP, TENSOR
from trainer.parallel.sharding import constrain, num_shards
from trainer.program.optimizers import Schedule
from trainer.program.state import TrainState

# The metrics of a step, in the order of their array. A model with experts has experts.METRICS after them. It is one
# array, because a controller needs two requests to read an array through a Pathways proxy.
METRICS = ("loss", "z_loss", "grad_norm", "lr", "weights", "skipped")


# The micro-batches of a step: batches [A, rows, T], one after the other. The second of two has one smaller micro-batch.
MicroBatches = tuple[Batch, ...]
TrainStep = Callable[[TrainState, MicroBatches, Any], tuple[TrainState, jax.Array]]  # see build_train_step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums over tokens, float32.

  grads: gradients of loss + z_loss, shaped like the weights. loss, z_loss: nats. weight: sum of token weights.
  """

  grads: Params
  loss: jax.Array
  z_loss: jax.Array
  weight: jax.Array


def token_losses(
  model: DecoderFunctions, cfg: OptimizerSection, params: Params, batch: Batch, reduce: GradReduce | None = None
) -> tuple[jax.Array, jax.Array]:
  """Returns the sums of weighted cross-entropy and of weighted z-loss of one micro-batch [B, T]: float32 scalars.

  reduce: also sums the gradients over slices, each as soon as it is known.
  """
  if reduce is not None:  # the decoder itself does this for its other weights
    norm = reduce.attach(params["final_norm"], reduce.totals["final_norm"], adds_totals=reduce.adds_totals)
    params = params | {"final_norm": norm}
  decoder = model.merge(params)
  x_BTD, head_VD = decoder.hidden_and_head(batch.tokens, batch.positions, batch.segment_ids, reduce)
  return head_losses(model, cfg, x_BTD, head_VD, batch)


def head_losses(
  model: DecoderFunctions, cfg: OptimizerSection, x_BTD: jax.Array, head_VD: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array]:
  """Returns what `token_losses` returns, from the stream after the final norm and the weights of the output head."""
  vocab = head_VD.shape[0]
  parts = num_shards(FSDP, TENSOR)
  if vocab % parts:
    # A vocabulary size that does not divide by the chips of a slice (151936 by 256) is padded, for the loss only.
    head_VD = jnp.pad(head_VD, ((0, -vocab % parts), (0, 0)))
  head_VD = constrain(head_VD, "vocab", "embed")  # gathers over context: each of its shards needs the rows
  with jax.named_scope("loss"):
    return linear_cross_entropy(
      x_BTD,
      head_VD,
      batch.targets,
      batch.weights,
      z_loss=cfg.z_loss_multiplier,
      valid_vocab=vocab,
      vocab_shards=parts,
      head_neighbours=model.kernels.head_neighbours,
      chunk_logits_bytes=model.kernels.chunk_logits_bytes,
    )


def loss_and_grads(model: DecoderFunctions, cfg: OptimizerSection, params: Params, batch: Batch) -> Sums:
  """Returns the sums over the micro-batches of one slice; the batch's arrays are [A, B, T]."""

  def one(micro: Batch) -> Sums:
    return _sums(lambda params: token_losses(model, cfg, params, micro), params, micro)

  if batch.tokens.shape[0] == 1:
    return one(jax.tree.map(lambda x: x[0], batch))
  nothing = Sums(_zeros(params), *(jnp.zeros((), jnp.float32) for _ in range(3)))
  sums, _ = jax.lax.scan(lambda acc, micro: (jax.tree.map(jnp.add, acc, one(micro)), None), nothing, batch)
  return sums


def reduced_loss_and_grads(
  model: DecoderFunctions, cfg: OptimizerSection, params: Params, rounds: MicroBatches
) -> Sums:
  """Returns the sum over all slices of what `loss_and_grads` returns, traced where the mesh axis `data` is manual.

  Each gradient travels between slices while the backward pass of the last micro-batch computes the next one.
  """
  last = jax.tree.map(lambda x: x[-1], rounds[-1])
  if accumulates := sum(len(batch.tokens) for batch in rounds) > 1:
    earlier = rounds[0] if len(rounds) > 1 else jax.tree.map(lambda x: x[:-1], rounds[0])
    before = loss_and_grads(model, cfg, params, earlier)
    totals = before.grads
  else:
    totals = _zeros(params)

  def losses(totals: Params) -> tuple[jax.Array, jax.Array]:
    return token_losses(model, cfg, params, last, GradReduce(totals, cfg.grad_reduce_dtype, accumulates))

  sums = _sums(losses, totals, last)
  scalars = (sums.loss, sums.z_loss, sums.weight)
  if accumulates:
    scalars = jax.tree.map(jnp.add, scalars, (before.loss, before.z_loss, before.weight))
  return Sums(sums.grads, *jax.lax.psum(scalars, DATA))


def _sums(losses: Callable[[Params], tuple[jax.Array, jax.Array]], at: Params, micro: Batch) -> Sums:
  """Returns the sums of one micro-batch [B, T]. losses(at) returns its loss and z_loss, and is differentiated."""

  def total(at: Params) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    loss, z_loss = losses(at)
    return loss + z_loss, (loss, z_loss)

  (_, (loss, z_loss)), grads = jax.value_and_grad(total, has_aux=True)(at)
  # float32 from here on: in bfloat16, sums over many micro-batches and slices lose bits.
  grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
  return Sums(grads, loss, z_loss, jnp.sum(micro.weights, dtype=jnp.float32))


def _zeros(params: Params) -> Params:
  """Returns float32 zeros shaped like the weights."""
  return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def apply_gradients(
  cfg: OptimizerSection,
  optimizer: optax.GradientTransformation,
  schedule: Schedule,
  state: TrainState,
  sums: Sums,
  schedule_values: Any,
) -> tuple[TrainState, jax.Array]:
  """Returns the next state and the step's metrics, float32; `metric_values` gives them names.

  loss and z_loss are in nats per token, grad_norm is before clipping, weights is a sum over tokens, skipped is the
  number of non-finite steps in a row, including this one. If the loss or a gradient is not finite, weights and
  optimizer state stay unchanged.
  """
  weight = jnp.where(sums.weight > 0, sums.weight, jnp.inf)  # a batch without targets has the mean 0
  sum_grads, counts = experts.pop_expert_counts(sums.grads)
  norm = optax.tree.norm(sum_grads) / weight
  loss = sums.loss / weight
  finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  scale = 1.0 / weight
  if cfg.gradient_clipping_threshold > 0:
    scale *= jnp.minimum(1.0, cfg.gradient_clipping_threshold / jnp.maximum(norm, 1e-12))
  # Mean and clipping in one product: the gradients are read by the norm and by the optimizer, and not stored again.
  grads = jax.tree.map(lambda g: g * scale, sum_grads)
  rate = schedule.rate(state.step, schedule_values)
  updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
  params = jax.tree.map(lambda p, u: (p.astype(jnp.float32) + rate * u).astype(p.dtype), state.params, updates)
  params, router = experts.take_loads(params, counts)
  keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
  skipped = jnp.where(finite, 0, state.skipped + 1)
  new_state = TrainState(
    step=state.step + 1,
    params=keep(params, state.params),
    opt_state=keep(opt_state, state.opt_state),
    skipped=skipped,
    outer=state.outer,
  )
  metrics = {
    "loss": loss,
    "z_loss": sums.z_loss / weight,
    "grad_norm": norm,
    "lr": rate,
    "weights": sums.weight,
    "skipped": skipped,
  }
  return new_state, jnp.stack([x.astype(jnp.float32) for x in (*map(metrics.get, METRICS), *router.values())])


def metric_values(metrics: jax.Array | np.ndarray) -> dict[str, float]:
  """Returns the metrics of a step by name. Waits for the step."""
  return dict(zip(METRICS + experts.METRICS, np.asarray(metrics).tolist(), strict=False))


def build_train_step(
  model: DecoderFunctions,
  cfg: OptimizerSection,
  optimizer: optax.GradientTransformation,
  schedule: Schedule,
  mesh: Mesh,
) -> TrainStep:
  """Returns train_step(state, rounds, schedule values) -> (state, metrics) on `mesh`, to be jitted with the state
  donated.

  The arrays of the rounds are [A, rows of all slices, T] sharded like `abstract_batch`.
  """

  def of_one_slice(params: Params, rounds: MicroBatches) -> Sums:
    (batch,) = rounds  # the micro-batches of one slice have the size of the full topology's
    return loss_and_grads(model, cfg, params, batch)

  sums = _over_slices(mesh, of_one_slice, functools.partial(reduced_loss_and_grads, model, cfg))
  return _step_with(model, cfg, optimizer, schedule, sums)


def build_replica_step(
  model: DecoderFunctions, cfg: OptimizerSection, optimizer: optax.GradientTransformation, schedule: Schedule
) -> TrainStep:
  """Returns what `build_train_step` returns, for a replica alone on its mesh, with the sums of a share."""
  sums = lambda params, rounds: loss_and_grads(model, cfg, params, *rounds)
  return _step_with(model, cfg, optimizer, schedule, sums)


def _step_with(
  model: DecoderFunctions,
  cfg: OptimizerSection,
  optimizer: optax.GradientTransformation,
  schedule: Schedule,
  sums: Callable[[Params, MicroBatches], Sums],
) -> TrainStep:
  """Returns a training step with these sums over its batch."""

  def train_step(state: TrainState, rounds: MicroBatches, schedule_values: Any) -> tuple[TrainState, jax.Array]:
    params = state.params
    if model.cfg.has_balance_loss:
      tokens = sum(jnp.sum(batch.segment_ids != 0, dtype=jnp.float32) for batch in rounds)
      weight = sum(jnp.sum(batch.weights, dtype=jnp.float32) for batch in rounds)
      params = experts.scale_loads(params, weight / jnp.maximum(tokens, 1.0))
    return apply_gradients(cfg, optimizer, schedule, state, sums(params, rounds), schedule_values)

  return train_step


def abstract_sums(state: TrainState, mesh: Mesh) -> Sums:
  """Returns the Sums of one share as ShapeDtypeStructs: gradients are float32 and sharded like their weights."""
  grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=p.sharding), state.params)
  scalar = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  return Sums(grads, scalar, scalar, scalar)


def build_eval_step(
  model: DecoderFunctions, cfg: OptimizerSection, mesh: Mesh
) -> Callable[[Params, MicroBatches], tuple[jax.Array, jax.Array]]:
  """Returns eval_step(params, rounds) -> sums of weighted cross-entropy and of weights, float32 scalars."""

  def batch_losses(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    losses = jax.lax.map(lambda micro: token_losses(model, cfg, params, micro)[0], batch)
    return jnp.sum(losses), jnp.sum(batch.weights, dtype=jnp.float32)

  def slice_losses(params: Params, rounds: MicroBatches) -> tuple[jax.Array, jax.Array]:
    sums = [batch_losses(params, batch) for batch in rounds]
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), sums)

  return _over_slices(mesh, slice_losses, lambda params, rounds: jax.lax.psum(slice_losses(params, rounds), DATA))


def require_whole_rows(mesh: Mesh, rows: int) -> None:
  """Raises ConfigError if the `rows` of a micro-batch over all slices do not divide over slices and fsdp."""
  ways = mesh.shape[DATA] * mesh.shape[FSDP]
  if rows % ways:
    share = mesh.size // ways  # devices per row
    remedy = f"a multiple of 1/{share}" if share > 1 else "a whole number (less with tensor or context parallelism)"
    raise ConfigError(
      f"A micro-batch of {rows} examples does not divide over data={mesh.shape[DATA]} x fsdp={mesh.shape[FSDP]} "
      f"ways. Choose per_device_batch_size, one device's share, as {remedy}."
    )


def abstract_batch(mesh: Mesh, accumulation: int, rows: int, length: int) -> Batch:
  """Returns a batch of ShapeDtypeStructs: `accumulation` micro-batches, each of `rows` rows over all slices."""
  where = NamedSharding(mesh, PartitionSpec(None, (DATA, FSDP), None))
  shape = (accumulation, rows, length)
  dtypes = (jnp.int32, jnp.int32, jnp.float32, jnp.int32, jnp.int32)
  return Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=where) for dtype in dtypes))


def _over_slices(
  mesh: Mesh, of_one_slice: Callable[[Params, MicroBatches], Any], reduced: Callable[[Params, MicroBatches], Any]
) -> Callable[[Params, MicroBatches], Any]:
  """Returns a function of (params, rounds) that returns sums over all slices of the mesh.

  of_one_slice: returns the sums of one slice; used as it is if the mesh has one slice. XLA's partitioner refuses a
    psum over a manual axis of size 1 together with automatic axes.
  reduced: called for each slice on the rows of this slice; returns the sums over all slices. In it the mesh axis
    `data` is manual: arrays are those of one slice, and the compiler cannot spread an operation over slices. Its sums
    over `data` are all the traffic between slices.
  """
  if mesh.shape[DATA] == 1:
    return of_one_slice
  whole = PartitionSpec()
  specs = (whole, PartitionSpec(None, DATA))
  # check_vma is off because custom_vjp kernels do not declare which values vary over `data`.
  return jax.shard_map(reduced, mesh=mesh, axis_names={DATA}, in_specs=specs, out_specs=whole, check_vma=False)
