"""The prefetch thread: order, bounds, waiting, errors, and closing in every state."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from input_pipeline.batch import DataError
from input_pipeline.prefetch import Prefetcher

depths = pytest.mark.parametrize("depth", [1, 3])


def threads() -> list[threading.Thread]:
  return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
  yield
  gc.collect()
  assert threads() == []


@depths
def test_yields_every_step_once_in_order(depth):
  calls = []
  with Prefetcher(lambda step: calls.append(step) or step * 10, 3, 9, depth) as items:
    assert list(items) == [(step, step * 10) for step in range(3, 9)]
    assert list(items) == []
  assert calls == list(range(3, 9))


@depths
def test_peek_shows_the_next_item_and_its_error_without_taking_it(depth):
  def fn(step):
    if step == 3:
      raise OSError("gone")
    return step

  with Prefetcher(fn, 0, 5, depth=depth) as items:
    for step in range(3):
      assert items.peek() == items.peek() == step
      assert next(items) == (step, step)
    with pytest.raises(DataError, match="gone"):
      items.peek()
  with Prefetcher(fn, 0, 1, depth=depth) as items:
    next(items)
    with pytest.raises(StopIteration):
      items.peek()


@depths
def test_error_comes_after_the_good_items_and_stays(depth):
  def fail_at_two(step):
    if step == 2:
      raise OSError("no space left")
    return step

  with Prefetcher(fail_at_two, 0, 9, depth) as items:
    assert [next(items), next(items)] == [(0, 0), (1, 1)]
    for _ in range(2):
      with pytest.raises(DataError, match=r"step 2: .*OSError: no space left") as caught:
        next(items)
      assert caught.value.step == 2 and isinstance(caught.value.__cause__, OSError)


def test_close_waits_for_the_running_call_and_prevents_further_calls():
  entered, calls = threading.Event(), []

  def slow(step):
    calls.append(step)
    entered.set()
    time.sleep(0.2)

  items = Prefetcher(slow, 0, 10, 2)
  entered.wait(10)
  assert items.close()
  assert calls == [0] and not items._ready


def test_close_does_not_hang_on_a_call_that_hangs():
  release = threading.Event()
  items = Prefetcher(lambda step: release.wait(30), 0, 10, 2)
  started = time.monotonic()
  assert not items.close(timeout_seconds=0.1)
  assert time.monotonic() - started < 5
  release.set()
  assert items.close()


def test_close_wakes_a_waiting_consumer():
  release, got = threading.Event(), []
  items = Prefetcher(lambda step: release.wait(30), 0, 10, 2)
  consumer = threading.Thread(target=lambda: got.extend(items))
  consumer.start()
  time.sleep(0.05)
  items.close(timeout_seconds=0.01)
  consumer.join(10)
  assert not consumer.is_alive() and got == []
  release.set()
  assert items.close()
