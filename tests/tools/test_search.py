"""The search of preflight, with a fake compiler that knows only how much memory a batch needs."""

from __future__ import annotations

import collections
import dataclasses
import types

import pytest

from stepcost import chips, costs, hlo
from trainer.config import load
from trainer.config.errors import ConfigError
from trainer.config.schema import RematPolicy
from trainer.preflight import search
from trainer.preflight.analysis import Analysis, Memory, Refused
from trainer.preflight.remat_choice import CANDIDATES

CHIP = chips.Chip("test", (), 1e12, 1000, 1e9, 1e9)
# Bytes per example, by policy.
NEEDED = dict(zip(CANDIDATES, (100, 200, 300, 400, 500, 600)))


def moving(traffic):
  """A program whose memory traffic is `traffic` bytes, and that does nothing else."""
  array = f"s8[{int(traffic) // 2}]{{0}}"
  return hlo.parse(
    f"HloModule m\n\nENTRY %main (p: {array}) -> {array} {{\n  %p = {array} parameter(0)\n"
    f"  ROOT %c = {array} copy(%p)\n}}\n"
  )


def compiler(tried, divides=lambda batch: batch >= 1):
  def attempt(policy, batch):
    if not divides(batch):
      raise ConfigError("a slice's micro-batch must be a whole number of at least 1")
    tried.append((policy, batch))
    used = int(NEEDED.get(policy, 100) * batch)
    if used > CHIP.hbm_bytes:
      return Refused(1, "too much", too_large=True)
    nothing = costs.Costs({}, 0.0, 0.0, 0.0, 0)
    memory = Memory(used, 0, 0, 0, 0, 0)
    return Analysis(
      *(1, 1, 1, 1, "test", {}, "", 1, memory, 0.0, 0.0, nothing, (), (), moving(1e6), (0,), "default"),
      *(0.0, int(batch) * 8, 0.0, 0.0, True),
    )

  return attempt


def found(attempt, batch, own=None):
  """{batch: policies of its candidates}"""
  policies = collections.defaultdict(list)
  for candidate in search.candidates(attempt, batch, CHIP, own):
    policies[candidate.per_device_batch_size].append(candidate.policy)
  return policies


def test_larger_batches_until_nothing_fits():
  tried = []
  assert found(compiler(tried), 2, RematPolicy.CUSTOM) == {
    2: [RematPolicy.CUSTOM, *CANDIDATES[:5]],
    4: [RematPolicy.CUSTOM, *CANDIDATES[:2]],
    8: [RematPolicy.CUSTOM, *CANDIDATES[:1]],
    1: [RematPolicy.CUSTOM, *CANDIDATES],
  }
  assert max(batch for _, batch in tried) == 16


def test_smaller_batches_where_the_given_one_does_not_fit():
  """And no larger batch is tried, because it cannot fit."""
  tried = []
  assert found(compiler(tried), 32) == {8: list(CANDIDATES[:1]), 4: list(CANDIDATES[:2])}
  assert [batch for _, batch in tried] == [32, 16, 8, 8, 4, 4, 4]


def test_smaller_batches_as_long_as_they_are_faster():
  """Here recomputation is expensive. The batch with room to save everything is the fastest; no smaller one is tried."""
  slower = dict(zip(CANDIDATES, (32, 16, 8, 4, 2, 1)))

  def attempt(policy, batch):
    finding = compiler([])(policy, batch)
    if isinstance(finding, Refused):
      return finding
    return dataclasses.replace(finding, module=moving(1e6 * batch * slower[policy]))

  assert {batch: policies[-1] for batch, policies in found(attempt, 8).items()} == {
    8: RematPolicy.FULL,
    4: RematPolicy.SAVE_OUT_PROJ,
    2: RematPolicy.MINIMAL_WITH_CONTEXT,
    1: RematPolicy.NONE,
  }


def test_smaller_batches_end_where_they_do_not_divide():
  tried = []
  assert found(compiler(tried, divides=lambda batch: batch >= 16), 64, RematPolicy.CUSTOM) == {}
  assert min(batch for _, batch in tried) == 16


def test_doublings_are_limited():
  tried = []
  unlimited = compiler(tried, divides=lambda batch: True)
  assert list(found(unlimited, 2**-10)) == [2**-10 * 2**n for n in range(search.MAX_DOUBLINGS + 1)]


