"""Random fault histories against the undisturbed run, on a tiny model: does elastic training lose anything, ever?

  JAX_PLATFORMS=cpu python end_to_end/elastic_histories.py [--count 1000] [--first 0] [--directory DIR]

History i is drawn from seed i: losses in a step, in a snapshot, in a save and in a recovery, double faults, returns,
flapping; every third one on a fixed mesh (it waits for replacements), the others with whatever slices are left. Each
run must complete; every step must have used the undisturbed run's examples; on a fixed mesh losses and final state
must be bit-identical, elsewhere losses within 1e-5; no fault may cost more than one completed step. The first history
that does not exits with 1 and prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trainer import train
from trainer.checkpoint import sealed
from trainer.cluster import View
from trainer.cluster.simulated import SimulatedCluster
from trainer.config import load
from trainer.config.faults import RandomFaults
from trainer.config.schema import Config
from trainer.data import Batch
from trainer.elastic.attempt import Carry, Job, Outcome
from trainer.elastic.faults import draw
from trainer.elastic.retry import elastic_retry
from trainer.observe.events import read_events
from trainer.observe.metrics import read_metrics
from trainer.session import Session, open_session

NUM_SLICES, STEPS = 3, 24
TOLERANCE = 1e-5  # relative difference of a loss whose sums were taken in another order, float32
_KEYS = (
  "base_num_decoder_layers=1 base_emb_dim=16 base_num_query_heads=2 base_num_kv_heads=1 base_mlp_dim=32 head_dim=8 "
  "vocab_size=64 dtype=float32 dataset_type=synthetic max_target_length=16 per_device_batch_size=2 "
  f"steps={STEPS} checkpoint_period=6 snapshot_period=1 elastic_min_resize_interval_seconds=0 "
  "elastic_enabled=true elastic_backoff_seconds=0 "
  f"num_slices={NUM_SLICES} devices_per_slice=1 enable_report=false enable_tensorboard=false log_period=1000"
)


@dataclass
class Recorder:
  """The session's loader; remembers for every step the rows that were read last, with their content."""

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
  """A finished run."""

  faults: str
  fixed_mesh: bool
  outcome: Outcome
  losses: dict[int, float]
  used: dict[int, dict[int, str]]
  state: dict[str, Any]  # fingerprints of the final checkpoint's arrays: weights and optimizer
  events: list[dict[str, Any]]


class Harness:
  """Runs histories one after the other in one process, with one set of compiled steps."""

  def __init__(self, directory: Path) -> None:
    self._directory = directory
    self._compiled: dict[tuple[int, ...], Any] = {}
    self._programs: dict[tuple[int, ...], Any] = {}

  def run(self, name: str, faults: str, fixed_mesh: bool) -> History:
    least = -1 if fixed_mesh else 1
    arguments = [f"base_output_directory={self._directory}", f"run_name={name}", f"fault_injection={faults}"]
    arguments.append(f"elastic_min_slice_count={least}")
    config = load(["configs/base.yml", *_KEYS.split(), *arguments])
    devices = jax.devices()
    slices = {i: (devices[i],) for i in range(NUM_SLICES)}
    cluster = SimulatedCluster(slices, replacement_seconds=0.05)
    with contextlib.redirect_stdout(io.StringIO()), open_session(config, cluster, time.monotonic()) as session:
      recorder = Recorder(session.loader)
      session.loader = recorder  # type: ignore[assignment]
      self._programs |= session.programs
      session.programs = self._programs
      attempt = functools.partial(self._attempt, config, session)
      job = Job(STEPS, config.optimizer.gradient_accumulation_steps, session.tokens_per_step)
      outcome = elastic_retry(attempt, cluster, config.elastic, session.events, session.log, job=job)
    losses = {record["step"]: record["loss"] for record in read_metrics(config.run_directory) if "loss" in record}
    events = read_events(config.run_directory)
    meta = Path(config.run_directory) / "checkpoints" / str(STEPS) / "meta.json"
    state = sealed.parse(meta.read_bytes(), meta.name)["arrays"]
    shutil.rmtree(config.run_directory)
    return History(faults, fixed_mesh, outcome, losses, recorder.used, state, events)

  def _attempt(self, config: Config, session: Session, view: View, carry: Carry) -> Outcome:
    carry.compiled = self._compiled  # of all histories: nothing but time depends on it
    carry.resizes.worth_it = lambda *costs: True  # a run this short would never think a resize worth its while
    return train.run(config, session, view, carry)


