"""Copies between arrays of different memory layouts, tile by tile.

A plain copy of a transposed matrix walks through one of the two with a stride of a whole row. If that is a power of
two, all elements of a column fall into the same few lines of the cache.
"""

from __future__ import annotations

import math
from concurrent import futures

import numpy as np

_TILE = 256  # rows and columns
_PAD = 33  # columns; with them the elements of a column use all lines of the cache
_STRIP = 1 << 20  # bytes that a thread copies at once


def copy(out: np.ndarray, values: np.ndarray) -> None:
  """out[...] = values, of the same shape and dtype. Fast if one of them is a transposed matrix with dims split."""
  bits = f"u{out.itemsize}"  # numpy copies types that it does not know, as bfloat16, one by one and with the GIL
  out, values = out.view(bits), values.view(bits)
  if out.flags.c_contiguous and values.flags.c_contiguous:
    out[...] = values
    return
  for split in range(1, out.ndim):
    shape = (math.prod(out.shape[:split]), math.prod(out.shape[split:]))
    try:
      to, of = np.reshape(out, shape, copy=False), np.reshape(values, shape, copy=False)
    except ValueError:  # the dims cannot be joined without a copy
      continue
    _copy_matrix(to, of)
    return
  out[...] = values


def contiguous(view: np.ndarray) -> np.ndarray:
  """The values of a view in C order, copied on all cores if they are not."""
  if view.flags.c_contiguous:
    return view
  out = np.empty(view.shape, view.dtype)
  rows = max(1, _STRIP // max(1, view[0].nbytes))

  def copy_rows(begin: int) -> None:
    copy(out[begin : begin + rows], view[begin : begin + rows])

  with futures.ThreadPoolExecutor() as pool:
    list(pool.map(copy_rows, range(0, len(view), rows)))
  return out


def _copy_matrix(out: np.ndarray, values: np.ndarray) -> None:
  spread = np.empty((_TILE, _TILE + _PAD), out.dtype)[:, :_TILE]
  if values.strides[0] < values.strides[1]:
    spread = spread.T
  for i in range(0, out.shape[0], _TILE):
    for j in range(0, out.shape[1], _TILE):
      tile = values[i : i + _TILE, j : j + _TILE]
      part = spread[: tile.shape[0], : tile.shape[1]]
      part[...] = tile
      out[i : i + _TILE, j : j + _TILE] = part
