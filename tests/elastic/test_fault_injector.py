from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint.arrays.state_tree import flatten
from trainer.config.errors import ConfigError
from trainer.config.faults import Fault, RandomFaults, parse
from trainer.elastic import flips
from trainer.elastic.fault_injector import FaultInjector, draw


class Slices:
  def __init__(self):
    self.calls = []

  def lose(self, slice_id, seconds=None):
    self.calls.append(("lose", slice_id, seconds))

  def hang(self, slice_id, seconds=None):
    self.calls.append(("hang", slice_id, seconds))

  def give_back(self, slice_id):
    self.calls.append(("give_back", slice_id))


def test_the_example_of_the_key_is_understood():
  assert parse("slice_down@12:1, slice_up@30:1, hang@40:2, ckpt_kill@50") == (
    Fault("slice_down", 12, 1),
    Fault("slice_up", 30, 1),
    Fault("hang", 40, 2),
    Fault("ckpt_kill", 50, None, "save"),
  )
  assert parse("random:seed=1,rate=0.05,slice_down@3:0") == (RandomFaults(1, 0.05), Fault("slice_down", 3, 0))
  assert parse("slice_down@3:0:recovery/1.5,slice_down@4:1/inf") == (
    Fault("slice_down", 3, 0, "recovery", 1.5),
    Fault("slice_down", 4, 1, "step", float("inf")),
  )
  assert parse("") == ()


FAULTS = st.one_of(
  st.builds(Fault, st.just("ckpt_kill"), st.integers(0, 999), st.none(), st.just("save")),
  st.builds(
    Fault, st.just("hang"), st.integers(0, 999), st.integers(0, 99), st.sampled_from(["step", "eval"]), st.just(1.5)
  ),
  st.builds(
    Fault,
    st.just("slice_down"),
    st.integers(0, 999),
    st.integers(0, 99),
    st.sampled_from(["step", "snapshot", "save", "eval", "restore", "recovery"]),
    st.sampled_from([None, 0.0, 2.5, float("inf")]),
  ),
  st.builds(
    Fault,
    st.sampled_from(["flip_gradient", "flip_weight", "flip_optimizer"]),
    st.integers(0, 999),
    st.integers(0, 99),
    sticky=st.booleans(),
    array=st.sampled_from(["", "layers.mlp", "0.mu"]),
    bit=st.integers(-1, 31),
  ),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(FAULTS, max_size=5))
def test_text_and_faults_are_inverse(faults):
  assert list(parse(", ".join(map(str, faults)))) == faults


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("slice_dwn@3:1", "is neither KIND@STEP"),
    ("slice_down@3", r"the slice is missing.\nWrite slice_down@STEP:SLICE"),
    ("slice_down@3:1:backup", r"no moment backup.\nUse one of step, prepared, snapshot, save, eval, restore, recovery"),
    ("slice_up@3:1/4", "only slice_down and hang have /SECONDS"),
    ("hang@3:1:recovery", r"cannot hang in a recovery.\nUse step, eval, snapshot or save"),
    ("ckpt_kill@3:1", "Write ckpt_kill@STEP"),
    ("random:seed=1,rate=0", "Use a rate above 0"),
    ("flip_gradient@3:1#32", "is neither"),
  ],
)
def test_mistakes_are_explained(text, message):
  with pytest.raises(ConfigError, match=message):
    parse(text)


def test_each_fault_happens_once_at_the_first_moment_of_its_kind():
  slices, records = Slices(), []
  faults = list(parse("slice_down@3:1, slice_up@5:1, slice_down@4:2:save/7, hang@6:0"))
  injector = FaultInjector(faults, slices, record=lambda fault, step: records.append((str(fault), step)))
  for step in range(1, 8):
    injector.at("step", step)
    if step in (3, 6):
      injector.at("save", step)
    if step == 5:  # steps 4 and 5 are repeated
      injector.at("step", 4)
      injector.at("step", 5)
  assert slices.calls == [("lose", 1, None), ("give_back", 1), ("hang", 0, None), ("lose", 2, 7.0)]
  assert records == [("slice_down@3:1", 3), ("slice_up@5:1", 5), ("hang@6:0", 6), ("slice_down@4:2:save/7", 6)]
  assert not injector.faults


def test_a_flip_changes_one_bit_of_the_named_array_once_unless_it_is_sticky():
  tree = {"norm": jnp.ones(3), "mlp": {"up": jnp.ones((2, 4), jnp.bfloat16), "down": jnp.ones(5)}}
  injector = FaultInjector(list(parse("flip_gradient@3:1=up#3, flip_gradient@4:1:sticky=mlp, flip_weight@4:0")))
  changed = []
  for step in range(1, 6):
    injector.at("step", step)
    assert injector.flips("flip_gradient", 0, flatten)(tree) is tree
    of_slice = injector.flips("flip_gradient", 1, flatten)
    for _ in range(2):  # the second time, the share is computed again
      found = of_slice(tree, "share")
      bits = jax.tree.map(lambda a, b: int(np.bitwise_count(as_bits(a) ^ as_bits(b)).sum()), found, tree)
      changed.append([bits["norm"], bits["mlp"]["up"], bits["mlp"]["down"]])
  assert changed[:4] == [[0, 0, 0]] * 4 and changed[4:6] == [[0, 1, 0], [0, 0, 0]]
  assert len({tuple(one) for one in changed[6:]}) == 1 and sum(changed[6]) == 1 and changed[6][0] == 0
  assert not injector.faults and injector.flips("flip_weight", 0, flatten)(tree) is not tree


def as_bits(array: jax.Array) -> np.ndarray:
  return np.asarray(array).view(f"uint{8 * array.dtype.itemsize}")


def test_an_array_that_does_not_exist_is_refused():
  params, opt_state = {"norm": jnp.ones(3)}, {"mu": jnp.ones(3)}
  flips.check(parse("flip_weight@1:0=norm, flip_optimizer@1:0=mu, slice_down@1:0"), params, opt_state)
  with pytest.raises(ConfigError, match=r"no array has mu in its name.\nUse one of norm"):
    flips.check(parse("flip_gradient@1:0=mu"), params, opt_state)


@pytest.mark.parametrize("moment", ["save", "eval"])
def test_a_slice_does_not_return_before_it_was_lost(moment):
  """The moment of a loss may come later than the step at which the slice returns."""
  slices = Slices()
  injector = FaultInjector(list(parse(f"slice_up@5:1, slice_down@3:1:{moment}, slice_down@4:2, slice_up@6:2")), slices)
  for step in range(1, 10):
    injector.at("step", step)
    if step == 8:
      injector.at(moment, step)
  assert slices.calls == [("lose", 2, None), ("give_back", 2), ("lose", 1, None), ("give_back", 1)]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.01, 0.9), st.integers(1, 8))
def test_random_faults_are_reproducible_and_spare_one_slice(seed, rate, num_slices):
  faults = draw(RandomFaults(seed, rate), num_slices, 50)
  assert faults == draw(RandomFaults(seed, rate), num_slices, 50)
  lost = {f.slice for f in faults if f.kind == "slice_down"}
  assert len(lost) < num_slices
  down = set()
  for fault in faults:
    (down.add if fault.kind == "slice_down" else down.remove)(
      fault.slice
    )  # no slice is lost twice or returned while it is alive
  assert [f.step for f in faults] == sorted(f.step for f in faults)
