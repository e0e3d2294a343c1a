"""FLOPs of custom calls, which XLA counts as zero: Pallas kernels, and GPU libraries.

The FLOPs of attention follow from its sizes and from the share that a causal mask leaves. cuDNN has small tiles, so the
share is half. Kernels for TPUs compute every block that is not fully masked: more than half of a short sequence.
"""

from __future__ import annotations

import dataclasses
import math
import re

from stepcost.hlo import Array, Computation, Instruction, matmul_dtype, numbers

_STATED = re.compile(r'"cost_estimate":\{[^{}]*"flops":"?(\d+)')
# This trainer's kernels state the FLOPs of the blocks that they compute.
_FLASH = re.compile(r"flash_attention_(forward|backward)")
# The name of a splash kernel contains its phase, and whether it has segments and saves residuals.
_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)")
_BLOCK = re.compile(r"(block_\w+)\W+(\d+)")
# A kernel that computes as many rows as it is given says how much this is of what its shapes allow.
_PART = re.compile(r"one_of_(\d+)_parts")
_FLOATS = ("bf16", "f16", "f32")
_FIXED_MAXIMUM = re.compile(r"max_logit_const\W+[\d.]")
# Number of matmuls of T x S x H per head. Forward: q k and p v. Backward: both kernels compute k q again and dO v; then
# one computes dq = ds k, the other dv = p dO and dk = ds q. The fused kernel computes all five once.
MATMULS = {"fwd": 2, "dq": 3, "dkv": 4, "fused": 5}


# Targets that move or mark arrays, choose the largest numbers, or sort with a radix: they cost their bytes.
_MOVES = re.compile(
  r"AllocateBuffer|ConcatBitcast|AsyncCollective(Start|Done)|LayoutConstraint|PadToStatic|SliceToDynamic|Sharding|"
  r"SPMD(FullToShard|ShardToFull)Shape|MoveTo(Host|Device)|annotate_device_placement|(__gpu\$|Approx)?TopK|"
  r"PartialReduce|__cub\$DeviceRadixSort\w*|SliceId|ZeroCrop"
)


@dataclasses.dataclass(frozen=True)
class Attention:
  dtype: str  # HLO type of the operands; "" if the kernel itself states its FLOPs
  scores: float  # that it computes: pairs of a query and a key, of all heads
  width: int  # H
  phase: str  # a key of MATMULS
  name: str = ""  # of a kernel for TPUs: its library, its phase, and what makes it faster
  keys: int = 0  # whose scores a splash kernel computes at a time; 0: it does not state its blocks

  @property
  def flops(self) -> float:
    return MATMULS[self.phase] * 2.0 * self.scores * self.width


def is_kernel(instruction: Instruction) -> bool:
  """Returns whether the instruction is a custom call whose computation the text of the module does not show."""
  target = instruction.target
  return target in ("tpu_custom_call", "__gpu$xla.gpu.triton") or target.startswith(("__cublas$", "__cudnn$"))


def is_unknown(instruction: Instruction) -> bool:
  """Returns whether the instruction is a custom call that is no kernel and may do more than move its arrays."""
  is_known = is_kernel(instruction) or _MOVES.fullmatch(instruction.target)
  return instruction.opcode == "custom-call" and not is_known


def flops(computation: Computation, kernel: Instruction) -> tuple[str, float] | None:
  """Returns (HLO type of the operands, FLOPs) of one run of `kernel`, or None if its FLOPs are unknown.

  The type is "" if the kernel itself states its FLOPs.
  """
  known = attention(computation, kernel)
  if known:
    return known.dtype, known.flops
  stated = _stated(kernel)
  if stated is not None:
    return "", stated
  if kernel.target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
    return _gemm(kernel, _operands(computation, kernel))
  return None


def attention(computation: Computation, kernel: Instruction) -> Attention | None:
  """Returns what `kernel` computes, None if it is not an attention kernel or if its FLOPs are unknown."""
  if not is_kernel(kernel):
    return None
  if kernel.target.startswith("__cudnn$fmha"):
    return _fmha(kernel, _operands(computation, kernel))
  # The compiler may rename an instruction. The name of its operation then still ends with the name of the kernel.
  for pattern, read in ((_FLASH, _flash), (_SPLASH, _splash)):
    named = pattern.findall(kernel.name) or pattern.findall(kernel.source)
    if named:
      return read(kernel, _operands(computation, kernel), named[-1])
  return None


def _stated(kernel: Instruction) -> float | None:
  stated = _STATED.search(_config(kernel))
  part = _PART.search(kernel.source)
  return float(stated.group(1)) / (int(part.group(1)) if part else 1) if stated else None