def histories(first: int, count: int) -> Iterator[tuple[str, bool]]:
  """(fault_injection, fixed mesh) of histories first..first+count-1."""
  for seed in range(first, first + count):
    rate = (0.05, 0.15, 0.3)[seed // 3 % 3]
    yield ", ".join(map(str, draw(RandomFaults(seed, rate), NUM_SLICES, STEPS))), seed % 3 == 0


def check(history: History, undisturbed: History) -> list[str]:
  """What the history did not keep of the promises; [] when it kept all."""
  broken = []
  if history.outcome != Outcome("complete", STEPS):
    broken.append(f"ended with {history.outcome}")
  for step in range(1, STEPS + 1):
    if history.used.get(step) != undisturbed.used[step]:
      broken.append(f"step {step} used other examples")
    ours, theirs = history.losses.get(step, float("nan")), undisturbed.losses[step]
    if not abs(ours - theirs) <= (0 if history.fixed_mesh else TOLERANCE * abs(theirs)):
      broken.append(f"step {step} has loss {ours!r}, undisturbed {theirs!r}")
  if history.fixed_mesh and history.state != undisturbed.state:
    broken.append("the final state differs on a fixed mesh")
  for record in history.events:
    if record["kind"] == "recovery" and record["steps_lost"] > 1:
      broken.append(f"{record['steps_lost']} completed steps lost by {record['event']} of slices {record['slice']}")
  return broken


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--count", type=int, default=1000, help="histories to run")
  parser.add_argument("--first", type=int, default=0, help="seed of the first")
  parser.add_argument("--directory", type=Path, default=None, help="where runs are written (default: a temporary one)")
  options = parser.parse_args()
  jax.config.update("jax_num_cpu_devices", NUM_SLICES)
  directory = options.directory or Path(tempfile.mkdtemp(prefix="elastic-histories-"))
  harness = Harness(directory)
  undisturbed = harness.run("undisturbed", "", fixed_mesh=True)
  totals = {"faults": 0, "recoveries": 0, "steps lost": 0, "runs with no fault": 0}
  worst, start = 0.0, time.monotonic()
  for i, (faults, fixed_mesh) in enumerate(histories(options.first, options.count)):
    seed = options.first + i
    history = harness.run(f"history-{seed}", faults, fixed_mesh)
    broken = check(history, undisturbed)
    if broken:
      print(f"history {seed} (fault_injection='{faults}', fixed mesh: {fixed_mesh}):", *broken, sep="\n  ")
      print(f"repeat with: python end_to_end/elastic_histories.py --first {seed} --count 1")
      return 1
    recoveries = [record for record in history.events if record["kind"] == "recovery"]
    totals["faults"] += sum(record["kind"] == "fault_injected" for record in history.events)
    totals["recoveries"] += len(recoveries)
    totals["steps lost"] += sum(record["steps_lost"] for record in recoveries)
    totals["runs with no fault"] += not faults
    worst = max(worst, *(abs(history.losses[s] / undisturbed.losses[s] - 1) for s in history.losses))
    if (i + 1) % 50 == 0 or i + 1 == options.count:
      print(
        f"{i + 1} histories in {time.monotonic() - start:.0f} s, all good; {totals}; largest relative loss "
        f"difference {worst:.1e}",
        flush=True,
      )
  return 0


if __name__ == "__main__":
  sys.exit(main())
