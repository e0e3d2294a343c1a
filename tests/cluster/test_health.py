"""Health checks with their real program, on CPU devices."""

from __future__ import annotations

import jax
import pytest

from trainer.cluster import health
from trainer.cluster.health import HealthChecks
from trainer.observe.compiles import COMPILE_EVENT, CompileCounter


@pytest.fixture
def slices():
  devices = jax.devices()
  return {i: tuple(devices[2 * i : 2 * i + 2]) for i in range(4)}


def test_the_program_is_compiled_once_per_slice_and_never_counted(slices):
  compiled = []

  def on_duration(event, duration, **_):
    if event == COMPILE_EVENT:
      compiled.append(event)

  jax.monitoring.register_event_duration_secs_listener(on_duration)
  try:
    with CompileCounter() as counter:
      checks = HealthChecks(slices, failed=pytest.fail)
      for _ in range(3):
        assert checks.check(slices) == {0, 1, 2, 3}
      assert len(compiled) == 4
      assert counter.compilations == 0
  finally:
    jax.monitoring.unregister_event_duration_listener(on_duration)


def test_a_slice_that_failed_gets_a_new_program(slices, monkeypatch):
  """An executable may belong to the slice before its replacement."""
  made, failures = [], []

  def compile(devices):
    made.append(devices)

    def run():
      if len(made) == 1:
        raise jax.errors.JaxRuntimeError("DATA_LOSS: executable of a dead slice\nmore")

    return run

  monkeypatch.setattr(health, "_compile", compile)
  checks = HealthChecks(slices, failed=failures.append)
  assert checks.check([2]) == frozenset()
  assert checks.describe([2]) == "slice 2: DATA_LOSS: executable of a dead slice"
  assert checks.check([2]) == checks.check([2]) == {2}
  assert made == [slices[2]] * 2 and failures == [2]
  assert checks.describe([2]) == ""


def test_a_wrong_result_fails_the_check(slices, monkeypatch):
  monkeypatch.setattr(health.np, "array_equal", lambda a, b: False)
  failures = []
  checks = HealthChecks(slices, failed=failures.append)
  assert checks.check([0]) == frozenset()
  assert "a health check returned [1.0, 2.0] instead of" in checks.describe([0]) and failures == [0]
