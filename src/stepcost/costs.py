"""The costs of one execution of a compiled program: matmul FLOPs, memory traffic, estimated cycles.

All numbers are per device and per execution, and multiply the body of a loop by its number of turns (see hlo.py).
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from stepcost import collectives, custom_calls
from stepcost.hlo import DEVICE, HOST, Array, Computation, Instruction, Module, matmul_dtype, numbers

# These instructions pass a buffer on, or run another computation whose instructions are counted separately.
_FREE = frozenset(
  "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id iota "
  "opt-barrier optimization-barrier async-start async-update call-start call-update custom-call-start "
  "custom-call-update add-dependency domain send send-done recv recv-done".split()
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather", "dynamic-slice-start", "slice-start"})
_UPDATES = frozenset({"dynamic-update-slice", "dynamic-update-slice-start"})
# Their work does not follow from their bytes, and is not counted here.
_UNPRICED = frozenset({"cholesky", "fft", "ragged-dot", "triangular-solve"})
_PRECISIONS = ("default", "high", "highest")
_INFINITE = 2**63 - 1  # the compiler writes this for fusions of a SparseCore
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Costs:
  # FLOPs of matmuls and kernels, by the HLO type of their operands ("": unknown) and their precision.
  flops_by_type: Mapping[tuple[str, str], float]
  device_bytes: float  # read and written in the device's main memory (HBM); on-chip memory is not counted
  host_bytes: float  # moved between the device and pinned host memory
  cycles: float  # the TPU compiler's estimates for its fusions, without kernels and communication
  unpriced_kernel_runs: int  # runs of kernels with unknown FLOPs

  @property
  def flops(self) -> float:
    """FLOPs of matmuls, convolutions and kernels, as far as they are known."""
    return sum(self.flops_by_type.values())


def count(module: Module, precision: str = "default") -> Costs:
  """Returns the costs of one execution of `module`. `precision` applies to kernels, whose text does not show it."""
  flops: dict[tuple[str, str], float] = collections.defaultdict(float)
  device = host = cycles = 0.0
  unpriced = 0
  for computation in module.computations.values():
    times = module.runs[computation.name]
    if not times:
      continue
    for instruction in computation.instructions:
      unpriced += int(times) * is_unpriced(computation, instruction)
      for kind, operations in flops_of(computation, instruction, precision):
        flops[kind] += times * operations
  for computation, instruction, times in module.executed():
    cycles += times * estimated_cycles(instruction)
    traffic = bytes_moved(module, computation, instruction)
    device += times * traffic[DEVICE]
    host += times * traffic[HOST]
  return Costs(dict(flops), device, host, cycles, unpriced)


def estimated_cycles(instruction: Instruction) -> int:
  """Returns the TPU compiler's estimate for a fusion; 0 if there is none, as for the fusions of a SparseCore."""
  estimate = _CYCLES.search(instruction.rest)
  cycles = int(estimate.group(1)) if estimate else 0
  return 0 if cycles == _INFINITE else cycles


def flops_of(
  computation: Computation, instruction: Instruction, precision: str = "default"
) -> list[tuple[tuple[str, str], float]]:
  """Returns ((HLO type, precision), FLOPs) of a matmul or a kernel, in a list; [] for other instructions."""
  if instruction.opcode in ("dot", "scaled-dot"):
    return [(_kind(computation, instruction), _dot_flops(computation, instruction))]
  if instruction.opcode == "convolution":
    return [(_kind(computation, instruction), _convolution_flops(computation, instruction))]
  if custom_calls.is_kernel(instruction):
    priced = custom_calls.flops(computation, instruction)
    return [((priced[0], precision), priced[1])] if priced is not None else []
  return []


def is_unpriced(computation: Computation, instruction: Instruction) -> bool:
  """Returns whether `instruction` is a kernel with unknown FLOPs."""
  return custom_calls.is_kernel(instruction) and custom_calls.flops(computation, instruction) is None


def unpriced(instruction: Instruction) -> str:
  """Returns what `instruction` is if no part of its cost is known, else ""."""
  if custom_calls.is_unknown(instruction):
    return f"a custom call of {instruction.target or 'an unnamed target'}"
  return f"of the kind {instruction.opcode}" if instruction.opcode in _UNPRICED else ""


def _shape(computation: Computation, name: str) -> Array:
  return computation.by_name[name].result[0]


