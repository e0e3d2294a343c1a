"""The step against itself: layouts, remat, accumulation, sharding, packing and missing slices must not change it.

Tolerances are relative, in float32, and stated at each test; sums in another order are the only difference allowed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import zlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.seeds import few

from input_pipeline.batch import Batch
from trainer.config import resume
from trainer.config.errors import ConfigError
from trainer.config.rules import AXES
from trainer.config.schema import Config, ModelSection, OptimizerSection, RematPolicy
from trainer.kernels import projection
from trainer.models import decoder
from trainer.parallel import sharding
from trainer.parallel.grad_reduce import GradReduce
from trainer.program import program, step
from trainer.program.state import TrainState

V, T, ROWS = 96, 32, 16  # V: tokens that occur; the vocabulary is larger
BASE = {
  "model": {
    "base_emb_dim": 32,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "base_mlp_dim": 64,
    "head_dim": 8,
    "vocab_size": 4096,  # few tokens for a table of this size: slices exchange rows of its gradient, not the table
    "dtype": "float32",
    "initializer_range": 0.2,
    "attention": "dot_product",
    "remat_policy": "none",
  },
  "data": {"max_target_length": T, "per_device_batch_size": ROWS},
  "optimizer": {"learning_rate": 1e-2, "z_loss_multiplier": 1e-3, "warmup_steps_fraction": 0.0},
  "run": {"steps": 10},
}


def config(**changes) -> Config:
  """BASE with `section={key: value}` changes."""
  sections = {name: {**BASE.get(name, {}), **changes.get(name, {})} for name in {*BASE, *changes}}
  return Config.model_validate(sections)


def packed_batch(rows: int = ROWS, seed: int = 0) -> Batch:
  """Random documents packed into rows, with padding at the end of some, as numpy arrays [rows, T]."""
  rng = np.random.default_rng(seed)
  batch = Batch(*(np.zeros((rows, T), dtype) for dtype in (np.int32, np.int32, np.float32, np.int32, np.int32)))
  for row in range(rows):
    start, segment = 0, 1
    while start < T - 3 * (row % 3):
      end = min(T, start + int(rng.integers(4, 20)))
      n = end - start
      document = rng.integers(1, V, n + 1)
      batch.tokens[row, start:end], batch.targets[row, start:end] = document[:-1], document[1:]
      batch.weights[row, start:end] = 1.0
      batch.positions[row, start:end] = np.arange(n)
      batch.segment_ids[row, start:end] = segment
      start, segment = end, segment + 1
  return batch


def slices(shape: tuple[int, int]) -> list[list[jax.Device]]:
  """shape = (slices, devices of each)."""
  devices = jax.devices()[: shape[0] * shape[1]]
  return [devices[i * shape[1] : (i + 1) * shape[1]] for i in range(shape[0])]


class Compiled(NamedTuple):
  program: program.Program
  step: jax.stages.Compiled


def compiled(cfg: Config, where: tuple[int, int] = (1, 1), total: int | None = None) -> Compiled:
  prog = program.build(cfg, slices(where), total or where[0])
  return Compiled(prog, prog.compile())


def run(cfg: Config, where: tuple[int, int] = (1, 1), total: int | None = None) -> tuple[list, TrainState]:
  """Metrics of each of two steps on packed batches, and the final state on the host."""
  return two_steps(cfg, compiled(cfg, where, total))


def two_steps(cfg: Config, built: Compiled) -> tuple[list, TrainState]:
  """What `run` returns, with a compiled program."""
  state, history = fresh(cfg), []
  for index in range(2):
    metrics, state = one_step(state, built, packed_batch(seed=index))
    history.append(metrics)
  return history, state


def one_step(state: TrainState, built: Compiled, batch: Batch) -> tuple[dict[str, float], TrainState]:
  """The metrics of a step on a batch, and the state after it; both states are on the host."""
  rounds = []
  for rows, like in zip(built.program.plan.groups, built.program.batch):
    dealt = (np.where((rows >= 0).reshape(-1, 1), field[rows.reshape(-1)], 0) for field in batch)
    rounds.append(Batch(*(jax.device_put(x.reshape(a.shape), a.sharding) for x, a in zip(dealt, like))))
  values = built.program.schedule.placed(built.program.mesh)
  after, metrics = built.step(on_devices(state, built.program), tuple(rounds), values)
  return step.metric_values(metrics), jax.device_get(after)


def on_devices(state: TrainState, prog: program.Program) -> TrainState:
  """A copy of a state on the devices of a program: the step overwrites the state that it receives."""
  return jax.tree.map(lambda host, leaf: jax.device_put(np.array(host), leaf.sharding), state, prog.state)


SCALES = {"out": 0.5, "down": 0.5, "lm_head": 0.25}  # of weights, as in the real initialization


# The keys that an initial state depends on.
STATE_KEYS = resume.CHANGES_STATE | {"scan_layers", "weight_dtype", "mu_dtype", "initializer_range"}


def fresh(cfg: Config) -> TrainState:
  """An initial state, on the host. Shared by all configurations of equal states."""
  values = {**cfg.model.model_dump(mode="json"), **cfg.optimizer.model_dump(mode="json")}
  return _fresh(json.dumps({key: values[key] for key in sorted(STATE_KEYS & values.keys())}))


@functools.cache
def _fresh(values: str) -> TrainState:
  """values: JSON of the values of STATE_KEYS. numpy draws the weights: the real initialization takes a compilation."""
  given = json.loads(values)
  sections = {
    "model": {key: value for key, value in given.items() if key in ModelSection.model_fields},
    "optimizer": {key: value for key, value in given.items() if key in OptimizerSection.model_fields},
  }
  cfg = config(**sections)

  prog = program.build(cfg, slices((1, 1)), 1)

  def draw(path, leaf):
    parts = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if parts[-1] in ("scale", "load"):
      return np.ones(leaf.shape, leaf.dtype)
    layer = next((int(part) for part in parts if part.isdigit()), None)  # a layer of its own is one of the stacked ones
    shape = leaf.shape if layer is None else (cfg.model.num_decoder_layers, *leaf.shape)
    seed = zlib.crc32("/".join(part for part in parts if not part.isdigit()).encode())
    drawn = SCALES.get(parts[-1], 1) * cfg.model.initializer_range * np.random.default_rng(seed).standard_normal(shape)
    return (drawn if layer is None else drawn[layer]).astype(leaf.dtype)

  params = jax.tree_util.tree_map_with_path(draw, prog.state.params)
  zero = np.int32(0)
  return jax.device_get(TrainState(zero, params, jax.jit(prog.optimizer.init)(params), zero))


@functools.cache
def on_one_device() -> Compiled:
  """The program of the reference: one micro-batch, scanned layers, no remat."""
  return compiled(config())


@functools.cache
def reference() -> tuple[list, TrainState]:
  return two_steps(config(), on_one_device())


TIED = {"vocab_size": 513, "logits_via_embedding": True}  # 513 does not divide by any number of devices here
TABLE = {"vocab_size": V}  # a table so small that slices exchange all of it


@functools.cache
def tied_reference() -> tuple[list, TrainState]:
  """With SGD, whose state is the gradient of the first step and adds the second one."""
  return run(config(model=TIED, optimizer={"opt_type": "sgd"}))


@functools.cache
def muon_reference() -> tuple[list, TrainState]:
  return run(config(model=TABLE, optimizer={"opt_type": "muon"}))


@pytest.fixture
def by_rows(monkeypatch) -> list[bool]:
  """Whether slices exchange rows of the table's gradient: the decisions of the programs that the test builds."""
  decisions, decide = [], GradReduce.rows_are_smaller
  monkeypatch.setattr(GradReduce, "rows_are_smaller", lambda *args: decisions.append(decide(*args)) or decisions[-1])
  return decisions


