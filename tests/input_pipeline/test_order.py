"""The order of examples: a permutation in each epoch, as random as NumPy's, and the same for the life of a run."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from tests.support.seeds import few

from input_pipeline.order import Order, permuted

POWERS = [65_535, 65_536, 65_537, 1_000_000, 1_048_575, 1_048_576, 1_048_577]
SMALL = [1, 2, 3, 5, 17, 100]


def epoch_of(size: int, seed: int = 1, epoch: int = 0) -> np.ndarray:
  """The corpus positions of an epoch in training order."""
  return permuted(np.arange(size), size, seed=seed, epoch=epoch).astype(np.int64)


def deviations(places: np.ndarray) -> dict[str, float]:
  """By how many standard deviations of a random order it differs: neighbours at lags, and means of neighbours."""
  size = len(places)
  x = (places - (size - 1) / 2) / math.sqrt((size**2 - 1) / 12)
  found = {f"lag {lag}": x[lag:] @ x[:-lag] / math.sqrt(size - lag) for lag in range(1, 65)}
  for count in (8, 16, 32, 64, 128, 256):
    means = x[: size // count * count].reshape(-1, count).mean(axis=1)
    ratio = means.var() * count / (1 - (count - 1) / (size - 1))
    found[f"means of {count}"] = (ratio - 1) / math.sqrt(2 / len(means))
  return {name: round(float(value), 2) for name, value in found.items()}


def outside(found: dict[str, float], bound: float = 5) -> dict[str, float]:
  """Two in a million values of a random order lie outside."""
  return {name: value for name, value in found.items() if abs(value) > bound}


@pytest.mark.parametrize("size", few([65_537, 300_000], [*POWERS, 10_007, 300_000]))
def test_neighbours_are_as_in_a_random_order(size):
  places = epoch_of(size, epoch=size % 4)
  assert np.bincount(places, minlength=size).tolist() == [1] * size
  assert outside(deviations(places)) == {}


def chi_square(counts: np.ndarray) -> float:
  """Standard deviations of the chi square of counts that should be equal."""
  expected = counts.mean()
  return (((counts - expected) ** 2 / expected).sum() - (counts.size - 1)) / math.sqrt(2 * (counts.size - 1))


@pytest.mark.parametrize("size", few([2, 4], [2, 3, 4, 5]))
def test_all_orders_of_few_examples_are_equally_frequent(size):
  number = math.factorial(size)
  found = Counter(tuple(epoch_of(size, epoch=epoch).tolist()) for epoch in range(10 * number))
  assert len(found) == number and chi_square(np.array([*found.values()])) < 5


# ---- orders of records


def numbers(ordered: Order, count: int) -> list[int | None]:
  records = [ordered.record(index) for index in range(count)]
  return [None if record is None else int(record) for record in records]


def ordered(size: int, split: str = "train", seed: int = 0, source: str = "web") -> Order:
  return Order([str(number).encode() for number in range(size)], split=split, seed=seed, source=source)


@pytest.mark.parametrize("size", [*SMALL, 255, 256, 257, 700])
def test_every_epoch_of_records_is_another_permutation(size):
  found = numbers(ordered(size), 3 * size)
  epochs = [found[start : start + size] for start in range(0, 3 * size, size)]
  assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
  assert size < 17 or len({tuple(epoch) for epoch in epochs}) == 3
  backwards = ordered(size)
  assert [int(backwards.record(index)) for index in reversed(range(3 * size))] == found[::-1]


SOAKED = ((1000, 1000), (40_000, 39_980))
SIZES = [(900, 890), (2049, 2048), *(pytest.param(sizes, marks=pytest.mark.soak) for sizes in SOAKED)]


@pytest.mark.parametrize("sizes", SIZES)
def test_sources_of_similar_sizes_have_independent_orders(sizes):
  """As two sources of a mixture, and as training and evaluation data; in the same epoch and in different ones."""
  least = min(sizes)

  def epoch(one: Order, number: int) -> np.ndarray:
    return np.array(numbers(one, (number + 1) * len(one._records))[-len(one._records) :])

  web, code, evaluation = ordered(sizes[0]), ordered(sizes[1], source="code"), ordered(sizes[0], "eval")
  epochs = [*(epoch(one, number) for one in (web, code) for number in (0, 1)), epoch(evaluation, 0)]
  for one, two in itertools.combinations(epochs, 2):
    places, others = np.argsort(one)[:least], np.argsort(two)[:least]  # of the same documents
    assert (places == others).sum() <= 10  # 1 by chance
    assert abs(np.corrcoef(places, others)[0, 1]) * math.sqrt(least) < 5
    assert abs(np.corrcoef(one[:least], two[:least])[0, 1]) * math.sqrt(least) < 5
    assert (one[:least] == two[:least]).sum() <= 10


def test_the_order_never_changes():
  """Runs that have started with it continue with it."""
  assert epoch_of(1000, seed=5, epoch=3)[:8].tolist() == [484, 559, 289, 493, 78, 828, 190, 668]
  assert numbers(ordered(10), 20) == [5, 1, 9, 2, 7, 0, 3, 6, 4, 8, 6, 1, 7, 4, 8, 0, 9, 2, 5, 3]
  assert numbers(ordered(10, "eval"), 11) == [2, 7, 1, 4, 6, 3, 5, 9, 0, 8, None]
