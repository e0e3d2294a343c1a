"""The table of what happened: every cost equals the record in events.jsonl, and every sentence is about its event."""

from __future__ import annotations

import pytest
from tests.support import fake_run

from trainer.observe.events import read_events
from trainer.report import goodput, history, incidents, page


def found(path) -> list[incidents.Incident]:
  return incidents.find(history.load(str(path)))


def five_faults(path) -> None:
  """A run on 3 slices with three losses and two returns, and costs that differ."""
  run = fake_run.FakeRun(path, steps=40)
  step = 0
  for change, slice_id, until, again in (
    ("lose", 1, 8, 0),
    ("gain", 1, 15, 0),
    ("lose", 0, 20, 2),
    ("gain", 0, 28, 0),
    ("lose", 2, 33, 1),
  ):
    while step < until:
      step += 1
      run.step(step)
    if change == "lose":
      run.lose(slice_id, step, resume=step + 1 - again, outage=0.1 * slice_id)
      step -= again
    else:
      run.gain(slice_id, step)
  while step < 40:
    step += 1
    run.step(step)
  run.end(step=40)


def test_five_faults_cost_what_their_records_say_and_the_buckets_sum_to_a_hundred(tmp_path):
  five_faults(tmp_path / "five")
  records = [event for event in read_events(str(tmp_path / "five")) if event["kind"] == "recovery"]
  shown = found(tmp_path / "five")
  assert len(shown) == len(records) == 5
  for incident, record in zip(shown, records, strict=True):
    assert (incident.seconds, incident.tokens) == (record["seconds"], record["tokens_lost"])
  assert [incident.tokens for incident in shown] == [0, 0, 2 * 6144, 0, 6144]
  result = goodput.compute(history.load(str(tmp_path / "five")))
  assert sum(result["percent"].values()) == pytest.approx(100, abs=1e-9)
  assert result["seconds"]["detect"] == pytest.approx(0.6, abs=1e-5)  # three losses, each detected after 0.2 s
  assert result["steps_lost"] == 3 and result["seconds"]["steps_lost"] > 0


def test_sentences_name_slice_step_source_and_what_was_done_again(tmp_path):
  five_faults(tmp_path / "five")
  text = [incident.what for incident in found(tmp_path / "five")]
  assert text[0] == "Slice 1 was lost after step 8. Training continued on 2 slices, from a snapshot in host memory."
  assert text[1].startswith("Slice 1 returned after step 15. Training continued on 3 slices")
  assert text[2].endswith("Steps 19 to 20 were done again.")
  assert text[4].endswith("Step 33 was done again.")


@pytest.mark.parametrize(
  ("end", "why"),
  [
    (lambda run: run.end(42), "stopped by a signal"),
    (lambda run: run.end(1), "had failed (exit code 1)"),
    (lambda run: run.close(), "it was killed"),
    (lambda run: (run.after(9.0, "hang", step=5, silent_seconds=9.0, operation=None), run.close()), "exit code 134"),
  ],
)
def test_a_restart_says_why_and_what_it_cost(tmp_path, end, why):
  first = fake_run.FakeRun(tmp_path / "a", steps=9, slices=1)
  for step in range(1, 6):
    first.step(step)
  end(first)
  last = first.wall + first.now
  second = fake_run.FakeRun(tmp_path / "a", steps=9, slices=1, wall=1.8e9 + 100)
  second.after(0.0, "init_done", step=3, seconds=3.2)
  for step in range(4, 8):
    second.step(step)
  second.close()
  restart = [incident for incident in found(tmp_path / "a") if "started again" in incident.what]
  assert len(restart) == 1 and why in restart[0].why
  assert restart[0].what.endswith("2 steps done again.") and restart[0].tokens == 2 * 6144
  # Until the second process was first ready: 3.2 s after its start.
  assert restart[0].seconds == pytest.approx(1.8e9 + 103.2 - last, abs=1e-3)


def test_a_complete_run_that_is_started_again_or_extended_is_no_incident(tmp_path):
  wall, done = 1.8e9, 0
  for until in (3, 3, 6, 4):
    run = fake_run.FakeRun(tmp_path / "a", steps=until, slices=1, wall=wall)
    for step in range(done + 1, until + 1):
      run.step(step)
    done = max(done, until)
    run.end(0, step=done)
    wall += 86400.0
  assert found(tmp_path / "a") == []
  text = page.sections_of(*(run := history.load(str(tmp_path / "a")), goodput.compute(run)), "")
  assert "6 (4 wanted)" in text and "6 of 4" not in text


def fail(run: fake_run.FakeRun, member: int, times: int) -> None:
  fields = {"host": f"host-{member}", "error": "ended with exit code 2", "pause_seconds": 0.5 * 2 ** (times - 1)}
  run.after(1.0, "member_failing", member=member, times=times, **fields)


def test_failures_of_a_member_in_a_row_are_one_incident_until_it_returns(tmp_path):
  run = fake_run.FakeRun(tmp_path)
  for times in (2, 3, 4, 2, 3):
    run.step(times)
    fail(run, 2, times)
  fail(run, 1, 2)
  run.events.emit("member_failing", member=0, times=2, pause_seconds="damaged")
  assert [incident.what for incident in found(tmp_path)] == [
    f"Member {member} (host host-{member}) has failed {times} times without 10 steps of its own: next start in {s} s."
    for member, times, s in ((2, 4, 4), (2, 3, 2), (1, 2, 1))
  ]
  assert {incident.why for incident in found(tmp_path)} == {"Ended with exit code 2."}
  failing = lambda: [event["member"] for event in incidents.failing(history.load(str(tmp_path)))]
  assert failing() == [2, 1]
  run.after(1.0, "slice_up", step=9, slice=[2], slices=[0, 1, 2])
  assert failing() == [1]


def test_an_alarm_of_the_witness_names_the_slice_and_the_arrays(tmp_path):
  run = fake_run.FakeRun(tmp_path)
  run.step(1)
  fields = {"round": "step 2", "members": [1], "where": {"1": "host a, TPU_3"}, "agreed": {"1": "step 1"}}
  run.events.emit("witness", outcome="removed", arrays={"embedding": 2}, **fields)
  run.events.emit("witness", outcome="removed", arrays="damaged", **fields)
  (incident,) = found(tmp_path)
  assert "embedding (2). Wrong sums from slice 1 (host a, TPU_3)" in incident.what and "step 1" in incident.what
