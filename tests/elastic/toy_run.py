"""A small, fast training run on simulated slices, with the calls that train.py and its stepper make.

The state is one weight matrix, replicated over slices and sharded inside a slice. The rows of a step depend on the step
only, and batch_plan assigns them to slices. Snapshots are numpy copies, one for the simulated host of each slice.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.support.clock import Clock
from tests.support.command import without_times

from trainer.cluster.simulated import SimulatedCluster
from trainer.config.schema import ElasticSection
from trainer.elastic import batch_plan
from trainer.elastic.elastic_run import ElasticRun, Outcome
from trainer.elastic.program_cache import ProgramCache
from trainer.elastic.retry import check, elastic_retry
from trainer.observe.compiles import CompileCounter
from trainer.observe.events import EventLog
from trainer.observe.log import get

WIDTH, ROWS_PER_MICRO = 8, 2
CACHE: dict = {}


class ToyRun:
  """One run: `attempt` is handed to elastic_retry; `losses` and `rows` record what every completed step used."""

  def __init__(self, num_slices=4, micro_batches=1, steps=20, save_period=5, backup="snapshot", cache=CACHE):
    """cache: steps that earlier runs have compiled; {} if a test counts compilations."""
    self.steps, self.micro_batches, self.save_period, self.backup = steps, micro_batches, save_period, backup
    self.cache = cache
    self.rows_total = num_slices * micro_batches * ROWS_PER_MICRO
    self.losses: dict[int, float] = {}
    self.rows: dict[int, list[int]] = {}
    self.snapshots: dict[int, tuple[int, np.ndarray]] = {}  # by slice
    self.saved: tuple[int, np.ndarray] | None = None  # the checkpoint tier
    self.fail_at: dict[int, Exception] = {}  # raised when the step is dispatched
    self.block = jax.block_until_ready
    self.restores: list[tuple[int, str]] = []
    self.state: np.ndarray | None = None
    self.elastic: ElasticRun | None = None

  def example(self, step, rows):
    """Rows [.., WIDTH] and weights [..] of a step: a pure function of the step and the row."""
    rows = np.asarray(rows)
    x = np.cos(np.arange(WIDTH) + 0.37 * step + 1.3 * rows[..., None]).astype(np.float32)
    weight = (rows != batch_plan.PADDING).astype(np.float32)
    return x, weight

  def compile(self, view):
    key = view.slices, view.num_slices_total, self.micro_batches
    if key not in self.cache:
      self.cache[key] = self.compile_now(view)
    return self.cache[key]

  def compile_now(self, view):
    mesh = Mesh(np.array(view.devices), ("data", "fsdp"))
    # One row for each device of a slice: rounds of unequal size are for the trainer's own step.
    plan = batch_plan.plan(view.num_slices_total, view.num_alive, self.micro_batches, ROWS_PER_MICRO, ROWS_PER_MICRO)
    sharded = NamedSharding(mesh, P(None, "fsdp"))

    def loss(w, micro):
      x, weight = micro
      return jnp.sum(weight * jnp.sum((jnp.tanh(x @ w) - 0.5) ** 2, -1))

    def step(w, batch):
      grads = jax.lax.map(lambda micro: jax.value_and_grad(loss)(w, micro), batch)
      value, grad = jax.tree.map(lambda g: g.sum(0), grads)
      return w - 0.01 * grad / self.rows_total, value / self.rows_total

    x = jax.ShapeDtypeStruct((plan.rounds, view.num_alive * ROWS_PER_MICRO, WIDTH), np.float32)
    place = NamedSharding(mesh, P(None, ("data", "fsdp")))
    batch = (
      jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
      jax.ShapeDtypeStruct(x.shape[:2], x.dtype, sharding=place),
    )
    state = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=sharded)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(sharded, NamedSharding(mesh, P())))
    return jitted.lower(state, batch).compile(), plan, sharded, place

  def restore(self, survivors):
    """(step, weights, tier) of the newest backup that still exists."""
    self.snapshots = {i: s for i, s in self.snapshots.items() if i in survivors}
    if self.backup == "snapshot" and self.snapshots:
      step, w = max(self.snapshots.values(), key=lambda s: s[0])
      return step, w, "snapshot"
    if self.saved is not None:
      return *self.saved, "persistent"
    return 0, np.eye(WIDTH, dtype=np.float32), "none"

  def attempt(self, elastic: ElasticRun, view, survivors) -> Outcome:
    self.elastic = elastic
    wait = elastic.waits_on(view)
    before = elastic.clock()
    compiled, plan, sharded, place = elastic.programs.step(view)
    compiled = elastic.cluster.on_slices(compiled, view)
    elastic.recovery.compiled(elastic.clock() - before)
    step, w, tier = self.restore(survivors)
    state = jax.device_put(w, sharded)
    self.restores.append((step, tier))
    elastic.restored(step, tier, 0.0)
    first = step + 1
    while step < self.steps:
      step += 1
      rows = plan.rows.reshape(plan.rounds, -1)
      batch = jax.device_put(self.example(step, rows), place)
      elastic.begin_step(step)
      if step in self.fail_at:
        raise self.fail_at[step]
      began = elastic.clock()
      state, loss = compiled(state, batch)
      wait.call(functools.partial(self.block, (state, loss)), f"step {step}")
      if isinstance(elastic.clock, Clock):
        elastic.clock.sleep(1)  # a step takes a second
      used = sorted(int(r) for r in rows.ravel() if r != batch_plan.PADDING)
      self.losses[step], self.rows[step] = float(loss), used
      self.snapshot(elastic, view, step, np.asarray(state))
      elastic.completed(step, elastic.clock() - began, view.num_alive)
      if step == first:
        elastic.prepare_steps(view)
      if elastic.resize_due(view, step):
        return Outcome("slice_up", step)
    self.state = np.asarray(state)
    return Outcome("complete", step)

  def snapshot(self, elastic, view, step, w):
    elastic.snapshot_policy.taken(step)
    elastic.inject_faults("snapshot", step)
    self.snapshots = {i: (step, w) for i in view.slices if i not in elastic.cluster.died(view)}
    if self.save_period and step % self.save_period == 0:
      elastic.inject_faults("save", step)
      self.saved = (step, w)


def simulated_cluster(num_slices, clock=None):
  """A simulated cluster of `num_slices` slices of equal size from this process's CPU devices."""
  devices = jax.devices()
  per = len(devices) // num_slices
  slices = {i: tuple(devices[i * per : (i + 1) * per]) for i in range(num_slices)}
  return SimulatedCluster(slices, clock=clock, sleep=clock.sleep) if clock else SimulatedCluster(slices)


