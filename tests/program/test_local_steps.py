"""Rounds of local steps against an oracle in float64, against optax, and against synchronous steps."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.config.errors import ConfigError
from trainer.config.schema import OptimizerSection
from trainer.program import local_steps, optimizers, step
from trainer.program.local_steps import Averages
from trainer.program.state import TrainState, with_params
from trainer.program.step import Sums

REPLICAS, H, ROUNDS, ROWS = 4, 5, 12, 6
AXES = {"w": ("embed", "mlp"), "norm": {"scale": ("norm",)}}


def params() -> dict:
  draw = np.random.default_rng(0)
  return {"w": draw.normal(size=(8, 4)).astype(np.float32), "norm": {"scale": np.ones(8, np.float32)}}


def rows(index: int, replica: int) -> tuple[np.ndarray, np.ndarray]:
  """Inputs and targets of a replica at the step `index`."""
  draw = np.random.default_rng((index, replica))
  return draw.normal(size=(ROWS, 8)).astype(np.float32), draw.normal(size=(ROWS, 4)).astype(np.float32)


def section(**changes) -> OptimizerSection:
  given = {"learning_rate": 0.05, "local_steps": H, "outer_learning_rate": 0.7, "outer_momentum": 0.9}
  return OptimizerSection(**{**given, **changes})


class Toy:
  """The real optimizer, schedule, averages and outer step on a linear model, whose gradients are easy to write."""

  def __init__(self, cfg: OptimizerSection, replicas: int = REPLICAS, steps: int = ROUNDS * H) -> None:
    self.cfg, self.replicas = cfg, replicas
    self.optimizer = optimizers.build(cfg, AXES)
    self.schedule = optimizers.schedule(cfg, steps)
    self.outer = local_steps.outer_optimizer(cfg)
    self.state = with_params(self.optimizer, self.outer, jax.tree.map(jnp.asarray, params()))
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    self.averages = Averages.of(self.state, types.SimpleNamespace(logical_axes=lambda: AXES), replicas)
    batch = tuple(map(place, rows(0, 0)))
    abstract = jax.tree.map(place, self.state), batch, self.schedule.abstract(mesh)
    self.programs = types.SimpleNamespace(
      **local_steps.compile_round(self.averages, self.outer, self.train_step, abstract, mesh, {}, adds=False)
    )
    self.values = self.schedule.placed(mesh)

  def train_step(self, state: TrainState, batch, values):
    def loss(params):
      x, y = batch
      return jnp.sum(jnp.square((x * params["norm"]["scale"]) @ params["w"] - y))

    value, grads = jax.value_and_grad(loss)(state.params)
    sums = Sums(grads, value, jnp.zeros(()), jnp.float32(ROWS))
    return step.apply_gradients(self.cfg, self.optimizer, self.schedule, state, sums, values)

  def round(self, first: int, count: int = H, broken: int | None = None) -> list:
    """Plays a round on the batches from `first` on. broken: a replica whose last batch is not finite. Returns what
    the replicas have added."""
    found = []
    kept, copied = self.averages.kept(self.state), lambda tree: jax.tree.map(jnp.copy, tree)
    for replica in range(self.replicas):
      inner = copied(dataclasses.replace(self.state, outer=None))
      for index in range(first, first + count):
        batch = rows(index, replica)
        if replica == broken and index == first + count - 1:
          batch = (np.full_like(batch[0], np.nan), batch[1])
        inner, _ = self.programs.step(inner, batch, self.values)
      (squares, small), (part,) = self.programs.sums(kept, inner)
      found.append((part.tree, small, squares))
    total = lambda trees: functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), trees)
    sums, small = total([one[0] for one in found]), total([list(one[1]) for one in found])
    self.state, _ = self.programs.outer_step(kept, sums, small, np.int32(count), np.int32(0))
    return found


def test_rounds_are_those_of_an_oracle_in_float64():
  """AdamW with decay, clipping and a cosine schedule; weights, moments and counts averaged; outer Nesterov momentum."""
  cfg = section(adam_weight_decay=0.1, gradient_clipping_threshold=1.0)
  toy = Toy(cfg)
  rates = [float(toy.schedule.at(index)) for index in range(ROUNDS * H)]
  w, s = (np.asarray(array, np.float64) for array in (params()["w"], params()["norm"]["scale"]))
  theta, zeros = [w, s], [np.zeros_like(w), np.zeros_like(s)]
  mu, nu, trace = zeros, zeros, zeros
  for first in range(0, ROUNDS * H, H):
    toy.round(first)
    ends = []
    for replica in range(REPLICAS):
      (w, s), m, v = theta, mu, nu
      for index in range(first, first + H):
        x, y = (array.astype(np.float64) for array in rows(index, replica))
        error = 2 * ((x * s) @ w - y) / ROWS
        grads = [(x * s).T @ error, np.sum(x * (error @ w.T), axis=0)]
        norm = np.sqrt(sum(np.sum(grad**2) for grad in grads))
        grads = [grad * min(1.0, 1.0 / norm) for grad in grads]
        m = [0.9 * old + 0.1 * grad for old, grad in zip(m, grads)]
        v = [0.95 * old + 0.05 * grad**2 for old, grad in zip(v, grads)]
        n = index + 1
        moves = [(a / (1 - 0.9**n)) / (np.sqrt(b / (1 - 0.95**n)) + 1e-8) for a, b in zip(m, v)]
        w, s = w - rates[index] * (moves[0] + 0.1 * w), s - rates[index] * moves[1]  # no decay of a norm's scale
      ends.append(([w, s], m, v))
    mean = lambda which: [np.mean(arrays, axis=0) for arrays in zip(*(end[which] for end in ends))]  # noqa: B023
    deltas = [old - new for old, new in zip(theta, mean(0))]
    mu, nu = mean(1), mean(2)
    trace = [0.9 * old + delta for old, delta in zip(trace, deltas)]
    theta = [old - 0.7 * (delta + 0.9 * kept) for old, delta, kept in zip(theta, deltas, trace)]
  adam = toy.state.opt_state[0]
  of = lambda tree: [tree["w"], tree["norm"]["scale"]]
  for ours, right in zip((toy.state.params, adam.mu, adam.nu, toy.state.outer[0].trace), (theta, mu, nu, trace)):
    for array, expected in zip(of(ours), right):
      np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
  assert int(adam.count) == int(toy.state.step) == ROUNDS * H


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (0.3, 0.0), (1.0, 0.0)])
def test_the_outer_step_has_the_bits_of_optax(rate, momentum):
  toy = Toy(section(outer_learning_rate=rate, outer_momentum=momentum))
  optimizer = optax.sgd(rate, momentum=momentum or None, nesterov=True)

  @jax.jit
  def update(grads, state, params):
    updates, state = optimizer.update(grads, state)
    return optax.apply_updates(params, updates), state

  expected = jax.tree.map(jnp.asarray, params())
  state = optimizer.init(expected)
  for first in range(0, 3 * H, H):
    found = toy.round(first)
    leaves = [functools.reduce(jnp.add, arrays) / REPLICAS for arrays in zip(*(one[0]["deltas"] for one in found))]
    expected, state = update(jax.tree.unflatten(jax.tree.structure(expected), leaves), state, expected)
    jax.tree.map(np.testing.assert_array_equal, toy.state.params, expected)


@pytest.mark.parametrize("keys", [{"opt_type": "muon"}, {"opt_type": "adafactor"}, {"mu_dtype": "bfloat16"}], ids=str)
def test_every_array_of_an_optimizer_becomes_the_mean_of_the_replicas(keys):
  """The momentum of each matrix for muon, the factors of the second moment for adafactor."""
  toy = Toy(section(outer_learning_rate=1.0, outer_momentum=0.0, **keys), steps=2 * H)
  toy.round(0)
  step_of, ends = jax.jit(toy.train_step), []
  for replica in range(REPLICAS):
    inner = dataclasses.replace(toy.state, outer=None)
    for index in range(H, 2 * H):
      inner, _ = step_of(inner, rows(index, replica), toy.values)
    ends.append(inner)
  toy.round(H)
  for ours, *others in zip(*map(jax.tree.leaves, ((one.params, one.opt_state) for one in (toy.state, *ends)))):
    mean = np.mean([np.asarray(other, np.float64) for other in others], axis=0)
    tolerance = 1e-2 if ours.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(np.asarray(ours, np.float64), mean, tolerance, tolerance * np.abs(mean).max())
  flat = lambda end: np.concatenate([np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(end.opt_state)])
  assert (flat(ends[0]) != flat(ends[1])).any(), "the replicas have the same moments"


def test_one_local_step_of_sgd_is_a_synchronous_step_of_nesterov_sgd():
  cfg = section(
    opt_type="sgd", adam_b1=0.0, local_steps=1, lr_schedule_type="constant", warmup_steps_fraction=0.0,
    adam_weight_decay=0.0, gradient_clipping_threshold=0.0,
  )  # fmt: skip
  toy = Toy(cfg)
  optimizer = optax.sgd(0.05 * 0.7, momentum=0.9, nesterov=True)
  expected = params()
  state = optimizer.init(expected)
  for index in range(20):
    x, y = (np.concatenate(arrays) for arrays in zip(*(rows(index, replica) for replica in range(REPLICAS))))
    loss = lambda p, x=x, y=y: jnp.sum(jnp.square((x * p["norm"]["scale"]) @ p["w"] - y)) / (REPLICAS * ROWS)
    updates, state = optimizer.update(jax.grad(loss)(expected), state)
    expected = optax.apply_updates(expected, updates)
    toy.round(index, 1)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), toy.state.params, expected)


def test_a_replica_that_skips_an_update_counts_for_its_share():
  """The count of AdamW is then the rounded mean, the same on all slices."""
  toy = Toy(section())
  toy.round(0, broken=2)
  assert int(toy.state.opt_state[0].count) == round(H - 1 / REPLICAS)
  assert int(toy.state.step) == H and np.isfinite(toy.state.params["w"]).all()


def test_loads_of_experts_are_averaged_and_get_no_outer_momentum():
  averages = Averages(2, (False, True), optax.identity().init(None))
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  weights = [jnp.ones(3), jnp.float32([1, 3])]
  start = dataclasses.replace(with_params(optax.identity(), outer, weights))
  ends = [[jnp.zeros(3), jnp.float32([2, 4])], [jnp.zeros(3), jnp.float32([5, 0])]]
  kept = averages.kept(start)
  found = [averages.contribution(kept, dataclasses.replace(start, params=end)) for end in ends]
  (_, small), (sums,) = jax.tree.map(jnp.add, *found)
  state, _ = averages.outer_step(outer, kept, sums, small, 1, jnp.int32(0))
  np.testing.assert_array_equal(state.params[1], [3.5, 2])
  np.testing.assert_allclose(state.params[0], 1 - 0.7 * 1.9, rtol=1e-6)


def test_an_optimizer_whose_state_has_no_mean_is_refused():
  seeded = optax.GradientTransformation(
    lambda params: {"seed": jnp.uint32(1)}, lambda grads, state, params: (grads, state)
  )
  state = with_params(seeded, None, params())
  with pytest.raises(ConfigError, match=r"has seed of type uint32, which cannot be averaged"):
    Averages.of(state, types.SimpleNamespace(logical_axes=lambda: AXES), 2)


def test_rounds_end_at_multiples_also_after_a_resume_with_another_number():
  ends = lambda first, **keys: [local_steps.end_of_round(section(**keys), step, 23) for step in first]
  assert ends([0, 5, 12, 20], local_steps=5) == [5, 10, 15, 23]
  assert ends([0, 7], local_steps=1) == [1, 8]


def test_without_local_steps_there_is_no_outer_state():
  cfg = OptimizerSection()
  assert local_steps.outer_optimizer(cfg) is None
  assert with_params(optax.identity(), None, params()).outer is None
  assert [OptimizerSection(**{name: value}).has_local_steps for name, value in (
    ("local_steps", 2), ("outer_learning_rate", 0.7), ("outer_momentum", 0.9)
  )] == [True] * 3  # fmt: skip
