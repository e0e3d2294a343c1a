"""The contract of attention, the table of its implementations, and the function that chooses one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from trainer.config import rules
from trainer.config.errors import ConfigError, require
from trainer.kernels import attention_cpu, attention_shard
from trainer.kernels.attention_xla import dot_product
from trainer.parallel.mesh import TENSOR

# (q [B,T,N,H], k [B,S,K,H], v [B,S,K,H], q_segment_ids [B,T], kv_segment_ids [B,S]) -> [B,T,N,H]
AttentionFunction = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Shape:
  """What is known about the attention of a model before tracing. All sizes are global."""

  platform: str  # "cpu", "gpu" or "tpu"
  mesh: Mesh | None
  head_dim: int
  seq_len: int
  num_q_heads: int
  num_kv_heads: int
  dtype: jnp.dtype  # of q, k and v
  precision: str = "default"  # JAX's matmul precision of the trace


@dataclass(frozen=True)
class AttentionKernel:
  """A chosen implementation: `attention(q, k, v, q_segment_ids, kv_segment_ids)`.

  Returns [B, T, N, H] in q.dtype, from q [B, T, N, H], k and v [B, S, K, H] (K divides N; k and v are not repeated) and
  int32 segment ids [B, T] and [B, S]. Attention is causal by index and stays within a segment. The function applies the
  scale H**-0.5. It names what its backward pass needs "context" for remat, so callers do not have to.
  zigzag: the mesh over whose axis context the positions of all arrays are in zigzag order; None: in natural order.
  """

  name: str
  reason: str
  function: AttentionFunction
  zigzag: Mesh | None = None

  def __call__(
    self, q: jax.Array, k: jax.Array, v: jax.Array, q_segment_ids: jax.Array, kv_segment_ids: jax.Array
  ) -> jax.Array:
    with jax.named_scope(f"attention_{self.name}"):
      return self.function(q, k, v, q_segment_ids, kv_segment_ids)


def _cpu_flash(shape: Shape, reason: str) -> AttentionKernel:
  if shape.mesh is None or shape.mesh.size == 1:
    return AttentionKernel("flash", reason, attention_cpu.flash)
  function = attention_shard.per_device(lambda _, *arrays: attention_cpu.flash_shard(*arrays), shape.mesh)
  return AttentionKernel("flash", reason, function)


def _tpu_flash(shape: Shape, reason: str) -> AttentionKernel:
  highest = shape.precision == "highest" and shape.dtype == jnp.float32
  if shape.precision != "default" and not highest:
    raise ConfigError(
      f"JAX_DEFAULT_MATMUL_PRECISION={shape.precision} with dtype={shape.dtype.name}: the flash kernel of TPUs has "
      "only default, or highest with dtype=float32. Set one of these, or attention=dot_product."
    )
  # Imported here, because Pallas takes a second to import and only TPUs need it.
  from trainer.kernels import attention_tpu

  function = attention_tpu.build(
    mesh=shape.mesh,
    seq_len=shape.seq_len,
    heads_per_key=shape.num_q_heads // shape.num_kv_heads,
    head_dim=shape.head_dim,
    itemsize=shape.dtype.itemsize,
  )
  return AttentionKernel("flash", reason, function, attention_tpu.order(shape.mesh, shape.seq_len))


def _cudnn(shape: Shape, reason: str) -> AttentionKernel:
  from trainer.kernels import attention_gpu

  function = attention_gpu.build(mesh=shape.mesh, head_dim=shape.head_dim, seq_len=shape.seq_len, dtype=shape.dtype)
  return AttentionKernel("flash", reason, function)


# Platform -> its flash kernel. Raises ConfigError with the reason if the kernel does not support the shape.
IMPLEMENTATIONS: Mapping[str, Callable[[Shape, str], AttentionKernel]] = MappingProxyType(
  {"cpu": _cpu_flash, "tpu": _tpu_flash, "gpu": _cudnn}
)

# With attention=autoselected, shorter sequences use dot_product. CPU: flash was not faster
# below this length. TPU: one block of the kernel.
MIN_FLASH_LENGTH = 128


def choose(name: str, shape: Shape) -> AttentionKernel:
  """Returns the implementation of `name` (dot_product, flash, autoselected) for the platform of `shape`.

  If the platform's flash kernel does not support the type or the sizes, flash raises ConfigError, and autoselected
  returns dot_product with the reason in `.reason`.
  """
  platform = shape.platform
  require(rules.heads_share(shape.num_q_heads, shape.num_kv_heads))
  ways = 1 if shape.mesh is None else shape.mesh.shape[TENSOR]
  require(rules.splits("base_num_kv_heads", shape.num_kv_heads, "tensor", ways, scaled=True))
  if platform not in IMPLEMENTATIONS:
    raise ConfigError(f"Attention supports the platforms {', '.join(IMPLEMENTATIONS)}, not '{platform}'.")
  if name == "dot_product":
    return AttentionKernel(name, f"set by attention={name}", dot_product)
  if name == "flash":
    return IMPLEMENTATIONS[platform](shape, f"set by attention={name}")
  assert name == "autoselected", name
  if shape.seq_len < MIN_FLASH_LENGTH:
    reason = f"for max_target_length={shape.seq_len}, below {MIN_FLASH_LENGTH}, flash is not faster on {platform}"
    return AttentionKernel("dot_product", reason, dot_product)
  try:
    return IMPLEMENTATIONS[platform](shape, f"the flash kernel of {platform} supports these sizes")
  except ConfigError as refusal:
    return AttentionKernel("dot_product", str(refusal), dot_product)
