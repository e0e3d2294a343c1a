"""What runs in Ray's processes: the backend in the controller of Ray Train, and the program in its workers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.util
from ray.train.backend import Backend, BackendConfig

from trainer.cluster import change_environment
from trainer.launch.ray.ray_slices import RayWorker
from trainer.launch.ray.ray_supervisor import RunSupervisor
from trainer.observe import screen
from worlds.addresses import free_port
from worlds.interruptions import end_on_error
from worlds.membership.run_rules import RunRules
from worlds.place import COMMAND

_REPORT_SECONDS = 5.0
_LAST_REPORT_SECONDS = 10.0  # for the report after the end, which needs all workers
_SLICE_NAME = "ray.io/tpu-slice-name"  # Ray's label of the hosts of a TPU slice of several hosts


class SliceLost(Exception):
  """The program of this worker has ended, and Ray must start it again."""


class SupervisorActor(RunSupervisor):
  """The supervisor as an actor: the controller and the workers of Ray Train call it."""

  def __init__(self, rules: RunRules, lanes: int, tpu: bool, attempts: int) -> None:
    host = ray.util.get_node_ip_address()
    super().__init__(
      rules, host=host, lanes=lanes, tpu=tpu, attempts=attempts, kill=lambda worker: ray.kill(worker.actor)
    )
    screen.protect()
    end_on_error(self.fail)


@dataclasses.dataclass
class SliceConfig(BackendConfig):
  """For Ray Train: every slice is a JAX world of its own. Unlike JaxConfig, it joins no worlds across slices."""

  supervisor: Any  # handle of the SupervisorActor
  replace_lost: bool  # Ray replaces only lost workers; False: it restarts all
  grace_seconds: float  # for saving, before Ray ends the workers

  @property
  def backend_cls(self) -> type[Backend]:
    return _ReplacingBackend if self.replace_lost else _SliceBackend


class _SliceBackend(Backend):
  """Gives every worker its place, and lets a group save before Ray ends it."""

  def on_start(self, worker_group: Any, backend_config: Any) -> None:
    supervisor, found = backend_config.supervisor, worker_group.get_workers()
    names = {node["NodeID"]: node.get("Labels", {}).get(_SLICE_NAME, "") for node in ray.nodes()}
    workers = [
      RayWorker(
        rank=one.distributed_context.world_rank,
        host=one.metadata.node_ip,
        port=port,
        slice_name=names.get(one.metadata.node_id, ""),
        actor=one.actor,
      )
      for one, port in zip(found, worker_group.execute(free_port), strict=True)
    ]
    if len(found) < found[0].distributed_context.world_size:
      (worker,) = workers
      environments = {worker.rank: ray.get(supervisor.replace.remote(worker))}
    else:
      environments = ray.get(supervisor.begin.remote(workers))
    ray.get(
      [
        worker_group.execute_single_async(i, change_environment, environments[worker.rank])
        for i, worker in enumerate(workers)
      ]
    )

  def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
    if len(worker_group) == worker_group.get_workers()[0].distributed_context.world_size:
      ray.get(backend_config.supervisor.leave.remote(backend_config.grace_seconds))


class _ReplacingBackend(_SliceBackend):
  """Each worker is a replica group: Ray Train replaces a lost worker and leaves the others alone."""

  has_replica_groups = True


@dataclasses.dataclass(frozen=True)
class RayProgram:
  """The program that every worker runs. All fields can be sent to it."""

  arguments: tuple[str, ...]  # of `python -m trainer`
  folder: str  # the current folder, from which relative paths start
  run_directory: str
  supervisor: Any
  run_command: str  # of the job

  def __call__(self) -> int:
    """Ray Train's training function. Returns the exit code of the run; raises SliceLost to be started again."""
    rank = ray.train.get_context().get_world_rank()
    ended = threading.Event()
    reports = threading.Thread(
      target=_report_until, args=(ended, self.run_directory, rank), name="reports to Ray", daemon=True
    )
    reports.start()
    time.sleep(ray.get(self.supervisor.pause.remote(rank)))
    code = self._train()
    run_code: int | None = ray.get(self.supervisor.ended.remote(rank, code))
    if run_code is None:
      raise SliceLost(f"the program ended with exit code {code}")
    ended.set()
    reports.join(_LAST_REPORT_SECONDS)
    return run_code

  def _train(self) -> int:
    from absl import logging

    from trainer.__main__ import main
    from worlds.exit_codes import BAD_INPUT

    logging.set_verbosity(logging.WARNING)  # Ray Train shows the level INFO of all libraries, as Orbax's at each save
    try:
      os.chdir(self.folder)
    except OSError as error:
      print(
        f"error: {self.folder}, where the job was started, cannot be entered on this host: {error}.\n"
        "Start the job in a folder that all hosts have: use the same image, or a shared folder.",
        file=sys.stderr,
      )
      return BAD_INPUT
    change_environment({COMMAND: self.run_command})
    return main(list(self.arguments))


def _report_until(ended: threading.Event, run_directory: str, rank: int) -> None:
  """Reports the newest metrics and checkpoint of the run to Ray Train, and once more at the end. Runs in a thread.

  A report of Ray Train waits for all workers, so it must never be in the way of training. All workers report at the
  same pace; Ray keeps the values of rank 0.
  """
  reported = -1  # the step of the checkpoint that was reported last
  is_last = False
  while not is_last:
    is_last = ended.wait(_REPORT_SECONDS)
    if rank:
      ray.train.report({})
      continue
    from trainer.launch.ray.ray_progress import newest_checkpoint, newest_metrics

    metrics, step = newest_metrics(run_directory), newest_checkpoint(run_directory)
    if step <= reported:
      ray.train.report(metrics)
      continue
    reported = step
    with tempfile.TemporaryDirectory() as folder:  # Ray copies it: a pointer, because the run keeps its checkpoints
      pointer = {"step": step, "path": f"{run_directory}/checkpoints/{step}"}
      (Path(folder) / "checkpoint.json").write_text(json.dumps(pointer))
      ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
