"""The training step of TPUs, compiled without a TPU: its memory, its matmuls and its communication."""

from __future__ import annotations

import collections

import jax
import pytest
from tests.support import needs

from stepcost import chips, topologies
from stepcost.hlo import Module
from stepcost.hlo_events import Channel
from trainer import config
from trainer.config.counts import parameter_count
from trainer.preflight import analysis

pytestmark = needs.LIBTPU
COMMON = "configs/base.yml run_name=t base_output_directory=unused dataset_type=synthetic per_device_batch_size=1"
FLASH = "attention=flash remat_policy=full"


def compiled(arguments: str, topology: str, slices: int) -> tuple[config.Config, analysis.Analysis]:
  cfg = config.load(f"{COMMON} {FLASH} {arguments}".split(), check_paths=False)
  found = analysis.analyse(cfg, topologies.devices(topologies.resolve(topology), slices), slices)
  assert isinstance(found, analysis.Analysis), found
  return cfg, found


def test_twelve_layers_on_three_slices():
  """Measured: 24.6 MB of arguments, 9.3 MB of temporaries (jax 0.12: 10.0), 73 MB of traffic, 0.17 of 1.84 ms of DCN
  exposed.

  docs/benchmarks/tpu.md has the command that shows the same of a published model. It takes minutes.
  """
  length, chips_per_slice = 128, 16
  keys = (
    "base_emb_dim=512 base_num_decoder_layers=12 base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=1024 "
    f"head_dim=128 vocab_size=8192 logits_via_embedding=true max_target_length={length} grad_reduce_dtype=bfloat16"
  )
  cfg, found = compiled(keys, "v5e-16", 3)
  parameters = parameter_count(cfg.model)
  assert found.memory.arguments < 1.02 * 3 * 4 * parameters / chips_per_slice  # weights and moments in float32
  assert found.memory.temporaries < (10e6 if jax.__version_info__ < (0, 12) else 10.5e6)
  assert found.costs.device_bytes < 78e6
  assert found.costs.flops < 1.34 * found.model_flops  # its share of the matmuls; remat adds at most a third
  sent = collections.Counter()
  for collective in found.collectives:
    sent[collective.kind, collective.crosses_slices] += collective.bytes * collective.times
  gradients = 2 * parameters / chips_per_slice
  assert gradients <= sent["all-reduce", True] < 1.02 * gradients
  rows = 3 * length * 2 * cfg.model.emb_dim  # looked up by a chip, from three slices, in bfloat16
  assert rows <= sent["all-gather", True] < 1.1 * rows
  layers = 2 * (parameters - cfg.model.vocab_size * cfg.model.emb_dim)  # all their weights in bfloat16, gathered
  loss = 4 * chips_per_slice * length * cfg.model.emb_dim  # the gradient of the last hidden states, in float32
  assert 0.95 * layers < sent["reduce-scatter", False] - loss < 1.05 * layers
  assert sent["all-reduce", False] < 0.01 * layers
  timeline = analysis.timeline(found, chips.find("TPU v5 lite"))
  assert timeline.exposed[Channel.DCN] < 0.23e-3 < 1.6e-3 < timeline.needed(Channel.DCN)


@pytest.mark.soak  # of axes that are divided by the compiler: tests/program/test_step.py has their results
@pytest.mark.parametrize("axis, parts", [("tensor", 4), ("context", 1)])
def test_every_mesh_axis_divides_what_is_sent(axis, parts):
  """A chip sends only its shard of the gradients to other slices, and gathers only its part of a weight over tensor."""
  layers, length = 3, 512
  keys = (
    f"base_emb_dim=512 base_num_decoder_layers={layers} base_num_query_heads=4 base_num_kv_heads=4 base_mlp_dim=1024 "
    f"head_dim=128 vocab_size=8192 logits_via_embedding=true max_target_length={length} grad_reduce_dtype=bfloat16"
  )
  cfg, found = compiled(f"{keys} ici_{axis}_parallelism=4", "v5e-16", 2)
  D, F, table = cfg.model.emb_dim, cfg.model.mlp_dim, cfg.model.vocab_size * cfg.model.emb_dim
  # In bfloat16. The table counts twice: the gradients of the head are known long before the gradients of the lookup.
  gradients = 2 * (parameter_count(cfg.model) + table) / 16
  across, inside = ([c for c in found.collectives if c.crosses_slices == crosses] for crosses in (True, False))
  assert gradients <= sum(c.bytes * c.times for c in across) < 1.02 * gradients
  gathered = [c.bytes for c in inside if c.kind == "all-gather" and c.times == layers]
  assert max(gathered) == 2 * (2 * D * F) / parts  # gate and up in bfloat16
  if axis == "context":  # the gradient of the lookup in float32, and no gradients of layers
    assert sum(c.bytes * c.times for c in inside if c.kind == "all-reduce") < 1.02 * 4 * table


TENSOR, CONTEXT = "ici_tensor_parallelism=2 max_target_length=128", "ici_context_parallelism=2 max_target_length=512"


# The first test has the matmuls of a chip and what it sends; tests/kernels/test_tpu_compile.py compiles both axes.
@pytest.mark.soak
@pytest.mark.parametrize("keys, topology", [(TENSOR, "v5e-8"), (CONTEXT, "v6e-8")])
def test_no_mesh_computes_twice_or_sends_whole_tables(keys, topology):
  """Each chip executes its share of the matmuls, and sends at most its fsdp shard of a table at once.

  SparseCores (of v6e and v5p) carry what a slice gathers and scatters: the matrix units would wait for a collective
  that they execute themselves.
  """
  sizes = (
    "base_emb_dim=128 base_num_decoder_layers=2 base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=256 "
    "head_dim=128 vocab_size=32768"
  )
  cfg, found = compiled(f"{sizes} {keys}", topology, 1)
  # Remat executes the layers, a sixth of the total, once more. In a short sequence, attention computes its only block.
  assert found.costs.flops < 1.3 * found.model_flops
  table = 4 * cfg.model.vocab_size * cfg.model.emb_dim / found.mesh["fsdp"]
  # The compiler joins a table's gradient with those of norms. Older libtpu joins the gradients of both tables.
  assert max(c.bytes for c in found.collectives) <= 2.02 * table
  if topology == "v6e-8":
    check_that_sparsecores_carry(found.module, "all-gather", "reduce-scatter")


def check_that_sparsecores_carry(module: Module, *kinds: str) -> None:
  """Asserts that each collective of these kinds is in a computation that a SparseCore executes."""
  instructions = [i for computation in module.computations.values() for i in computation.instructions]
  offloaded = {name for i in instructions if i.opcode in ("call-start", "custom-call-start") for name in i.called}
  where = collections.defaultdict(set)
  for computation, instruction, _ in module.executed():
    for _, part in module.parts(computation, instruction):
      where[part.opcode.removesuffix("-start")].add(computation.name)
  for kind in kinds:
    assert where[kind] and where[kind] <= offloaded