def test_a_program_that_the_compiler_refuses_is_not_a_candidate():
  fits = compiler([])
  refused = lambda policy, batch: Refused(1, "a bug") if policy is RematPolicy.SAVE_OUT_PROJ else fits(policy, batch)
  assert found(refused, 4) == {4: [RematPolicy.FULL], 8: [RematPolicy.FULL], 2: [CANDIDATES[0], *CANDIDATES[2:5]]}


def test_a_configured_batch_that_does_not_divide_is_an_error():
  with pytest.raises(ConfigError, match="micro-batch"):
    found(compiler([]), 0.5)


def test_a_suggestion_also_fits_with_one_slice_lost(monkeypatch):
  """With one slice lost, a device also holds the gradients of another micro-batch: here 500 bytes."""
  tried = []

  def analyse(config, slices, total):
    policy, batch = config.model.remat_policy, config.data.per_device_batch_size
    more = 500 / NEEDED[policy] if len(slices) < total else 0
    found = compiler([], divides=lambda batch: True)(policy, batch + more)
    tried.append((len(slices), policy, batch, isinstance(found, Analysis)))
    return found

  monkeypatch.setattr(search, "analyse", analyse)
  keys = ["run_name=t", "base_output_directory=x", "per_device_batch_size=1"]
  config = load(["configs/base.yml", *keys], check_paths=False)
  slices = [[types.SimpleNamespace(platform="cpu")]] * 3

  def suggested(*slice_sets):
    tried.clear()
    return search.lines(config, slice_sets, CHIP)[0]

  assert "remat_policy=full per_device_batch_size=8 is the fastest candidate that fits" in suggested(slices)
  assert "remat_policy=full per_device_batch_size=4 is the fastest candidate that fits" in suggested(slices, slices[:2])
  on_two = [key for count, *key, fits in tried if count == 2 and fits]
  assert [key for count, *key, _ in tried if count == 3] == on_two, "compile for three what fits on two"


@pytest.mark.parametrize(("own", "tried"), [(1, [2, 4, 8]), (2, [1, 4, 8])])
def test_groups_of_experts_grow_as_long_as_they_are_faster(own, tried):
  """Groups of four are the fastest here."""
  groups = []

  def compile_step(policy, batch, ways):
    groups.append(ways)
    return dataclasses.replace(compiler([])(policy, batch), module=moving(1e6 * {1: 4, 2: 3, 4: 2, 8: 5}[ways]))

  start = next(search.candidates(lambda *key: compile_step(*key, own), 1, CHIP))
  groups.clear()
  best = dataclasses.replace(start, expert_parallelism=own)
  found = list(search.expert_groups(compile_step, best, 128, CHIP))
  assert groups == [candidate.expert_parallelism for candidate in found] == tried
  assert max(found, key=lambda c: c.tokens_per_second).expert_parallelism == 4


def test_groups_of_experts_end_where_they_do_not_divide():
  config = load(["configs/quickstart_experts.yml", "ici_fsdp_parallelism=6"], check_paths=False)
  grouped = search.with_groups(config, 2).parallelism
  assert (grouped.ici_fsdp_parallelism, grouped.ici_expert_parallelism) == (3, 2)
  with pytest.raises(ConfigError, match="cannot be divided for ici_expert_parallelism=4"):
    search.with_groups(config, 4)


def test_the_configured_policy_is_tried_and_refusals_are_printed(monkeypatch):
  def analyse(config, slices, total):
    policy, batch = config.model.remat_policy, config.data.per_device_batch_size
    if policy is RematPolicy.SAVE_OUT_PROJ:
      return Refused(1, "a bug")
    finding = compiler([], divides=lambda batch: True)(policy, batch)
    slower = policy is RematPolicy.CUSTOM and isinstance(finding, Analysis)
    return dataclasses.replace(finding, module=moving(2e6)) if slower else finding

  monkeypatch.setattr(search, "analyse", analyse)
  keys = ["run_name=t", "base_output_directory=x", "per_device_batch_size=4", "remat_policy=custom", "mlpwo=offload"]
  config = load(["configs/base.yml", *keys], check_paths=False)
  lines = search.lines(config, [[[types.SimpleNamespace(platform="tpu")]]], CHIP)
  assert "remat_policy=full per_device_batch_size=8 is the fastest candidate that fits" in lines[0]
  assert lines[1] == "  Ignored, because it applies only to remat_policy=custom: custom_remat=mlpwo=offload"
  assert any(line.startswith("  custom | 8 |") for line in lines)
  assert lines[-1] == (
    "Search: the compiler refused remat_policy=save_out_proj per_device_batch_size=4 for a reason other than memory: "
    "a bug"
  )
