"""The device mesh: axes data (across slices), fsdp, tensor and context (inside a slice)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Device
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from trainer.config import rules
from trainer.config.errors import require
from trainer.config.rules import AXES
from trainer.config.schema import ParallelismSection

DATA, FSDP, TENSOR, CONTEXT = AXES


def axis_sizes(cfg: ParallelismSection, group: str, devices: int) -> tuple[int, ...]:
  """Returns the sizes of AXES for `group` ("dcn": across slices, "ici": inside a slice), with -1 filled in.

  The sizes multiply to `devices` (the number of slices, or of devices per slice). Raises ConfigError if they cannot.
  """
  require(rules.group_fits(rules.group_sizes(cfg, group), group, devices))
  return tuple(rules.axis_sizes(cfg, group, devices).values())


def make(cfg: ParallelismSection, slices: Sequence[Sequence[Device]]) -> Mesh:
  """Returns the mesh over `slices`: the slices that are alive, in order, each with its devices.

  Along every axis the DCN factor is outermost, so that the devices of a slice stay neighbours.
  Raises ConfigError if the configured parallelisms do not fit the devices.
  """
  dcn = axis_sizes(cfg, "dcn", len(slices))
  ici = axis_sizes(cfg, "ici", len(slices[0]))
  inside = np.stack([_slice_mesh(ici, devices) for devices in slices])  # [slice, *ici]
  blocks = inside.reshape(*dcn, *ici)
  # [dcn_data, dcn_fsdp, .., ici_data, ici_fsdp, ..] -> [dcn_data, ici_data, dcn_fsdp, ici_fsdp, ..]
  order = np.arange(2 * len(AXES)).reshape(2, -1).T.ravel()
  devices = blocks.transpose(order).reshape([outer * inner for outer, inner in zip(dcn, ici)])
  return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _slice_mesh(ici: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
  """Returns the devices of one slice as [data, fsdp, tensor, context]; on TPU, torus neighbours stay together."""
  if devices[0].platform == "tpu":
    return mesh_utils.create_device_mesh(ici, devices=list(devices), allow_split_physical_axes=True)
  return np.array(devices).reshape(ici)