def train(toy, faults="", num_slices=4, directory=None, cluster=None, clock=None, **keys):
  """Outcome, log lines and events of a run with these elastic keys."""
  clock = clock or Clock()
  keys = {"elastic_enabled": True, "elastic_min_slice_count": 1, "elastic_min_resize_interval_seconds": 0.0} | keys
  cfg = ElasticSection(fault_injection=faults, **keys)
  lines, records = [], []
  log, events = get(directory), EventLog(directory)
  log.redirect(lambda text: lines.append(without_times(text)))
  emit = events.emit
  events.emit = lambda kind, **fields: records.append(emit(kind, **fields)) or records[-1]
  cluster = cluster or simulated_cluster(num_slices, clock)
  with CompileCounter() as counter:
    programs = ProgramCache(lambda view: view, toy.compile, events, log, counter, clock)
    try:
      sizes = {"units": toy.micro_batches, "tokens_per_step": 100, "state_bytes": 4 * WIDTH * WIDTH}
      faults = check(cluster, cfg, toy.steps)
      elastic = ElasticRun(cfg, cluster, log, events, programs, faults, steps=toy.steps, **sizes, clock=clock)
      return elastic_retry(functools.partial(toy.attempt, elastic), elastic, sleep=clock.sleep)
    finally:
      # jax counts compilations per process: a compilation that is still running would count for the next test.
      assert programs.wait(60)
      toy.lines, toy.records = lines, records
      log.close()
      events.close()
