"""The contract of attention, the table of its implementations, and the one place that chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.kernels import attention_cpu, attention_shard
from trainer.kernels.attention_xla import dot_product

AttentionFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Shape:
  """What is known of a model's attention before it is traced: global sizes, and the mesh it runs on."""

  platform: str
  mesh: Mesh | None
  head_dim: int
  seq_len: int
  num_q_heads: int
  num_kv_heads: int
  dtype: jnp.dtype
  precision: str

  def axis(self, name: str) -> int:
    """Size of mesh axis `name`; 1 without a mesh."""
    return 1 if self.mesh is None else self.mesh.shape.get(name, 1)


@dataclass(frozen=True)
class Attention:
  """A chosen implementation: `attention(q, k, v, q_segment_ids, kv_segment_ids)`.

  q [B, T, N, H], k and v [B, S, K, H], segment ids [B, T] and [B, S] int32; returns [B, T, N, H] in q.dtype. Causal
  by index, and a position sees its own segment alone; the scale H**-0.5 is applied inside; K divides N and neither k
  nor v is repeated. What the backward pass needs of the forward pass is named "context" for remat, so the caller
  names nothing more.
  """

  name: str
  reason: str
  function: AttentionFunction

  def __call__(
    self, q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array
  ) -> jax.Array:
    with jax.named_scope(f"attention_{self.name}"):
      return self.function(q, k, v, q_segment_ids, kv_segment_ids)


def _cpu_flash(shape: Shape) -> AttentionFunction:
  if shape.mesh is None or shape.mesh.size == 1:
    return attention_cpu.flash
  return attention_shard.per_device(lambda _, *arrays: attention_cpu.flash_shard(*arrays), shape.mesh)


def _splash(shape: Shape) -> AttentionFunction:
  highest = shape.precision == "highest" and shape.dtype == jnp.float32
  if shape.precision != "default" and not highest:
    raise ValueError(
      f"matmul_precision={shape.precision} with dtype={shape.dtype.name}: a TPU's flash kernel multiplies in the "
      "default precision, or float32 in the highest. Choose one of those, or attention=dot_product."
    )
  # Imported here: Pallas takes a second to import, and only a TPU needs it.
  from trainer.kernels import attention_splash

  return attention_splash.build(
    mesh=shape.mesh,
    seq_len=shape.seq_len,
    num_q_heads=shape.num_q_heads,
    head_bytes=shape.head_dim * shape.dtype.itemsize,
  )


def _cudnn(shape: Shape) -> AttentionFunction:
  from trainer.kernels import attention_gpu

  return attention_gpu.build(mesh=shape.mesh, head_dim=shape.head_dim, seq_len=shape.seq_len, dtype=shape.dtype)


# Platform -> its flash kernel, or a ValueError with the reason; dot_product serves every platform.
IMPLEMENTATIONS: Mapping[str, Callable[[Shape], AttentionFunction]] = MappingProxyType(
  {"cpu": _cpu_flash, "tpu": _splash, "gpu": _cudnn}
)

# Shorter sequences go to dot_product under autoselected. CPU: where flash stops being faster in
# end_to_end/benchmarks/attention_cpu.py; TPU: one block of the kernel.
SHORTEST: Mapping[str, int] = MappingProxyType({"cpu": 128, "tpu": 128, "gpu": 128})


def choose(
  name: str,
  *,
  platform: str,
  mesh: Mesh | None,
  head_dim: int,
  seq_len: int,
  num_q_heads: int,
  num_kv_heads: int,
  dtype: Any = jnp.bfloat16,
  precision: str = "default",
) -> Attention:
  """Returns the implementation of `name` (dot_product, flash, autoselected) for a platform ("cpu", "tpu", "gpu").

  `dtype` is that of q, k and v, `precision` the JAX matmul precision that they are traced under. flash raises
  ValueError where the platform's kernel cannot serve these or the sizes; autoselected then takes dot_product and says
  why in `.reason`.
  """
  shape = Shape(platform, mesh, head_dim, seq_len, num_q_heads, num_kv_heads, jnp.dtype(dtype), precision)
  if num_q_heads % num_kv_heads:
    raise ValueError(f"base_num_query_heads={num_q_heads} must be a multiple of base_num_kv_heads={num_kv_heads}.")
  if num_kv_heads % shape.axis("tensor"):
    raise ValueError(
      f"base_num_kv_heads={num_kv_heads} does not divide over tensor parallelism {shape.axis('tensor')}: choose "
      "ici_tensor_parallelism that divides it."
    )
  if platform not in IMPLEMENTATIONS:
    raise ValueError(f"Attention knows the platforms {', '.join(IMPLEMENTATIONS)}, not '{platform}'.")
  if name == "dot_product":
    return Attention(name, "asked for", dot_product)
  if name == "flash":
    return Attention(name, "asked for", IMPLEMENTATIONS[platform](shape))
  if name != "autoselected":
    raise ValueError(f"attention='{name}' is not one of dot_product, flash, autoselected.")
  if seq_len < SHORTEST[platform]:
    reason = f"sequences of {seq_len} are shorter than {SHORTEST[platform]}, where flash starts to pay on {platform}"
    return Attention("dot_product", reason, dot_product)
  try:
    return Attention("flash", f"the flash kernel of {platform} serves these sizes", IMPLEMENTATIONS[platform](shape))
  except ValueError as refusal:
    return Attention("dot_product", str(refusal), dot_product)
