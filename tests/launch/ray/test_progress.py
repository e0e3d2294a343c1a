"""What is reported to Ray Train comes from the files of the run."""

from __future__ import annotations

from trainer.launch.ray.ray_progress import newest_checkpoint, newest_metrics


def test_the_last_record_of_a_step_and_the_last_committed_checkpoint(tmp_path):
  """Not an evaluation, a record that is being written, nor a checkpoint that is."""
  lines = ['{"step": 1, "loss": 4.5}', '{"step": 2, "loss": 4.25}', '{"step": 2, "eval_loss": 5.0}', '{"step": 3, "lo']
  (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
  for step, committed in ((50, True), (100, True), (150, False)):
    folder = tmp_path / "checkpoints" / str(step)
    folder.mkdir(parents=True)
    if committed:
      (folder / "commit_success.txt").touch()
  assert newest_metrics(str(tmp_path)) == {"step": 2, "loss": 4.25}
  assert newest_checkpoint(str(tmp_path)) == 100