def assert_close(got: tuple[list, TrainState], want: tuple[list, TrainState], tolerance: float) -> None:
  for ours, theirs in zip(got[0], want[0], strict=True):
    for key in ("loss", "z_loss", "grad_norm", "lr", "weights"):
      assert ours[key] == pytest.approx(theirs[key], rel=tolerance), key
  for ours, theirs in zip(jax.tree.leaves(got[1].params), jax.tree.leaves(want[1].params), strict=True):
    # Adam turns a gradient of rounding noise into a full step: compare where the weights are, not bit by bit.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-3 * np.abs(theirs).max() + 1e-6)
  # The moments are the gradients themselves, element by element, or their squares.
  for ours, theirs in zip(jax.tree.leaves(got[1].opt_state), jax.tree.leaves(want[1].opt_state), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def gradients(batch: Batch | None = None, accumulation: int = 1, **model) -> step.Sums:
  """The summed gradients themselves, before clipping and optimizer, of a batch of ROWS rows; layers stacked."""
  cfg = config(model=model)
  params = jax.tree.map(jnp.asarray, fresh(config()).params)
  if not cfg.model.scan_layers:
    params["layers"] = {str(i): jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(2)}
  batch = packed_batch() if batch is None else batch
  sums = gradient_program(cfg.model_dump_json())(params, jax.tree.map(lambda x: x.reshape(accumulation, -1, T), batch))
  return dataclasses.replace(sums, grads=stacked(sums.grads))


@functools.cache
def gradient_program(values: str) -> Callable[..., step.Sums]:
  """values: JSON of the configuration. Compiled once for all batches of one shape."""
  cfg = Config.model_validate_json(values)
  functional = program.build(cfg, slices((1, 1)), 1).model
  return jax.jit(functools.partial(step.loss_and_grads, functional, cfg.optimizer))


def stacked(tree):
  """A tree of weights, or a state, with its layers stacked as those of a scan."""
  holds_layers = lambda x: isinstance(x, dict) and "0" in x.get("layers", {})
  stack = lambda *layers: np.stack(layers)
  return jax.tree.map(
    lambda x: x | {"layers": jax.tree.map(stack, *(x["layers"][str(i)] for i in range(2)))} if holds_layers(x) else x,
    tree,
    is_leaf=holds_layers,
  )


plain_gradients = functools.cache(gradients)


def assert_same_sums(got: step.Sums, want: step.Sums, tolerance: float) -> None:
  """tolerance: of gradients, relative to the largest number of each array."""
  assert float(got.weight) == float(want.weight)
  assert float(got.loss) == pytest.approx(float(want.loss), rel=1e-6)
  for ours, theirs in zip(jax.tree.leaves(got.grads), jax.tree.leaves(want.grads), strict=True):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance * np.abs(theirs).max())


