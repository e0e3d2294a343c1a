"""Local copies of slices that are real processes: all processes are killed, and some copies are gone."""

from __future__ import annotations

from end_to_end.agent_runs import AgentRun
from end_to_end.command import differences
from end_to_end.process_runs import ProcessRun
from tests.launch.conftest import LANES, LANES_STEPS

STEPS = LANES_STEPS
PERIOD = 5  # of local copies; the only checkpoint in storage is that of the last step


def keys(ram: str, compiled: str) -> list[str]:
  return [
    *(compiled, f"steps={STEPS}", f"checkpoint_period={STEPS}", "enable_emergency_checkpoint=true"),
    *(f"local_checkpoint_directory={ram}", f"local_checkpoint_period={PERIOD}"),
  ]


def on_one_host(folder, compiled: str, server) -> ProcessRun:
  """Two slices of one process each."""
  return ProcessRun(folder, keys(str(folder / "ram"), compiled), slices=2, server=server)


def test_local_copies_of_one_slice_are_enough_for_all(compiled, server, tmp_path):
  """Slice 0 has lost its copies. The copies of slice 1 are the newest state that is left."""
  undisturbed = on_one_host(tmp_path / "undisturbed", compiled, server)
  with undisturbed.launched() as supervisor:
    assert undisturbed.wait(supervisor) == 0, undisturbed.tail()
  run = on_one_host(tmp_path / "run", compiled, server)
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


def on_two_hosts(folder, compiled: str, server) -> AgentRun:
  """Two slices of two processes each, without a process on the supervisor's host."""
  changes = [*keys("~/ram", compiled), *LANES]
  return AgentRun(folder, changes, slices=2, options=["--processes-per-slice", "2"], server=server)


def hosts(run: AgentRun) -> None:
  """Starts one slice on each of two hosts, which have home folders of their own."""
  for number in range(2):
    home = run.folder / f"host{number}"
    home.mkdir(exist_ok=True)
    run.agent(f"127.0.0.{number + 2}", home=str(home))


def test_parts_of_a_state_on_two_hosts_are_put_together(compiled, one_worker, server, tmp_path):
  """Each host lacks the copies of another process of its slice; together they have every part of the newest state.

  Oracle: one process with two devices, which computes all and has no local copies.
  """
  run = on_two_hosts(tmp_path / "run", compiled, server)
  with run.launched() as supervisor:
    hosts(run)
    run.wait_for(lambda: run.last_step >= 4 * PERIOD, supervisor)
  reached = run.last_step
  for host in (run.folder / "host0", run.folder / "host1"):
    (slice_number,) = {path.name.split(".")[1] for path in host.rglob("*.s*.json")}
    gone = list(host.rglob(f"*.{slice_number}.{'p1' if slice_number == 's0' else 'p0'}.*"))
    assert gone
    for path in gone:
      path.unlink()
  with run.launched() as supervisor:
    hosts(run)
    assert supervisor.wait(120) == 0, run.tail()
    run.wait_for_processes(30)  # the agents end after the supervisor
  (step,) = {event["step"] for event in run.events("restore") if event["tier"] == "emergency"}
  assert reached - 2 * PERIOD <= step <= reached
  assert sorted(run.losses()) == list(range(1, STEPS + 1))
  assert differences(run, one_worker, STEPS) == []