def _kind(computation: Computation, matmul: Instruction) -> tuple[str, str]:
  """Returns the type of the operands and their precision ("default", "high" or "highest")."""
  left, right = (_shape(computation, name) for name in matmul.operands[:2])
  stated = re.findall(r"\w+", matmul.attribute("operand_precision") or "")
  return matmul_dtype(left, right), max(stated, key=_PRECISIONS.index, default="default")


def _dot_flops(computation: Computation, dot: Instruction) -> float:
  """Returns 2 x elements of the result x size of the contraction."""
  left = _shape(computation, dot.operands[0])
  contracted = [left.dims[d] for d in numbers(dot.attribute("lhs_contracting_dims"))]
  return 2.0 * math.prod(dot.result[0].dims) * math.prod(contracted)


def _convolution_flops(computation: Computation, conv: Instruction) -> float:
  """Returns 2 x the multiply-adds that read real input.

  The TPU compiler writes every matmul as a convolution, and batch dims as dilated windows. Most positions of such a
  window are padding, which costs nothing.
  """
  labels = re.match(r"([\w?]+)_([\w?]+)->([\w?]+)", conv.attribute("dim_labels") or "")
  if labels is None:
    raise ValueError(f"the convolution {conv.name} has no dim_labels")
  left, kernel, out = labels.groups()
  left_dims, kernel_dims = (_shape(computation, name).dims for name in conv.operands[:2])
  out_dims = conv.result[0].dims
  window = _window(conv.attribute("window"), sum(c.isdigit() for c in kernel))
  total = 2.0 * out_dims[out.index("b")] * out_dims[out.index("f")] * kernel_dims[kernel.index("i")]
  for axis in range(sum(c.isdigit() for c in kernel)):
    label = str(axis)
    sizes = left_dims[left.index(label)], kernel_dims[kernel.index(label)], out_dims[out.index(label)]
    total *= valid_positions(*sizes, **window[axis])
  return total / int(conv.attribute("batch_group_count") or 1)


def _window(text: str | None, axes: int) -> list[dict[str, int]]:
  """Returns the keywords of `valid_positions` for each spatial axis, from `{size=8x1 pad=0_0x7_7 lhs_dilate=..}`."""
  fields = dict(re.findall(r"(\w+)=([\w\-]+)", text or ""))
  found = []
  for axis in range(axes):
    part = lambda name, default, axis=axis: fields[name].split("x")[axis] if name in fields else default
    found.append(
      {
        "stride": int(part("stride", "1")),
        "pad": int(part("pad", "0_0").split("_")[0]),
        "left_dilation": int(part("lhs_dilate", "1")),
        "kernel_dilation": int(part("rhs_dilate", "1")),
      }
    )
  return found