@pytest.mark.parametrize(
  "changes",
  [
    # Each named activation is recomputed by one of these policies and saved by the other. tests/kernels/test_remat.py
    # tests all policies. Offloading needs a memory space that the CPU compiler lacks: see test_tpu_compile.py there.
    {"scan_layers": False, "remat_policy": RematPolicy.FULL},
    {"accumulation": 4, "use_iota_embed": True, "remat_policy": RematPolicy.MINIMAL_WITH_CONTEXT},
  ],
  ids="-".join,
)
def test_the_gradients_themselves_are_the_same(changes):
  """The first step of Adam is nearly the gradient's sign: weights after it tell little about the gradient's size.

  Within 1e-6 of the largest number of each array, 2e-6 where rows are summed in another order.
  """
  assert_same_sums(gradients(**changes), plain_gradients(), 2e-6 if "accumulation" in changes else 1e-6)


def test_packed_documents_equal_documents_alone():
  """Each document in a row of its own, padded: the same sums of loss and the same gradients, within 2e-6."""
  packed = packed_batch(4)
  alone = []
  for row in range(4):
    for segment in range(1, packed.segment_ids[row].max() + 1):
      where = packed.segment_ids[row] == segment
      document = Batch(*(np.zeros(T, field.dtype) for field in packed))
      for field, source in zip(document, packed):
        field[: where.sum()] = source[row, where]
      document.segment_ids[: where.sum()] = 1
      alone.append(document)
  assert len(alone) > 4
  single = Batch(*(np.stack(field) for field in zip(*alone)))
  got, want = gradients(with_padding(packed)), gradients(with_padding(single))
  assert float(got.weight) == packed.weights.sum()
  assert_same_sums(got, want, 2e-6)


def with_padding(batch: Batch) -> Batch:
  """A batch with rows of padding, ROWS in all."""
  return Batch(*(np.concatenate([x, np.zeros((ROWS - len(x), T), x.dtype)]) for x in batch))


def test_padding_weighs_nothing():
  """Two halves of a batch, each with rows of padding, have the sums of the batch: the loss is per weighted token."""
  parts = [gradients(with_padding(Batch(*(x[rows] for x in packed_batch())))) for rows in (slice(8), slice(8, None))]
  assert_same_sums(jax.tree.map(jnp.add, *parts), plain_gradients(), 2e-6)


@functools.cache
def init_on_one_device() -> TrainState:
  return jax.device_get(program.build(config(), slices((1, 1)), 1).init(jax.random.key(3)))


