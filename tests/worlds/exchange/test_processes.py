"""Real processes: SIGKILL in the middle of a reduction, and the survivors compute the exact sum."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.exchange_members import sum_in_order
from tests.support.exchange_process import digest, share_values
from tests.support.seeds import few

ROOT = Path(__file__).parents[3]
SIZE = 3_000_000
SHARES = 4


class Process:
  """A member in a process of its own. `answers` has what it prints."""

  def __init__(self, member):
    self.member = member
    self._process = subprocess.Popen(
      [sys.executable, "-m", "tests.support.exchange_process", str(member), str(SIZE)],
      env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      bufsize=1,
    )
    self.answers = queue.SimpleQueue()
    self._reader = threading.Thread(target=self._read)
    self._reader.start()

  def _read(self):
    for line in self._process.stdout:
      with contextlib.suppress(ValueError):  # a killed process leaves half a line
        self.answers.put(json.loads(line))

  def ask(self, **request):
    self._process.stdin.write(json.dumps(request) + "\n")
    self._process.stdin.flush()

  def answer(self, epoch=None, seconds=60):
    """The next answer of this epoch, or the next answer at all. Raises queue.Empty."""
    while True:
      answer = self.answers.get(timeout=seconds)
      if epoch is None or answer["epoch"] == epoch:
        return answer

  def kill(self):
    self._process.kill()
    assert self._process.wait(20) == -signal.SIGKILL

  def end(self):
    if self._process.poll() is None:
      self._process.kill()
    self._process.wait(20)
    self._reader.join(20)
    self._process.stdin.close()
    self._process.stdout.close()


@contextlib.contextmanager
def processes(count):
  started = [Process(member) for member in range(count)]
  try:
    yield {process.member: process for process in started}
  finally:
    for process in started:
      process.end()


def deal(members):
  members = sorted(members)
  return {member: list(range(SHARES))[index :: len(members)] for index, member in enumerate(members)}


@functools.cache  # twelve million random numbers
def expected(tag):
  return digest(sum_in_order({share: share_values(share, tag, SIZE) for share in range(SHARES)}))


@pytest.mark.parametrize("seed", few([0], [0, 1]))
def test_survivors_of_sigkill_in_mid_reduction_get_the_exact_sum(seed):
  """Of 4 processes, 3 are killed one after the other: the first as soon as a reduction begins, the others later."""
  moments = random.Random(seed)
  with processes(4) as alive:
    addresses = {member: process.answer()["address"] for member, process in alive.items()}
    epoch, losses = 0, 0

    def begin(tag):
      nonlocal epoch
      epoch += 1
      for process in alive.values():
        process.ask(epoch=epoch, peers={m: addresses[m] for m in alive}, dealt=deal(alive), tag=tag)
      for process in alive.values():
        assert process.answer(epoch).get("ready")

    begin("warm up")
    answers = [process.answer(epoch) for process in alive.values()]
    assert {answer["digest"] for answer in answers} == {expected("warm up")}
    seconds = [0.0, *(moments.uniform(0, answers[0]["seconds"]) for _ in range(2))]
    while len(alive) > 1:
      tag = f"step {epoch}"
      begin(tag)
      time.sleep(seconds.pop(0))
      victim = moments.choice(sorted(alive))
      alive.pop(victim).kill()
      for process in alive.values():
        try:
          answer = process.answer(epoch, seconds=5)
        except queue.Empty:
          continue  # it has the victim's data, but waits for a sum of a member that lacks some, until the next epoch
        losses += "lost" in answer
        assert answer.get("lost", [victim]) == [victim] and answer.get("digest") in (None, expected(tag))
      begin(tag)
      assert {process.answer(epoch)["digest"] for process in alive.values()} == {expected(tag)}
  assert losses, "no process was killed in the middle of a reduction"
