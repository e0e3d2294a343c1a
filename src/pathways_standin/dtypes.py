"""Element types: the numbers of the protocol, the names of MLIR, and NumPy's types."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from pathways_standin.status import Status

# DTypeProto.Kind -> NumPy type.
_KINDS: dict[int, type] = {
  1: np.bool_,
  2: np.int8,
  3: np.int16,
  4: np.int32,
  5: np.int64,
  6: np.uint8,
  7: np.uint16,
  8: np.uint32,
  9: np.uint64,
  10: np.float16,
  11: np.float32,
  12: np.float64,
  15: np.complex64,
  16: ml_dtypes.bfloat16,
  18: np.complex128,
  19: ml_dtypes.float8_e5m2,
  20: ml_dtypes.float8_e4m3fn,
  21: ml_dtypes.int4,
  22: ml_dtypes.uint4,
  23: ml_dtypes.float8_e4m3b11fnuz,
  24: ml_dtypes.float8_e5m2fnuz,
  25: ml_dtypes.float8_e4m3fnuz,
  26: ml_dtypes.int2,
  27: ml_dtypes.uint2,
  28: ml_dtypes.float8_e4m3,
  29: ml_dtypes.float8_e3m4,
  30: ml_dtypes.float4_e2m1fn,
  31: ml_dtypes.float8_e8m0fnu,
}
_NOT_SERVED = {14: "opaque values", 17: "tokens", 99: "strings"}
DTYPES = {kind: np.dtype(scalar) for kind, scalar in _KINDS.items()}
KIND_OF = {dtype: kind for kind, dtype in DTYPES.items()}


def from_kind(kind: int) -> np.dtype:
  """The type of a DTypeProto.Kind. Raises Status for types that are not served."""
  if kind not in DTYPES:
    name = _NOT_SERVED.get(kind, f"DTypeProto kind {kind}")
    raise Status("UNIMPLEMENTED", f"arrays of {name}: the Pathways stand-in serves numeric types")
  return DTYPES[kind]


def _mlir_name(dtype: np.dtype) -> str:
  """The type as StableHLO writes it, in lower case: i32, ui8, bf16, f8e4m3fn, complex<f32>."""
  name = dtype.name
  if name == "bool":
    return "i1"
  if name.startswith("complex"):
    return f"complex<f{dtype.itemsize * 4}>"
  for long, short in (("bfloat", "bf"), ("float", "f"), ("uint", "ui"), ("int", "i")):
    if name.startswith(long):
      return short + name[len(long) :].replace("_", "")
  raise AssertionError(name)


def by_mlir_name() -> dict[str, np.dtype]:
  """The types by their names in MLIR, in lower case."""
  return {_mlir_name(dtype): dtype for dtype in KIND_OF}
