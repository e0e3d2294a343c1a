from __future__ import annotations

import base64
import html.parser
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tests.report import fake_run
from tests.support import guide_awk

from trainer.observe import log
from trainer.report import history, page
from trainer.tools import report as tool


class Page(html.parser.HTMLParser):
  """Checks that tags are balanced and collects what is loaded and what is said."""

  def __init__(self, text: str):
    super().__init__()
    self.open, self.loads, self.text = [], [], ""
    self.feed(text)
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.loads += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
    if tag not in ("meta", "img"):
      self.open.append(tag)

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.text += data + " "


def png_size(data: bytes) -> tuple[int, int]:
  assert data.startswith(b"\x89PNG\r\n\x1a\n")
  return struct.unpack(">II", data[16:24])


def test_the_report_stands_alone_and_says_what_happened(tmp_path):
  fake_run.elastic_run(tmp_path / "demo", config={"learning_rate": 0.001, "fault_injection": "slice_down@12:1 <x>"})
  path = page.write(str(tmp_path / "demo"))
  text = Path(path).read_text()
  shown = Page(text)
  assert len(shown.loads) == 4 and all(load.startswith("data:image/png;base64,") for load in shown.loads)
  assert "http" not in text and "<script" not in text
  for load in shown.loads:
    width, height = png_size(base64.b64decode(load.split(",")[1]))
    assert width == 1440 and 150 < height < 1600
  for fact in ("60 of 60", "3.2 million parameters", "slice_down", "slice_up", "snapshot", "ended with exit code 0"):
    assert fact in shown.text
  assert "fault_injection" in shown.text and "slice_down@12:1 <x>" in shown.text
  assert "return <b>None</b>  # \u00e9" in shown.text  # the sample is text, not markup
  assert png_size((tmp_path / "demo" / "loss.png").read_bytes())[0] == 1440


def test_the_history_of_an_elastic_run(tmp_path):
  fake_run.elastic_run(tmp_path / "demo")
  run = history.load(str(tmp_path / "demo"))
  assert [record["step"] for record in run.steps] == list(range(1, 61))
  assert [record["step"] for record in run.lost] == [12]
  assert [record["slices"] for record in run.steps] == [3] * 11 + [2] * 19 + [3] * 30
  assert [record["step"] for record in run.evals] == [20, 40, 60]
  speeds = run.tokens_per_second()
  assert speeds[0] == pytest.approx(6144 / 0.35) and speeds[20] == pytest.approx(6144 / 0.35 * 2 / 3)


def test_a_run_that_is_still_going_on_and_knows_little(tmp_path):
  run = fake_run.FakeRun(tmp_path / "young", slices=1, vocab_size=None, unigram_entropy=None, config=None)
  run.step(1)
  run.close()
  shown = Page(Path(page.write(str(tmp_path / "young"))).read_text())
  assert "not ended" in shown.text and "Not recorded." in shown.text
  assert "Recoveries" not in shown.text and "Sample" not in shown.text


def test_a_report_that_fails_is_a_warning(tmp_path, monkeypatch, capsys):
  fake_run.plain_run(tmp_path / "a", steps=3)
  page.write_or_warn(str(tmp_path / "a"), log.get(None))
  assert capsys.readouterr().out == f"Report: {tmp_path}/a/report.html\n"
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  monkeypatch.delitem(sys.modules, "trainer.report.plots")
  monkeypatch.delattr("trainer.report.plots")
  page.write_or_warn(str(tmp_path / "a"), log.get(None))
  assert capsys.readouterr().out.startswith("warning: no report: ModuleNotFoundError")


def test_many_steps_restarts_and_bad_losses_are_drawn(tmp_path):
  first = fake_run.FakeRun(tmp_path / "long", steps=8000, slices=1)
  for step in range(1, 4000):
    first.step(step)
  first.step(4000, error=float("nan"))
  first.close()
  second = fake_run.FakeRun(tmp_path / "long", steps=8000, slices=1, wall=1.8e9 + 9000)
  for step in range(3900, 8001):
    second.step(step)
  second.end(42, step=8000)
  shown = Page(Path(page.write(str(tmp_path / "long"))).read_text())
  assert "exit code 42" in shown.text and "8,000 of 8,000" in shown.text


def test_compare_finds_the_largest_difference(tmp_path):
  fake_run.elastic_run(tmp_path / "a", error=2.0**-22)
  fake_run.plain_run(tmp_path / "b")
  result = page.compare([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "both.png"))
  assert result.largest == pytest.approx(2.0**-22, rel=1e-3) and 12 <= result.at_step <= 30
  assert (result.common_steps, result.equal_steps) == (60, 41)
  assert str(result) == f"largest relative difference 2.4e-07 (step {result.at_step}) over 60 steps"
  assert png_size((tmp_path / "both.png").read_bytes())[0] == 1440


def test_equal_runs_are_equal_and_nan_differs_from_a_number(tmp_path):
  fake_run.plain_run(tmp_path / "a", steps=5)
  fake_run.plain_run(tmp_path / "b", steps=5)
  same = page.compare([str(tmp_path / "a"), str(tmp_path / "b")])
  assert same.largest == 0 and str(same) == "all 5 losses equal to the last bit"
  broken = fake_run.FakeRun(tmp_path / "c", steps=5)
  broken.step(1)
  broken.step(2, error=float("nan"))
  broken.close()
  result = page.compare([str(tmp_path / "a"), str(tmp_path / "c")], str(tmp_path / "both.png"))
  assert result.largest == float("inf") and result.at_step == 2 and result.common_steps == 2


def test_the_tool(tmp_path, capsys):
  fake_run.plain_run(tmp_path / "a", steps=3)
  assert tool.main([str(tmp_path / "a")]) == 0
  assert capsys.readouterr().out == f"{tmp_path}/a/report.html\n"
  assert tool.main([str(tmp_path / "a"), str(tmp_path / "a"), "--compare", str(tmp_path / "p.png")]) == 0
  assert capsys.readouterr().out == f"all 3 losses equal to the last bit\n{tmp_path}/p.png\n"
  assert tool.main([str(tmp_path / "nothing")]) == 2
  assert "no completed step" in capsys.readouterr().err
  assert tool.main([str(tmp_path / "a"), "--compare", str(tmp_path / "p.png")]) == 2


def test_the_guides_awk_script_reads_our_log_unchanged(tmp_path):
  fake_run.elastic_run(tmp_path / "demo")
  assert guide_awk.slice_count_changes(tmp_path / "demo" / "log.txt") == [
    "Step: 12, Old Slice Count: 3, New Slice Count: 2",
    "Step: 31, Old Slice Count: 2, New Slice Count: 3",
  ]


def test_the_log_of_a_run_has_the_guides_lines(tmp_path):
  fake_run.elastic_run(tmp_path / "demo")
  lines = (tmp_path / "demo" / "log.txt").read_text().splitlines()
  shape = re.compile(r"completed step: \d+, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, loss: \d+\.\d{3}, .*")
  assert sum(bool(shape.fullmatch(line)) for line in lines) == 61


def test_recording_and_reporting_need_no_jax():
  code = (
    "import sys\n"
    "from trainer.observe import log, metrics, events, progress, throughput, chips\n"
    "from trainer.observe import watchdog, files\nfrom trainer.report import goodput, history, page, plots\n"
    "import trainer.tools.report\n"
    "print(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'tensorboardX', 'rich')))\n"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
  assert done.stdout == "[]\n"
