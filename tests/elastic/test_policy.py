from __future__ import annotations

from trainer.elastic.policy import ResizePolicy, RetryPolicy


def test_attempts_without_progress_run_out_with_growing_pauses():
  policy = RetryPolicy(max_attempts=5, reset_steps=10, backoff_seconds=1.0)
  assert [policy.failed() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, None]


def test_pauses_end_at_a_minute():
  policy = RetryPolicy(max_attempts=20, reset_steps=10, backoff_seconds=1.0)
  pauses = [policy.failed() for _ in range(10)]
  assert pauses[6:] == [60.0] * 4


def test_an_attempt_with_new_steps_is_followed_at_once():
  policy = RetryPolicy(max_attempts=5, reset_steps=10, backoff_seconds=1.0)
  policy.failed()
  policy.completed(1)
  assert policy.failed() == 0.0
  assert policy.failed() == 1.0  # the pauses begin anew too


def test_progress_resets_the_count():
  policy = RetryPolicy(max_attempts=3, reset_steps=4, backoff_seconds=0.0)
  for first in range(1, 400, 4):  # for ever, as long as it gets on
    for step in range(first, first + 4):
      policy.completed(step)
    assert policy.attempt == 1
    assert policy.failed() == 0.0
    assert policy.attempt == 2


def test_too_little_progress_does_not_reset_the_count():
  policy = RetryPolicy(max_attempts=3, reset_steps=4, backoff_seconds=0.0)
  results = []
  for attempt in range(3):
    for step in range(3 * attempt + 1, 3 * attempt + 4):
      policy.completed(step)
    results.append(policy.failed())
  assert results == [0.0, 0.0, None]


def test_repeating_old_steps_is_no_progress():
  policy = RetryPolicy(max_attempts=3, reset_steps=4, backoff_seconds=0.0)
  for step in range(1, 51):
    policy.completed(step)
  assert policy.failed() == 0.0
  for step in range(1, 51):  # restored from step 0, fails at the same place
    policy.completed(step)
  assert policy.failed() == 0.0
  assert policy.failed() is None


def test_steps_of_an_earlier_process_are_no_progress():
  policy = RetryPolicy(max_attempts=2, reset_steps=1, backoff_seconds=0.0)
  policy.start_at(100)
  policy.completed(99)
  policy.completed(100)
  assert policy.new_steps == 0


def test_a_resize_costs_no_attempt():
  policy = RetryPolicy(max_attempts=2, reset_steps=100, backoff_seconds=1.0)
  for _ in range(10):
    policy.resized()
  assert policy.attempt == 1


def test_growing_waits_for_the_interval():
  now = [0.0]
  policy = ResizePolicy(min_interval_seconds=30, clock=lambda: now[0])
  worth = lambda: policy.worth_it(100, 1.0, 0.5, 1.0)
  assert worth()
  policy.resized()
  now[0] = 29
  assert not worth()
  now[0] = 31
  assert worth()


def test_growing_must_pay():
  policy = ResizePolicy(min_interval_seconds=0, clock=lambda: 0.0, cost_seconds=10)
  assert policy.worth_it(steps_left=21, step_seconds=1, throughput_now=0.5, throughput_then=1.0)  # saves 10.5 s
  assert not policy.worth_it(steps_left=19, step_seconds=1, throughput_now=0.5, throughput_then=1.0)
  assert not policy.worth_it(steps_left=10**6, step_seconds=1, throughput_now=0.5, throughput_then=0.5)  # 5 or 6 of 8
