"""Flash attention for GPUs: cuDNN's fused kernels, called on the heads and queries of each device.

Whether a batch is packed is known only at run time, so the program holds three calls and runs one of them:
- The causal kernel, if no row is packed.
- The kernel for documents, if no row has too many of them: it computes only the scores inside each document. It needs
  Hopper or a later GPU. JAX has no public function for it, and compiles it only where it finds such a GPU.
- The kernel with a mask of [B, 1, T, S] in the compute dtype: the only array that is not linear in the length, not
  saved for the backward pass. The kernel computes all scores. A device with a part of the sequence always uses it.
The backward pass runs the forward kernel again, because JAX does not pass the residuals of cuDNN, which differ between
the calls, to a custom gradient.

The tests check the lowered program, and the same calls in plain XLA. On an H200 (docs/benchmarks/accelerator.md) output
and gradients were within 0.4% of attention by definition in float32: the rounding of bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from trainer.config.errors import ConfigError
from trainer.kernels.attention_shard import per_device
from trainer.parallel.mesh import CONTEXT

Implementation = Literal["cudnn", "xla"]
MAX_HEAD_DIM, MAX_HEAD_DIM_BEFORE_HOPPER = 256, 128
MAX_DOCUMENT_HEAD_DIM = 128  # of the kernel for documents, as far as it was tried
# For each document that a row may have, the backward kernel for documents has temporaries of 8 bytes per element of the
# queries, and fills half of them with zeros. So a row may have a document per 256 positions, but at least 16 and at
# most 64, and the kernel runs for so many heads at once that the temporaries fit into 1 GiB.
POSITIONS_PER_DOCUMENT, MIN_DOCUMENTS, MAX_DOCUMENTS = 256, 16, 64
DOCUMENT_BYTES = 1 << 30
REPAIRED_JAX = (0, 11, 1)  # before it, keys get the offsets of the queries, which have more heads

_Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (q, k, v) -> out


def build(
  *, mesh: Mesh | None, head_dim: int, seq_len: int, dtype: jnp.dtype, implementation: Implementation = "cudnn"
) -> Callable[..., jax.Array]:
  """Returns a function with the contract of `attention.AttentionKernel`, for q, k and v of a 16-bit `dtype`.

  Raises ConfigError if cuDNN does not support the type or the sizes, as far as JAX lets it: for wide heads JAX wants to
  see the GPU. `implementation="xla"` is for tests: it computes the same calls in plain XLA on any platform.
  """
  if dtype not in (jnp.bfloat16, jnp.float16):
    raise ConfigError(
      f"dtype={jnp.dtype(dtype)}: the flash kernel of GPUs needs a 16-bit type. Set dtype=bfloat16, or "
      "attention=dot_product."
    )
  if head_dim % 8 or head_dim > MAX_HEAD_DIM:
    raise ConfigError(
      f"head_dim={head_dim}: the flash kernel of GPUs needs a multiple of 8, at most {MAX_HEAD_DIM}. Set one, or "
      "attention=dot_product."
    )
  if head_dim > MAX_HEAD_DIM_BEFORE_HOPPER and implementation == "cudnn" and not _finds_hopper():
    raise ConfigError(
      f"head_dim={head_dim}: JAX finds no GPU of Hopper or later here, and without one its flash kernel of GPUs takes "
      f"at most {MAX_HEAD_DIM_BEFORE_HOPPER}. Set that, use such a GPU, or set attention=dot_product."
    )
  if seq_len % 2:
    raise ConfigError(
      f"max_target_length={seq_len}: the flash kernel of GPUs needs an even length. Set one, or attention=dot_product."
    )

  if mesh is None or mesh.size == 1:
    return lambda *arrays: _flash(*arrays, jnp.int32(0), implementation)

  def local(_: None, q: jax.Array, k: jax.Array, *rest: jax.Array) -> jax.Array:
    first = jnp.int32(0) if q.shape[1] == k.shape[1] else jax.lax.axis_index(CONTEXT) * q.shape[1]
    return _flash(q, k, *rest, first, implementation)

  return per_device(local, mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _flash(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  q_segment_ids: jax.Array,
  kv_segment_ids: jax.Array,
  first: jax.Array,
  implementation: Implementation,
) -> jax.Array:
  """Returns attention of q [B, T, N, H], at the positions from `first` on, to all S keys in k and v [B, S, K, H]."""
  forward = lambda attend, *qkv: attend(*qkv)
  return _with_kernel(forward, (q, k, v), (q_segment_ids, kv_segment_ids, first), implementation)


def _flash_fwd(*arguments: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return checkpoint_name(_flash(*arguments), "context"), arguments[:6]


def _flash_bwd(
  implementation: Implementation, residuals: tuple[jax.Array, ...], dout: jax.Array
) -> tuple[jax.Array | None, ...]:
  def backward(attend: _Attend, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    *qkv, dout = arrays
    return jax.vjp(attend, *qkv)[1](dout)

  return *_with_kernel(backward, (*residuals[:3], dout), residuals[3:], implementation), None, None, None


_flash.defvjp(_flash_fwd, _flash_bwd)


def _with_kernel(
  run: Callable[..., Any], arrays: tuple[jax.Array, ...], place: tuple[jax.Array, ...], implementation: Implementation
) -> Any:
  """Returns run(attend, *arrays) with the call for this batch. arrays: q, k, v, and in the backward pass dout."""
  q_segment_ids, kv_segment_ids, first = place
  t, s = q_segment_ids.shape[1], kv_segment_ids.shape[1]
  kernel = functools.partial(jax.nn.dot_product_attention, implementation=implementation)

  def masked(*arrays: jax.Array) -> Any:
    seen = q_segment_ids[:, :, None] == kv_segment_ids[:, None, :]
    if t != s:  # a shard of the sequence, but the causal mask of cuDNN begins at position 0
      seen = seen & (jnp.arange(s)[None, :] <= first + jnp.arange(t)[:, None])
    return run(functools.partial(kernel, mask=seen[:, None], is_causal=t == s), *arrays)

  def causal(*arrays: jax.Array) -> Any:
    return run(functools.partial(kernel, is_causal=True), *arrays)

  if t != s:
    return masked(*arrays)
  packed = jnp.any(q_segment_ids != q_segment_ids[:, :1])
  documents = _most_documents(arrays[0], arrays[1].shape[2], implementation)
  if documents < 2:
    return jax.lax.cond(packed, masked, causal, *arrays)
  *places, fit = _documents(q_segment_ids, documents)

  def by_document(*arrays: jax.Array) -> Any:
    attend = _documents_in_cudnn if implementation == "cudnn" else _documents_in_xla
    run_at = lambda places, *arrays: run(functools.partial(attend, *places), *arrays)
    is_backward = len(arrays) > 3
    return _for_some_heads_at_once(run_at, places, arrays) if is_backward else run_at(places, *arrays)

  return jax.lax.switch(jnp.where(packed, jnp.where(fit, 1, 2), 0), [causal, by_document, masked], *arrays)


def _most_documents(q: jax.Array, K: int, implementation: Implementation) -> int:
  """Returns the most documents of a row that the kernel for documents takes; 0 if the GPU or JAX has no such kernel."""
  _, T, N, H = q.shape
  most = min(max(T // POSITIONS_PER_DOCUMENT, MIN_DOCUMENTS), MAX_DOCUMENTS)
  if implementation == "xla":
    return most
  supported = H <= MAX_DOCUMENT_HEAD_DIM and q.size < 2**31  # offsets are int32
  if not supported or (jax.__version_info__ < REPAIRED_JAX and K < N) or not _finds_hopper():
    return 0
  return min(most, DOCUMENT_BYTES // _temporary_bytes(q, K))


def _finds_hopper() -> bool:
  """Returns whether JAX finds a GPU of Hopper or later: of this process, also when it compiles for another GPU."""
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  return cudnn.check_compute_capability("9.0")


def _temporary_bytes(q: jax.Array, K: int) -> int:
  """Returns the bytes of temporaries for a document, of the backward kernel on the queries of one of K key heads."""
  _, T, N, H = q.shape
  return 8 * T * (N // K) * H


def _documents(segment_ids: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns where the documents of each row begin, int32 [B, most + 1], and their lengths, int32 [B, most].

  Both are -1 for documents that a row does not have. A run of padding is a document. The third result is whether this
  describes all rows: no row has more documents, or two runs of one segment.
  """
  before, after = segment_ids[:, :-1], segment_ids[:, 1:]
  number = jnp.cumsum(jnp.pad(before != after, ((0, 0), (1, 0))), axis=1, dtype=jnp.int32)
  wanted = jnp.arange(most + 1, dtype=jnp.int32)
  starts = jnp.sum(number[:, None, :] < wanted[None, :, None], axis=2, dtype=jnp.int32)
  exists = wanted <= number[:, -1:]
  lengths = jnp.where(exists[:, :-1], starts[:, 1:] - starts[:, :-1], -1)
  ordered = (before > 0) & (before <= after) | (after == 0)
  return jnp.where(exists, starts, -1), lengths, jnp.all(ordered) & jnp.all(number < most)


