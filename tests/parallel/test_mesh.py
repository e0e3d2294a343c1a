"""The mesh: axis sizes, order of devices, and refused configurations."""

from __future__ import annotations

import jax
import pytest

from trainer.config.errors import ConfigError
from trainer.config.schema import ParallelismSection
from trainer.parallel import mesh


def make_mesh(slices, **keys):
  return mesh.make(ParallelismSection(**keys), slices)


def test_slices_are_replicas_and_devices_inside_share_the_state():
  devices = jax.devices()
  m = make_mesh([devices[:4], devices[4:]])
  assert dict(m.shape) == {"data": 2, "fsdp": 4, "tensor": 1, "context": 1}
  assert list(m.devices[0].flat) == devices[:4] and list(m.devices[1].flat) == devices[4:]


def test_every_axis_keeps_a_slice_together():
  devices = jax.devices()
  m = make_mesh([devices[:4], devices[4:]], ici_fsdp_parallelism=1, ici_tensor_parallelism=2)
  assert dict(m.shape) == {"data": 4, "fsdp": 1, "tensor": 2, "context": 1}
  assert list(m.devices[:2].flat) == devices[:4]
  experts = make_mesh([devices[:4], devices[4:]], ici_expert_parallelism=2)
  assert dict(experts.shape) == {"data": 2, "fsdp": 4, "tensor": 1, "context": 1}
  across = make_mesh([devices[:4], devices[4:]], dcn_fsdp_parallelism=2)
  assert dict(across.shape) == {"data": 1, "fsdp": 8, "tensor": 1, "context": 1}


@pytest.mark.parametrize(
  ("keys", "text"),
  [
    ({"ici_fsdp_parallelism": 3}, "the product 3 must divide the 4 devices per slice"),
    ({"ici_tensor_parallelism": 3}, "the product 3 must divide the 4 devices per slice"),
    ({"dcn_data_parallelism": 3}, "the product 3 must equal the 2 slices"),
    ({"ici_tensor_parallelism": -1}, "are -1: only one"),
    ({"ici_expert_parallelism": 3}, "the product 3 must divide the 4 devices per slice"),
    ({"ici_context_parallelism": 0}, "must be a positive size"),
  ],
)
def test_parallelisms_that_do_not_fit_the_devices_are_refused(keys, text):
  devices = jax.devices()
  with pytest.raises(ConfigError, match=text):
    make_mesh([devices[:4], devices[4:]], **keys)