def _operands(computation: Computation, kernel: Instruction) -> list[Array]:
  return [computation.by_name[name].result[0] for name in kernel.operands]


def _flash(kernel: Instruction, arrays: list[Array], direction: str) -> Attention | None:
  """Operands: integers that describe the blocks, q [B, N, T, H], and others."""
  floats, stated = [a for a in arrays if a.dtype in _FLOATS], _stated(kernel)
  if not floats or stated is None:
    return None
  phase, width = "fwd" if direction == "forward" else "fused", floats[0].dims[-1]
  return Attention(floats[0].dtype, stated / (MATMULS[phase] * 2.0 * width), width, phase, f"flash_attention {phase}")


def _splash(kernel: Instruction, arrays: list[Array], phase: str) -> Attention | None:
  """Operands: integers that describe the mask, q [.., N, T, H], k and v [.., K, S, H], and others.

  The last two dims of each may have the other order. The FLOPs follow from the blocks, which JAX's and tokamax's
  kernels state in their metadata. What a kernel states about its FLOPs counts only without them: tokamax's forward
  kernel states as many as without a mask.
  """
  suffix = {"fwd": "", "dq": "_dq", "dkv": "_dkv"}[phase]
  blocks = {name: int(size) for name, size in _BLOCK.findall(kernel.rest)}
  rows, columns = blocks.get(f"block_q{suffix}"), blocks.get(f"block_kv{suffix}")
  floats = [a for a in arrays if a.dtype in _FLOATS]
  if not floats:
    return None
  q = floats[0]
  # The fused backward kernel also returns dq in several parts.
  parts = [a for a in kernel.result if len(a.dims) == len(q.dims) + 1 and sorted(a.dims[-3:]) == sorted(q.dims[-3:])]
  name = phase = "fused" if phase == "dkv" and parts else phase
  if "use_experimental_scheduler" in kernel.rest:  # only tokamax's kernels have this option
    name = f"tokamax {phase}" + (", fixed maximum" if _FIXED_MAXIMUM.search(kernel.rest) else "")
  if rows and columns and len(floats) > 1:
    size = lambda a, block: a.dims[-2] if a.dims[-2] % block == 0 else a.dims[-1]
    queries, keys = size(q, rows), size(floats[1], columns)
    width = math.prod(q.dims[-2:]) // queries
    scores = math.prod(q.dims[:-2]) * queries * keys * computed_share(queries, keys, rows, columns)
    return Attention(q.dtype, scores, width, phase, name, blocks.get(f"block_kv{suffix}_compute", columns))
  stated, width = _stated(kernel), min(q.dims[-2:])
  if stated is None:
    return None
  return Attention("", stated / (MATMULS[phase] * 2.0 * width), width, phase, name)


def computed_share(queries: int, keys: int, rows: int, columns: int) -> float:
  """Returns the share of blocks that are not above the diagonal, for `queries` of a sequence of `keys`.

  A chip of a context axis has fewer queries than keys: one part of the sequence near its beginning and one as near its
  end, so that all chips have as much work. Here they are the first and the last part.
  """
  length = queries if queries == keys else queries // 2
  rows = min(rows, length)
  ends = [first + end for first in {0, keys - length} for end in range(rows, length + 1, rows)]
  return sum(math.ceil(end / columns) for end in ends) / (len(ends) * (keys // columns))


def _config(kernel: Instruction) -> str:
  """Returns the text of `kernel` without spaces after the colons of its JSON. JAX writes such spaces, XLA does not."""
  return kernel.rest.replace('": ', '":')


def _fmha(kernel: Instruction, arrays: list[Array]) -> Attention | None:
  """cuDNN attention. Its configuration has the shape of the scores, [B, N, T, S]. Backward is one fused kernel."""
  shape = re.search(r'"intermediate_tensor_shape":\{[^{}]*"dimensions":\[([^\]]*)\]', _config(kernel))
  if shape is None:
    return None
  phase = "fused" if "Backward" in kernel.target else "fwd"
  causal = 2 if re.search(r'"mask_type":"(?:PADDING_)?CAUSAL"', _config(kernel)) else 1
  scores = math.prod(numbers(shape.group(1))) / causal
  return Attention(arrays[0].dtype, scores, arrays[0].dims[-1], phase)


def _gemm(kernel: Instruction, arrays: list[Array]) -> tuple[str, float] | None:
  """Returns the type of a matmul, and 2 x elements of the result x size of the contraction."""
  contracted = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', _config(kernel))
  if contracted is None:
    return None
  size = math.prod(arrays[0].dims[d] for d in numbers(contracted.group(1)))
  return matmul_dtype(*arrays[:2]), 2.0 * math.prod(kernel.result[0].dims) * size
