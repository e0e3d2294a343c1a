"""What belongs to the process and not to one set of living slices: records, data, the watchdog."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from trainer.cluster import Cluster
from trainer.config.schema import Config
from trainer.data import Loader, make_loader
from trainer import program
from trainer.program import Program
from trainer.observe import log as log_lib
from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.observe.metrics import Metrics
from trainer.observe.progress import Progress
from trainer.observe.watchdog import Watchdog


@dataclasses.dataclass
class Session:
  """The run's open records and data, shared by all attempts of this process."""

  log: Log
  events: EventLog
  metrics: Metrics
  progress: Progress
  watchdog: Watchdog
  compiles: CompileCounter
  loader: Loader
  eval_loader: Loader | None
  global_batch_size: int  # examples per step, fixed for the life of the run
  programs: dict[tuple[int, ...], Program] = dataclasses.field(default_factory=dict)  # by View.slices


@contextlib.contextmanager
def open_session(config: Config, cluster: Cluster) -> Iterator[Session]:
  """Opens the run's folder, its records and its data, and closes them at the end."""
  first = cluster.process_index == 0
  directory = config.run_directory
  batch = program.global_batch_size(config, cluster.num_slices, cluster.devices_per_slice)
  loaders = [
    make_loader(config.data, vocab_size=config.model.vocab_size, global_batch_size=batch, split=split)
    for split in ("train", "eval")
    if split == "train" or config.observe.eval_steps > 0
  ]
  with contextlib.ExitStack() as stack:
    log = log_lib.get(directory, cluster.process_index)
    stack.callback(log.close)
    events = EventLog(directory, config.run.run_name, process_index=cluster.process_index)
    stack.callback(events.close)
    metrics = Metrics(directory if first else None, config.observe, events, log)
    stack.callback(metrics.close)
    progress = Progress(
      log,
      total_steps=config.run.steps,
      total_slices=cluster.num_slices,
      log_period=config.observe.log_period,
      terminal=None if first else False,
    )
    stack.enter_context(progress)
    watchdog = Watchdog(config.observe.watchdog_timeout_seconds, log, events)
    stack.callback(watchdog.stop)
    compiles = stack.enter_context(CompileCounter())
    for loader in loaders:
      stack.callback(loader.close)
    watchdog.start()
    yield Session(
      log, events, metrics, progress, watchdog, compiles, loaders[0], loaders[1] if len(loaders) > 1 else None, batch
    )

