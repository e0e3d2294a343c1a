from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from tests.support import fake_run

from trainer.observe import events, metrics
from trainer.report import goodput, history, list_page, page


class Life:
  """One process writing the real files under a clock that the test moves."""

  def __init__(self, path, wall: float, monotonic: float = 100.0):
    self.wall, self.now = wall - monotonic, monotonic
    self.events = events.EventLog(str(path), "r", wall=lambda: self.wall + self.now, monotonic=lambda: self.now)
    self.metrics = metrics.Metrics(str(path), self.events)

  def after(self, pause: float, kind: str, /, **fields) -> None:
    self.now += pause
    self.events.emit(kind, **fields)

  def step(self, step: int, seconds: float = 1.0, wait: float = 0.0, slices: int = 3) -> None:
    self.now += seconds
    self.metrics.write(
      metrics.StepRecord(
        step=step, seconds=seconds, loss=1.0, grad_norm=1.0, lr=0.1, tokens=step, slices=slices, data_wait=wait
      )
    )


def compute(path) -> dict:
  return goodput.compute(history.load(str(path)))


def seconds(path) -> dict[str, float]:
  result = compute(path)
  assert sum(round(1e6 * s) for s in result["seconds"].values()) == round(1e6 * result["wall_seconds"])
  assert sum(round(100 * p) for p in result["percent"].values()) == 10000
  return {name: value for name, value in result["seconds"].items() if value}


def test_each_kind_of_time_has_its_bucket(tmp_path):
  life = Life(tmp_path, wall=1000.0)
  life.after(0, "run_start", num_slices=3)
  life.after(1, "restore", seconds=1, tier="none", step=0)
  life.after(4, "compile", seconds=2.5, what="train_step")
  life.after(0.5, "init_done", seconds=5.5)
  life.step(0, seconds=2, wait=0.25)
  life.after(0.125, "snapshot", blocking_seconds=0.125, step=0)
  life.after(0, "compile", seconds=50, background=True, what="two slices")
  life.after(3, "eval", seconds=2, loss=1.0, step=0)
  life.after(0.25, "profile", seconds=0.25)
  life.after(1, "run_end", exit=0)
  assert seconds(tmp_path) == {
    "compile": 2.5,
    "restore": 1.0,
    "snapshot": 0.125,
    "eval": 2.0,
    "profile": 0.25,
    "data_wait": 0.25,
    "steps": 1.75,
    "init": 2.0,
    "other": 2.0,  # one before the evaluation, one at the end
  }


def test_the_wait_of_a_rehearsed_fault_is_no_work(tmp_path):
  """163 s of a demo counted as steps."""
  life = Life(tmp_path, wall=0.0)
  life.step(1)
  life.after(5, "rehearsal_wait", seconds=5, step=3)  # the step before it is not recorded yet
  life.now += 1 - 6
  life.step(2, seconds=6)
  assert seconds(tmp_path) == {"steps": 2.0, "rehearsal": 5.0}


def test_an_elastic_rewind(tmp_path):
  life = Life(tmp_path, wall=50.0)
  life.after(0, "run_start", num_slices=3)
  life.after(0, "attempt_start", attempt=1)
  for step in range(4):
    life.step(step)
  life.after(0.75, "slice_down", slice=1, step=3)
  life.after(0, "attempt_start", attempt=2)
  life.after(2, "wait_slices", seconds=2)
  life.after(0.5, "restore", seconds=0.5, tier="snapshot", step=2)
  for step in (3, 4):
    life.step(step, slices=2)
  life.after(0, "run_end", exit=0)
  assert seconds(tmp_path) == {"steps": 5.0, "detect": 0.75, "steps_lost": 1.0, "wait_slices": 2.0, "restore": 0.5}
  result = compute(tmp_path)
  assert (result["steps"], result["steps_lost"], result["attempts"], result["processes"]) == (5, 1, 2, 1)
  assert result["slice_percent"] == round(100 * (3 * 3 + 2 * 2) / 15, 2)
  assert result["goodput_percent"] == pytest.approx(100 * 5 / 9.25, abs=0.01)


def test_an_evaluation_that_fails_counts_as_detection_of_the_fault(tmp_path):
  """One that succeeds counts as evaluation, and its compilation as compilation."""
  life = Life(tmp_path, wall=0.0)
  life.after(0, "run_start")
  life.step(1)
  life.after(0.5, "slice_down", slice=[1], step=1)
  for fails in (True, False):
    life.after(0, "attempt_end", step=1)
    life.after(0, "attempt_start")
    life.after(1, "restore", seconds=1, tier="snapshot", step=1)
    life.after(0.25, "init_done", seconds=1.25, step=1)
    if fails:
      life.after(8, "slice_down", slice=[2], step=1)
  life.after(3, "compile", seconds=3, what="evaluation on slices [0]")
  life.after(2, "eval", seconds=5, step=1)
  life.step(2)
  assert seconds(tmp_path) == {"steps": 2.0, "detect": 8.5, "restore": 2.0, "init": 0.5, "compile": 3.0, "eval": 2.0}


def test_a_restart_of_the_process(tmp_path):
  first = Life(tmp_path, wall=1000.0, monotonic=7.0)
  first.after(0, "run_start")
  for step in range(10):
    first.step(step)  # then killed
  second = Life(tmp_path, wall=1030.0, monotonic=90000.0)  # another boot: its monotonic clock means nothing here
  second.after(2, "run_start", seconds=2)
  second.after(1, "restore", seconds=1, step=7, tier="persistent")
  for step in range(8, 12):
    second.step(step)
  assert seconds(tmp_path) == {"steps": 12.0, "steps_lost": 2.0, "down": 20.0, "init": 2.0, "restore": 1.0}
  assert compute(tmp_path)["processes"] == 2


