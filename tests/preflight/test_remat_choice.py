"""remat_policy=auto: what is chosen, and that a run keeps it. With a fake compiler, CPU steps and the real command."""

from __future__ import annotations

import types

import jax
import pytest

from stepcost import chips
from trainer import config as config_lib
from trainer.cluster.simulated import SimulatedCluster
from trainer.config.errors import ConfigError
from trainer.config.schema import RematPolicy
from trainer.preflight import analysis, remat_choice
from trainer.preflight.analysis import Memory, Refused
from trainer.preflight.remat_choice import CANDIDATES
from trainer.world import SingleWorld

KEYS = (
  "configs/base.yml run_name=run dataset_type=synthetic base_emb_dim=16 base_num_decoder_layers=2 base_mlp_dim=32 "
  "base_num_query_heads=2 base_num_kv_heads=1 head_dim=8 vocab_size=64 max_target_length=64 per_device_batch_size=4 "
  "dtype=float32 opt_type=sgd remat_policy=auto elastic_enabled=true"
).split()
V5E = chips.find("v5e")
TPU = [[types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite", coords=(0, 0, 0))]]


def load(*keys):
  return config_lib.load([*KEYS, "base_output_directory=unused", "jax_cache_dir=", *keys], check_paths=False)


@pytest.fixture
def compiler(monkeypatch):
  """A TPU compiler that is given milliseconds, and GB on all slices, by policy. `tried` lists what it compiled."""
  fake = types.SimpleNamespace(milliseconds={}, gigabytes={}, more=0.0, tried=[])

  def analyse(config, slices, total):
    policy = config.model.remat_policy
    fake.tried.append((policy, len(slices)))
    used = fake.gigabytes[policy] + fake.more * (len(slices) < total)
    if used > 30:
      return Refused(len(slices), "a bug")
    if used > 20:
      return Refused(len(slices), "Used 20G of 15.75G hbm", too_large=True)
    found = object.__new__(analysis.Analysis)
    found.__dict__.update(memory=Memory(int(used * 1e9), 0, 0, 0, 0, 0), policy=policy)
    return found

  def timeline(found, chip):
    assert chip == V5E
    return types.SimpleNamespace(seconds=fake.milliseconds[found.policy] / 1e3, computed=0.0)

  monkeypatch.setattr(analysis, "analyse", analyse)
  monkeypatch.setattr(analysis, "timeline", timeline)
  return fake


# Milliseconds in the order of CANDIDATES, as estimated for qwen3-0.6b on v5e-16 with one example of 2,048 tokens, with
# one of 8,192 tokens, and for a step in which recomputation is expensive.
SHORT, LONG, FALLING = (121, 120, 123, 125, 123, 130), (587, 582, 570, 555, 546, 596), (60, 50, 40, 30, 20, 10)


@pytest.mark.parametrize(
  ("milliseconds", "gigabytes", "chosen", "compiled"),
  [
    (SHORT, (1, 2, 3, 4, 5, 6), "save_out_proj", 6),
    (LONG, (1, 2, 3, 4, 5, 6), "minimal_with_context", 6),
    (LONG, (4, 8, 12, 16, 25, 28), "save_dot_with_context_except_mlp", 5),
    (FALLING, (1, 2, 3, 4, 5, 6), "none", 6),
    (FALLING, (10, 18, 19, 20, 25, 28), "full", 2),  # a v5e has 17.2 GB
    (FALLING, (10, 31, 12, 13, 14, 21), "minimal_with_context", 6),  # one is refused for another reason
  ],
)
def test_on_tpus_the_shortest_estimated_step_that_fits(compiler, milliseconds, gigabytes, chosen, compiled):
  compiler.milliseconds = dict(zip(CANDIDATES, milliseconds))
  compiler.gigabytes = dict(zip(CANDIDATES, gigabytes))
  choice, candidates = remat_choice.choose(load(), [TPU])
  assert choice.policy == chosen
  assert [c.policy for c in candidates] == [policy for policy, _ in compiler.tried] == list(CANDIDATES[:compiled])
  assert str(choice).startswith(f"remat_policy=auto: {chosen}, the shortest of ")


def test_the_choice_also_fits_with_one_slice_lost(compiler):
  """Gradients of an earlier micro-batch need memory then. Policies that do not fit there are not compiled for all."""
  compiler.milliseconds = dict(zip(CANDIDATES, FALLING))
  compiler.gigabytes = dict(zip(CANDIDATES, (1, 5, 10, 15, 16, 17)))
  compiler.more = 5.0
  choice, candidates = remat_choice.choose(load(), [TPU * 3, TPU * 2])
  assert choice.policy is RematPolicy.SAVE_DOT_EXCEPT_MLP
  too_large = RematPolicy.SAVE_DOT_WITH_CONTEXT_EXCEPT_MLP
  assert compiler.tried[-3:] == [(choice.policy, 2), (choice.policy, 3), (too_large, 2)]
  assert candidates[-1].problem == "needs 18.63 GiB of 16.00 GiB"
  assert remat_choice.needs_fewer(load("elastic_min_slice_count=2"), 3)
  assert not remat_choice.needs_fewer(load("elastic_min_slice_count=2"), 2)
  assert not remat_choice.needs_fewer(load("elastic_min_slice_count=-1"), 3)
  assert not remat_choice.needs_fewer(load("elastic_min_slice_count=1", "elastic_enabled=false"), 3)


@pytest.fixture
def cluster():
  return SimulatedCluster({i: (jax.devices()[i],) for i in range(2)})


def resolve(config, cluster):
  """(chosen policy, the line for the log, the announcements of compilations)."""
  notes = []
  resolved, line = remat_choice.resolve(config, cluster, notes.append)
  assert resolved == config.with_values(remat_policy=resolved.model.remat_policy)
  return resolved.model.remat_policy, line, notes


@pytest.fixture
def chooses(monkeypatch):
  """choose() returns the policies of this list, one after the other, and compiles nothing."""
  policies = []
  choose = lambda config, slice_sets: (remat_choice.Choice(policies.pop(0), "a reason"), [])
  monkeypatch.setattr(remat_choice, "choose", choose)
  return policies


def test_all_processes_use_the_choice_of_the_primary(chooses):
  class Secondary(SingleWorld):
    rank, size, is_primary = 1, 2, False

    def __init__(self):
      self.primary = [[None, ""], ["none", "a reason"]]

    def gather(self, value):
      return [[True, self.primary.pop(0)], value]

  chooses[:] = [RematPolicy.FULL]
  assert resolve(load(), SimulatedCluster({0: (jax.devices()[0],)}, Secondary()))[0] is RematPolicy.NONE


@pytest.mark.parametrize(
  ("text", "policy"), [("remat_policy: save_out_proj\n", RematPolicy.SAVE_OUT_PROJ), ("remat_policy: custom\n", None)]
)
def test_a_run_keeps_a_policy_that_auto_can_have_chosen(cluster, chooses, tmp_path, text, policy):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.yml").write_text(text)
  chooses[:] = [RematPolicy.FULL]
  config = load(f"base_output_directory={tmp_path}")
  assert resolve(config, cluster)[0] is (policy or RematPolicy.FULL)
  (tmp_path / "run" / "config.yml").write_text("[")
  with pytest.raises(ConfigError, match="line 1: not valid YAML"):
    resolve(config, cluster)
