"""The world of one process. Several processes: tests/checkpoint/test_processes.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from jax.experimental import multihost_utils

from trainer import world as world_lib
from trainer.world import JaxWorld, SingleWorld


def test_one_process_agrees_with_itself():
  alone = SingleWorld()
  assert alone.gather({"a": 1}) == [{"a": 1}]
  assert world_lib.from_primary(alone, [1, 2]) == [1, 2]


def test_without_jax_distributed_the_world_is_one_process():
  assert isinstance(world_lib.of_jax(), SingleWorld)


@pytest.mark.parametrize("others", ["x", "x" * 58, "x" * 59, "x" * 500])
def test_processes_gather_short_and_long_values(monkeypatch, others):
  barrier, given, found = threading.Barrier(2, timeout=20), {}, {}

  def allgather(row):
    given[threading.current_thread().name] = row
    barrier.wait()
    rows = np.stack([given["0"], given["1"]])
    barrier.wait()
    return rows

  def gather(name, value):
    one = object.__new__(JaxWorld)
    one.rank, one.size = int(name), 2
    found[name] = one.gather(value)

  monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
  threads = [threading.Thread(target=gather, name=n, args=(n, v)) for n, v in (("0", [1, False]), ("1", others))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(20)
  assert found == {"0": [[1, False], others], "1": [[1, False], others]}
