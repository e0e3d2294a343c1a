"""Some signals of end_to_end/sigterm.py, on the real command."""

from __future__ import annotations

import os

import pytest
from end_to_end import sigterm

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:Sharding info not provided")]


@pytest.mark.soak  # test_stopping.py has the moments by name
def test_sigterm_at_random_moments_loses_repeats_and_changes_nothing(start, tmp_path):
  found = list(sigterm.torment(tmp_path, start, steps=30, signals=2, seed=25))
  ended = [each for each in found if isinstance(each, sigterm.Ended)]
  assert len(ended) == 2
  assert [each if isinstance(each, str) else each.wrong for each in found] == [""] * len(found), found


class Fake:
  """A process that ends with a given code when it gets the signal."""

  pid = os.getpid()

  def __init__(self, code):
    self.code, self.signalled = code, False

  def poll(self):
    return self.code if self.signalled else None

  def wait(self, timeout):
    return self.code

  def send_signal(self, number):
    self.signalled = True


@pytest.mark.parametrize(
  ("code", "last", "committed", "wrong"),
  [
    (42, 7, 7, ""),
    (42, 0, 0, ""),
    (0, 9, 9, ""),
    (42, 7, 5, "step 7 is not committed"),
    (0, 7, 7, "exit code 0, but the run is not complete"),
    (143, 7, 7, "exit code 143"),
    (-15, 0, 0, "exit code -15"),
  ],
)
def test_the_check_reports_broken_rules(monkeypatch, code, last, committed, wrong):
  monkeypatch.setattr(sigterm, "handles_sigterm", lambda process: True)

  class Run:
    last_step, printed = last, ""
    start = staticmethod(lambda: Fake(code))
    committed_steps = staticmethod(lambda: [committed])

  class Rng:
    choice = staticmethod(lambda choices: choices[0])
    uniform = staticmethod(lambda low, high: low)

  ended = sigterm.terminate(Run(), 9, Rng(), 1.0)
  assert (ended.code, ended.wrong) == (code, wrong)
