"""Runs that the real torchrun starts: several nodes on this machine, each with an agent and one worker."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.command import Process
from tests.support.forked_runs import ENDLESS
from tests.support.process_runs import ProcessRun

from worlds.addresses import free_port

SUPERVISOR = "trainer.launch.child_supervisor"


class OneWorker(ProcessRun):
  """A run in the environment that torchrun gives to a group of one worker, which computes all shares."""

  def launch(self, *keys: str) -> Process:
    group = f"RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={free_port()}"
    changes = dict(variable.split("=") for variable in group.split()) | {"TORCHELASTIC_RUN_ID": "one"}
    return self.run_module("trainer", [*self.argv(*keys), f"num_slices={self.slices}"], changes)


class TorchrunRun(ProcessRun):
  """A run of several slices, each on a node of its own as far as torchrun knows."""

  def __init__(self, folder: Path, keys: Sequence[str], *, slices: int = 3, restarts: int = 3) -> None:
    super().__init__(folder, [*keys, f"num_slices={slices}"], slices=slices)
    self._torchrun = [
      *(sys.executable, "-m", "torch.distributed.run", f"--nnodes=1:{slices}", "--nproc-per-node=1"),
      *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"),
      # A group is complete when all nodes are there, or this long after the fewest are there.
      *("--rdzv-id=run", "--local-addr=127.0.0.1"),
    ]
    self._nodes = 0  # that were started

  def argv(self, *keys: str) -> list[str]:
    return [*super().argv(*keys), f"num_slices={self.slices}"]

  def launch(self, *keys: str) -> Process:
    """Starts the agent of one more node."""
    changes = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    # The first node has the store, whichever process is the fastest: the run ends if that node is lost.
    conf = f"--rdzv-conf=last_call_timeout=3,is_host={str(self._nodes == 0).lower()}"
    self._nodes += 1
    argv = self.argv(*keys)
    module = "tests.support.slow_trainer" if ENDLESS in argv else "trainer"
    return self.spawn([*self._torchrun, conf, "-m", module, *argv], changes)

  @contextlib.contextmanager
  def nodes(self, count: int) -> Iterator[list[Process]]:
    """The agents of `count` nodes; the block may add others. At its end no process of the run is left."""
    with self.launched() as first:
      agents = [first, *(self.launch() for _ in range(count - 1))]
      yield agents
      self.end_processes()
      for agent in agents:
        agent.wait(30)

  def workers(self) -> dict[int, int]:
    """{rank: process id} of the living workers."""
    return {int(env["RANK"]): pid for pid, env in self._workers().items()}

  def group(self) -> list[int]:
    """The sizes of the groups of the living workers, one for each worker."""
    return [int(env["WORLD_SIZE"]) for env in self._workers().values()]

  def _workers(self) -> dict[int, dict[str, str]]:
    """{process id: its environment} of the living workers."""
    found = {}
    for pid, env in self.processes().items():
      with contextlib.suppress(OSError):
        if "RANK" in env and SUPERVISOR not in Path(f"/proc/{pid}/cmdline").read_text():
          found[pid] = env
    return found
