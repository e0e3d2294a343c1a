"""A model whose state cannot fit the memory of its devices is refused, and no other model is."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config import ConfigError
from trainer.parallel import memory

EACH = 3 * 8 * 4 + 5 * 4  # bytes of the state below on a device: half of `split`, and all of `whole`


def state():
  """A state on four devices, as on two slices with fsdp=2."""
  mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
  return {
    "split": jax.ShapeDtypeStruct((6, 8), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))),
    "whole": jax.ShapeDtypeStruct((5,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())),
  }


def on_accelerators(kind: str, statistics) -> dict:
  """The same state on devices that only have a kind and statistics."""
  device = SimpleNamespace(platform="gpu", device_kind=kind, memory_stats=lambda: statistics)

  def moved(leaf):
    sharding = SimpleNamespace(shard_shape=leaf.sharding.shard_shape, addressable_devices=[device])
    return SimpleNamespace(shape=leaf.shape, dtype=leaf.dtype, sharding=sharding)

  return jax.tree.map(moved, state())


SIMULATED, PATHWAYS = "simulated", "pathways"


def test_simulated_devices_share_the_memory_and_swap_of_the_machine(monkeypatch, tmp_path):
  (tmp_path / "meminfo").write_text("MemTotal:  999 kB\nSwapTotal:       0 kB\n")
  monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
  monkeypatch.setattr(memory, "of_host", lambda: 4 * EACH)
  memory.require_fit(state(), 53, SIMULATED)
  monkeypatch.setattr(memory, "of_host", lambda: 4 * EACH - 1)
  with pytest.raises(ConfigError, match=r"53 parameters: .*for 4 CPU devices, .*\n.*base_emb_dim.*num_slices"):
    memory.require_fit(state(), 53, SIMULATED)
  (tmp_path / "meminfo").write_text("MemTotal:  999 kB\nSwapTotal:       1 kB\n")
  memory.require_fit(state(), 53, SIMULATED)


def test_an_accelerator_must_hold_its_share_of_the_state():
  for limit in (EACH, EACH + 1):
    memory.require_fit(on_accelerators("NVIDIA H200", {"bytes_limit": limit}), 53, SIMULATED)
  with pytest.raises(ConfigError, match=r"a NVIDIA H200 has 0\.0 GiB\.\n.*ici_fsdp_parallelism"):
    memory.require_fit(on_accelerators("NVIDIA H200", {"bytes_limit": EACH - 1}), 53, SIMULATED)


def test_on_pathways_the_memory_of_the_chip_counts(monkeypatch):
  def no_statistics():
    raise AssertionError("a proxy device has no statistics")

  huge = on_accelerators("TPU v5 lite", None)
  device = next(iter(huge["whole"].sharding.addressable_devices))
  device.memory_stats = no_statistics
  memory.require_fit(huge, 53, PATHWAYS)
  huge["whole"].sharding.shard_shape = lambda shape: (4 << 30,)  # 16 GiB of int32, and `split` as well
  with pytest.raises(ConfigError, match=r"a TPU v5 lite has 16\.0 GiB"):
    memory.require_fit(huge, 53, PATHWAYS)
  device.device_kind = "TPU v99"
  memory.require_fit(huge, 53, PATHWAYS)