@pytest.mark.parametrize("name", few(["all"], ["fsdp", "all"]))
def test_a_fresh_state_is_the_same_on_every_mesh(name):
  where, parallelism = MESHES[name]
  cfg = config(data={"per_device_batch_size": ROWS / math.prod(where)}, parallelism=parallelism)
  state = program.build(cfg, slices(where), where[0]).init(jax.random.key(3))
  for ours, theirs in zip(jax.tree.leaves(state), jax.tree.leaves(init_on_one_device()), strict=True):
    np.testing.assert_array_equal(ours, theirs)


MESHES = {
  "fsdp": ((1, 8), {}),
  "data-inside": ((1, 8), {"ici_fsdp_parallelism": 2}),
  "slices": ((4, 2), {}),
  "all": ((2, 4), {"ici_tensor_parallelism": 2, "ici_context_parallelism": 2}),
  "fsdp-across": ((2, 2), {"dcn_fsdp_parallelism": 2}),
}


@pytest.mark.parametrize("wide_units", few([True], [False, True]))
def test_matmuls_as_on_tpus_and_weights_gathered_in_two_stages_are_the_same(wide_units, monkeypatch):
  """Gate and up are one matmul; on chips with wide units they are two. Some slices gather weights in two stages:

  two neighbours of the four along fsdp first (`sharding.first_stage`).
  """
  choose = projection.choose
  monkeypatch.setattr(program.projection, "choose", lambda _, *others: choose("tpu", *others[:-1], wide_units))
  monkeypatch.setattr(program.sharding, "first_stage", lambda mesh, width: mesh.shape["fsdp"] // 2)
  cfg = config(data={"per_device_batch_size": ROWS / 8}, parallelism={"ici_tensor_parallelism": 2})
  built = compiled(cfg, (1, 8))
  project = built.program.model.kernels.project
  assert project.first_stage == 2
  assert (project.wide_units, project.fuses_shared_input) == (wide_units, not wide_units)
  assert_close(two_steps(cfg, built), reference(), 5e-6)


@pytest.mark.parametrize(
  "kind, num_slices, shape, width, first",
  [
    ("TPU v5 lite", 2, (8, 8), 2560, 1),
    ("TPU v5 lite", 2, (16, 16), 5120, 16),  # shards of 20 rows
    ("TPU v5p", 2, (4, 4, 8), 4096, 1),
    ("TPU v5p", 1, (4, 4, 8), 5120, 8),  # shards of 40 rows
    ("TPU v4", 2, (4, 4, 4), 2560, 4),
    ("TPU v5 lite", 1, (1, 1), 8, 1),
    ("cpu", 1, (16, 16), 5120, 1),
  ],
)
def test_gathers_have_two_stages_where_the_compiler_would_make_all_reduces(kind, num_slices, shape, width, first):
  """That is, where shards do not fill tiles, and lines of devices have wraparounds (from 256 and 64 chips on)."""
  assert sharding.first_stage(tpu_mesh(num_slices, shape, kind), width) == first


def tpu_mesh(num_slices: int, shape: tuple[int, ...], kind: str = "TPU v5 lite") -> types.SimpleNamespace:
  """A mesh whose axis fsdp has all devices of a TPU slice with this shape, row by row."""
  coords = list(np.ndindex(*shape, *(1,) * (3 - len(shape))))
  devices = [
    types.SimpleNamespace(coords=place, slice_index=i, device_kind=kind) for i in range(num_slices) for place in coords
  ]
  sizes = (num_slices, len(coords), 1, 1)
  return types.SimpleNamespace(
    devices=np.array(devices).reshape(sizes), axis_names=AXES, shape=dict(zip(AXES, sizes, strict=True))
  )


@pytest.mark.parametrize(
  "shape, tokens, vocab, neighbours",
  [
    ((4, 4), 2048, 32000, 4),
    ((4, 4), 2048, 151936, 1),  # rows are as many as tokens
    ((8, 8), 2048, 128256, 8),
    ((1, 1), 2048, 151936, 1),
  ],
)
def test_neighbours_gather_rows_of_the_head_where_tokens_are_many(shape, tokens, vocab, neighbours):
  for num_slices in (1, 2):
    mesh = tpu_mesh(num_slices, shape)
    assert sharding.head_neighbours(mesh, tokens, vocab) == neighbours
    mesh.shape["tensor"] = 2
    assert sharding.head_neighbours(mesh, tokens, vocab) == 1


def test_neighbours_that_gather_rows_of_the_head_exchange_fewer_tokens(monkeypatch):
  """Of 8 shards, 2 neighbours have the same rows of the head: gathers of tokens have half of the batch, not all of it.

  And the step equals that on one device. Large slices of TPUs need this form: see `sharding.head_neighbours`. The
  head is tied, and its vocabulary does not divide by the shards: it is padded for the loss only.
  """
  monkeypatch.setattr(program.sharding, "head_neighbours", lambda *_: 2)
  cfg = config(model=TIED, data={"per_device_batch_size": ROWS / 8}, optimizer={"opt_type": "sgd"})
  built = compiled(cfg, (1, 8))
  got = two_steps(cfg, built)
  assert got[1].params["embedding"].shape == (513, 32)
  assert_close(got, tied_reference(), 5e-6)
  gathered = re.findall(r"= f32\[(\d+),32,32\]\S* all-gather\(.*/linear_cross_entropy/", built.step.as_text())
  assert set(gathered) == {str(ROWS // 2)}


@pytest.mark.soak
@pytest.mark.parametrize("name", few(["all"], ["all", "data-inside"]))
def test_muon_sharded_equals_muon_unsharded(name, by_rows):
  where, parallelism = MESHES[name]
  data = {"per_device_batch_size": ROWS / math.prod(where)}
  cfg = config(model=TABLE, data=data, parallelism=parallelism, optimizer={"opt_type": "muon"})
  assert_close(run(cfg, where), muon_reference(), 5e-6)
  assert by_rows and not any(by_rows)


REDUCED = {
  "rows, accumulated, unrolled": {"scan_layers": False, "remat_policy": "full"},
  "table, accumulated, iota": {"use_iota_embed": True},
}


@pytest.mark.parametrize("name", few(["table, accumulated, iota"], REDUCED))
def test_gradients_reduced_in_the_backward_pass_equal_those_of_one_device(name, by_rows):
  """Of a tied table with padding, in two of four slices."""
  model = TIED | REDUCED[name]
  cfg = config(model=model, data={"per_device_batch_size": ROWS / 8}, optimizer={"opt_type": "sgd"})
  history, state = run(cfg, (2, 2), total=4)
  assert any(by_rows) == name.startswith("rows")
  assert_close((history, stacked(state)), tied_reference(), 5e-6)


def test_gradients_that_travel_in_bfloat16_are_rounded_once_per_slice(by_rows):
  where, _ = MESHES["slices"]
  rows = {"per_device_batch_size": ROWS / math.prod(where)}
  changes = {"opt_type": "sgd", "grad_reduce_dtype": "bfloat16"}
  metrics, state = run(config(model=TIED, data=rows, optimizer=changes), where)
  assert any(by_rows)
  exact, wanted = tied_reference()
  assert metrics[0]["loss"] == pytest.approx(exact[0]["loss"], rel=5e-6)
  assert metrics[0]["grad_norm"] != exact[0]["grad_norm"]
  assert metrics[0]["grad_norm"] == pytest.approx(exact[0]["grad_norm"], rel=2**-8)
  before = jax.tree.leaves(fresh(config(model=TIED, optimizer={"opt_type": "sgd"})).params)
  for ours, theirs, start in zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted.params), before, strict=True):
    # Sums in another order would differ far less.
    assert 2**-12 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs - start) < 2**-7