def _for_some_heads_at_once(
  run: Callable[..., Any], places: list[jax.Array], arrays: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
  """Returns run(places, *arrays), computed for a few key heads of a few rows at once, to limit the temporaries."""
  (B, T, _, H), K = arrays[0].shape, arrays[1].shape[2]
  most = DOCUMENT_BYTES // (places[1].shape[1] * _temporary_bytes(arrays[0], K))
  at_once = max(size for size in range(1, max(most, 1) + 1) if B * K % size == 0)

  def split(x: jax.Array) -> jax.Array:  # [B, T, K * G, H] -> [parts, at_once, T, G, H]
    return x.reshape(B, T, K, -1, H).swapaxes(1, 2).reshape(-1, at_once, T, x.shape[2] // K, H)

  def merge(x: jax.Array) -> jax.Array:
    return x.reshape(B, K, T, -1, H).swapaxes(1, 2).reshape(B, T, -1, H)

  of_heads = [jnp.repeat(x, K, axis=0).reshape(-1, at_once, x.shape[1]) for x in places]
  results = jax.lax.map(lambda given: run(given[0], *given[1]), (of_heads, [split(x) for x in arrays]))
  return tuple(merge(x) for x in results)


def _documents_in_cudnn(starts: jax.Array, lengths: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  from jax._src.cudnn import fused_attention_stablehlo as cudnn

  places = (lengths, lengths, starts, starts)
  kind, scale = cudnn.MaskType.PADDING_CAUSAL, q.shape[-1] ** -0.5
  return cudnn.dot_product_attention(q, k, v, None, None, *places, mask_type=kind, scale=scale)


def _documents_in_xla(starts: jax.Array, lengths: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
  at = jnp.arange(q.shape[1], dtype=jnp.int32)
  inside = (starts[:, :-1, None] <= at) & (at < starts[:, :-1, None] + lengths[:, :, None])  # [B, documents, T]
  seen = jnp.any(inside[:, :, :, None] & inside[:, :, None, :], axis=1)
  return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], is_causal=True, implementation="xla")
