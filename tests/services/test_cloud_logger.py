from __future__ import annotations

import json
import sys
import types

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from trainer.observe import files, log
from trainer.services import cloud_logger


def test_a_real_save_and_restore_leave_their_timings(tmp_path):
  with (
    cloud_logger.CheckpointTimings(str(tmp_path), "demo", log.get(None)),
    ocp.CheckpointManager(tmp_path / "checkpoints") as manager,
  ):
    manager.save(3, args=ocp.args.StandardSave({"w": jnp.arange(8.0)}))
    manager.wait_until_finished()
    manager.restore(3, args=ocp.args.StandardRestore({"w": jnp.zeros(8)}))
  jax.monitoring.record_event_duration_secs("/jax/orbax/after_the_end", 1.0)
  records = list(files.read_json_lines(str(tmp_path), cloud_logger.TIMINGS_FILE))
  names = {record["event"] for record in records}
  assert any("/write/" in name for name in names) and any("/read/" in name for name in names)
  assert all(record["seconds"] >= 0 and record["run"] == "demo" and record["wall"] > 0 for record in records)
  assert "/jax/orbax/after_the_end" not in names


def fake_cloud(monkeypatch, client) -> None:
  """Modules in the shape of google-cloud-logging, which is not a dependency."""
  error = type("DefaultCredentialsError", (Exception,), {})
  exceptions = types.ModuleType("google.auth.exceptions")
  exceptions.DefaultCredentialsError = error
  logging = types.ModuleType("google.cloud.logging")
  logging.Client = lambda: client(error)
  cloud = types.ModuleType("google.cloud")
  cloud.logging = logging
  for name, module in [
    ("google.auth", types.ModuleType("google.auth")),
    ("google.auth.exceptions", exceptions),
    ("google.cloud", cloud),
    ("google.cloud.logging", logging),
  ]:
    monkeypatch.setitem(sys.modules, name, module)


def test_cloud_logging_is_used_where_it_is_installed(tmp_path, monkeypatch):
  sent = []
  fake_cloud(
    monkeypatch,
    lambda error: types.SimpleNamespace(
      logger=lambda name: types.SimpleNamespace(log_struct=lambda record: sent.append((name, record)))
    ),
  )
  with cloud_logger.CheckpointTimings(str(tmp_path), "demo", log.get(None)):
    jax.monitoring.record_event_duration_secs("/jax/orbax/write/x", 2.0, kind="k")
  ((name, record),) = sent
  assert name == cloud_logger.LOGGER_NAME and json.dumps(record)
  assert (record["event"], record["seconds"], record["kind"]) == ("/jax/orbax/write/x", 2.0, "k")
  assert not (tmp_path / cloud_logger.TIMINGS_FILE).exists()


def test_without_credentials_the_file_is_used_and_the_log_says_so(tmp_path, monkeypatch, capsys):
  def no_credentials(error):
    raise error("no credentials here")

  fake_cloud(monkeypatch, no_credentials)
  with cloud_logger.CheckpointTimings(str(tmp_path), "demo", log.get(None)):
    jax.monitoring.record_event_duration_secs("/jax/orbax/write/x", 2.0)
  assert "not to Cloud Logging: no credentials here" in capsys.readouterr().out
  assert len(list(files.read_json_lines(str(tmp_path), cloud_logger.TIMINGS_FILE))) == 1
