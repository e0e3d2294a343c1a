"""Small states for the tests of the checkpoint package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.checkpoint import run_folder
from trainer.checkpoint.backups import Backups
from trainer.checkpoint.state_backup import RunContext
from trainer.config.schema import CheckpointSection
from trainer.world import SINGLE_WORLD, World

LAYERS = 3


def mesh(data: int, fsdp: int, first: int = 0) -> Mesh:
  devices = np.array(jax.devices()[first : first + data * fsdp]).reshape(data, fsdp)
  return Mesh(devices, ("data", "fsdp"))


def _numbers(seed: int, shape: tuple[int, ...]) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def values(seed: int = 0) -> dict[str, Any]:
  """A state in numpy with every kind of leaf: stacked layers, moments, bf16, int8, bool, scalars."""

  def params(offset: int) -> dict[str, Any]:
    layers = {"mlp": {"w": _numbers(offset, (LAYERS, 8, 4))}, "norm": _numbers(offset + 1, (LAYERS, 8))}
    return {"embedding": _numbers(offset + 2, (16, 8)), "layers": layers}

  seed *= 100
  return {
    "params": params(seed),
    "opt_state": ({"mu": params(seed + 10), "nu": params(seed + 20)}, {}),
    "big": _numbers(seed + 40, (64, 32)),  # Orbax keeps smaller arrays in its compressed index
    "low": _numbers(seed + 30, (8,)).astype(jnp.bfloat16),
    "bytes": np.arange(16, dtype=np.int8) - 8,
    "flags": np.array([True, False, True, True]),
    "zeros": np.array([0.0, -0.0], np.float32),
    "step": np.int32(seed),
  }


def _spec(x: Any) -> PartitionSpec:
  if x.ndim == 3:
    return PartitionSpec(None, "fsdp")
  if x.ndim == 2 and x.shape[0] % 8 == 0:
    return PartitionSpec("fsdp")
  return PartitionSpec()


def place(tree: Any, on: Mesh) -> Any:
  def one(x: Any) -> jax.Array:
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(on, _spec(x)), lambda index: x[index])

  return jax.tree.map(one, tree)


def abstract(tree: Any, on: Mesh) -> Any:
  def one(x: Any) -> jax.ShapeDtypeStruct:
    x = np.asarray(x)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, _spec(x)))

  return jax.tree.map(one, tree)


def state(seed: int = 0, on: Mesh | None = None) -> Any:
  return place(values(seed), on or mesh(2, 4))


def assert_same_bits(got: Any, want: Any) -> None:
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)):
    b = np.asarray(b)
    assert a.dtype == b.dtype and a.shape == b.shape, (path, a.dtype, b.dtype, a.shape, b.shape)
    for shard in a.addressable_shards:  # every replica
      assert np.asarray(shard.data).tobytes() == b[shard.index].tobytes(), f"{jax.tree_util.keystr(path)} differs"


def config(**changes: Any) -> CheckpointSection:
  return CheckpointSection(**changes)


class Recorder:
  """log and emit functions that remember their arguments."""

  def __init__(self) -> None:
    self.lines: list[str] = []
    self.events: list[tuple[str, dict[str, Any]]] = []

  def log(self, line: str) -> None:
    self.lines.append(line)

  def emit(self, kind: str, **fields: Any) -> None:
    self.events.append((kind, fields))

  def context(self, world: World = SINGLE_WORLD, run_id: str = "", fetch: Any = None) -> RunContext:
    return RunContext(world, run_id, fetch, self.log, self.log, self.emit)

  def kinds(self) -> list[str]:
    return [kind for kind, _ in self.events]


def backups(
  cfg: CheckpointSection,
  run_directory: str,
  recorder: Recorder | None = None,
  *,
  world: World = SINGLE_WORLD,
  run_id: str | None = None,
  slices: Mapping[int, Sequence[jax.Device]] | None = None,
  snapshots: Any = None,
) -> Backups:
  """The backups of a run. run_id: default: the id is read from the run's folder, or created there."""
  if run_id is None:
    run_id = run_folder.establish(run_directory, world)
  context = (recorder or Recorder()).context(world, run_id)
  return Backups(cfg, run_directory, context, slices, snapshots)


def restore_newest(tiers: Sequence[Any], abstract: Any, recorder: Recorder | None = None) -> Any:
  """The newest good state of these tiers, the fastest first."""
  recorder = recorder or Recorder()
  backups = Backups(config(enable_checkpointing=False), "run", recorder.context())
  backups._tiers = list(tiers)
  return backups.restore_newest(abstract)


def bytes_read() -> int:
  """Bytes that this process has read from files up to now (Linux)."""
  for line in Path("/proc/self/io").read_text().splitlines():
    if line.startswith("rchar:"):
      return int(line.split()[1])
  raise AssertionError("no rchar in /proc/self/io")
