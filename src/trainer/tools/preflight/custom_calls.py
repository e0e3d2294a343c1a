"""FLOPs of custom calls, which XLA counts as none: Pallas kernels, and the libraries that compute for GPUs.

Attention is priced by the sizes it is given and the share of them that a causal mask leaves: of cuDNN's small tiles
half, of splash's blocks those that are not empty, which are more than half of a short sequence.
"""

from __future__ import annotations

import math
import re

from trainer.kernels import attention_splash
from trainer.tools.preflight.hlo import Array, Computation, Instruction, matmul_dtype, numbers

_STATED = re.compile(r'"cost_estimate":\{[^{}]*"flops":"?(\d+)')
# JAX names its splash kernels after their phase, and whether they know segments and keep residuals.
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
# Matmuls of T x S x H per head: forward q k and p v; backward k q again and dO v in both kernels, then dq = ds k in
# one and dv = p dO, dk = ds q in the other. The fused kernel makes all three from one pair.
_MATMULS = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}


def is_kernel(instruction: Instruction) -> bool:
  """Whether it is a custom call that computes what the module's text does not show."""
  target = instruction.target
  return target in ("tpu_custom_call", "__gpu$xla.gpu.triton") or target.startswith(("__cublas$", "__cudnn$"))


def flops(computation: Computation, kernel: Instruction) -> tuple[str, float] | None:
  """(HLO type of the operands, FLOPs) of one run; the type is "" where the kernel itself states its FLOPs, and all is
  None where neither it nor anything here does."""
  stated = _STATED.search(kernel.rest)
  if stated:
    return "", float(stated.group(1))
  arrays = [computation.by_name[name].result[0] for name in kernel.operands]
  target = kernel.target
  if target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
    return _gemm(kernel, arrays)
  if target.startswith("__cudnn$fmha"):
    return _fmha(kernel, arrays)
  # The compiler may rename an instruction; the operation's name ends with the kernel's.
  named = _SPLASH.findall(kernel.name) or _SPLASH.findall(kernel.source)
  return _splash(kernel, arrays, named[-1]) if named else None


def _splash(kernel: Instruction, arrays: list[Array], phase: str) -> tuple[str, float]:
  """Its operands are integers that describe the mask, then q [.., N, T, H], k and v [.., K, S, H], and others."""
  q, k = [a for a in arrays if a.dtype in ("bf16", "f16", "f32")][:2]
  # The fused backward kernel also returns dq, a part of it for each block of keys.
  if phase == "dkv" and any(len(a.dims) == len(q.dims) + 1 and a.dims[-3:] == q.dims[-3:] for a in kernel.result):
    phase = "fused"
  (queries, head_dim), keys = q.dims[-2:], k.dims[-2]
  blocks = attention_splash.block_sizes(queries, keys, head_dim * q.bits // 8)
  backward = blocks.block_q_dkv, blocks.block_kv_dkv
  rows, columns = (blocks.block_q, blocks.block_kv) if phase == "fwd" else backward
  return q.dtype, _MATMULS[phase] * 2.0 * math.prod(q.dims) * keys * _computed(queries, keys, rows, columns)


def _computed(queries: int, keys: int, rows: int, columns: int) -> float:
  """The share of blocks that are not above the diagonal, for the last `queries` of a sequence of `keys`: where a
  context axis deals out queries, the chip that has those is the one that the others wait for."""
  first = keys - queries
  reached = sum(math.ceil((first + end) / columns) for end in range(rows, queries + 1, rows))
  return reached / (queries // rows * (keys // columns))


def _fmha(kernel: Instruction, arrays: list[Array]) -> tuple[str, float] | None:
  """cuDNN's attention; its configuration has the scores' shape [B, N, T, S]. Backward computes all in one kernel."""
  scores = re.search(r'"intermediate_tensor_shape":\{[^{}]*"dimensions":\[([^\]]*)\]', kernel.rest)
  if scores is None:
    return None
  matmuls = _MATMULS["fused" if "Backward" in kernel.target else "fwd"]
  causal = 2 if re.search(r'"mask_type":"(?:PADDING_)?CAUSAL"', kernel.rest) else 1
  return arrays[0].dtype, matmuls * 2.0 * math.prod(numbers(scores.group(1))) * arrays[0].dims[-1] / causal


def _gemm(kernel: Instruction, arrays: list[Array]) -> tuple[str, float] | None:
  """2 x elements of the result x size of the contraction."""
  contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', kernel.rest)
  if contracted is None:
    return None
  size = math.prod(arrays[0].dims[d] for d in numbers(contracted.group(1)))
  return matmul_dtype(*arrays[:2]), 2.0 * math.prod(kernel.result[0].dims) * size
