"""One run as a job of Ray Train: the resources of a slice, the policies, and the exit code."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

from input_pipeline import storage
from trainer.cluster import change_environment, run_command
from trainer.cluster.launched import check, run_rules
from trainer.config import shares
from trainer.config.errors import ConfigError, how_to_install
from trainer.config.schema import Config
from trainer.process.stop import requests
from worlds.exit_codes import FAILED, INTERRUPTED
from worlds.interruptions import Repeats

_POLL_SECONDS = 1.0
_END_SECONDS = 30.0  # from the end of the run to the end of Ray Train


def run(config: Config, arguments: Sequence[str], options: argparse.Namespace) -> int:
  """Runs the command on the Ray cluster and returns its exit code. Raises ConfigError, before anything is written."""
  try:
    import ray
    from ray.train import TrainingFailedError
  except ImportError as error:
    raise ConfigError(f"trainer.launch.ray: needs the package ray: {error}.\n{how_to_install('ray')}.") from error
  _connect(ray)
  lanes = _workers_per_slice(options)
  if options.replace_lost and lanes > 1:
    raise ConfigError(
      f"--replace-lost: Ray replaces single workers, and a slice with --topology {options.topology} has {lanes}.\n"
      "Remove --replace-lost."
    )
  rules = run_rules(shares.resolve(config))
  check(rules, lanes)
  from trainer.launch.ray.ray_workers import SupervisorActor

  supervisor = (
    ray.remote(SupervisorActor)
    .options(num_cpus=0, max_concurrency=8, label_selector={"ray.io/node-id": ray.get_runtime_context().get_node_id()})
    .remote(rules, lanes, options.topology is not None, config.elastic.elastic_max_retries)
  )
  stop = functools.partial(_stop, supervisor, Repeats())
  handlers = {number: signal.signal(number, stop) for number in requests()}
  try:
    _fit(_trainer(config, arguments, options, lanes, supervisor), supervisor)
    code = ray.get(supervisor.exit_code.remote())
  except TrainingFailedError as error:
    print(f"error: Ray Train has given up: {error}", file=sys.stderr)
    code = ray.get(supervisor.exit_code.remote())
  except KeyboardInterrupt:
    code = INTERRUPTED
  finally:
    ray.shutdown()  # ends the workers, if there are any. A request to end meanwhile does not change the exit code
    for number, handler in handlers.items():
      signal.signal(number, handler)
  return FAILED if code is None else code


def _fit(trainer: Any, supervisor: Any) -> None:
  """Returns when Ray Train has ended, or a while after the run is over. Raises the error of Ray Train.

  Ray Train does not notice the end while it waits for the host of a lost worker.
  """
  import ray

  failed: list[BaseException] = []

  def fit() -> None:
    try:
      trainer.fit()
    except Exception as error:  # noqa: BLE001 - raised below, in the main thread
      failed.append(error)

  thread = threading.Thread(target=fit, name="Ray Train", daemon=True)
  thread.start()
  while thread.is_alive():
    thread.join(_POLL_SECONDS)
    if ray.get(supervisor.exit_code.remote()) is not None:
      thread.join(_END_SECONDS)
      break
  if failed:
    raise failed[0]


def _connect(ray: Any) -> None:
  # Otherwise Ray Train also logs what a worker prints, and the terminal shows each line twice.
  change_environment({"RAY_TRAIN_ENABLE_PRINT_PATCH": "0"})
  try:
    ray.init(address="auto")
  except ConnectionError as error:
    raise ConfigError(
      f"trainer.launch.ray: finds no Ray cluster: {error}\nStart one with `ray start --head`, or set RAY_ADDRESS."
    ) from error


def _workers_per_slice(options: argparse.Namespace) -> int:
  """The hosts of one slice, as Ray counts them: one worker each. Raises ConfigError for a slice that Ray lacks."""
  if options.topology is None:
    return 1
  from ray.util.tpu import get_tpu_worker_resources

  try:
    workers, _ = get_tpu_worker_resources(options.topology, options.accelerator_type)
  except ValueError as error:
    raise ConfigError(
      f"--topology {options.topology} --accelerator-type {options.accelerator_type}: {error}\n"
      "Give a topology of this TPU, for example --topology 2x4 --accelerator-type TPU-V6E."
    ) from error
  return int(workers)


def _trainer(config: Config, arguments: Sequence[str], options: argparse.Namespace, lanes: int, supervisor: Any) -> Any:
  """Ray's JaxTrainer with the policies of this run."""
  from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
  from ray.train.v2.jax import JaxTrainer

  from trainer.launch.ray.ray_workers import RayProgram, SliceConfig

  least, most = options.min_slices * lanes, options.max_slices * lanes
  resources = {"GPU": options.gpus_per_slice, "CPU": 1} if options.gpus_per_slice else {"CPU": 1}
  tpu = options.topology is not None
  return JaxTrainer(
    RayProgram(tuple(arguments), os.getcwd(), config.run_directory, supervisor, run_command()),
    jax_config=SliceConfig(supervisor, options.replace_lost, config.checkpoint.autocheckpoint_grace_seconds),
    scaling_config=ScalingConfig(
      # A group that replaces lost workers has a fixed size: Ray would restart all of them to change it.
      num_workers=most if options.replace_lost or least == most else (least, most),
      use_tpu=tpu,
      use_gpu=bool(options.gpus_per_slice),
      topology=options.topology,
      accelerator_type=options.accelerator_type,
      resources_per_worker=None if tpu else resources,
      placement_strategy="SPREAD",
      elastic_resize_monitor_interval_s=config.elastic.elastic_min_resize_interval_seconds,
    ),
    run_config=RunConfig(
      name=config.run.run_name,
      storage_path=_storage(config.run.base_output_directory),
      # The supervisor decides when a failure ends the run, because it knows exit codes and progress.
      failure_config=FailureConfig(
        max_failures=-1,
        controller_failure_limit=config.elastic.elastic_max_retries,  # groups that could not start
      ),
      checkpoint_config=CheckpointConfig(num_to_keep=config.checkpoint.max_num_checkpoints_to_keep),
    ),
  )


def _storage(folder: str) -> str:
  """Where Ray keeps its own records, and a pointer to the newest checkpoint: beside the runs."""
  return f"{folder if storage.is_address(folder) else os.path.abspath(folder)}/ray"


def _stop(supervisor: Any, repeats: Repeats, number: int, frame: object) -> None:
  if repeats(number):
    raise SystemExit(128 + number)  # ends the workers without a save
  # In a thread: the handler may have interrupted a call of ray.
  threading.Thread(target=supervisor.stop.remote, name="stop", daemon=True).start()