def test_a_wall_clock_that_is_set_back_does_not_make_lives_overlap(tmp_path):
  first = Life(tmp_path, wall=1000.0)
  first.step(0, seconds=100)
  second = Life(tmp_path, wall=1050.0)
  second.step(1, seconds=1)
  assert seconds(tmp_path) == {"steps": 101.0}


def test_any_history_sums_to_the_wall_time(tmp_path):
  rng = random.Random(0)
  kinds = [*goodput._TIMED, *goodput._BLOCKING, "attempt_end", "slice_down", "attempt_start", "hang", "nonsense"]
  for case in range(30):
    path, wall, step = tmp_path / str(case), 1e9, 0
    for _ in range(rng.randint(1, 4)):
      life = Life(path, wall=wall, monotonic=rng.uniform(0, 1e6))
      for _ in range(rng.randint(1, 40)):
        if rng.random() < 0.5:
          step = max(0, step + rng.choice([1, 1, 1, 1, -3]))
          life.step(step, seconds=rng.expovariate(1), wait=rng.expovariate(3))
        else:
          took = rng.expovariate(0.5)
          life.after(rng.expovariate(1), rng.choice(kinds), seconds=took, blocking_seconds=rng.random() * took)
      wall += life.now + rng.uniform(-5, 5)
    seconds(path)


def test_no_wrong_value_in_a_record_ends_the_report(tmp_path):
  """Every field of every kind of record, with values of other types: only the value or its record is left out."""
  fake_run.elastic_run(tmp_path / "a")
  changed = 0
  for name in ("metrics.jsonl", "events.jsonl"):
    path = tmp_path / "a" / name
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {(record.get("kind"), "loss" in record): index for index, record in enumerate(records)}
    fields = [(index, field) for index in kinds.values() for field in records[index]]
    for number, (index, field) in enumerate(fields):
      wrong = ["x", [1], {"a": 1}, math.inf, None, 1e13, 1e300, -1e13, 10**400][number % 9]
      path.write_text(
        "".join(json.dumps(r | {field: wrong} if i == index else r) + "\n" for i, r in enumerate(records))
      )
      run = history.load(str(tmp_path / "a"))
      assert len(run.rows) >= 60 and page.sections_of(run, goodput.compute(run), "")
      assert list_page.body([list_page.read(str(tmp_path / "a"), "a")], 1.8e9)
      assert len(metrics.read_metrics(str(tmp_path / "a"))) >= 59
      changed += 1
    path.write_text("\n".join(map(json.dumps, records)))
  assert changed > 60


@pytest.mark.parametrize(
  ("file", "field", "wrong"),
  [("metrics.jsonl", "seconds", 1e13), ("events.jsonl", "wall", 1e300), ("events.jsonl", "num_slices", 10**400)],
)
def test_one_impossible_number_does_not_take_the_list_of_all_runs_down(tmp_path, file, field, wrong):
  fake_run.plain_run(tmp_path / "a", steps=20)
  path = tmp_path / "a" / file
  records = [json.loads(line) for line in path.read_text().splitlines()]
  index = [i for i, record in enumerate(records) if field in record][:2][-1]  # not the first record of the run
  path.write_text("".join(json.dumps(r | {field: wrong} if i == index else r) + "\n" for i, r in enumerate(records)))
  row = list_page.read(str(tmp_path / "a"), "a")
  assert "20 of 20" in list_page.body([row], 1.8e9) and not row.problem


@pytest.mark.parametrize("clock", [0.0, 3e6, -3e6])
def test_the_clocks_of_two_hosts_make_no_duration(tmp_path, clock):
  """A process takes the records over after 0.7 s, and another one continues the run later."""
  first = Life(tmp_path, wall=1.8e9)
  first.after(0, "run_start")
  for step in range(1, 11):
    first.step(step)
  second = Life(tmp_path, wall=1.8e9 + 10.7 + clock, monotonic=5000.0)
  second.after(0, "primary", step=10, host="other", seconds=0.7)
  for step in range(11, 21):
    second.step(step)
  second.after(0, "run_end", exit=42)
  run = history.load(str(tmp_path))
  assert seconds(tmp_path) == {"steps": 20.0, "down": 0.7}
  assert np.ptp(goodput.elapsed(goodput.compute(run), run.rows["wall"])) == pytest.approx(19.7)
  assert run.last_wall == pytest.approx(1.8e9 + 20.7 + clock)  # a reader compares it with its own clock
  third = Life(tmp_path, wall=1.8e9 + 10)  # by the clock of its host, the run goes on already
  third.step(21)
  assert seconds(tmp_path) == {"steps": 21.0, "down": 0.7}


def test_a_refused_process_does_not_count(tmp_path):
  """Its time is neither down time nor start-up, and its slices are not the run's."""
  life = Life(tmp_path, wall=1000.0)
  life.after(0, "run_start", num_slices=3)
  life.after(1, "init_done", seconds=1)
  life.step(1)
  life.after(1, "run_end", exit=0)
  before = compute(tmp_path)
  refused = Life(tmp_path, wall=9000.0)
  refused.after(0, "run_start", num_slices=9)
  refused.after(1, "run_end", exit=2)
  assert compute(tmp_path) == before
  assert before["slice_percent"] == 100.0 and before["processes"] == 1
