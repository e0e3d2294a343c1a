"""The real training state: saved and restored on other devices, with every optimizer."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from tests.support import toy_state
from tests.support.seeds import few

from trainer import config
from trainer.checkpoint.arrays import state_tree
from trainer.config import resume
from trainer.program import program

TINY = (
  "configs/base.yml run_name=t dataset_type=synthetic base_emb_dim=16 base_num_decoder_layers=2 "
  "base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=32 head_dim=8 vocab_size=64 max_target_length=16"
).split()


def build(opt_type: str, scan: bool, devices: int, *keys: str) -> program.Program:
  own = f"opt_type={opt_type}", f"scan_layers={str(scan).lower()}"
  given = {key.partition("=")[0]: key for key in (*TINY[1:], *own, *keys)}
  cfg = config.load([TINY[0], *given.values()])
  return program.build(cfg, [jax.devices()[:devices]], 1)


def numbered(state):
  """A state of these shapes. Every array has different numbers, so a swap of two arrays is detected."""
  count = 0

  def fill(x: jax.ShapeDtypeStruct) -> jax.Array:
    nonlocal count
    values = (np.arange(x.size) % 4096 + count).reshape(x.shape).astype(x.dtype)
    count += 4096
    return jax.device_put(values, x.sharding)

  return jax.tree.map(fill, state)


@pytest.mark.parametrize(
  ("opt_type", "scan"),
  few([("adafactor", True)], [("adamw", False), ("muon", True), ("sgd", False), ("adafactor", True)]),
)
def test_every_array_is_restored_on_other_devices(tmp_path, opt_type, scan):
  state = numbered(build(opt_type, scan, 4).state)
  tiers = toy_state.backups(toy_state.config(checkpoint_period=1), str(tmp_path))
  tiers.save(1, state, {})
  tiers.close()
  restored = toy_state.backups(toy_state.config(), str(tmp_path)).restore_newest(build(opt_type, scan, 2).state)
  toy_state.assert_same_bits(restored.state, state)


OTHER_VALUES = {
  "base_emb_dim": 32, "base_num_decoder_layers": 4, "base_num_query_heads": 8, "base_num_kv_heads": 4,
  "base_mlp_dim": 64, "head_dim": 16, "vocab_size": 128, "global_parameter_scale": 2, "use_qk_norm": "false",
  "logits_via_embedding": "true", "opt_type": "sgd", "rope_max_timescale": 5e5,
  "init_weights_seed": 1, "dtype": "float32", "weight_dtype": "bfloat16",
  "quantization": "int8", "mu_dtype": "bfloat16", "scan_layers": "false",
}  # fmt: skip


@pytest.mark.parametrize("key", few(["head_dim", "opt_type", "dtype", "scan_layers"], OTHER_VALUES))
def test_the_keys_of_changes_state_change_the_arrays(key):
  shapes = []
  for keys in ([], [f"{key}={OTHER_VALUES[key]}"]):
    arrays = state_tree.describe(state_tree.flatten(build("adamw", True, 1, *keys).state))
    shapes.append({name: array["shape"] for name, array in arrays.items()})
  assert (shapes[0] != shapes[1]) == (key in resume.CHANGES_STATE)
