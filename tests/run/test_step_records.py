"""Records of a step that is not finite."""

from __future__ import annotations

import types

import jax
import pytest

from trainer.config.schema import Config, OptimizerSection
from trainer.run.step_records import StepRecords, TrainingDiverged


@pytest.mark.parametrize("skipped", [1, 2, 11])
def test_a_diverged_run_says_how_many_steps_in_a_row_were_skipped(skipped):
  config = Config(optimizer=OptimizerSection(max_nonfinite_steps=skipped - 1))
  events = types.SimpleNamespace(emit=lambda *_, **__: None)
  session = types.SimpleNamespace(data=types.SimpleNamespace(tokens_per_step=8), events=events)
  records = StepRecords(config, session, elastic=None, driver=None, device=jax.devices()[0])
  step = types.SimpleNamespace(step=30, loss=float("nan"), grad_norm=1.0)
  with pytest.raises(TrainingDiverged, match=rf"\({skipped} in a row, max_nonfinite_steps={skipped - 1}\)\. The"):
    records._nonfinite(step, skipped)
