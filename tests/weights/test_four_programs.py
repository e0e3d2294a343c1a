"""The command that draws one curve with four programs: its comparison, its arguments, and this project's part of it."""

from __future__ import annotations

import numpy as np
import pytest
from end_to_end.four_programs import __main__ as command
from end_to_end.four_programs import common, compare, inputs, with_trainer
from tests.support.command import ROOT

CURVES = ROOT / "docs" / "benchmarks" / "four_programs"


def test_the_first_steps_are_those_of_transformers(tmp_path):
  inputs.make(tmp_path, command.work("qwen3", 3))
  with_trainer.main(tmp_path)
  expected = common.read_curve(CURVES / "qwen3.csv")[:3]
  found = common.read_curve(tmp_path / "trainer" / "curve.csv")
  np.testing.assert_allclose(found, expected, rtol=5e-6)
  assert max(compare.weights(tmp_path / "trainer" / "model", tmp_path / "model").values()) < 0.01, "three small steps"


def test_the_differences_are_relative_and_over_the_first_steps():
  expected = np.full((400, 2), 2.0)
  found = expected.copy()
  found[299], found[399, 0] = (2.0002, 2.0), 2.02
  assert compare.curves(found, expected) == {300: pytest.approx((1e-4, 0)), 400: pytest.approx((0.01, 0))}
  assert [compare.bound(count) for count in (3, 300, 301, 1000, 2000)] == [1e-5, 1e-5, 1e-4, 1e-4, 1e-4]
  with pytest.raises(AssertionError, match="400 and 3 steps"):
    compare.curves(found, expected[:3])


def test_the_rates_are_those_of_the_trainer_and_norms_do_not_decay():
  work = command.work("llama", 1000)
  assert [work.rate(step) for step in (0, 99, 100, 1000)] == pytest.approx([1e-5, 1e-3, 1e-3, 1e-4])
  names = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_norm.weight", "lm_head.weight")
  assert [work.decays(name) for name in names] == [False, False, False, True]


@pytest.mark.parametrize(
  ("given", "message"),
  [
    (["--models", "qwen3,gpt2"], "--models gpt2: must be of qwen3, llama, qwen3-moe"),
    (["--python", "no-such-python"], "--python no-such-python: is not a command"),
    (["--steps", "0"], "must be a whole number of at least 1"),
  ],
)
def test_wrong_arguments_are_refused(given, message, capsys):
  with pytest.raises(SystemExit):
    command.arguments(["folder", *given])
  assert message in capsys.readouterr().err
