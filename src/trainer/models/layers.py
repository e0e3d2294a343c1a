"""The parts of a decoder layer: norm, attention, feed-forward. docs/notation.md explains the letters of shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh

from trainer.config.schema import ModelSection
from trainer.kernels import grouped_matmul, projection
from trainer.kernels.attention import AttentionFunction
from trainer.kernels.cross_entropy import CHUNK_LOGITS_BYTES
from trainer.kernels.grouped_matmul import GroupedMatmul
from trainer.kernels.projection import Projection, computed_once, unfused
from trainer.models import rope
from trainer.parallel.sharding import constrain


@dataclasses.dataclass(frozen=True)
class Kernels:
  """The implementations that the model uses, chosen once for a platform."""

  attention: AttentionFunction
  _: dataclasses.KW_ONLY  # several are functions, and no type checker sees two in the wrong order
  grouped_matmul: GroupedMatmul = grouped_matmul.in_tiles  # of experts
  expert_parallelism: int = 1  # devices that share the experts
  project: Projection = projection.PLAIN
  rotate_half: rope.RotateHalf = rope.rotate_half_by_reversal  # for the rotary positions
  chunk_logits_bytes: int = CHUNK_LOGITS_BYTES["tpu"]
  head_neighbours: int = 1  # see sharding.LossExchange
  zigzag: Mesh | None = None  # the order of positions that attention expects, see attention.AttentionKernel


def normal_param(
  key: jax.Array, shape: tuple[int, ...], axes: tuple[str, ...], std: float, cfg: ModelSection
) -> nnx.Param:
  """Returns a weight of `shape` drawn from N(0, std^2), with its logical `axes` as metadata."""
  values = std * jax.random.normal(key, shape, jnp.float32)
  return nnx.Param(values.astype(cfg.weight_dtype), axes=axes)


# Save only the inputs for the backward pass and recompute the rest: on every platform, reading five stored arrays takes
# longer than recomputing them. prevent_cse=False, because merging equal expressions can only save work here.
@functools.partial(jax.checkpoint, prevent_cse=False)
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
  return nnx.silu(gate) * up


def _computed_together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the arrays, which a TPU computes in one operation, with the last dim innermost in memory.

  Without a fixed layout, the compiler may choose a layout for a later matmul. Then the gradient of the weights is
  copied before its reduce-scatter.
  """
  rows = (with_layout_constraint(array, Layout(tuple(range(array.ndim)))) for array in arrays)
  return jax.lax.optimization_barrier(tuple(rows))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def swiglu_matmul(
  gate: jax.Array, up: jax.Array, w: jax.Array, multiply: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
  """Returns multiply(swiglu(gate, up), w), where `multiply` is linear in each of its arguments.

  On 7x its derivative is faster than JAX's. The compiler computes JAX's products in operations of their own, and these
  products inside matmuls.
  """
  return multiply(swiglu(gate, up), w)


def _swiglu_matmul_backward(
  multiply: Callable[[jax.Array, jax.Array], jax.Array], saved: tuple[jax.Array, ...], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  gate, up, w = saved
  activated, pull = jax.vjp(nnx.silu, gate)
  (slope,) = pull(jnp.ones_like(gate))
  hidden, activated, slope = _computed_together(activated * up, activated, slope * up)  # in the matmul of `up`
  (dhidden,) = jax.vjp(lambda hidden: multiply(hidden, w), hidden)[1](g)
  dgate, dup = _computed_together(dhidden * slope, dhidden * activated)
  (dw,) = jax.vjp(lambda w: multiply(hidden, w), w)[1](g)
  return dgate, dup, dw


swiglu_matmul.defvjp(lambda *given: (swiglu_matmul(*given), given[:3]), _swiglu_matmul_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
  """Returns x / rms(x) * scale over the last dim, computed in float32, in the dtype of x (Zhang & Sennrich, 2019)."""
  x32 = x.astype(jnp.float32)
  return (x32 * _inverse_rms(x32, epsilon) * scale.astype(jnp.float32)).astype(x.dtype)


def _inverse_rms(x32: jax.Array, epsilon: float) -> jax.Array:
  return jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)


def _rms_norm_backward(epsilon: float, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (dx, dscale), computed from the saved input. With y = x / rms(x): dx = (dy - y * mean(dy * y)) / rms(x)."""
  x, scale = saved
  x32, g32 = x.astype(jnp.float32), g.astype(jnp.float32)
  inverse = _inverse_rms(x32, epsilon)
  y, dy = x32 * inverse, g32 * scale.astype(jnp.float32)
  dx = inverse * (dy - y * jnp.mean(dy * y, axis=-1, keepdims=True))
  dscale = jnp.sum(g32 * y, axis=tuple(range(x.ndim - 1)))
  return dx.astype(x.dtype), dscale.astype(scale.dtype)


rms_norm.defvjp(lambda x, scale, epsilon: (rms_norm(x, scale, epsilon), (x, scale)), _rms_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def rotated_rms_norm(
  x_BTNH: jax.Array, scale: jax.Array, cos: jax.Array, sin: jax.Array, epsilon: float, rotate_half: rope.RotateHalf
) -> jax.Array:
  """Returns `rope.rotate(rms_norm(x, scale), cos, sin)`, [B, T, N, H] in the dtype of x, but rounded only once.

  scale: float32 [H]. cos, sin: see `rope.cos_sin_tables`; they get no gradient. The scale is multiplied into cos and
  sin, and the division by the rms comes last. So the rotation reads only x. Otherwise a TPU would compute the norm
  twice, once for each term of the rotation.
  """
  x32 = x_BTNH.astype(jnp.float32)
  scale_of_other_half = jnp.roll(scale, scale.size // 2)
  rotated = x32 * (scale * cos) + rotate_half(x_BTNH) * (scale_of_other_half * sin)
  return (_inverse_rms(x32, epsilon) * rotated).astype(x_BTNH.dtype)


def _rotated_rms_norm_backward(
  epsilon: float, rotate_half: rope.RotateHalf, saved: tuple[jax.Array, ...], g_BTNH: jax.Array
) -> tuple[jax.Array, jax.Array, None, None]:
  """Returns (dx, dscale, None, None).

  The gradient is rounded to the dtype of x between the rotation and the norm. Without this rounding, a TPU would write
  and read twice as many bytes (docs/LOG.md).
  """
  x_BTNH, scale, cos, sin = saved
  return *_rms_norm_backward(epsilon, (x_BTNH, scale), rope.rotate_back(g_BTNH, cos, sin, rotate_half)), None, None


rotated_rms_norm.defvjp(lambda *given: (rotated_rms_norm(*given), given[:4]), _rotated_rms_norm_backward)


class RMSNorm(nnx.Module):
  """`rms_norm` with a learned scale. The scale is always float32: near 1, bfloat16 loses every update below 1/256."""

  def __init__(self, size: int, cfg: ModelSection, scale: float = 1.0) -> None:
    """`scale` is the initial value of all elements of the learned scale."""
    self.scale = nnx.Param(jnp.full((size,), scale, jnp.float32), axes=("norm",))
    self.epsilon = cfg.normalization_layer_epsilon

  def __call__(self, x: jax.Array) -> jax.Array:
    return rms_norm(x, self.scale[...], self.epsilon)

  def rotated(self, x_BTNH: jax.Array, cos: jax.Array, sin: jax.Array, rotate_half: rope.RotateHalf) -> jax.Array:
    """Returns the norm of each head, rotated: see `rotated_rms_norm`."""
    return rotated_rms_norm(x_BTNH, self.scale[...], cos, sin, self.epsilon, rotate_half)


class Attention(nnx.Module):
  """Grouped-query attention with rotary positions. With `use_qk_norm`, RMSNorm on each query head and key head."""

  KEYS = 4
  QUERY_AXES = ("embed", "heads", "head_dim")
  KEY_AXES = ("embed", "kv_heads", "head_dim")
  OUT_AXES = ("heads", "head_dim", "embed")

  def __init__(self, cfg: ModelSection, kernels: Kernels, out_std: float, *, keys: jax.Array) -> None:
    D, N, K, H = cfg.emb_dim, cfg.num_query_heads, cfg.num_kv_heads, cfg.head_dim
    std = cfg.initializer_range
    query_key, key_key, value_key, out_key = keys
    self.query = normal_param(query_key, (D, N, H), self.QUERY_AXES, std, cfg)
    self.key = normal_param(key_key, (D, K, H), self.KEY_AXES, std, cfg)
    self.value = normal_param(value_key, (D, K, H), self.KEY_AXES, std, cfg)
    self.out = normal_param(out_key, (N, H, D), self.OUT_AXES, out_std, cfg)
    if cfg.use_qk_norm:
      self.query_norm = RMSNorm(H, cfg)
      self.key_norm = RMSNorm(H, cfg)
    self.use_qk_norm = cfg.use_qk_norm
    self.kernels = kernels

  def __call__(self, x_BTD: jax.Array, cos: jax.Array, sin: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    project = self.kernels.project
    # Three separate matmuls: to split a joint result, a TPU would copy it three times, head by head.
    weights = (self.query[...], self.QUERY_AXES), (self.key[...], self.KEY_AXES), (self.value[...], self.KEY_AXES)
    q, k, v = project.project_each(x_BTD, weights)
    q = checkpoint_name(constrain(q, "batch", "length", "heads", "head_dim"), "query_proj")
    k = checkpoint_name(constrain(k, "batch", "length", "kv_heads", "head_dim"), "key_proj")
    v = checkpoint_name(constrain(v, "batch", "length", "kv_heads", "head_dim"), "value_proj")
    rotate_half = self.kernels.rotate_half
    if self.use_qk_norm:
      if project.wide_units:
        q, k = unfused(q), unfused(k)
      q = self.query_norm.rotated(q, cos, sin, rotate_half)
      k = self.key_norm.rotated(k, cos, sin, rotate_half)
    else:
      q, k = (rope.rotate(x, cos, sin, rotate_half) for x in (q, k))
    # The kernel itself names what its backward pass needs "context" for remat.
    context = self.kernels.attention(q, k, v, segment_ids_BT, segment_ids_BT)
    context = constrain(context, "batch", "length", "heads", "head_dim")
    out = project(context, self.out[...], self.OUT_AXES, contracted=2)
    return checkpoint_name(constrain(out, "batch", "length", "embed"), "out_proj")


class FeedForward(nnx.Module):
  """SwiGLU feed-forward: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

  KEYS = 3
  UP_AXES = ("embed", "mlp")
  DOWN_AXES = ("mlp", "embed")

  def __init__(self, cfg: ModelSection, kernels: Kernels, out_std: float, *, keys: jax.Array) -> None:
    D, F = cfg.emb_dim, cfg.mlp_dim
    gate_key, up_key, down_key = keys
    self.gate = normal_param(gate_key, (D, F), self.UP_AXES, cfg.initializer_range, cfg)
    self.up = normal_param(up_key, (D, F), self.UP_AXES, cfg.initializer_range, cfg)
    self.down = normal_param(down_key, (F, D), self.DOWN_AXES, out_std, cfg)
    self.project = kernels.project

  def __call__(self, x_BTD: jax.Array, _segment_ids_BT: jax.Array) -> jax.Array:
    if self.project.wide_units:
      x_BTD = computed_once(x_BTD)
    gate, up = self.project.project_all(x_BTD, [self.gate[...], self.up[...]], self.UP_AXES)
    gate = checkpoint_name(constrain(gate, "batch", "length", "mlp"), "mlpwi_0")
    up = checkpoint_name(constrain(up, "batch", "length", "mlp"), "mlpwi_1")
    out = self._project_down(gate, up)
    return checkpoint_name(constrain(out, "batch", "length", "embed"), "mlpwo")

  def _project_down(self, gate: jax.Array, up: jax.Array) -> jax.Array:
    project = functools.partial(self.project, axes=self.DOWN_AXES)
    down = self.down[...]
    return swiglu_matmul(gate, up, down, project) if self.project.wide_units else project(swiglu(gate, up), down)
