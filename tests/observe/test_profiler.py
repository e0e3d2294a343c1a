from __future__ import annotations

import jax
import numpy as np
import pytest

from trainer.config.schema import ObserveSection
from trainer.observe import events, log, profiler


def make(path, **cfg) -> profiler.Profiler:
  section = ObserveSection(**({"profiler": "xplane", "skip_first_n_steps_for_profiler": 2, "profiler_steps": 3} | cfg))
  return profiler.Profiler(str(path), section, log.get(str(path)), events.EventLog(str(path)))


def traces(path) -> list:
  return sorted(path.glob("profile/plugins/profile/*/*.xplane.pb"))


@pytest.fixture
def calls(monkeypatch) -> list[str]:
  """Replaces the tracer, to see exactly when it is started and stopped."""
  made: list[str] = []
  monkeypatch.setattr(jax.profiler, "start_trace", lambda directory: made.append("start"))
  monkeypatch.setattr(jax.profiler, "stop_trace", lambda: made.append("stop"))
  return made


def test_a_real_profile_is_written(tmp_path):
  step = jax.jit(lambda x: x @ x)
  x, tracer = np.ones((8, 8), np.float32), make(tmp_path)
  for index in range(6):
    tracer.before_step(index)
    step(x).block_until_ready()
  tracer.close()
  assert len(traces(tmp_path)) == 1 and traces(tmp_path)[0].stat().st_size > 0
  (event,) = events.read_events(str(tmp_path))
  assert event["kind"] == "profile" and event["seconds"] > 0


def test_the_window(tmp_path, calls):
  tracer = make(tmp_path)
  for index in range(8):
    tracer.before_step(index, lambda: calls.append("wait"))
    calls.append(str(index))
  tracer.close()
  assert calls == ["0", "1", "wait", "start", "2", "3", "4", "wait", "stop", "5", "6", "7"]


@pytest.mark.parametrize("last", range(7))
def test_an_attempt_may_end_anywhere(tmp_path, calls, last):
  tracer = make(tmp_path)
  for index in range(last + 1):
    tracer.before_step(index)
  tracer.close()
  tracer.close()
  assert calls == ([] if last < 2 else ["start", "stop"])


def test_every_attempt_has_its_own_profile(tmp_path, calls):
  for _ in range(2):
    tracer = make(tmp_path)
    tracer.before_step(2)
    tracer.close()
  assert calls == ["start", "stop"] * 2


def test_no_profiler_records_nothing(tmp_path, calls):
  tracer = make(tmp_path, profiler="")
  for index in range(8):
    tracer.before_step(index)
  tracer.close()
  assert calls == []


def test_an_error_of_the_tracer_is_a_warning(tmp_path, capsys):
  jax.profiler.start_trace(str(tmp_path / "of somebody else"))
  try:
    tracer = make(tmp_path)
    for index in range(8):
      tracer.before_step(index)
    tracer.close()
  finally:
    jax.profiler.stop_trace()
  assert capsys.readouterr().out.count("warning: no profile of this attempt") == 1
  tracer = make(tmp_path)
  tracer.before_step(2)
  jax.profiler.stop_trace()  # the running trace is lost in some way
  tracer.close()
  assert "warning: the profile was lost" in capsys.readouterr().out
