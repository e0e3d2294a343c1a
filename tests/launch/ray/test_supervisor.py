"""The supervisor of a run under Ray, with members that connect to it as workers do, without Ray."""

from __future__ import annotations

import threading
import time

import pytest

from trainer.launch.ray.ray_slices import RayWorker
from trainer.launch.ray.ray_supervisor import RunSupervisor
from worlds.exit_codes import BAD_INPUT, FAILED, PREEMPTED
from worlds.membership import wire
from worlds.membership.client import Membership
from worlds.membership.messages import from_ranges
from worlds.membership.run_rules import RunRules
from worlds.place import Place

RULES = RunRules(slices=3, minimum=1, shares=3, timeout=60.0, join_interval=0.0, elastic=True)
SECONDS = 5.0


def place_of(environment: dict[str, str | None]) -> Place:
  return Place.read({name: value for name, value in environment.items() if value is not None})


class Group:
  """The members of one group of workers, one worker per slice."""

  def __init__(self, run: RunSupervisor, ranks: int) -> None:
    self.run = run
    self.environments = run.begin([RayWorker(rank, "127.0.0.1", 1) for rank in range(ranks)])
    self.members = {rank: self.join(rank, self.environments[rank]) for rank in range(ranks)}
    self.step = 0

  def join(self, rank: int, environment: dict[str, str | None]) -> Membership:
    place = place_of(environment)
    channel = wire.connect(place.supervisors[0], place.token)
    member = Membership(channel, place, f"127.0.0.1:{rank}", lambda epoch: None, lambda line: None)
    deadline = time.monotonic() + SECONDS
    while place.member not in self.run._server.connected:  # so that the first member becomes the primary
      assert time.monotonic() < deadline, f"member {place.member} is not let in"
      time.sleep(0.001)
    member.send("ready", newest=0, holds=False)
    return member

  def next(self, rank: int) -> dict:
    received = self.members[rank].next(timeout=SECONDS)
    assert received is not None, f"member {rank} hears nothing"
    return received

  def world(self, rank: int) -> dict:
    """The next epoch that a member hears of. If it is asked to lead, it has restored the state."""
    while (received := self.next(rank))["kind"] != "world":
      if received["kind"] == "lead":
        self.members[rank].send("restored", epoch=received["epoch"], step=0)
    return received

  def commit(self, epoch: int) -> list[dict]:
    """All members have done a step. Returns the commit, as each of them hears it."""
    self.step += 1
    for member in self.members.values():
      member.send("done", epoch=epoch, round=f"step {self.step}", checksum=0)
    return [self.next(rank) for rank in self.members]

  def train(self) -> dict:
    """All members commit a step. Returns the world in which they do."""
    world = [self.world(rank) for rank in self.members][-1]
    assert {commit["kind"] for commit in self.commit(world["epoch"])} == {"commit"}
    return world

  def close(self) -> None:
    for member in self.members.values():
      member.close()


@pytest.fixture
def run():
  supervisor = RunSupervisor(RULES, host="127.0.0.1", lanes=1, tpu=False, attempts=2, kill=lambda worker: None)
  yield supervisor
  supervisor.close()


def test_a_smaller_group_does_not_wait_for_the_slices_that_are_gone(run):
  """Ray restarts with two of three slices: they train at once, on all shares, with the id of the same run."""
  group = Group(run, 3)
  before = group.next(0)
  group.close()
  group = Group(run, 2)
  after = group.next(0)
  assert before["kind"] == after["kind"] == "welcome" and before["run_id"] == after["run_id"]
  world = group.train()
  assert sorted(world["members"]) == ["0", "1"]
  assert sorted(share for ranges in world["ranges"].values() for share in from_ranges(ranges)) == [0, 1, 2]
  group.close()


def test_the_others_train_on_when_a_worker_is_replaced(run):
  group = Group(run, 2)
  epoch = group.train()["epoch"]
  group.members.pop(1).close()
  world = group.world(0)
  assert world["gone"] == [1] and world["epoch"] > epoch and run.exit_code() is None
  group.members[1] = group.join(1, run.replace(RayWorker(1, "127.0.0.1", 1)))
  assert group.next(1)["kind"] == "welcome"
  group.close()


@pytest.mark.parametrize("code", [FAILED, BAD_INPUT, None])
def test_a_worker_that_fails_alone_waits_longer_each_time_and_the_others_train_on(run, code):
  """None: it crashes, and Ray only starts it again."""
  group = Group(run, 2)
  group.train()
  group.members.pop(1).close()
  for pause in (0.5, 1.0, 2.0):
    if code is not None:
      assert run.ended(1, code) is None
    run.replace(RayWorker(1, "127.0.0.1", 1))
    assert pause - 0.2 < run.pause(1) <= pause and run.pause(0) == 0
  group.commit(group.world(0)["epoch"])
  assert run.exit_code() is None
  run.replace(RayWorker(1, "127.0.0.2", 1))  # on another host
  assert run.pause(1) == 0
  group.close()


@pytest.mark.parametrize(("code", "times"), [(FAILED, 2), (BAD_INPUT, 1)])
def test_the_run_ends_when_all_workers_fail_before_the_first_step(run, code, times):
  run.begin([RayWorker(rank, "127.0.0.1", 1) for rank in range(2)])
  for _ in range(times - 1):
    for rank in range(2):
      assert run.ended(rank, code) is None
      run.replace(RayWorker(rank, "127.0.0.1", 1))
  assert run.ended(0, code) is None and run.ended(1, code) == code == run.exit_code()


def test_groups_without_progress_end_the_run(run):
  for _ in range(2):
    Group(run, 1).close()
    assert run.exit_code() is None
  last = Group(run, 1)
  assert last.next(0) == {"kind": "end", "code": FAILED, "reason": ""} and run.exit_code() == FAILED
  last.close()


def test_a_group_saves_before_ray_ends_it(run):
  """`leave` waits until the members have saved and gone. The run is not over: the next group begins."""
  group = Group(run, 1)
  epoch = group.train()["epoch"]
  leaving = threading.Thread(target=run.leave, args=(SECONDS,))
  leaving.start()
  deadline = time.monotonic() + SECONDS
  while not group.commit(epoch)[0]["stop"]:
    assert time.monotonic() < deadline
  assert leaving.is_alive()
  group.members[0].send("finished", code=PREEMPTED)
  assert group.next(0)["kind"] == "end"
  assert run.ended(0, PREEMPTED) == PREEMPTED
  group.close()
  leaving.join(SECONDS)
  assert not leaving.is_alive() and run.exit_code() is None
  again = Group(run, 2)
  again.train()
  assert run.exit_code() is None
  again.close()


def test_a_stop_outlives_the_group(run):
  """The workers were killed before they had saved. The next group must not train."""
  group = Group(run, 1)
  group.train()
  run.stop()
  group.close()
  again = Group(run, 1)
  assert again.next(0)["kind"] == "end" and run.exit_code() == PREEMPTED
  again.close()
