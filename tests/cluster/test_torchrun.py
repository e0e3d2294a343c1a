"""The place of a process that torchrun has started, read from environments; no process is started."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import subprocess
import sys

import pytest

from trainer import cluster
from trainer.cluster import torchrun
from trainer.cluster.torchrun import TorchrunWorker
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection, ElasticSection
from worlds.membership.run_rules import RunRules
from worlds.peers import RunEnded

# As torchrun --nnodes=3 --nproc-per-node=1 sets it for the worker of the second node.
GROUP = {
  "RANK": "1",
  "WORLD_SIZE": "3",
  "LOCAL_RANK": "0",
  "LOCAL_WORLD_SIZE": "1",
  "GROUP_RANK": "1",
  "GROUP_WORLD_SIZE": "3",
  "MASTER_ADDR": "127.0.0.1",
  "MASTER_PORT": "29400",
  "TORCHELASTIC_RUN_ID": "job",
  "TORCHELASTIC_RESTART_COUNT": "0",
  "TORCHELASTIC_MAX_RESTARTS": "3",
}
RULES = RunRules(3, 1, 3, 300.0, 0.0, True)


@pytest.fixture
def environment(monkeypatch):
  def set_variables(**changes: str) -> None:
    for name, value in (GROUP | changes).items():
      monkeypatch.setenv(name, value)

  return set_variables


def test_every_worker_of_a_group_finds_the_same_supervisor():
  workers = [TorchrunWorker.read(GROUP | {"RANK": str(rank)}) for rank in range(3)]
  places = [worker.place(wait_seconds=1.0) for worker in workers]
  assert [place.member for place in places] == [0, 1, 2]
  assert len({(place.supervisors, place.token) for place in places}) == 1
  assert all(address.startswith("127.0.0.1:2") for address in places[0].supervisors)
  assert not any(place.can_rehearse for place in places) and {place.gpu for place in places} == {None}


def test_a_supervisor_that_ends_at_once_is_no_error_of_the_process_that_starts_it(monkeypatch):
  """The worker will find nobody at the ports, and say so."""

  class Ended(subprocess.Popen):
    def __init__(self, *args, **options):
      super().__init__(*args, **options)
      self.wait()

  monkeypatch.setattr(subprocess, "Popen", Ended)
  monkeypatch.setattr(sys, "executable", "true")
  TorchrunWorker.read(GROUP | {"RANK": "0", "TORCHELASTIC_RUN_ID": "ended"}).supervise(RULES).close(over=False)


def test_restarts_of_a_node_do_not_separate_it_from_the_others():
  """Each torchrun counts the restarts that its own workers have caused."""
  restarted = TorchrunWorker.read(GROUP | {"TORCHELASTIC_RESTART_COUNT": "2", "GROUP_RANK": "2", "RANK": "2"})
  assert restarted.token == TorchrunWorker.read(GROUP).token


def test_another_run_or_group_has_another_token_and_other_ports():
  changes = [{}, {"TORCHELASTIC_RUN_ID": "other"}, {"MASTER_PORT": "29401"}, {"MASTER_ADDR": "::1"}]
  changes.append({"TRAINER_TOKEN": "secret"})
  workers = [TorchrunWorker.read(GROUP | change) for change in changes]
  for one, other in itertools.combinations(workers, 2):
    assert one.token != other.token and not set(one.ports) & set(other.ports)


def test_each_of_several_workers_on_a_node_has_a_gpu_of_its_own():
  places = [
    TorchrunWorker.read(GROUP | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "3", "RANK": str(rank)}).place(1.0)
    for rank in range(3)
  ]
  assert [(place.member, place.gpu) for place in places] == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.parametrize(
  "change",
  [{"RANK": "3"}, {"RANK": "x"}, {"RANK": ""}, {"MASTER_PORT": "0"}, {"MASTER_ADDR": ""}, {"LOCAL_WORLD_SIZE": "4"}],
)
def test_an_environment_that_torchrun_would_not_set_is_refused(change):
  with pytest.raises(ConfigError, match=r"the environment has \{'RANK'"):
    TorchrunWorker.read(GROUP | change)


def test_rank_0_listens_on_the_first_free_port_of_its_group():
  worker = TorchrunWorker.read(GROUP | {"RANK": "0"})
  with torchrun._listen(worker) as first:
    assert first.getsockname() == ("127.0.0.1", worker.ports[0])
    with torchrun._listen(worker) as second:
      assert second.getsockname() == ("127.0.0.1", worker.ports[1])


@pytest.mark.parametrize(
  ("workers", "num_slices", "kind"), [("3", 3, "multiprocess"), ("1", 3, "multiprocess"), ("1", 1, "simulated")]
)
def test_a_group_of_one_worker_may_be_what_is_left_of_several(workers, num_slices, kind):
  assert cluster._find(ClusterSection(num_slices=num_slices), GROUP | {"WORLD_SIZE": workers}) == kind


def test_a_host_without_an_address_on_the_exchange_network_is_refused_before_the_supervisor_starts(environment):
  environment(RANK="0", WORLD_SIZE="3")
  with pytest.raises(ConfigError, match=r"exchange_network=10\.99\.0\.0/16: .* lo \(127\.0\.0\.1.*\nGive the name"):
    cluster.start(ClusterSection(num_slices=3), RULES, ElasticSection(exchange_network="10.99.0.0/16"))


def test_a_supervisor_that_never_listens_is_one_message(environment):
  with socket.create_server(("127.0.0.1", 0)) as free:
    environment(MASTER_PORT=str(free.getsockname()[1]), LOCAL_WORLD_SIZE="1")
  with pytest.raises(RunEnded, match=r"(?s)cannot join the run there.*MASTER_ADDR=127\.0\.0\.1.*--local-addr"):
    cluster.start(ClusterSection(num_slices=3), dataclasses.replace(RULES, timeout=0.1))
