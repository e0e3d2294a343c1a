from __future__ import annotations

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
