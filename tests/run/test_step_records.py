"""Records of a step: their fields, and a step that is not finite."""

from __future__ import annotations

import dataclasses
import types

import jax
import pytest

from trainer.config.schema import Config, OptimizerSection
from trainer.models import experts
from trainer.observe.metrics import StepRecord
from trainer.program import step as step_lib
from trainer.run.step_records import StepRecords, TrainingDiverged


@pytest.mark.parametrize("skipped", [1, 2, 11])
def test_a_diverged_run_says_how_many_steps_in_a_row_were_skipped(skipped):
  config = Config(optimizer=OptimizerSection(max_nonfinite_steps=skipped - 1))
  events = types.SimpleNamespace(emit=lambda *_, **__: None)
  data = types.SimpleNamespace(tokens_per_step=8)
  session = types.SimpleNamespace(config=config, data=data, events=events)
  records = StepRecords(session, driver=None, wait=None, device=jax.devices()[0])
  step = types.SimpleNamespace(step=30, loss=float("nan"), grad_norm=1.0)
  with pytest.raises(TrainingDiverged, match=rf"\({skipped} in a row, max_nonfinite_steps={skipped - 1}\)\. The"):
    records._nonfinite(step, skipped)


def test_a_metric_of_the_step_is_a_field_of_its_record():
  assert {*step_lib.METRICS, *experts.METRICS} <= {field.name for field in dataclasses.fields(StepRecord)}
