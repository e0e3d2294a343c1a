"""CPU budget of each test folder: measured in every run, printed at its end, and enforced with a margin of two.

CPU seconds are those of this process, of its children that have ended, and of the runs that the fixture `server` has
forked, with the workers of a launcher. Unlike wall time, they depend little on other work of the machine. With N cores,
a run takes about the sum of the table divided by N.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest
from tests.support.forked_runs import Server

# CPU seconds of a whole run of .ci/run, per folder: what one took with either Python (2026-11-28), and a tenth more.
# "tests" stands for the files directly in tests/.
BUDGETS = {
  "tests": 120,
  "tests/checkpoint": 280,
  "tests/cluster": 60,
  "tests/config": 70,
  "tests/input_pipeline": 110,
  "tests/elastic": 160,
  "tests/kernels": 120,
  "tests/launch": 220,
  "tests/models": 45,
  "tests/observe": 60,
  "tests/pages": 100,
  "tests/program": 200,
  "tests/report": 60,
  "tests/run": 100,
  "tests/stepcost": 60,
  "tests/tools": 100,
  "tests/weights": 80,
}
DEFAULT_BUDGET = 60  # of a folder without an entry
LIMIT = 2.0  # a folder that takes this many times its budget fails the run; machines differ, so 1 only warns


class Budgets:
  """Pytest plugin. Workers of pytest-xdist attach the seconds to their reports; the main process adds them up."""

  def __init__(self) -> None:
    # Set while the fixture `server` lives. When it has ended, its seconds are those of a child that has ended.
    self.server: Server | None = None
    self._last = 0.0
    self._spent: defaultdict[str, float] = defaultdict(float)
    self._of_tests: defaultdict[str, float] = defaultdict(float)

  def pytest_collection_finish(self) -> None:
    self._last = self._cpu_seconds()

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self):
    """Adds the CPU seconds since the previous report, including fixtures."""
    report = yield
    now = self._cpu_seconds()
    report.cpu_seconds, self._last = now - self._last, now
    return report

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    # pytest-xdist makes the report of a test that has ended its process.
    seconds = getattr(report, "cpu_seconds", 0.0)
    self._spent[folder(report.nodeid)] += seconds
    self._of_tests[report.nodeid] += seconds

  def _cpu_seconds(self) -> float:
    return sum(os.times()[:4]) + (self.server.cpu_seconds() if self.server else 0)

  def over_limit(self) -> list[str]:
    """The folders whose tests took more than LIMIT times their budget."""
    return [name for name, spent in self._spent.items() if spent > LIMIT * BUDGETS.get(name, DEFAULT_BUDGET)]

  @pytest.hookimpl(tryfirst=True)
  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and self.over_limit():
      session.exitstatus = pytest.ExitCode.TESTS_FAILED

  def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("CPU seconds per folder", sep="=")
    for line in self.table():
      terminalreporter.write_line(line)
    terminalreporter.section("tests with most CPU seconds", sep="=")
    number = terminalreporter.config.option.durations or None  # as for the slowest durations, 0 means all
    for test, seconds in sorted(self._of_tests.items(), key=lambda pair: -pair[1])[:number]:
      terminalreporter.write_line(f"{seconds:7.1f}  {test}")

  def table(self) -> list[str]:
    """One line per folder: seconds, budget, and a remark if over; the last line is the sum."""
    over, lines = self.over_limit(), []
    for name, spent in sorted(self._spent.items(), key=lambda pair: -pair[1]):
      budget = BUDGETS.get(name, DEFAULT_BUDGET)
      remark = "FAILED: over twice the budget" if name in over else "over budget" if spent > budget else ""
      lines.append(f"{spent:7.0f} of {budget:4.0f}  {name}  {remark}".rstrip())
    return [*lines, f"{sum(self._spent.values()):7.0f} in all (budgets: {__name__.replace('.', '/')}.py)"]


def folder(nodeid: str) -> str:
  """tests/input_pipeline/test_text.py::test_x -> tests/input_pipeline"""
  return nodeid.partition("::")[0].rpartition("/")[0]
