"""Sums over shares: the same bits for every dealing of the shares to members."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.exchange_members import members, random_shares, same_bits, sum_in_order

from worlds.exchange import MismatchedCall, reduction


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
  monkeypatch.setattr(reduction, "PART", 16)


def partitions(shares, most):
  """All ways to split `shares` into at most `most` groups."""
  if not shares:
    yield []
    return
  for rest in partitions(shares[1:], most):
    for i in range(len(rest)):
      yield [*rest[:i], [shares[0], *rest[i]], *rest[i + 1 :]]
    if len(rest) < most:
      yield [[shares[0]], *rest]


def dealings(count, group):
  """Every dealing of `count` shares to `group` members, up to the order of the members, which rotates."""
  for turn, groups in enumerate(partitions(list(range(count)), group)):
    groups = groups + [[]] * (group - len(groups))
    yield {(member + turn) % group: groups[member] for member in range(group)}


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_the_sum_has_the_same_bits_for_every_dealing(group):
  cases = 0
  with members(group) as those:
    for count in range(1, 7 if group < 4 else 6):
      shares = random_shares(count, 150, seed=count)
      expected = sum_in_order(shares)
      if count > 2:
        reverse = sum_in_order({-share: values for share, values in shares.items()})
        assert not same_bits(expected, reverse), "the order does not matter for these values"
      for dealt in dealings(count, group):
        results = those.reduce(shares, dealt, tag=f"step {cases}")
        assert all(same_bits(result, expected) for result in results), dealt
        cases += 1
  assert cases == {1: 6, 2: 63, 3: 185, 4: 74}[group]


@pytest.mark.parametrize("size", [0, 1, 2, 3, 47, 48, 49, 1000])
def test_odd_sizes(size):
  shares = random_shares(4, size)
  with members(3) as those:
    results = those.reduce(shares, {0: [1, 3], 1: [0], 2: [2]})
  assert all(same_bits(result, sum_in_order(shares)) for result in results)


def test_bfloat16_rounds_shares_and_total_wherever_they_are():
  shares = random_shares(4, 300)
  rounded = {share: np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32)) for share, x in shares.items()}
  expected = np.asarray(jnp.asarray(sum_in_order(rounded)).astype(jnp.bfloat16).astype(jnp.float32))
  assert not same_bits(expected, sum_in_order(shares))
  for dealt in ({0: [0, 1, 2, 3]}, {0: [3], 1: [0, 1, 2]}, {0: [0, 2], 1: [], 2: [1, 3]}):
    with members(len(dealt)) as those:
      assert all(same_bits(result, expected) for result in those.reduce(shares, dealt, "bfloat16")), dealt


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_special_values_pass(wire):
  special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0] * 20, np.float32)
  ones = {share: np.full(special.size, value, np.float32) for share, value in ((1, -0.0), (2, -0.0))}
  with members(3) as those:
    for result in those.reduce({0: special} | ones, {0: [2], 1: [0], 2: [1]}, wire):
      assert same_bits(result, special)
    results = those.reduce({0: special, 1: -special, 2: ones[2]}, {0: [2], 1: [0], 2: [1]}, wire, tag="step 2")
  expected = np.array([np.nan, np.nan, np.nan, 0.0, 0.0, 0.0] * 20, np.float32)
  for result in results:
    np.testing.assert_array_equal(result, expected)


def test_the_own_shares_are_not_modified():
  shares = random_shares(3, 100)
  before = {share: values.copy() for share, values in shares.items()}
  for values in shares.values():
    values.flags.writeable = False
  with members(2) as those:
    those.reduce(shares, {0: [0, 1], 1: [2]})
    those.reduce(shares, {0: [0, 1], 1: [2]}, "bfloat16", tag="step 2")
  assert all(same_bits(shares[share], before[share]) for share in shares)


def test_a_fast_member_does_not_fill_the_memory_of_a_slow_one(monkeypatch):
  """Member 1 hands out its values slowly. No member holds pieces of more than 2 * WINDOW buckets."""
  shares, buckets = random_shares(3, 16 * 3 * 40), 40
  most = 0
  arrive = reduction.Reduction._arrive

  def watch(self, bucket, share, piece):
    nonlocal most
    arrive(self, bucket, share, piece)
    most = max(most, len(self._pieces))

  monkeypatch.setattr(reduction.Reduction, "_arrive", watch)

  class Slow:
    def __init__(self):
      self.size = shares[1].size
      self.read_ranges = []

    def read(self, start, stop):
      self.read_ranges.append((start, stop))
      return shares[1][start:stop].copy()

  slow = Slow()
  with members(3) as those:
    results = those.reduce(shares | {1: slow}, {0: [0], 1: [1], 2: [2]})
  assert all(same_bits(result, sum_in_order(shares)) for result in results)
  assert slow.read_ranges == [(16 * i, 16 * (i + 1)) for i in range(3 * buckets)]
  assert 0 < most <= 2 * reduction.WINDOW


@pytest.mark.parametrize("change", ["tag", "size", "wire", "dealing"])
def test_members_that_make_different_calls_are_told_so(change):
  shares = random_shares(2, 64)

  def reduce(exchange, member):
    other = member == 1
    size = 63 if other and change == "size" else 64
    dealt = {0: [0], 1: [1]} if not (other and change == "dealing") else {0: [2], 1: [1]}
    tag = "step 2" if other and change == "tag" else "step 1"
    wire = "bfloat16" if other and change == "wire" else "float32"
    out = np.zeros(size, np.float32)
    exchange.reduce(tag, {member: shares[member][:size]}, dealt, out, wire)

  with members(2) as those, pytest.raises(MismatchedCall, match="same tag, dealing, size and wire type"):
    those.call(reduce)


def test_a_plan_covers_every_value_once():
  for size, group in itertools.product((0, 1, 3, 16, 100), (1, 2, 3, 5)):
    plan = reduction.Plan({member: [member] for member in range(group)}, size, "float32")
    covered = [index for bucket in plan.order for member in range(group) for index in range(*plan.part(bucket, member))]
    assert covered == list(range(size))
