"""The training step of TPUs, compiled without a TPU: its memory, its matmuls and its communication."""

from __future__ import annotations

import collections

import pytest
from tests.support import needs

from trainer import config
from trainer.cluster import topologies
from trainer.compiled import analysis
from trainer.compiled.events import Channel
from trainer.config.counts import parameter_count
from trainer.observe import chips

pytestmark = needs.LIBTPU
COMMON = "configs/base.yml run_name=t base_output_directory=unused dataset_type=synthetic per_device_batch_size=1"
FLASH = "attention=flash remat_policy=full"


def compiled(arguments: str, topology: str, slices: int) -> tuple[config.Config, analysis.Analysis]:
  cfg = config.load(f"{COMMON} {FLASH} {arguments}".split(), check_paths=False)
  found = analysis.analyse(cfg, topologies.devices(topologies.resolve(topology), slices), slices)
  assert isinstance(found, analysis.Analysis), found
  return cfg, found


def test_a_published_model_on_three_slices():
  """Measured: 448 MB of arguments, 260 MB of temporaries, 5.3 GB of traffic, 3.7 of 32.7 ms of DCN exposed.

  Sequences of 2,048 tokens, which docs/benchmarks/tpu_compile.md has, take half as long again to compile.
  """
  length = 512
  keys = f"model_name=qwen3-0.6b max_target_length={length} grad_reduce_dtype=bfloat16"
  cfg, found = compiled(keys, "v5e-16", 3)
  assert found.memory.arguments < 460e6
  assert found.memory.temporaries < 280e6
  assert found.costs.device_bytes < 5.6e9
  sent = collections.Counter()
  for collective in found.collectives:
    sent[collective.kind, collective.crosses_slices] += collective.bytes * collective.times
  gradients = 2 * parameter_count(cfg.model) / 16
  assert gradients <= sent["all-reduce", True] < 1.02 * gradients
  rows = 3 * length * 2 * cfg.model.emb_dim  # looked up by a chip, from three slices, in bfloat16
  assert rows <= sent["all-gather", True] < 1.1 * rows
  layers = 2 * 440e6  # the weights of all layers in bfloat16, gathered
  loss = 4 * 16 * length * cfg.model.emb_dim  # the gradient of the last hidden states, in float32
  assert 0.95 * layers < sent["reduce-scatter", False] - loss < 1.05 * layers
  assert sent["all-reduce", False] < 0.01 * layers
  timeline = analysis.timeline(found, chips.find("TPU v5 lite"))
  assert timeline.exposed[Channel.DCN] < 0.005 < 0.03 < timeline.needed(Channel.DCN)


@pytest.mark.parametrize(
  "keys",
  ["ici_tensor_parallelism=2 max_target_length=128", "ici_context_parallelism=4 max_target_length=512"],
)
def test_no_mesh_computes_twice_or_sends_whole_tables(keys):
  """Each chip executes its share of the matmuls, and sends at most its fsdp shard of a table at once."""
  sizes = (
    "base_emb_dim=128 base_num_decoder_layers=2 base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=256 "
    "head_dim=128 vocab_size=32768"
  )
  cfg, found = compiled(f"{sizes} {keys}", "v5e-8", 1)
  # Remat executes the layers, a sixth of the total, once more. In a short sequence, attention computes its only block.
  assert found.costs.flops < 1.3 * found.model_flops
  table = 4 * cfg.model.vocab_size * cfg.model.emb_dim / found.mesh["fsdp"]
  assert max(c.bytes for c in found.collectives) <= 1.01 * table  # the compiler joins it with the gradients of norms
