"""Sums over shares: the same bits for every dealing of the shares to members."""

from __future__ import annotations

import contextlib

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.support.exchange_members import members, random_shares, same_bits, sum_in_order

from worlds.exchange import MismatchedCall, plan, reduction, thread_pool
from worlds.exchange.link import Link


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
  """Sums of many buckets in several threads, and pieces in memory that is used again."""
  monkeypatch.setattr(plan, "PART", 16)
  monkeypatch.setattr(reduction, "ALONE", 16)
  monkeypatch.setattr(thread_pool, "_LEAST_BYTES", 1)


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


@pytest.fixture(scope="module")
def crowds():
  """{count: connected members}, for many sums."""
  with contextlib.ExitStack() as stack:
    yield {count: stack.enter_context(members(count)) for count in (1, 2, 3, 5)}


@st.composite
def two_level_sums(draw):
  """(members, shares of a group, {member: shares}, values, wire, how many shares of a piece are added already, how many
  values one thread sums)."""
  count, group, groups = (draw(st.sampled_from(choices)) for choices in ((1, 2, 3, 5), (1, 2, 3, 8), (1, 2, 3)))
  owner = draw(st.lists(st.integers(0, count - 1), min_size=group * groups, max_size=group * groups))
  if draw(st.booleans()):  # as after a loss: most groups are whole
    owner = [owner[share if share // group == 0 else share // group * group] for share in range(len(owner))]
  dealt = {member: [share for share, theirs in enumerate(owner) if theirs == member] for member in range(count)}
  size, wire = draw(st.sampled_from((1, 15, 100, 700))), draw(st.sampled_from(("float32", "bfloat16")))
  return count, group, dealt, size, wire, draw(st.integers(0, 7)), draw(st.sampled_from((0, 1000)))


@hypothesis.given(two_level_sums())
@hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
def test_a_sum_in_two_levels_has_the_same_bits_for_every_dealing(crowds, small_buckets, case):
  count, group, dealt, size, wire, added, alone = case
  shares = random_shares(sum(map(len, dealt.values())), size, seed=size)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reduction, "ALONE", alone)
    results = crowds[count].reduce(shares, dealt, wire, "step 1", group, added)
  assert all(same_bits(result, sum_in_order(shares, group, wire)) for result in results)


@pytest.mark.parametrize("streams", [2, 3])
def test_several_connections_between_two_members_carry_one_sum(streams, monkeypatch):
  shares, used, post = random_shares(3, 16 * 3 * 7 + 5), set(), Link.post

  def posted(self, *args):
    used.add(self)
    post(self, *args)

  monkeypatch.setattr(Link, "post", posted)
  with members(3, streams=streams) as those:
    results = those.reduce(shares, {0: [0], 1: [1], 2: [2]})
  assert all(same_bits(result, sum_in_order(shares)) for result in results)
  assert len(used) == 3 * 2 * streams


def test_a_whole_group_travels_as_one_piece_and_orphaned_shares_as_one_each():
  assert plan.pieces([8, 9, 10, 11], 4) == [(8, 12)]
  assert plan.pieces([0, 1, 3, 4, 6, 7, 8, 9], 4) == [(0, 2), (3, 4), (4, 5), (6, 7), (7, 8), (8, 10)]
  assert plan.pieces([0, 1, 2, 5], 1) == [(0, 1), (1, 2), (2, 3), (5, 6)]
  whole = plan.Plan({0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}, 1000, "bfloat16", group=4)
  alone = plan.Plan({0: [0], 1: [1], 2: [2]}, 1000, "bfloat16")
  assert len(list(whole.frames(0, 1))) == len(list(alone.frames(0, 1)))
  assert set(whole.types.values()) == {whole.dtype}
  after_a_loss = plan.Plan({0: [0, 1, 2, 3, 8, 9], 1: [4, 5, 6, 7, 10, 11]}, 1000, "bfloat16", group=4)
  assert [after_a_loss.types[first] == whole.dtype for first in (0, 8, 4, 10, 11)] == [True, False, True, False, False]


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
    most = max(most, len(self._sums))

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

  with members(2) as those, pytest.raises(MismatchedCall, match="same tag, dealing, size, wire type and group"):
    those.call(reduce)
