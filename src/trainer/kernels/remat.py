"""Rematerialisation: which activations of a decoder layer are saved for the backward pass.

The model names its activations with `jax.ad_checkpoint.checkpoint_name`. A policy is a set of names to save on the
device and a set of names to move to pinned host memory. The backward pass recomputes all other activations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from trainer.config.schema import ACTIVATIONS, ModelSection, RematPolicy


class SavedNames(NamedTuple):
  """Names of the activations that are saved on the device, and in pinned host memory."""

  device: tuple[str, ...] = ()
  host: tuple[str, ...] = ()


_QKV = ("query_proj", "key_proj", "value_proj")
_DOTS = (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")

# `jax.checkpoint` itself saves the input of a layer, so no policy names it. `custom` can offload it.
TABLE: Mapping[RematPolicy, SavedNames] = MappingProxyType(
  {
    RematPolicy.FULL: SavedNames(),
    RematPolicy.SAVE_OUT_PROJ: SavedNames(("out_proj",)),
    RematPolicy.SAVE_QKV_PROJ: SavedNames(_QKV),
    RematPolicy.SAVE_DOT_EXCEPT_MLP: SavedNames((*_QKV, "out_proj")),
    RematPolicy.SAVE_DOT_EXCEPT_MLPWI: SavedNames((*_QKV, "out_proj", "mlpwo")),
    RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP: SavedNames((*_QKV, "context", "out_proj")),
    RematPolicy.MINIMAL: SavedNames(_DOTS),
    RematPolicy.MINIMAL_WITH_CONTEXT: SavedNames((*_DOTS, "context")),
    RematPolicy.QKV_PROJ_OFFLOADED: SavedNames(host=_QKV),
    RematPolicy.MINIMAL_OFFLOADED: SavedNames(host=_DOTS),
  }
)


def saved_names(cfg: ModelSection) -> SavedNames:
  """Returns the names that `cfg.remat_policy` saves in each layer. Not defined for `none`, which saves everything."""
  if cfg.remat_policy is not RematPolicy.CUSTOM:
    return TABLE[cfg.remat_policy]
  kept = lambda choice: tuple(name for name in ACTIVATIONS if cfg.activations.get(name, "remat") == choice)
  return SavedNames(kept("device"), kept("offload"))


def checkpoint_policy(cfg: ModelSection) -> tuple[bool, Callable[..., Any] | None]:
  """Returns (use_remat, policy). If use_remat, wrap each layer with `jax.checkpoint(layer, policy=policy)`.

  The policy None saves only the inputs of the layer.
  """
  assert cfg.remat_policy is not RematPolicy.AUTO, "a policy must be chosen before the model is built"
  if cfg.remat_policy is RematPolicy.NONE:
    return False, None
  device, host = saved_names(cfg)
  if host:
    return True, jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=list(device),
      names_which_can_be_offloaded=list(host),
      offload_src="device",
      offload_dst="pinned_host",
    )
  if device:
    return True, jax.checkpoint_policies.save_only_these_names(*device)
  return True, None
