"""The world of one process. Several processes: tests/checkpoint/test_processes.py."""

from __future__ import annotations

import dataclasses

from trainer import world as world_lib
from trainer.world import SingleWorld


@dataclasses.dataclass
class FixedWorld:
  """A process of a world in which the values of the other processes are given."""

  rank: int
  others: list  # the values of all ranks; the own value is replaced by the gathered value
  is_primary: bool = False

  @property
  def size(self):
    return len(self.others)

  def gather(self, value):
    return [value if rank == self.rank else other for rank, other in enumerate(self.others)]


def test_one_process_agrees_with_itself():
  alone = SingleWorld()
  assert alone.gather({"a": 1}) == [{"a": 1}]
  assert world_lib.from_primary(alone, [1, 2]) == [1, 2]


def test_the_primary_may_have_any_rank():
  second = FixedWorld(1, [[False, None], None, [False, None]], is_primary=True)
  assert world_lib.from_primary(second, "mine") == "mine"
  third = FixedWorld(2, [[False, None], [True, "hers"], None])
  assert world_lib.from_primary(third, "ignored") == "hers"


def test_without_jax_distributed_the_world_is_one_process():
  assert isinstance(world_lib.of_jax(), SingleWorld)
