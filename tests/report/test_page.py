from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support import fake_run, guide_awk
from tests.support.command import without_times
from tests.support.report_page import Page

from trainer.observe import events, log
from trainer.report import goodput, history, page, plots, style
from trainer.tools import report as tool


def png_size(data: bytes) -> tuple[int, int]:
  assert data.startswith(b"\x89PNG\r\n\x1a\n")
  return struct.unpack(">II", data[16:24])


def report(path) -> str:
  """Writes the report of a run and returns the page."""
  run = history.load(str(path))
  return Path(page.write(run, goodput.compute(run))).read_text()


@pytest.fixture
def no_pictures(monkeypatch):
  """Pages without pictures: it takes two seconds to draw them."""
  monkeypatch.setattr(plots, "styled", lambda *_: None)
  for kind in ("svg", "png"):
    monkeypatch.setattr(style, kind, lambda figure: b"")


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> tuple[Path, str]:
  """The folder and the report of an elastic run."""
  folder = tmp_path_factory.mktemp("report") / "demo"
  fake_run.elastic_run(folder, config={"learning_rate": 0.001, "fault_injection": "slice_down@12:1 <x>"})
  return folder, report(folder)


def test_the_report_is_one_file_and_tells_what_happened(demo):
  folder, text = demo
  shown = Page(text)
  assert "http" not in text and shown.scripts == []
  for fact in ("60 of 60", "3.2 million parameters", "slice_down", "slice_up", "snapshot", "Complete (exit code 0)."):
    assert fact in shown.text
  assert "The parts of 2 recoveries" in shown.text and "2 keys" in shown.text
  assert "fault_injection" in shown.text and "slice_down@12:1 <x>" in shown.text
  assert "return <b>None</b>  # \u00e9" in shown.text  # the sample is text, not markup
  assert png_size((folder / "loss.png").read_bytes())[0] == 1440


def test_a_run_may_end_in_a_process_that_took_over_the_records(no_pictures, tmp_path):
  """Where each slice is a process, the primary may be killed: the next one writes no run_start."""
  first = fake_run.FakeRun(tmp_path / "a", steps=4)
  first.step(1)
  first.close()  # killed
  clock = iter(range(200))
  heir = events.EventLog(str(tmp_path / "a"), "a", wall=lambda: first.wall + 200, monotonic=lambda: 200.0 + next(clock))
  heir.emit("primary", step=1)
  assert "Not ended" in report(tmp_path / "a")
  heir.emit("run_end", exit=0)
  heir.close()
  assert "Complete (exit code 0)" in report(tmp_path / "a")
  result = goodput.compute(history.load(str(tmp_path / "a")))
  assert sum(result["percent"].values()) == pytest.approx(100, abs=1e-9) and result["processes"] == 2


def test_a_report_that_fails_is_a_warning(tmp_path, monkeypatch, capsys):
  fake_run.plain_run(tmp_path / "a", steps=3)
  for name in ("plots", "style"):
    monkeypatch.delitem(sys.modules, f"trainer.report.{name}", raising=False)
    monkeypatch.delattr(f"trainer.report.{name}", raising=False)
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  page.write_or_warn(str(tmp_path / "a"), log.get(None), with_goodput=False, with_page=True)
  assert "\nwarning: no report: ModuleNotFoundError" in without_times(capsys.readouterr().out)


def test_the_tool(no_pictures, tmp_path, capsys):
  fake_run.plain_run(tmp_path / "a", steps=3)
  assert tool.main([str(tmp_path / "a")]) == 0
  assert capsys.readouterr().out == f"{tmp_path}/a/report.html\n"


def test_the_tool_refuses_a_path_without_a_run_with_one_message(tmp_path, capsys):
  (tmp_path / "empty").mkdir()
  (tmp_path / "file").write_text("x")
  fake_run.FakeRun(tmp_path / "unborn").close()
  failed = fake_run.FakeRun(tmp_path / "failed")
  failed.after(1.0, "run_end", exit=1)
  failed.close()
  for name, reason in (
    ("nothing", "does not exist"),
    ("empty", "is not the folder of a run"),
    ("file", "is not the folder of a run"),
    ("unborn", "no completed step"),
    ("failed", "the run ended with exit code 1 before its first step. log.txt there says why"),
  ):
    assert tool.main([str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {tmp_path / name}") and reason in said and said.count("\n") == 1
  assert not list((tmp_path / "empty").iterdir())


def test_the_guides_awk_script_reads_our_log_unchanged(tmp_path):
  fake_run.elastic_run(tmp_path / "demo")
  assert guide_awk.slice_count_changes(tmp_path / "demo" / "log.txt") == [
    "Step: 12, Old Slice Count: 3, New Slice Count: 2",
    "Step: 31, Old Slice Count: 2, New Slice Count: 3",
  ]


def test_the_log_of_a_run_has_the_guides_lines(tmp_path):
  fake_run.elastic_run(tmp_path / "demo")
  lines = without_times((tmp_path / "demo" / "log.txt").read_text()).splitlines()
  shape = re.compile(r"completed step: \d+, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, loss: \d+\.\d{3}, .*")
  assert sum(bool(shape.fullmatch(line)) for line in lines) == 61


def test_recording_and_reporting_need_no_jax():
  code = (
    "import sys\n"
    "from trainer.observe import log, metrics, events, progress_bar, throughput\n"
    "from trainer.observe import watchdog, files\n"
    "from trainer.report import goodput, history, page, plots\n"
    "import trainer.tools.report\n"
    "print(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'tensorboardX', 'rich')))\n"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
  assert done.stdout == "[]\n"
