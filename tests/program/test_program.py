"""The program of a set of slices: batch sizes, what is refused, that nothing is allocated, and how rows are placed."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from input_pipeline.batch import Batch
from trainer.config import compiler_flags
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, ModelSection
from trainer.program import program, state
from trainer.program.feed import Feed
from trainer.program.step import abstract_sums

T = 16
MODEL = {
  "base_emb_dim": 32,
  "base_num_decoder_layers": 1,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "base_mlp_dim": 64,
  "head_dim": 8,
  "vocab_size": 64,
}


def config(per_device_batch_size: float = 2, accumulation: int = 1, **parallelism: int) -> Config:
  return Config.model_validate({
    "model": MODEL,
    "data": {"max_target_length": T, "per_device_batch_size": per_device_batch_size},
    "optimizer": {"gradient_accumulation_steps": accumulation},
    "parallelism": parallelism,
  })  # fmt: skip


def build(cfg: Config, alive: int, total: int, per_slice: int = 2) -> program.Program:
  devices = jax.devices()
  return program.build(cfg, [devices[i * per_slice : (i + 1) * per_slice] for i in range(alive)], total)


@dataclasses.dataclass
class NumberedLoader:
  """A loader whose example `row` of batch `index` consists of the number 1000 * index + row; keeps what was read."""

  read: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list)

  def batch(self, index: int, rows: np.ndarray) -> Batch:
    self.read.append((index, rows.tolist()))
    numbers = np.where(rows >= 0, 1000 * index + rows, 0)[:, None] + np.zeros((1, T))
    return Batch(*(numbers.astype(field.dtype) for field in build(config(), 1, 1).batch[0]))


@pytest.mark.parametrize(
  ("share", "slices", "devices", "accumulation", "size"),
  [(2, 3, 4, 1, 24), (0.25, 2, 4, 1, 2), (1, 2, 2, 8, 32), (0.5, 1, 2, 3, 3)],
)
def test_the_global_batch_is_share_x_devices_x_slices_x_accumulation(share, slices, devices, accumulation, size):
  assert program.global_batch_size(config(share, accumulation), slices, devices) == size


@pytest.mark.parametrize(("share", "devices"), [(0.3, 2), (0.25, 2), (1.5, 1)])
def test_a_share_of_an_example_is_refused_with_the_shares_that_work(share, devices):
  with pytest.raises(ConfigError, match=rf"per_device_batch_size={share} x {devices} .* Choose "):
    program.rows_per_micro_batch(config(share), devices)


TPU, SPARSECORE = program.TPU_OPTIONS, program.SPARSECORE_OPTIONS


def memory(mib: int) -> dict[str, str]:
  return {compiler_flags.ON_CHIP_MEMORY_OPTION: str(mib * 1024)}


@pytest.mark.parametrize(
  "platform, kind, width, options",
  [
    ("cpu", "cpu", 8192, {}),
    ("gpu", "NVIDIA H100 80GB HBM3", 8192, {}),
    ("tpu", "TPU v4", 8192, TPU),
    ("tpu", "TPU v5 lite", 2048, TPU),
    ("tpu", "TPU v5 lite", 2560, {**TPU, **memory(64)}),
    ("tpu", "TPU v5 lite", 4096, {**TPU, **memory(48)}),
    ("tpu", "TPU v5p", 1024, {**TPU, **SPARSECORE}),
    ("tpu", "TPU v5p", 8192, {**TPU, **SPARSECORE, **memory(64)}),
    ("tpu", "TPU v6 lite", 4096, {**TPU, **SPARSECORE, **memory(64)}),
    ("tpu", "TPU7x", 2048, TPU),
    ("tpu", "TPU7x", 4096, {**TPU, **memory(60)}),
    ("tpu", "TPU of tomorrow", 8192, TPU),
  ],
)
def test_tpus_get_compiler_options_and_given_flags_replace_them(platform, kind, width, options):
  device = types.SimpleNamespace(platform=platform, device_kind=kind)
  model = ModelSection(base_emb_dim=width)
  assert program.compiler_options(device, model, {}) == options
  given = dict.fromkeys(options, "other") | {"xla_other": True}
  assert program.compiler_options(device, model, given) == given


def test_halves_are_compiled_for_the_same_bits_on_all_slices(monkeypatch):
  """Shares, their sums, evaluations, and the update, which each slice does for itself."""
  compiled: list[dict[str, object]] = []
  compile_nothing = lambda lowered, options=None: compiled.append(dict(options or {}))
  monkeypatch.setattr(jax.stages.Lowered, "compile", compile_nothing)
  (flag,) = same = program.SAME_BITS["gpu"]
  prog = build(config(), 1, 1)

  def options(*, adds: bool, **given: object) -> list[dict[str, object]]:
    compiled.clear()
    dataclasses.replace(prog, compiler_options=given).compile_halves(evaluates=True, adds=adds)
    share, *additions, update, evaluation, _ = compiled
    assert len(additions) == adds
    return [share, update, evaluation]

  assert options(adds=False) == [{}, {}, {}]  # other platforms need none
  monkeypatch.setattr(program, "SAME_BITS", {"cpu": same})
  assert options(adds=True) == [same, same, same]
  faster = {flag: False}  # a user may give the same bits of shares up
  assert options(adds=False, **faster) == [faster, same, same]


def test_the_digest_of_a_witness_sees_each_bit_and_each_place_and_no_sharding():
  numbers = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
  expected = np.asarray(state.digest([numbers, numbers[0].astype(jnp.bfloat16)]))
  assert expected[0, 1] == sum(map(int.bit_count, numbers.view(np.uint32).reshape(-1).tolist()))
  two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
  placed = jax.device_put(numbers, jax.sharding.NamedSharding(two, jax.sharding.PartitionSpec("x")))
  assert np.array_equal(jax.jit(state.digest)([placed])[0], expected[0])
  damaged, moved = numbers.copy(), numbers[::-1].copy()
  damaged.view(np.uint32).flat[-1] ^= 1 << 31
  found, of_moved = (np.asarray(state.digest([array]))[0].astype(int) for array in (damaged, moved))
  assert found[0] != expected[0, 0] and abs(found[1] - int(expected[0, 1])) == 1
  assert of_moved[0] != expected[0, 0] and of_moved[1] == expected[0, 1]


def test_the_checksum_of_weights_sees_each_bit_and_no_sharding():
  numbers = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
  weights = {"a": numbers, "b": numbers[0].astype(jnp.bfloat16)}
  expected = int(numbers.view(np.uint32).astype(np.uint64).sum() + weights["b"].view(np.uint16).sum()) % 2**32
  assert int(state.checksum(weights)) == expected
  two = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
  place = lambda array: jax.device_put(array, jax.sharding.NamedSharding(two, jax.sharding.PartitionSpec("x")))
  assert int(jax.jit(state.checksum)(jax.tree.map(place, weights))) == expected
  for name, bits in {"a": np.uint32, "b": np.uint16}.items():
    damaged = weights[name].copy()
    damaged.view(bits).flat[-1] ^= 1
    assert int(state.checksum(weights | {name: damaged})) != expected


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_runs_with_other_rates_warm_ups_and_decays_have_the_same_program(kind):
  """So a sweep over them compiles once. Before, each of these values was a constant of the program."""
  sections = [
    {"learning_rate": 1e-3},
    {"learning_rate": 2e-4, "warmup_steps_fraction": 0.3, "learning_rate_final_fraction": 0.5},
    {"warmup_steps_fraction": 0.0, "learning_rate_schedule_steps": 77, "wsd_decay_steps_fraction": 0.5},
  ]
  texts = set()
  for section in sections:
    prog = build(config().with_values(lr_schedule_type=kind, **section), 2, 2)
    halves = jax.jit(prog.apply_sums).lower(prog.state, abstract_sums(prog.state, prog.mesh), np.zeros(7, np.float32))
    texts.add(prog.lower().as_text() + halves.as_text())
  assert len(texts) == 1


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("alive", [1, 2, 3])
def test_the_feed_deals_every_row_of_the_global_batch_to_the_slices_alive(alive, accumulation):
  """Whatever number of slices is alive: each example once, and only padding (0) besides."""
  prog = build(config(2, accumulation), alive, 3)
  loader = NumberedLoader()
  rounds = Feed(loader, prog)(5)
  rows = 2 * 2 * 3 * accumulation
  for batch, group, abstract in zip(rounds, prog.plan.groups, prog.batch, strict=True):
    assert batch.tokens.shape == (len(group), group[0].size, T)
    for host, like in zip(batch, abstract):
      assert host.sharding == like.sharding and host.dtype == like.dtype
  numbers = np.concatenate([np.asarray(batch.tokens)[..., 0].ravel() for batch in rounds])
  assert sorted(numbers[numbers > 0]) == [5000 + row for row in range(rows)]
  planned = prog.plan.rows.ravel()
  np.testing.assert_array_equal(numbers, np.where(planned >= 0, 5000 + planned, 0))
  assert loader.read == [(5, planned.tolist())]
