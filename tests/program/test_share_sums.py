"""The sums of a share as several programs: the same bits as one program, and the parts that an exchange needs."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest
from tests.program.test_step import config, fresh, on_devices, packed_batch, slices
from tests.support.seeds import few

from input_pipeline.batch import Batch
from trainer.config.schema import Config
from trainer.program import program
from trainer.program.share_sums import OneProgram, ShareSums, Stages
from trainer.program.step import abstract_sums
from worlds.exchange import FlatLayout

LAYERS = 4


def build(
  *, stages: int | None = None, model=None, optimizer=None, parallelism=None, devices=1
) -> tuple[program.Program, Config]:
  cfg = config(
    model={"base_num_decoder_layers": LAYERS, "vocab_size": 96, **(model or {})},
    optimizer=optimizer or {},
    parallelism=parallelism or {},
    data={"per_device_batch_size": 8 / devices},
  )
  least = program.least_stages if stages is None else lambda layers, platform: stages
  with mock.patch.object(program, "least_stages", least):
    return program.build(cfg, slices((1, devices)), 1), cfg


def share(prog: program.Program, seed: int) -> Batch:
  host = packed_batch(8 * prog.plan.rounds, seed)
  return Batch(*(jax.device_put(x.reshape(a.shape), a.sharding) for x, a in zip(host, prog.batch[0])))


CASES = {
  "tied": {
    "stages": 2,
    "optimizer": {"gradient_accumulation_steps": 3},
    "model": {"logits_via_embedding": True, "remat_policy": "minimal", "attention": "flash"},
  },
  "fsdp": {
    "stages": 4,
    "model": {"logits_via_embedding": False, "quantization": "int8"},
    "parallelism": {"ici_fsdp_parallelism": 4},
    "devices": 4,
  },
  "experts": {
    "stages": 2,
    "optimizer": {"gradient_accumulation_steps": 2},
    "model": {
      "num_experts": 4,
      "num_experts_per_tok": 2,
      "base_moe_mlp_dim": 16,
      "quantization": "int8",
      "base_num_decoder_layers": 2,
    },
  },
  "all axes": {
    "stages": 2,
    "model": {"use_iota_embed": True, "remat_policy": "full"},
    "parallelism": {"ici_tensor_parallelism": 2, "ici_context_parallelism": 2},
    "devices": 8,
  },
}


class Compiled(NamedTuple):
  program: program.Program
  config: Config
  sums: ShareSums
  layout: FlatLayout


@functools.cache
def compiled(name: str, stages: int) -> Compiled:
  """Several tests use these programs."""
  return compile_sums(adds=name == "fsdp", **CASES[name] | {"stages": stages})


def compile_sums(*, adds: bool = False, **given) -> Compiled:
  """given: arguments of `build`."""
  prog, cfg = build(**given)
  grads = abstract_sums(prog.state, prog.mesh).grads
  with jax.set_mesh(prog.mesh):
    share_sums = prog.share.compile(prog.state.params, prog.batch[0], grads, None, adds=adds)
  return Compiled(prog, cfg, share_sums, FlatLayout(grads))


def sums(built: Compiled) -> tuple[list, np.ndarray]:
  """The scalars of a share, and its gradients as flat values."""
  prog = built.program
  scalars, parts = built.sums(on_devices(fresh(built.config), prog).params, share(prog, 0))
  return jax.device_get(scalars), built.layout.to_host(parts).read(0, built.layout.size)


# test_zigzag.py has several micro-batches of a model with tied tables.
@pytest.mark.slow
@pytest.mark.parametrize("name", few(["fsdp"], CASES))
def test_several_programs_give_the_sums_of_one(name):
  """The same bits; with tensor and context parallelism, the compiler chooses the order of some sums in each program."""
  one, several = compiled(name, 1), compiled(name, CASES[name]["stages"])
  assert isinstance(one.program.share, OneProgram) and isinstance(several.program.share, Stages)
  scalars, grads = sums(one)
  own_scalars, own_grads = sums(several)
  tolerance = 1e-6 if name == "all axes" else 0
  np.testing.assert_allclose(own_scalars, scalars, rtol=tolerance)
  np.testing.assert_allclose(own_grads, grads, rtol=0, atol=tolerance * np.abs(grads).max())
  assert np.any(grads)


@pytest.mark.parametrize("stages", few([LAYERS], [1, LAYERS]))
def test_shares_are_added_from_left_to_right(stages):
  prog, cfg, share_sums, layout = compiled("fsdp", stages)
  params = on_devices(fresh(cfg), prog).params
  parts = [share_sums(params, share(prog, seed))[1] for seed in range(3)]
  first, second, third, total = (layout.to_host(some).read(0, layout.size) for some in (*parts, share_sums.add(parts)))
  assert total.tobytes() == ((first + second) + third).tobytes()


def test_the_exchange_follows_the_backward_pass():
  _, _, share_sums, layout = compiled("fsdp", LAYERS)
  ranges = layout.ranges(share_sums.parts)
  assert [set(part.tree) for part in share_sums.parts] == [{"final_norm", "lm_head"}, *[{"layers"}] * 4, {"embedding"}]
  assert [part.first for part in share_sums.parts[1:-1]] == [3, 2, 1, 0]
  ends = [0, *(stop for _, stop in sorted(ranges))]
  assert [start for start, _ in sorted(ranges)] == ends[:-1] and ends[-1] == layout.size  # every value once


def test_no_weight_is_kept_for_the_derivative():
  prog, _ = build(stages=2, model={"remat_policy": "full"})
  with jax.set_mesh(prog.mesh):
    begun = jax.eval_shape(prog.share.begin, prog.state.params, prog.batch[0])
  kept = [leaf.shape for leaf in jax.tree.leaves(begun.saved)]
  _, rows, length = prog.batch[0].tokens.shape
  assert kept[0] == (LAYERS, rows, length, 32)  # the streams before the layers
  assert all(math.prod(shape) <= LAYERS * rows * length for shape in kept[1:]), kept
