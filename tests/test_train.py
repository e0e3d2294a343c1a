"""What an attempt says of its steps."""

from __future__ import annotations

import types

import jax
import pytest

from trainer import train
from trainer.config.schema import Config, OptimizerSection


@pytest.mark.parametrize("skipped", [1, 2, 11])
def test_a_diverged_run_says_how_often_in_any_number(skipped):
  config = Config(optimizer=OptimizerSection(max_nonfinite_steps=skipped - 1))
  session = types.SimpleNamespace(tokens_per_step=8, events=types.SimpleNamespace(emit=lambda *_, **__: None))
  view = types.SimpleNamespace(devices=(tuple(jax.devices()[:1]),))
  records = train.Records(config, session, view, carry=None)
  step = types.SimpleNamespace(step=30, loss=float("nan"), grad_norm=1.0)
  with pytest.raises(train.TrainingDiverged, match=rf"\({skipped} in a row, max_nonfinite_steps={skipped - 1}\)\. The"):
    records._nonfinite(step, skipped)
