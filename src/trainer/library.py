"""The library: what `import trainer` gives besides models, for notebooks and for the tools (docs/library.md)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import cli
from trainer.config.errors import ConfigError
from trainer.config.load import load as load_arguments
from trainer.config.schema import Config

if TYPE_CHECKING:
  import optax

  from input_pipeline.loader import Loader, Split
  from trainer.cluster import Cluster
  from trainer.models.decoder import Params
  from trainer.observe.metrics import StepRecord
  from trainer.program.feed import Feed
  from trainer.program.program import Program
  from trainer.weights.sources import WeightSource


def load(config: str | os.PathLike[str] | Config, *arguments: str, **keys: bool | int | float | str) -> Config:
  """The configuration of a YAML file, or another configuration, with other values of some keys.

  arguments: "key=value", as on the command line. A relative path starts in the current folder or in the package, so
  "configs/quickstart.yml" is always there. Raises ConfigError with all independent mistakes.
  """
  changes = [*arguments, *(f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in keys.items())]
  if not isinstance(config, str | os.PathLike | Config):
    raise ConfigError(f"load({config!r}): takes a YAML file or a configuration.\nWrite trainer.load('my_run.yml').")
  if not isinstance(config, Config):
    return load_arguments([os.fspath(config), *changes])
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "config.yml"
    file.write_text(cli.print_config(config))
    return load_arguments([str(file), *changes])


class Run:
  """A run of a configuration, in this process, with its files in `directory`.

  source: data to train on, in the place of the configuration's: a grain.MapDataset or another object that is read by
  index, of documents or examples (docs/data.md). schedule, optimizer: an optax schedule
  (step -> learning rate) and an optax.GradientTransformation, in the place of the configuration's (docs/library.md).
  """

  def __init__(
    self,
    config: Config,
    source: Any = None,
    *,
    schedule: Callable[[Any], Any] | None = None,
    optimizer: optax.GradientTransformation | None = None,
  ) -> None:
    if not isinstance(config, Config):
      raise ConfigError(f"Run({config!r}): needs a configuration.\nWrite trainer.Run(trainer.load({config!r})).")
    if source is not None:
      from input_pipeline import elements

      elements.require_random_access("Run(source=...)", source)
    self.config, self.source, self._schedule, self._optimizer = config, source, schedule, optimizer
    self.directory = config.run_directory

  def train(self, callbacks: Sequence[Callable[[StepRecord], object]] = ()) -> bool:
    """Trains until all steps are done, from the newest checkpoint of `directory` if there is one.

    callbacks: called with the record of each completed step; a step that is done again after a recovery is recorded
    again. Returns whether the run is complete; False: it was asked to stop, and has saved. Raises ConfigError for a
    wrong configuration, and the error that ended the run otherwise: also KeyboardInterrupt and errors of a callback.
    """
    if not isinstance(callbacks, Sequence) or not all(map(callable, callbacks)):
      raise ConfigError(f"train({callbacks!r}): takes a list of functions.\nWrite run.train([print]).")
    from trainer import app, defaults
    from trainer.process.stop import Stop
    from trainer.program.optimizers import UserOptimizer
    from worlds.exit_codes import COMPLETE, PREEMPTED

    with _process_kept():
      given = {"source": self.source, "callbacks": tuple(callbacks)}
      added = lambda: dataclasses.replace(
        defaults.extensions(), **given, user_optimizer=UserOptimizer(self._schedule, self._optimizer)
      )
      ended = app.run(self.config, added, Stop(), time.monotonic(), is_command=False)
    if ended.error is not None and ended.code not in (COMPLETE, PREEMPTED):
      raise ended.error
    return ended.code == COMPLETE

  def loader(self, split: Split = "train") -> Loader:
    """The batches of the run, by step or as an iterator. `close` it. Raises ConfigError if the data cannot be read."""
    from trainer.program import program
    from trainer.run import run_data

    with self._cluster() as cluster:
      batch = program.global_batch_size(self.config, cluster.num_slices, cluster.devices_per_slice)
    return run_data.open_loader(self.config, batch, split, print, self.source)

  def evaluate(self, place: str = "") -> dict[str, tuple[float, float]]:
    """{set: (mean loss in nats per token, number of tokens)} on the first eval_steps batches of each set.

    place: RUN_DIR or RUN_DIR@STEP with the weights; "": the newest checkpoint of `directory`. Raises ConfigError if the
    devices, the data or the weights do not fit the configuration, ConfigMismatch if the run has other numbers.
    """
    from trainer.program import program
    from trainer.program.feed import Feed
    from trainer.run import run_data
    from trainer.weights import sources

    config = self.config.with_values(shares_per_slice=-1)  # one program computes whole batches here

    def evaluate(source: WeightSource) -> dict[str, tuple[float, float]]:
      source.require_model(config.model)
      with self._cluster() as cluster:
        prog = program.of_view(config, cluster.view(cluster.slices))
        batch = program.global_batch_size(config, cluster.num_slices, cluster.devices_per_slice)
        with run_data.open_data(config, batch, print, self.source) as data:
          if not data.evaluations:
            raise ConfigError(f"{source.where}: the run has no evaluation data. Set eval_sets or eval_dataset_path.")
          params = source.load(prog.state.params)
          counts = data.eval_batches(config.observe.eval_steps)
          sets = zip(data.evaluations.items(), counts, strict=True)
          return {name: _loss(prog, params, Feed(loader, prog), count) for (name, loader), count in sets}

    return sources.use(place or self.directory, evaluate)

  @contextlib.contextmanager
  def _cluster(self) -> Iterator[Cluster]:
    from trainer import cluster as cluster_lib

    with _process_kept():
      cluster = cluster_lib.start(self.config.cluster)
      try:
        yield cluster
      finally:
        cluster.stop()


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
  """Puts back what a run and the libraries that it imports change in this process. docs/library.md has what stays."""
  import gc
  import logging
  import random
  import resource
  import sys

  from input_pipeline import storage
  from trainer import cluster as cluster_lib

  numbers = random.getstate()
  import rich.style  # noqa: F401 -- orbax imports it, and it draws from this generator then

  random.setstate(numbers)
  environment, open_files = cluster_lib.inherited_environment(), resource.getrlimit(resource.RLIMIT_NOFILE)
  collects, frozen = gc.isenabled(), gc.get_freeze_count()
  handlers, loggers = (
    logging.root.handlers[:],
    [logging.getLogger(name) for name in ("absl", "asyncio", "gcsfs", "s3fs")],
  )
  filters, hook = [logger.filters[:] for logger in loggers], sys.unraisablehook
  try:
    yield
  finally:
    sys.unraisablehook = hook
    changed = ("XLA_FLAGS", "CRC32C_SW_MODE", *storage.TENSORSTORE_LIMITS)
    cluster_lib.change_environment({name: environment.get(name) for name in changed})
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(resource.RLIMIT_NOFILE, open_files)
    if not frozen:
      gc.unfreeze()  # or a cycle among the objects of this run would never be freed
    if not collects:
      gc.disable()
    for logger, before in zip(loggers, filters, strict=True):
      logger.filters[:] = before
    # absl calls logging.basicConfig at its first message; a later call by the program would have no effect.
    if not handlers:
      logging.root.handlers[:] = [
        handler for handler in logging.root.handlers if type(handler) is not logging.StreamHandler
      ]


def _loss(prog: Program, params: Params, feed: Feed, count: int) -> tuple[float, float]:
  """The mean loss and the number of tokens of `count` batches."""
  import jax

  with jax.set_mesh(prog.mesh):
    parts: Sequence[tuple[jax.Array, jax.Array]] = [prog.evaluate(params, feed(index)) for index in range(count)]
  loss, weight = (sum(float(value) for value in values) for values in zip(*parts))
  return loss / weight if weight else math.nan, weight
