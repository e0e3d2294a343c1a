"""The blocks of scores that a TPU computes, as lists of integers that the flash kernels look up.

A step has a block of queries, a block of keys, and bits that say what to do. The lists follow from positions alone. So
they are made once, with numpy, and a step whose segments have nothing in common is skipped when it runs.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LANES = 128
BLOCK = 1024  # queries and keys; half of it for wide heads
# Of the scores that are computed at a time: keys in the forward pass, queries and keys in the backward pass. With
# these sizes, as with the sizes of blocks, the compiler's schedules have the fewest instructions (libtpu 0.0.52).
TILE = 512
# A step of the grid: a block of queries << 19 | a block of keys << 6 | what to do there.
RUN, FIRST, LAST, MASKED, FIRST_OF_QUERIES, LAST_OF_QUERIES = (1 << bit for bit in range(6))
KEYS_AT, QUERIES_AT = 6, 19
BEFORE, NOW, AFTER = range(3)  # see `_written`
MAX_BLOCKS = 80_000  # of a device; the backward pass has two lists of them, in 1 MiB of scalar memory


class Steps(NamedTuple):
  """Integers that tell a device which blocks it computes; the first dim is over the context axis of the mesh."""

  starts: Any  # first position of each block of queries, int32 [context, T / block]
  forward: Any  # steps of the grid, int32 [context, steps]
  backward: Any
  written: Any  # for each step of `backward`: the block of queries whose gradients it writes, or a later step


def make(starts: np.ndarray, queries: int, keys: int, columns: int, rows_of_chunk: int) -> Steps:
  """Returns the steps for blocks of `queries` and `columns` blocks of `keys`.

  starts: first position of each block of queries, int32 [context, T / queries]. rows_of_chunk: blocks of queries whose
  gradients are in VMEM at a time.
  """
  forward = _table([_forward(each, queries, keys) for each in starts.tolist()])
  backward = _table([_backward(each, queries, keys, columns, rows_of_chunk) for each in starts.tolist()])
  return Steps(starts, forward, backward, _written(backward))


def _forward(starts: list[int], queries: int, keys: int) -> list[int]:
  """Returns the steps for the blocks of queries that begin at `starts`: all keys of one block, then of the next."""
  steps = []
  for row, start in enumerate(starts):
    columns = math.ceil((start + queries) / keys)
    for column in range(columns):
      flags = RUN | FIRST * (column == 0) | LAST * (column == columns - 1) | _masked(start, column, keys)
      steps.append(_step(row, column, flags))
  return steps


def _backward(starts: list[int], queries: int, keys: int, columns: int, rows_of_chunk: int) -> list[int]:
  """Returns the steps for each chunk of queries: all its queries that see one block of keys, then the next.

  A block of keys that no query of a chunk sees has a step, too, which writes zeros.
  """
  steps = []
  for first in range(0, len(starts), rows_of_chunk):
    for column in range(columns):
      rows = [row for row in range(first, first + rows_of_chunk) if column * keys < starts[row] + queries]
      for row in rows:
        last = math.ceil((starts[row] + queries) / keys) - 1
        flags = RUN | FIRST * (row == rows[0]) | LAST * (row == rows[-1]) | _masked(starts[row], column, keys)
        flags |= FIRST_OF_QUERIES * (column == 0) | LAST_OF_QUERIES * (column == last)
        steps.append(_step(row, column, flags))
      if not rows:
        steps.append(_step(first, column, FIRST | LAST))
  return steps


def computed(starts: list[int], queries: int, keys: int) -> int:
  """Returns the number of scores that are computed for the blocks of queries that begin at `starts`."""
  tile = largest_block(keys, TILE)
  places = [(start, at) for start in starts for at in range(0, start + queries, keys)]
  hidden = lambda start, at, first: 0 if start + min(first, queries) > at + first else min(first, queries)
  return sum((queries - hidden(*place, first)) * tile for place in places for first in range(0, keys, tile))


def _masked(start: int, column: int, keys: int) -> int:
  return MASKED * ((column + 1) * keys > start + 1)


def _step(row: int, column: int, flags: int) -> int:
  return row << QUERIES_AT | column << KEYS_AT | flags


def _table(lists: list[list[int]]) -> np.ndarray:
  """Returns the steps of all devices of the context axis, int32 [context, steps].

  Steps that do nothing, with the blocks of the last one, follow where a device has fewer than another.
  """
  longest = max(map(len, lists))
  nothing = ~(RUN | FIRST | LAST | FIRST_OF_QUERIES | LAST_OF_QUERIES)
  return np.array([[*steps, *[steps[-1] & nothing] * (longest - len(steps))] for steps in lists], np.int32)


def _written(table: np.ndarray) -> np.ndarray:
  """Returns, for each step, the block of queries << 2 | BEFORE, NOW or AFTER.

  The step, or else the next step that writes gradients, writes the gradients of this block. A block of an output must
  belong to consecutive steps, because it is copied to HBM when another one follows.
  """
  found = np.empty_like(table)
  for steps, blocks in zip(table.tolist(), found, strict=True):
    last = next(step for step in reversed(steps) if step & LAST_OF_QUERIES)
    block = last >> QUERIES_AT << 2 | AFTER
    for at in reversed(range(len(steps))):
      if steps[at] & LAST_OF_QUERIES:
        block = steps[at] >> QUERIES_AT << 2
      blocks[at] = block | NOW * bool(steps[at] & LAST_OF_QUERIES)
  return found


def largest_block(length: int, limit: int) -> int:
  """Returns the largest multiple of 128 that divides `length` (a multiple of 128) and is at most `limit`."""
  return max(size for size in range(LANES, min(length, limit) + 1, LANES) if length % size == 0)


def row(step: jax.Array) -> jax.Array:
  return step >> QUERIES_AT


def column(step: jax.Array) -> jax.Array:
  return step >> KEYS_AT & (1 << QUERIES_AT - KEYS_AT) - 1


def head_written(written: jax.Array, head: jax.Array, group: int) -> jax.Array:
  """Returns the query head, of the `group` of a key head, whose gradients the step for `head` writes or waits with."""
  kind = written & 3
  return jnp.where(kind == NOW, head, jnp.where(kind == AFTER, group - 1, 0))
