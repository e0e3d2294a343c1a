from __future__ import annotations

import threading

import jax
import numpy as np
from jax._src import profiler as jax_profiler

from trainer.config.schema import ObserveSection
from trainer.observe import events, log, profiler


def make(path, **cfg) -> profiler.Profiler:
  section = ObserveSection(**({"profiler": "xplane", "skip_first_n_steps_for_profiler": 2, "profiler_steps": 3} | cfg))
  return profiler.Profiler(str(path), section, log.get(str(path)), events.EventLog(str(path)))


def traces(path) -> list:
  return sorted(path.glob("profile/*/plugins/profile/*/*.xplane.pb"))


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


def test_a_round_of_local_steps_is_profiled_whole(tmp_path, monkeypatch):
  calls = []
  tracer_for = lambda directory: (lambda folder: calls.append("begin"), lambda: calls.append("end"))
  monkeypatch.setattr(profiler, "tracer_for", tracer_for)
  tracer = make(tmp_path)
  for index in range(0, 60, 20):
    tracer.before_step(index)
    calls.append(index)
  assert calls == [0, "begin", 20, "end", 40]


def test_attempts_within_a_second_keep_all_their_profiles(tmp_path):
  """JAX names the folder of a profile by the second, so the second one would replace the first."""
  log_events = events.EventLog(str(tmp_path))
  section = ObserveSection(profiler="xplane", skip_first_n_steps_for_profiler=0, profiler_steps=1)
  for attempt in (1, 2):
    log_events.emit("attempt_start", attempt=attempt)
    tracer = profiler.Profiler(str(tmp_path), section, log.get(None), log_events)
    tracer.before_step(0)
    jax.block_until_ready(jax.numpy.ones(3) + attempt)
    tracer.close()
  found = traces(tmp_path)
  assert [path.parts[len(tmp_path.parts) + 1][-2:] for path in found] == ["-1", "-2"]
  for path in found:
    names = {
      event.name
      for plane in jax.profiler.ProfileData.from_file(str(path)).planes
      for line in plane.lines
      for event in line.events
    }
    assert any("block_until_ready" in name for name in names)


def test_a_tracer_that_does_not_end_is_given_up(tmp_path, monkeypatch, capsys):
  """Pathways asks every slice for its part of the profile, and a slice may hang."""
  release = threading.Event()
  monkeypatch.setattr(profiler, "_LONGEST_END_SECONDS", 0.2)
  monkeypatch.setattr(profiler, "tracer_for", lambda directory: (lambda folder: None, release.wait))
  tracer = make(tmp_path)
  tracer.before_step(2)
  tracer.close()
  assert "warning: the profile was lost: the tracer did not end within 0.2 s" in capsys.readouterr().out
  release.set()


def test_folders_of_an_object_store_are_for_the_tracer_of_pathways(monkeypatch):
  """Which pathwaysutils puts in the place of JAX's."""
  of_jax, of_pathways = (jax.profiler.start_trace, jax.profiler.stop_trace), (lambda folder: None, lambda: None)
  for name, function in zip(("start_trace", "stop_trace"), of_pathways):
    monkeypatch.setattr(jax.profiler, name, function)
    monkeypatch.setattr(jax_profiler, name, function)
  assert profiler.tracer_for("gs://b/run/profile") == of_pathways
  assert profiler.tracer_for("/runs/a/profile") == of_jax
