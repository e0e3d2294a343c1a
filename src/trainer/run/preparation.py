"""Builds and checks all that a run needs before it has a folder: its program, its data, its plug-ins, its weights."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from input_pipeline import remote
from trainer import world as world_lib
from trainer.checkpoint import disk_space, run_folder
from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.together import on_primary
from trainer.cluster import Cluster
from trainer.config import counts
from trainer.config.errors import ConfigError
from trainer.config.faults import Fault
from trainer.config.schema import Config, RematPolicy
from trainer.elastic import flips, retry
from trainer.observe.metrics import StepRecord
from trainer.parallel import memory
from trainer.program import program
from trainer.program.optimizers import UserOptimizer
from trainer.program.program import Program
from trainer.run import run_data
from trainer.run.plugins import Extensions, Plugins, Weights
from trainer.run.run_data import RunData
from worlds import lines


@dataclasses.dataclass(frozen=True)
class Prepared:
  """A run that fits its devices and its data. callbacks: get the record of each step."""

  config: Config
  origins: Mapping[str, str]  # where each key was given, for the report
  cluster: Cluster
  program: Program  # of all slices
  data: RunData
  plugins: Plugins
  weights: Callable[[], Weights] | None  # opens the source of load_parameters_path; None: random parameters
  faults: list[Fault]  # to rehearse
  notes: list[str]  # lines for the log, which is not open yet
  callbacks: Sequence[Callable[[StepRecord], object]]


@contextlib.contextmanager
def prepare(
  config: Config, cluster: Cluster, extensions: Extensions, origins: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Prepared]:
  """Everything of the run that needs no folder, closed at the end. Raises ConfigError for wrong input, and
  CheckpointError if the store of the run does not answer."""
  faults = retry.check(cluster, config.elastic, config.run.steps)
  program.check_compiler_flags(config, cluster.view(cluster.slices).devices)
  notes = extensions.user_optimizer.lines()
  if config.model.remat_policy is RematPolicy.AUTO:
    config, note = _choose_remat(config, cluster, extensions)
    origins = {**origins, "remat_policy": "chosen for these devices, because of remat_policy=auto"}
    notes.append(note)
  full = _program(config, cluster, extensions.user_optimizer)
  flips.check(faults, state_tree.flatten(full.state.params), state_tree.flatten(full.state.opt_state))
  weights = _weights(config, cluster, extensions)
  batch = program.global_batch_size(config, cluster.num_slices, cluster.devices_per_slice)
  with run_data.open_data(config, batch, notes.append, extensions.source) as data:
    data.identify(extensions.user_optimizer.identity(full.state.opt_state), cluster.world)
    plugins = Plugins([plugin(config, data) for plugin in extensions.plugins])
    yield Prepared(config, origins, cluster, full, data, plugins, weights, faults, notes, extensions.callbacks)


def _choose_remat(config: Config, cluster: Cluster, extensions: Extensions) -> tuple[Config, str]:
  """The configuration with a policy in the place of remat_policy=auto, and a line for the log."""
  instead = f"Choose a policy, such as remat_policy={RematPolicy.FULL}."
  if extensions.user_optimizer.optimizer is not None:
    raise ConfigError(
      "remat_policy=auto: counts the memory of the optimizer opt_type, and the program gives another one.\n" + instead
    )
  if extensions.choose_remat is None:
    raise ConfigError(f"remat_policy=auto: this program has nothing that chooses.\n{instead}")
  return extensions.choose_remat(config, cluster, lines.tell)


def _program(config: Config, cluster: Cluster, user_optimizer: UserOptimizer) -> Program:
  """The program of all slices. Raises ConfigError if the run would not fit this machine or its disks, and
  CheckpointError if its store does not answer."""
  on_primary(cluster.world, lambda: remote.require_bucket(config.run_directory, config.run_directory))
  full = program.of_view(config, cluster.view(cluster.slices), user_optimizer)
  state = full.state
  # In a round of local steps the host keeps the state: on a CPU, in the memory of the devices.
  keeps = full.outer is not None and full.mesh.devices.flat[0].platform == "cpu"
  held = [state, dataclasses.replace(state, outer=None)] if keeps else [state]
  memory.require_fit(held, counts.parameter_count(config.model), cluster.kind)
  disk_space.require_locks(config)
  return full


def _weights(config: Config, cluster: Cluster, extensions: Extensions) -> Callable[[], Weights] | None:
  """Opens the source of load_parameters_path at its first call. A new run opens it now, and checks it."""
  place, open_weights = config.run.load_parameters_path, extensions.open_weights
  if not place:
    return None
  if open_weights is None:
    raise ConfigError(f"load_parameters_path={place}: this program reads no weights.\nStart it as python -m trainer.")

  @functools.cache
  def opened() -> Weights:
    source = open_weights(place, cluster.world)
    source.require_model(config.model)
    return source

  begun = cluster.world.is_primary and (run_folder.folder(config.run_directory) / run_folder.FILE).exists()
  if not world_lib.from_primary(cluster.world, begun):
    opened()
  return opened