def valid_positions(
  left: int, kernel: int, out: int, *, stride: int, pad: int, left_dilation: int, kernel_dilation: int
) -> int:
  """Returns the number of pairs (output position, kernel position) of one spatial axis that read an input element."""
  # Output position i reads an element if i * stride is `first` plus a multiple of left_dilation, up to the last
  # element. It is then one of every `period` positions. A batch of 65,536 has too many pairs to look at each.
  first = pad - np.arange(kernel) * kernel_dilation
  lowest = np.maximum(-(-first // stride), 0)
  highest = np.minimum((first + (left - 1) * left_dilation) // stride, out - 1)
  common = math.gcd(stride, left_dilation)
  period = left_dilation // common
  one_of_them = first // common * pow(stride // common, -1, period)
  count = (highest - one_of_them) // period - (lowest - 1 - one_of_them) // period
  return int(np.sum(np.where((first % common == 0) & (highest >= lowest), count, 0)))


def bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> dict[int, float]:
  """Returns the bytes that one instruction reads and writes, by memory space.

  If an instruction uses only a slice of a buffer, only the slice counts.
  """
  by_space: dict[int, float] = collections.defaultdict(float)
  # These two targets of the TPU compiler only reserve a buffer or join buffers.
  moves_nothing = instruction.target in ("AllocateBuffer", "ConcatBitcast")
  if instruction.opcode in _FREE or instruction.opcode.endswith("-done") or moves_nothing:
    return by_space
  operands = [computation.by_name.get(name) for name in instruction.operands]
  inner = module.computations[instruction.called[0]] if instruction.opcode in ("fusion", "fusion-start") else None
  if inner is not None and inner.root.target == "AsyncCollectiveDone":
    return by_space  # the buffers count where the collective starts
  for index, operand in enumerate(operands):
    if operand is None or not operand.result:
      continue
    array = operand.result[0]
    if inner is None:
      by_space[array.space] += _read(instruction, index, array)
    else:
      by_space[array.space] += _read_by_users(module, inner, inner.parameters[index], array.bytes)
  for index, array in _outputs(instruction, inner):
    by_space[array.space] += _write(module, computation, instruction, inner, index, array)
  return by_space


def _outputs(instruction: Instruction, inner: Computation | None) -> list[tuple[int, Array]]:
  if inner is not None and inner.root.target == "AsyncCollectiveStart":
    return [(1, instruction.result[1])]  # position 0 is the operand
  return list(enumerate(written(instruction)))


def written(instruction: Instruction) -> tuple[Array, ...]:
  """Returns the new results. The start of an asynchronous operation also lists its operands and its semaphore."""
  if instruction.opcode == "copy-start":
    return instruction.result[:1]
  if instruction.opcode in ("slice-start", "dynamic-slice-start", "dynamic-update-slice-start"):
    return instruction.result[-2:-1]
  if instruction.opcode in ("collective-permute-start", "all-gather-start"):
    return instruction.result[1:2]
  if instruction.opcode == "fusion-start":  # of the GPU compiler
    return instruction.result[len(instruction.operands) : -1]
  return instruction.result


def _read(instruction: Instruction, index: int, array: Array) -> float:
  """Returns the bytes that a single instruction reads from its operand `index`."""
  if instruction.opcode in _SLICES and index == 0:
    return sum(a.bytes for a in written(instruction))
  if instruction.opcode in (*_UPDATES, "scatter") and index == 0:
    return 0
  return array.bytes


def _read_by_users(module: Module, inner: Computation, value: Instruction, whole: int) -> float:
  """Returns the bytes that the body `inner` of a fusion reads from `value`: slices, nothing, or the `whole`."""
  read = 0.0
  for user in inner.users.get(value.name, []):
    position = user.operands.index(value.name)
    if user.opcode == "tuple" and user.is_root:
      continue
    if user.opcode in _SLICES and position == 0:
      read += user.result[0].bytes
    elif (user.opcode in ("dynamic-update-slice", "scatter") and position == 0) or collectives.continues(user):
      continue
    elif _passes_on(module, user, position):
      read += whole if user.is_root else _read_by_users(module, inner, user, whole)
    elif user.opcode == "fusion":
      body = module.computations[user.called[0]]
      read += _read_by_users(module, body, body.parameters[position], whole)
    else:
      read += whole
  return min(read, whole)


def _passes_on(module: Module, user: Instruction, position: int) -> bool:
  """Returns whether the result of `user` is its operand at `position`, at most in another layout."""
  if user.opcode != "fusion":
    return user.opcode in ("bitcast", "copy")
  inner = module.computations[user.called[0]]
  made = inner.root
  while made.opcode in ("bitcast", "copy"):
    made = inner.by_name[made.operands[0]]
  return made is inner.parameters[position]


def _scattered(computation: Computation, scatter: Instruction) -> float:
  """Returns the bytes of the rows that a scatter reads and writes; it leaves the other rows unchanged."""
  return 2 * _shape(computation, scatter.operands[2]).bytes


def _write(
  module: Module,
  computation: Computation,
  instruction: Instruction,
  inner: Computation | None,
  index: int,
  array: Array,
) -> float:
  if inner is None:
    if instruction.opcode in _UPDATES:
      return _shape(computation, instruction.operands[1]).bytes
    return _scattered(computation, instruction) if instruction.opcode == "scatter" else array.bytes
  made = inner.root
  if made.opcode == "tuple":
    if index >= len(made.operands):
      return array.bytes
    made = inner.by_name[made.operands[index]]
  while made.opcode == "bitcast":
    made = inner.by_name[made.operands[0]]
  if made.opcode == "parameter" or collectives.continues(made):
    return 0
  if made.opcode == "scatter":
    return _scattered(inner, made)
  if made.opcode == "dynamic-update-slice":
    return _shape(inner, made.operands[1]).bytes
  if made.opcode == "fusion" and len(made.result) == 1:
    return _write(module, inner, made, module.computations[made.called[0]], 0, array)
  return array.bytes
