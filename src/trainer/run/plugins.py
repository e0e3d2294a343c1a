"""The hooks of a run: the only way in which services, the sample and the report reach it.

The core of the trainer imports none of them. The command's entry hands in classes of `Plugin` (trainer/defaults.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from trainer.cluster import Cluster
from trainer.config.schema import Config, ModelSection
from trainer.models.decoder import Params
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.observe.metrics import Recorder, StepRecord
from trainer.process.stop import StopRequested
from trainer.program.optimizers import NO_OVERRIDES, UserOptimizer
from trainer.program.program import Program
from trainer.run.run_data import RunData
from trainer.world import World


class Weights(Protocol):
  """Parameters that a new run can start from."""

  @property
  def where(self) -> str:
    """The place, in words."""

  def require_model(self, cfg: ModelSection) -> None:
    """Raises ConfigError with all keys of `cfg` that do not fit these weights."""

  def load(self, abstract: Params, world: World) -> Params:
    """The parameters with the shapes, types and shardings of `abstract`. Every process of `world` must call. Raises
    ConfigError, on all processes, if they cannot be read."""


@dataclasses.dataclass(frozen=True)
class Opened:
  """A run whose folder is open."""

  config: Config
  cluster: Cluster
  data: RunData
  log: Log
  events: EventLog
  run_id: str  # "" without checkpoints
  earlier_step: Callable[[], int]  # the last step that was recorded before this process began; 0: none


@dataclasses.dataclass(frozen=True)
class Completed:
  """The last step of a run is done. unless_ending(work, name): returns work(); raises StopRequested once the process
  has been asked to end."""

  step: int
  params: Params
  program: Program
  unless_ending: Callable[[Callable[[], Any], str], Any]


class Plugin:
  """A part of a run that is no part of training. Every hook does nothing unless a plug-in needs it.

  Hooks are called on every process unless they say otherwise. An error of a hook becomes a warning, except where the
  hook says that it may raise.
  """

  def __init__(self, config: Config, data: RunData) -> None:
    """Raises ConfigError if the configuration asks for what cannot be. The run's folder does not exist yet."""
    self.config, self.data = config, data

  def open(self, run: Opened, stack: contextlib.ExitStack) -> None:
    """The run's folder is open. `stack` closes what this opens, at the end of the process. May raise ConfigError. A
    plug-in that overrides this calls it first."""
    self.run = run

  def recorders(self) -> Sequence[Recorder]:
    """Called whenever this process begins to write the files of the run: each gets the records of metrics.jsonl."""
    return ()

  def ready(self) -> None:
    """The first step can be dispatched; only on the process that writes the files of the run."""

  def completed(self, done: Completed) -> None:
    """The last step is done, and its checkpoint is committed or on its way."""

  def ends(self, code: int) -> None:
    """The process ends with this exit code, and its records are closed; only on the process that writes the files of
    the run, and only if the run's folder is still its own."""


@dataclasses.dataclass(frozen=True)
class Extensions:
  """What the command or the library adds to the core: plug-ins, and functions that need parts above the core. What
  the caller of the library gives in the place of keys: data, functions, a schedule and an optimizer."""

  plugins: tuple[type[Plugin], ...] = ()
  open_weights: Callable[[str, World], Weights] | None = None  # what load_parameters_path names; raises ConfigError
  # The configuration with a policy in the place of remat_policy=auto, and a line for the log. Raises ConfigError.
  choose_remat: Callable[[Config, Cluster, Callable[[str], None]], tuple[Config, str]] | None = None
  source: Any = None  # to train on, see `run_data.open_data`
  callbacks: tuple[Callable[[StepRecord], object], ...] = ()  # get the record of each step
  user_optimizer: UserOptimizer = NO_OVERRIDES


class Plugins:
  """The plug-ins of a run together."""

  def __init__(self, plugins: Sequence[Plugin]) -> None:
    self._plugins = plugins
    self._log: Log | None = None

  def open(self, run: Opened, stack: contextlib.ExitStack) -> None:
    self._log = run.log
    for plugin in self._plugins:
      plugin.open(run, stack)

  def recorders(self) -> list[Recorder]:
    return [recorder for found in self._each("recorders") for recorder in found]

  def ready(self) -> None:
    list(self._each("ready"))

  def completed(self, done: Completed) -> None:
    list(self._each("completed", done))

  def ends(self, code: int) -> None:
    list(self._each("ends", code))

  def _each(self, hook: str, *arguments: Any) -> Iterator[Any]:
    """The results of a hook. What only reports never hurts the run: an error is a warning."""
    for plugin in self._plugins:
      try:
        yield getattr(plugin, hook)(*arguments)
      except StopRequested:
        raise
      except Exception as error:  # noqa: BLE001 - each library raises its own types
        assert self._log is not None, "hooks are called after open"
        self._log.warning(f"{type(plugin).__name__}: {hook} has failed: {error!r}. Training goes on.")


NO_EXTENSIONS = Extensions()
