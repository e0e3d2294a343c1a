"""The world of one process. Several processes: tests/checkpoint/test_processes.py."""

from __future__ import annotations

from trainer import world as world_lib
from trainer.world import SingleWorld


def test_one_process_agrees_with_itself():
  alone = SingleWorld()
  assert alone.gather({"a": 1}) == [{"a": 1}]
  assert world_lib.from_primary(alone, [1, 2]) == [1, 2]


def test_without_jax_distributed_the_world_is_one_process():
  assert isinstance(world_lib.of_jax(), SingleWorld)
