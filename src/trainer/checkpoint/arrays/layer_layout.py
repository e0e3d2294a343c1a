"""Converts between stacked layers, `layers.w` [L, ...], and separate layers, `layers.0.w` ... `layers.{L-1}.w`.

Works on names and shapes only, so that parameters and optimizer moments follow one rule. A restore reads and converts
one group of arrays after the other, so that only one group at a time exists twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.errors import Rejected

LAYER = re.compile(r"^((?:.*\.)?layers)\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Move:
  """Stored arrays that become wanted arrays: one to one ("same"), one to L layers ("split"), L layers to one ("stack").

  L may be 1.
  """

  sources: tuple[str, ...]
  targets: tuple[str, ...]
  kind: Literal["same", "split", "stack"]


def plan(saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]) -> list[Move]:
  """Moves that make every wanted array (ShapeDtypeStruct) from saved arrays ({name: {"shape", "dtype"}}).

  Raises Rejected if an array is missing, left over or has another shape. Types may differ: they are cast.
  """
  stacked: dict[str, dict[int, str]] = {}
  for name in [*saved, *wanted]:
    if match := LAYER.match(name):
      stacked.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
  moves: list[Move] = []
  done: set[str] = set()
  for name in wanted:
    if name in done:
      continue
    match = LAYER.match(name)
    whole = f"{match[1]}.{match[3]}" if match else name
    layers = tuple(layer for _, layer in sorted(stacked.get(whole, {}).items()))
    if name in saved:
      move = Move((name,), (name,), "same")
    elif whole in saved and match:
      move = Move((whole,), layers, "split")
    elif layers and all(layer in saved for layer in layers):
      move = Move(layers, (name,), "stack")
    else:
      raise Rejected(f"it has no array {name}")
    _check_shapes(move, saved, wanted)
    moves.append(move)
    done.update(move.targets)
  used = {source for move in moves for source in move.sources}
  if extra := [name for name in saved if name not in used]:
    raise Rejected(f"it has {len(extra)} arrays that the state lacks: {', '.join(extra[:3])}")
  return moves


def _check_shapes(move: Move, saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]) -> None:
  have = [tuple(saved[name]["shape"]) for name in move.sources]
  want = [tuple(wanted[name].shape) if name in wanted else None for name in move.targets]
  if move.kind == "split":
    want = [(len(want), *want[0])] if want[0] is not None and len(set(want)) == 1 else [None]
  if move.kind == "stack":
    have = [(len(have), *have[0])] if len(set(have)) == 1 else [()]
  if have != want:
    raise Rejected(f"{move.sources[0]} has shape {list(have[0])} where the state wants {list(want[0] or ())}")


def _respec(sharding: Sharding, leading: bool) -> Sharding:
  """The sharding for an array with one unsharded first dim more (leading=True) or less."""
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec = (None, *sharding.spec) if leading else tuple(sharding.spec)[1:]
  return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def stored(move: Move, saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Any]) -> dict[str, Any]:
  """{source name: ShapeDtypeStruct} with the stored shape and type, sharded like the target."""
  sharding = wanted[move.targets[0]].sharding
  if move.kind != "same":
    sharding = _respec(sharding, leading=move.kind == "split")
  return {
    name: jax.ShapeDtypeStruct(tuple(saved[name]["shape"]), jnp.dtype(saved[name]["dtype"]), sharding=sharding)
    for name in move.sources
  }


def convert(move: Move, arrays: Mapping[str, jax.Array], wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
  """{target name: array} in the wanted shapes, types and shardings."""
  sources = [arrays[name] for name in move.sources]
  targets = [wanted[name] for name in move.targets]
  dtype = targets[0].dtype
  if move.kind == "same" and sources[0].dtype == dtype:
    return dict(zip(move.targets, sources))

  def change(sources: Sequence[jax.Array]) -> list[jax.Array]:
    if move.kind == "split":
      sources = [sources[0][i] for i in range(len(move.targets))]
    elif move.kind == "stack":
      sources = [jnp.stack(sources)]
    return [x.astype(dtype) for x in sources]

  return dict(zip(move.targets, jax.jit(change, out_shardings=[t.sharding for t in targets])(sources)))


def batches(moves: Iterable[Move], wanted: Mapping[str, Any], limit: int) -> Iterator[list[Move]]:
  """The moves in order, in lists of at most `limit` bytes. A larger move is a list of its own."""
  batch: list[Move] = []
  size = 0
  for move in moves:
    need = state_tree.state_bytes([wanted[name] for name in move.targets])
    if batch and size + need > limit:
      yield batch
      batch, size = [], 0
    batch.append(move)
    size += need
  if batch:
    yield batch
