from __future__ import annotations

import random

import pytest

from trainer.elastic.policy import ResizePolicy, RetryPolicy, SnapshotPolicy

LARGE = 2**30


def test_attempts_without_progress_run_out_with_growing_pauses():
  policy = RetryPolicy(max_attempts=5, reset_steps=10, backoff_seconds=1.0)
  assert [policy.failed() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]


def test_progress_resets_the_count():
  policy = RetryPolicy(max_attempts=3, reset_steps=4, backoff_seconds=0.0)
  for first in range(1, 400, 4):  # without a limit, as long as it makes progress
    for step in range(first, first + 4):
      policy.completed(step)
    assert policy.attempt == 1
    assert policy.failed() == 0.0
    assert policy.attempt == 2


def test_growing_waits_for_the_interval():
  now = [0.0]
  policy = ResizePolicy(min_interval_seconds=30, clock=lambda: now[0])
  assert policy.interval_over
  policy.resized()
  now[0] = 29
  assert not policy.interval_over
  now[0] = 31
  assert policy.interval_over


def test_growing_must_pay():
  policy = ResizePolicy(min_interval_seconds=0, clock=lambda: 0.0, cost_seconds=10)
  assert policy.worthwhile(saved_seconds=11, compile_seconds=0)
  assert not policy.worthwhile(saved_seconds=11, compile_seconds=2)
  assert not ResizePolicy(0, lambda: 0.0).worthwhile(saved_seconds=0, compile_seconds=0)  # 5 or 6 slices of 8


def test_every_step_of_a_small_state_has_a_snapshot_whatever_it_costs():
  policy = SnapshotPolicy(period=0, max_overhead=0.01, state_bytes=2**20)
  assert run_steps(policy, 100, step_seconds=0.01, cost=0.01) == list(range(1, 101))
  assert policy.is_fixed


def run_steps(policy, steps, step_seconds, cost, first=1, waits=False, noise=lambda: 0.0):
  """The steps with a snapshot. A step takes step_seconds, plus `cost` after a snapshot or (waits) during a snapshot."""
  taken = []
  for step in range(first, first + steps):
    if policy.due(step):
      policy.taken(step)
      taken.append(step)
    policy.completed(step, step_seconds + noise() + (cost if (step if waits else step - 1) in taken else 0.0))
  return taken


def test_a_snapshot_that_a_slow_copy_prevents_follows_when_the_copy_is_done():
  """Before, the run waited for the next multiple of the period, so that twice as many steps were lost."""
  policy = SnapshotPolicy(period=0, max_overhead=0.01, state_bytes=LARGE)
  assert [step for step in range(1, 5) if policy.due(step)] == [4]
  policy.taken(4)  # its copy takes 4.5 steps, so nothing is taken at step 8
  assert [step for step in range(5, 10) if policy.due(step)] == [8, 9]
  policy.restarted()  # at step 2, say
  assert [step for step in range(3, 10) if policy.due(step)] == [4, 8]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(("cost", "period"), [(0.0, 1), (0.009, 1), (0.025, 3), (0.5, 50)])
def test_snapshots_cost_no_more_than_allowed(cost, period, waits):
  policy = SnapshotPolicy(period=0, max_overhead=0.01, state_bytes=LARGE)
  run_steps(policy, 400, step_seconds=1.0, cost=cost, waits=waits)
  assert policy.period == period
  assert cost / policy.period <= 0.01 * 1.0


@pytest.mark.parametrize("cost, noise", [(0.02, 0.15), (0.05, 0.02), (0.3, 0.05)])
def test_noise_makes_no_snapshot_look_free(cost, noise):
  """In 2,500 steps, snapshots cost the allowed 1 % or little more, even if the step times scatter widely."""
  for seed in range(2):
    normal = random.Random(seed)
    policy = SnapshotPolicy(period=0, max_overhead=0.01, state_bytes=LARGE)
    taken = run_steps(policy, 3000, 1.0, cost, noise=lambda normal=normal: normal.gauss(0, noise))
    assert 0.001 < cost * sum(step > 500 for step in taken) / 2500 < 0.0125


def test_another_attempt_drops_old_measurements():
  """With half the slices a step takes twice as long. Compared with old times, a snapshot would seem to cost a step."""
  policy = SnapshotPolicy(period=0, max_overhead=0.01, state_bytes=LARGE)
  run_steps(policy, 400, step_seconds=1.0, cost=0.0)
  policy.restarted()
  run_steps(policy, 20, step_seconds=2.0, cost=0.0, first=401)
  assert policy.period == 1


def test_a_run_may_fail_for_ever():
  policy = RetryPolicy(max_attempts=10_000, reset_steps=10)
  assert [policy.failed() for _ in range(2000)][-1] == 60.0
