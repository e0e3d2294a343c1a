"""Slices of two processes each: the death of one process takes its slice out, and nothing else."""

from __future__ import annotations

import os
import signal

import pytest
from tests.launch.conftest import LANES, LANES_STEPS
from tests.support.command import differences
from tests.support.forked_runs import SLOW
from tests.support.process_runs import ProcessRun
from tests.support.torchrun_runs import OneWorker

from worlds.place import LANE, MEMBER


def process_of(run: ProcessRun, member: int, lane: int) -> int:
  """The process id of one lane."""
  name = (str(member), str(lane))
  (pid,) = [pid for pid, env in run.processes().items() if (env.get(MEMBER), env.get(LANE)) == name]
  return pid


@pytest.mark.slow
def test_a_killed_process_of_a_slice_costs_no_step(compiled, server, tmp_path):
  """Oracle: one process with two devices, which computes all. Losses and the last checkpoint are bit-identical."""
  run = ProcessRun(
    tmp_path / "lanes",
    [*LANES, compiled, "elastic_min_slice_count=-1", "witness_period=4"],
    slices=2,
    options=["--processes-per-slice", "2"],
    environment=SLOW,
    server=server,
  )
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 3, supervisor)
    os.kill(process_of(run, member=1, lane=1), signal.SIGKILL)
    assert run.wait(supervisor) == 0, run.tail()
  assert [event["slice"] for event in run.events("slice_down")] == [[1]], run.tail()
  assert run.count("witness") == 0, "no lane computes other bits"
  assert run.count("slice_up") == 1 and run.steps() == list(range(1, LANES_STEPS + 1))
  one_worker = OneWorker(tmp_path / "one-worker", [*LANES, compiled], slices=2, server=server)
  with one_worker.launched() as worker:
    assert one_worker.wait(worker) == 0, one_worker.tail()
  assert run.losses() == one_worker.losses()
  assert differences(run, one_worker, LANES_STEPS) == []


@pytest.mark.soak  # of a mesh that two processes rarely have
def test_processes_of_a_slice_agree_on_the_order_of_collectives(server, tmp_path):
  """If the compiler chose how to shard the one-hot matmul, both would wait for each other in the first step.

  It takes 8 s on a quiet machine, 44 s when five such tests run at once on two cores.
  """
  mesh = "devices_per_slice=4 ici_fsdp_parallelism=1 ici_tensor_parallelism=2 ici_context_parallelism=2"
  shape = "base_num_decoder_layers=2 base_emb_dim=128 base_mlp_dim=2048 base_num_query_heads=4 base_num_kv_heads=2"
  table = "vocab_size=61 use_iota_embed=true logits_via_embedding=true"
  batch = "dataset_type=synthetic max_target_length=16 per_device_batch_size=1 steps=2"
  rest = "head_dim=8 dtype=float32 attention=dot_product remat_policy=full"
  run = ProcessRun(
    tmp_path / "order",
    f"{mesh} {shape} {table} {batch} {rest}".split(),
    slices=1,
    options=["--processes-per-slice", "2"],
    server=server,
  )
  with run.launched() as supervisor:
    assert run.wait(supervisor, 150) == 0, run.tail()
  assert run.steps() == [1, 2]