def test_a_step_that_is_not_finite_changes_nothing_but_the_counters():
  prog, compiled = on_one_device()
  place = lambda batch: (Batch(*(jax.device_put(x[None], a.sharding) for x, a in zip(batch, prog.batch[0]))),)
  before, values = fresh(config()), prog.schedule.placed(prog.mesh)
  good = packed_batch()
  bad = good._replace(weights=np.where(good.weights > 0, np.inf, 0).astype(np.float32))
  state, metrics = compiled(on_devices(before, prog), place(bad), values)
  assert step.metric_values(metrics)["skipped"] == 1 and int(state.step) == 1
  jax.tree.map(
    np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), (before.params, before.opt_state)
  )
  state, metrics = compiled(state, place(bad), values)
  assert step.metric_values(metrics)["skipped"] == 2
  state, metrics = compiled(state, place(good), values)
  values = step.metric_values(metrics)
  assert values["skipped"] == 0 and math.isfinite(values["loss"])
  assert not np.array_equal(state.params["embedding"], before.params["embedding"])


def test_sizes_that_do_not_fit_are_refused():
  with pytest.raises(ConfigError, match=r"'embed' of size 32 .* 'fsdp' \(3 ways\)"):
    program.build(config(model=TABLE, data={"per_device_batch_size": 3}), slices((1, 3)), 1)
  with pytest.raises(ConfigError, match="does not divide over data=1 x fsdp=4"):
    program.build(config(data={"per_device_batch_size": 0.5}), slices((1, 4)), 1)
  tensor = config(data={"per_device_batch_size": 0.25}, parallelism={"ici_tensor_parallelism": 2})
  with pytest.raises(ConfigError, match=r"1 examples .* over data=1 x fsdp=2 ways\. .* a multiple of 1/2\."):
    program.build(tensor, slices((1, 4)), 1)
  with pytest.raises(ConfigError, match=r"the product 3 must divide the 2 devices per slice"):
    program.build(config(parallelism={"ici_fsdp_parallelism": 3}), slices((1, 2)), 1)
  with pytest.raises(ConfigError, match="whole number"):
    program.build(config(data={"per_device_batch_size": 0.3}), slices((1, 2)), 1)


