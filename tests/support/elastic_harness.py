"""Runs a tiny model on three simulated slices, many runs in one process, with the same compiled steps."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from tests.support.command import last_of_each

from input_pipeline.batch import Batch
from trainer import train
from trainer.checkpoint import checksums
from trainer.cluster import Cluster, View
from trainer.cluster.simulated import SimulatedCluster
from trainer.config import load
from trainer.elastic.elastic_run import ElasticRun, Outcome
from trainer.elastic.program_cache import CachedProgram
from trainer.elastic.retry import elastic_retry
from trainer.observe.events import read_events
from trainer.observe.metrics import read_metrics
from trainer.process.stop import Stop
from trainer.program.program import Program
from trainer.run import preparation
from trainer.run.plugins import NO_EXTENSIONS
from trainer.run.session import Session, open_session

NUM_SLICES = 3
TINY = (
  "base_num_decoder_layers=1 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=1 base_mlp_dim=32 head_dim=8 "
  "vocab_size=64 dtype=float32 dataset_type=synthetic max_target_length=16 per_device_batch_size=2 "
  "learning_rate=1e-2 warmup_steps_fraction=0"  # so that every update changes the next losses
)
_ALWAYS = (
  f"elastic_enabled=true num_slices={NUM_SLICES} devices_per_slice=1 elastic_min_resize_interval_seconds=0 "
  "enable_report=false services= log_period=1000"
)


Prepare = Callable[[Session, Cluster], None]


@dataclass
class Recorder:
  """The loader of the session. Remembers for every step which rows were read last, with a hash of their tokens."""

  loader: Any
  used: dict[int, dict[int, str]] = field(default_factory=dict)

  def __getattr__(self, name: str) -> Any:
    return getattr(self.loader, name)

  def batch(self, index: int, rows: np.ndarray | None = None) -> Batch:
    batch = self.loader.batch(index, rows)
    assert rows is not None
    self.used[index + 1] = {
      int(row): hashlib.sha1(tokens.tobytes()).hexdigest() for row, tokens in zip(rows, batch.tokens) if row >= 0
    }
    return batch


@dataclass(frozen=True)
class History:
  """The results of a run that ended without an error."""

  outcome: Outcome
  losses: dict[int, float]
  used: dict[int, dict[int, str]]  # step -> row -> hash of its tokens
  state: dict[str, Any]  # fingerprints of the arrays in the last checkpoint: weights and optimizer state
  events: list[dict[str, Any]]
  log: str
  seen: Any  # what `look` has returned

  def of_kind(self, kind: str) -> list[dict[str, Any]]:
    return [event for event in self.events if event["kind"] == kind]


def simulated_slices() -> SimulatedCluster:
  """NUM_SLICES slices of one device each."""
  devices = jax.devices()
  return SimulatedCluster({i: (devices[i],) for i in range(NUM_SLICES)}, replacement_seconds=0.05)


@contextlib.contextmanager
def cached_in(folder: Path) -> Iterator[None]:
  """Inside the block, compiled programs are read from the folder, or else compiled and written there."""
  seconds = jax.config.jax_persistent_cache_min_compile_time_secs
  try:
    _cache_in(str(folder), 0.0)
    yield
  finally:
    _cache_in(None, seconds)


def _cache_in(folder: str | None, least_seconds: float) -> None:
  jax.config.update("jax_compilation_cache_dir", folder)
  jax.config.update("jax_persistent_cache_min_compile_time_secs", least_seconds)
  compilation_cache.reset_cache()  # JAX reads the folder only once


class Harness:
  """Starts runs that share programs and compiled steps. This saves time and does not change results."""

  def __init__(
    self,
    directory: Path,
    make_cluster: Callable[[], Cluster] = simulated_slices,
    cache: Path | None = None,
    prepare_steps: bool = True,
  ) -> None:
    """make_cluster: NUM_SLICES slices for one run. cache: of compiled programs, for several processes; None: none.

    prepare_steps: whether a run prepares in the background the steps of sets of slices that it may never have.
    """
    self._directory, self._make_cluster, self._cache = directory, make_cluster, cache
    self._prepare_steps = prepare_steps
    self._topologies: dict[str, dict[tuple[int, ...], CachedProgram[Program]]] = {}  # by the model, then by slices
    self._others: dict[str, dict[str, Any]] = {}  # by the model, then by name

  def run(
    self,
    name: str,
    keys: Iterable[str],
    prepare: Prepare = lambda session, cluster: None,
    watch: Callable[[ElasticRun], None] = lambda elastic: None,
    look: Callable[[Path], Any] = lambda directory: None,
  ) -> History:
    """Runs TINY with these key=value and returns its history. Removes the folder of the run.

    prepare: called before the first attempt. watch: called before each attempt. look: called with the folder.
    """
    places = [f"base_output_directory={self._directory}", f"run_name={name}"]
    config = load(["configs/base.yml", *last_of_each([*TINY.split(), *_ALWAYS.split(), *places, *keys])])
    cluster = self._make_cluster()
    with contextlib.ExitStack() as stack:
      if self._cache:
        stack.enter_context(cached_in(self._cache))
      stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
      stop = Stop()
      stop.listen()
      stack.callback(stop.restore)
      prepared = stack.enter_context(preparation.prepare(config, cluster, NO_EXTENSIONS))
      session = stack.enter_context(open_session(prepared, stop, time.monotonic()))
      recorder = Recorder(session.data.train)
      session.data.train = recorder  # type: ignore[assignment]
      topologies = session.programs.topologies | self._topologies.get(repr(config.model), {})
      self._topologies[repr(config.model)] = session.programs.topologies = topologies
      session.programs.others = self._others.setdefault(repr(config.model), {})
      attempt = functools.partial(self._attempt, session, watch)
      prepare(session, cluster)
      outcome = elastic_retry(attempt, session.elastic, stop=lambda: session.stop.noticed)
    losses = {record["step"]: record["loss"] for record in read_metrics(config.run_directory) if "loss" in record}
    events = read_events(config.run_directory)
    meta = Path(config.run_directory) / "checkpoints" / str(outcome.step) / "meta.json"
    state = checksums.parse(meta.read_bytes(), meta.name)["arrays"]
    log = (Path(config.run_directory) / "log.txt").read_text()
    seen = look(Path(config.run_directory))
    shutil.rmtree(config.run_directory)
    return History(outcome, losses, recorder.used, state, events, log, seen)

  def _attempt(
    self, session: Session, watch: Callable[[ElasticRun], None], view: View, survivors: frozenset[int]
  ) -> Outcome:
    elastic = session.elastic
    watch(elastic)
    if not self._prepare_steps:
      elastic.prepare_steps = lambda *_: None  # type: ignore[method-assign]
    elastic.retries.backoff_seconds = 0.0
    elastic.resizes.worthwhile = lambda *costs: True  # otherwise a run this short would never resize
    return train.run(session, view, survivors)
