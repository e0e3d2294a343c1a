"""A run that torchrun starts: each worker is a slice, and rank 0 starts the supervisor as a child process.

torchrun gives MASTER_ADDR, MASTER_PORT and the run id to all workers of a group. The ports on which the supervisor may
listen and the token of the job are derived from them, so nothing else has to be agreed. A worker finds the supervisor
among the ports because only the right one proves that it has the token: two runs on one host are never confused.

When a worker ends, torchrun restarts the whole group. The workers that live get SIGTERM: they finish the step, the last
of them saves it, and the next group, perhaps of another size, continues from there. If a node is lost together with its
torchrun, nobody restarts the others: they train on without it. When rank 0 has to leave, all workers save and end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping

from trainer.cluster import launched
from trainer.config.errors import ConfigError
from worlds import addresses
from worlds.membership.run_rules import RunRules
from worlds.membership.server import BACKLOG
from worlds.place import TOKEN, Place

RUN_ID = "TORCHELASTIC_RUN_ID"
_PORTS = 8  # that the supervisor tries, in this order
_FIRST_PORT, _LAST_PORT = 20_000, 29_999  # below the ports that systems give to clients
_END_SECONDS = 15.0  # that the supervisor may need when the run is over, until all workers have ended


@dataclasses.dataclass(frozen=True)
class TorchrunWorker:
  """This process among the workers of a group that torchrun has started."""

  rank: int
  workers: int  # in the group, on all nodes
  local_rank: int
  local_workers: int  # on this node
  master_host: str  # of rank 0
  master_port: int
  run_id: str
  secret: str = ""  # that the user has given to all nodes

  @classmethod
  def read(cls, environment: Mapping[str, str]) -> TorchrunWorker:
    """The worker that torchrun's variables describe. Raises ConfigError if they describe none."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    given = {name: environment.get(name, "") for name in (*names, "MASTER_ADDR")}
    if not given["MASTER_ADDR"] or not all(given[name].isdecimal() for name in names):
      raise ConfigError(
        f"{RUN_ID} is set, as by torchrun, and the environment has {given}: torchrun sets an address, and numbers.\n"
        f"Start the run with torchrun, or unset {RUN_ID}."
      )
    rank, workers, local_rank, local_workers, port = (int(given[name]) for name in names)
    if not (rank < workers and local_rank < local_workers <= workers and 0 < port < 1 << 16):
      raise ConfigError(
        f"the environment has {given}: ranks count from 0 and are below the number of workers.\n"
        "Leave these variables to torchrun."
      )
    identity = given["MASTER_ADDR"], port, environment[RUN_ID], environment.get(TOKEN, "")
    return cls(rank, workers, local_rank, local_workers, *identity)

  @property
  def token(self) -> bytes:
    """The token of the job: 32 bytes, the same for all workers of the group."""
    group = f"{self.run_id}\0{self.master_host}\0{self.master_port}"
    return hmac.digest(self.secret.encode(), group.encode(), hashlib.sha256)

  @property
  def ports(self) -> tuple[int, ...]:
    """The ports of the supervisor, in the order in which it tries them."""
    digest = hashlib.sha256(b"ports\0" + self.token).digest()
    count = _LAST_PORT - _FIRST_PORT + 1
    return tuple(_FIRST_PORT + int.from_bytes(digest[2 * i : 2 * i + 2], "big") % count for i in range(_PORTS))

  def place(self, wait_seconds: float) -> Place:
    """Where this worker joins the run."""
    return Place(
      tuple(addresses.join(self.master_host, port) for port in self.ports),
      self.token,
      self.rank,
      gpu=self.local_rank if self.local_workers > 1 else None,
      wait_seconds=wait_seconds,
      can_rehearse=False,
      remedy=f"Rank 0 starts the supervisor on its host, MASTER_ADDR={self.master_host}. Let all nodes reach this "
      "address, and give torchrun --local-addr if a host does not know its own address. If nodes come and go, set "
      "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise torchrun may keep the address of a node that has left.",
    )

  def supervise(self, rules: RunRules) -> ChildSupervisor | None:
    """The supervisor of the run if this is rank 0. Raises ConfigError if workers are missing, a rule does not fit
    torchrun, or no port is free."""
    if not rules.elastic and self.workers < rules.slices:
      raise ConfigError(
        f"num_slices={rules.slices}: torchrun has started {self.workers} workers, and elastic_enabled=false needs one "
        "for each slice.\nSet elastic_enabled=true with elastic_min_slice_count, or start more workers."
      )
    if rules.slow_factor:
      raise ConfigError(
        f"elastic_slow_factor={rules.slow_factor:g}: torchrun starts all workers again when one is replaced.\n"
        "Remove it, or use agents (trainer.launch.agent) instead of torchrun."
      )
    launched.check(rules, lanes=1)
    return ChildSupervisor(self, rules) if self.rank == 0 else None


class ChildSupervisor:
  """The supervisor of the run, as a child process of rank 0. It ends with this process."""

  def __init__(self, worker: TorchrunWorker, rules: RunRules) -> None:
    """Raises ConfigError if no port can be had."""
    listener = _listen(worker)
    job = {
      "token": worker.token.hex(),
      "expected": worker.workers,
      "rules": dataclasses.asdict(rules),
      "listener": listener.fileno(),
      "parent": os.getpid(),
    }
    with listener:
      self._process = subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.child_supervisor"],
        stdin=subprocess.PIPE,
        pass_fds=(listener.fileno(),),
        start_new_session=True,  # torchrun signals the process group of a worker, and the supervisor must outlive it
      )
    assert self._process.stdin is not None
    with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # then nobody answers at the ports
      stdin.write(json.dumps(job).encode() + b"\n")

  def stop(self) -> None:
    """Ends the run in good order: all workers finish the step, one saves it, and all end with exit code 42."""
    self._process.terminate()

  def close(self, *, over: bool) -> None:
    """Returns when the supervisor has ended. over: the run is over, so it ends when all workers have."""
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_END_SECONDS if over else 0.0)
    self._process.kill()
    self._process.wait()


def _listen(worker: TorchrunWorker) -> socket.socket:
  """A socket that listens on the first free port of the worker's group, at the address MASTER_ADDR."""
  reason: OSError | None = None
  for port in worker.ports:
    try:
      return addresses.listen(worker.master_host, port, BACKLOG)
    except OSError as error:
      reason = error
  raise ConfigError(
    f"MASTER_ADDR={worker.master_host}: rank 0 cannot listen there on any of the ports {worker.ports}: {reason}.\n"
    "MASTER_ADDR must be an address of the host of rank 0: give torchrun --local-addr, or another --rdzv-id for other "
    "ports."
  ) from reason