@pytest.mark.parametrize(
  ("optimizer", "mu_dtype", "scan_layers"),
  few(
    [("adamw", "", True), ("adafactor", "", False), ("muon", "float32", True), ("sgd", "float32", False)],
    [
      ("adamw", "", True),
      ("adamw", "float32", False),
      ("adafactor", "", True),
      ("adafactor", "", False),
      ("muon", "", False),
      ("muon", "float32", True),
      ("sgd", "", True),
      ("sgd", "float32", False),
    ],
  ),
)
def test_bfloat16_weights_keep_the_types_of_the_state(optimizer, mu_dtype, scan_layers):
  """The step is compiled once, so its output must have the types of its input. Second moments are float32."""
  keys = {"opt_type": optimizer, "mu_dtype": mu_dtype}
  cfg = config(model={"weight_dtype": "bfloat16", "scan_layers": scan_layers}, optimizer=keys)
  prog = program.build(cfg, slices((1, 1)), 1)
  types = lambda state: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state)
  after, _ = jax.eval_shape(prog.train_step, prog.state, prog.batch, prog.schedule.abstract(prog.mesh))
  assert types(after) == types(prog.state)
  for path, leaf in jax.tree_util.tree_leaves_with_path(after.params):
    assert leaf.dtype == ("float32" if "scale" in jax.tree_util.keystr(path) else "bfloat16"), path
  moments = [leaf.dtype for leaf in jax.tree.leaves(after.opt_state) if leaf.ndim]
  if optimizer in ("adamw", "muon"):
    assert set(moments) == {jnp.dtype("float32"), jnp.dtype(mu_dtype or "bfloat16")}
  else:
    assert set(moments) == {jnp.dtype(mu_dtype or {"adafactor": "float32", "sgd": "bfloat16"}[optimizer])}


@functools.cache
def in_bfloat16() -> tuple[list, TrainState]:
  """The reference with weights and computation in bfloat16."""
  return run(config(model=BFLOAT16))


BFLOAT16 = {"dtype": "bfloat16", "weight_dtype": "bfloat16"}


def test_a_frequent_tokens_gradient_adds_up_whatever_the_type_of_the_weights():
  """4,096 rows of 1: in bfloat16 they would add up to 256."""
  tokens = jnp.zeros((16, 256), jnp.int32)
  for dtype in (jnp.float32, jnp.bfloat16):
    total = lambda table: jnp.sum(decoder._lookup(table, tokens, "bfloat16", False).astype(jnp.float32))
    grads = jax.jit(jax.grad(total))(jnp.ones((3, 2), dtype))
    assert grads.dtype == dtype and grads.tolist() == [[4096, 4096], [0, 0], [0, 0]]


@pytest.mark.soak
def test_norms_learn_where_weights_are_bfloat16():
  """They have digits that bfloat16 lacks: next to 1.0 its numbers are 4e-3 and 8e-3 apart."""
  _, state = in_bfloat16()
  scale = state.params["final_norm"]["scale"]
  assert scale.dtype == jnp.float32 and (scale != scale.astype(jnp.bfloat16).astype(np.float32)).all()
