"""Local copies of slices that are real processes and share a host: all are killed, and some copies are gone."""

from __future__ import annotations

from end_to_end.command import differences
from end_to_end.process_runs import ProcessRun

STEPS = 40
PERIOD = 5  # of local copies; the only checkpoint in storage is that of the last step


def keys(run_folder, compiled: str) -> list[str]:
  return [
    *(compiled, f"steps={STEPS}", f"checkpoint_period={STEPS}", "enable_emergency_checkpoint=true"),
    *(f"local_checkpoint_directory={run_folder / 'ram'}", f"local_checkpoint_period={PERIOD}"),
  ]


def test_local_copies_of_one_slice_are_enough_for_all(compiled, server, tmp_path):
  """Slice 0 has lost its copies. The copies of slice 1 are the newest state that is left."""
  undisturbed = ProcessRun(tmp_path / "undisturbed", keys(tmp_path / "undisturbed", compiled), slices=2, server=server)
  with undisturbed.launched() as supervisor:
    assert undisturbed.wait(supervisor) == 0, undisturbed.tail()
  run = ProcessRun(tmp_path / "run", keys(tmp_path / "run", compiled), slices=2, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: run.last_step >= 4 * PERIOD, supervisor)  # all processes are killed at the end of the block
  reached = run.last_step
  copies = sorted(run.ram.rglob("*.s0.*"))
  assert copies and run.committed_steps() == []
  for path in copies:
    path.unlink()
  with run.launched() as supervisor:
    assert run.wait(supervisor) == 0, run.tail()
  (step,) = [event["step"] for event in run.events("restore") if event["tier"] == "emergency"]
  assert reached - 2 * PERIOD <= step <= reached
  assert sorted(run.losses()) == list(range(1, STEPS + 1))
  assert differences(run, undisturbed, STEPS) == []
