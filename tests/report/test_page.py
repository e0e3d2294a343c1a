from __future__ import annotations

import base64
import math
import re
import struct
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import numpy as np
import pytest
from tests.support import fake_run, guide_awk
from tests.support.command import without_times
from tests.support.report_page import Page

from trainer.observe import events, log
from trainer.observe.metrics import Evaluation
from trainer.report import (
  goodput,
  history,
  markup,
  page,
  plots,
  style,
)
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


def test_pictures_follow_the_width_of_the_screen_and_the_choice_of_light_or_dark(demo):
  _, text = demo
  shown = Page(text)
  assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in shown.media
  assert "@media (prefers-color-scheme: dark)" in text
  assert len(shown.loads) == 6  # three pictures in two widths
  widths = []
  for load in shown.loads:
    kind, data = load.split(",")
    assert kind == "data:image/svg+xml;base64"
    picture = base64.b64decode(data).decode()
    widths.append(float(xml.etree.ElementTree.fromstring(picture).get("width").removesuffix("pt")))
    assert "prefers-color-scheme:dark" in picture and "var(--c0)" in picture and "<script" not in picture
    rest = picture.replace(re.search("<style>svg.*?</style>", picture)[0], "")
    assert "#ffffff" not in rest  # nothing is white on a dark page
  narrow, wide = widths[::2], widths[1::2]  # <source> stands before <img>
  assert max(narrow) < 350 < 700 < min(wide)
  assert sum(attrs.get("media") == "(max-width: 640px)" for attrs in shown.media) == 3


def test_the_start_of_the_run_is_described(no_pictures, tmp_path):
  fake_run.plain_run(
    tmp_path / "a",
    steps=3,
    git_commit="0123abc-dirty",
    command="python -m trainer x.yml 'name=a <b>'",
    host="node-7",
    versions={"jax": "0.10.2", "orbax-checkpoint": "0.12.8"},
    data={"dataset": "text in /books", "tokens": 1234567, "epochs": 0.25, "tokenizer": {"type": "bpe", "size": 512}},
  )
  shown = Page(report(tmp_path / "a")).text
  for fact in (
    "0123abc-dirty",
    "python -m trainer x.yml 'name=a <b>'",
    "node-7",
    "jax 0.10.2, orbax-checkpoint 0.12.8",
  ):
    assert fact in shown
  for fact in ("text in /books", "1,234,567", "0.25", "type: bpe, size: 512"):
    assert fact in shown


@pytest.mark.parametrize(
  ("value", "name", "shown"),
  [
    (6.128999984866823e-06, "restore_seconds", "<0.001"),
    (6.128999984866823e-06, "loss", "6.129e-06"),
    (0.0, "wait_seconds", "0"),
    (1234.5678, "seconds", "1,234.568"),
    (5.123456789, "loss", "5.123"),
    (1234567.8, "x", "1,234,568"),
    (73728, "tokens_lost", "73,728"),
    (float("nan"), "loss", "nan"),
    ([0, 2], "slice", "0, 2"),
    (True, "cached", "true"),
    (None, "x", ""),
  ],
)
def test_numbers_are_short(value, name, shown):
  assert markup.cell(value, name) == shown


@pytest.mark.parametrize(
  ("number", "shown"),
  [(960, "960"), (45_678, "45,678"), (999_999, "999,999"), (3_212_000, "3.2 million"), (8e9, "8.0 billion")],
)
def test_parameter_counts_have_a_fitting_unit(number, shown):
  assert markup.magnitude(number) == shown


def test_a_count_of_one_is_singular(no_pictures, tmp_path):
  run = fake_run.FakeRun(tmp_path / "one", slices=1, devices=1, config={"steps": 1})
  run.step(1)
  run.close()
  shown = Page(report(tmp_path / "one")).text
  assert "1 device (cpu) in 1 slice." in shown and "1 key " in shown


def test_the_history_of_an_elastic_run(tmp_path):
  fake_run.elastic_run(tmp_path / "demo")
  run = history.load(str(tmp_path / "demo"))
  assert run.steps["step"].tolist() == list(range(1, 61))
  assert run.lost["step"].tolist() == [12]
  assert run.steps["slices"].tolist() == [3] * 11 + [2] * 19 + [3] * 30
  assert run.evals["step"].tolist() == [20, 40, 60]
  speeds = run.tokens_per_second()
  assert speeds[0] == pytest.approx(6144 / 0.35) and speeds[20] == pytest.approx(6144 / 0.35 * 2 / 3)


def test_evaluation_sets_are_shown(tmp_path):
  """The first evaluation had only one of the sets."""
  run = fake_run.FakeRun(tmp_path / "sets", slices=1)
  for step, losses in ((1, {"web": 3.0}), (2, {"web": 2.0, "code <x>": 1.25}), (3, {"web": 2.5, "code <x>": 1.5})):
    run.step(step)
    run.metrics.write_eval(Evaluation(step, losses["web"], eval_losses=losses))
  run.close()
  loaded = history.load(str(tmp_path / "sets"))
  assert loaded.eval_sets["web"].tolist() == [3.0, 2.0, 2.5]
  assert np.array_equal(loaded.eval_sets["code <x>"], [np.nan, 1.25, 1.5], equal_nan=True)
  shown = Page(report(tmp_path / "sets")).text
  assert "web 2.5000 (step 3) 2.0000 (step 2)" in shown
  assert "code <x> 1.5000 (step 3) 1.2500 (step 2)" in shown
  figure = plots.loss_over_steps(loaded, style.WIDE)
  labels = {line.get_label() for axis in figure.axes for line in axis.get_lines()}
  assert {"evaluation (web)", "evaluation (code <x>)"} <= labels


def test_the_first_sentence_says_what_was_lost(no_pictures, tmp_path):
  fake_run.elastic_run(tmp_path / "a")
  assert "60 steps, 1 slice lost, 1.40 s lost, 6,144 tokens lost" in Page(report(tmp_path / "a")).text
  fake_run.plain_run(tmp_path / "b", steps=3, slices=1)
  assert "3 steps, 0 s lost, 0 tokens lost" in Page(report(tmp_path / "b")).text


def test_tiles_say_what_they_are(no_pictures, tmp_path):
  """The loss did not say whether it is a mean; a run without evaluations had a tile to compare them with."""
  fake_run.plain_run(tmp_path / "short", steps=3, unigram_eval_loss=4.6)
  loaded = history.load(str(tmp_path / "short"))
  tiles = Page(report(tmp_path / "short")).tiles
  assert "training loss, last step" in tiles and not any("evaluation" in tile for tile in tiles)
  assert loaded.last_loss() == (loaded.steps["loss"][-1], "last step")
  fake_run.plain_run(tmp_path / "long", unigram_eval_loss=4.6)
  loaded = history.load(str(tmp_path / "long"))
  tiles = Page(report(tmp_path / "long")).tiles
  assert {"training loss, mean of last 20 steps", "evaluation loss (step 60)"} <= set(tiles)
  assert loaded.last_loss()[0] == pytest.approx(loaded.steps["loss"][40:].mean())
  loaded.steps["loss"][59] = math.nan  # an update that was not applied
  assert loaded.last_loss()[0] == pytest.approx(loaded.steps["loss"][40:59].mean())


def test_no_line_breaks_inside_the_number_of_a_tile(no_pictures, tmp_path):
  run = fake_run.FakeRun(tmp_path / "a", slices=1)
  run.step(1_000_000_000)
  run.close()
  text = report(tmp_path / "a")
  assert "<div class=wide><b>6,144,000,000,000</b>tokens</div>" in text and "<div><b>0</b>steps done again" in text
  assert re.search(r"\.tiles b \{[^}]*white-space: nowrap", text) and ".tiles .wide { grid-column: span 2; }" in text


def test_the_data_are_described_in_words(no_pictures, tmp_path):
  data = {"dataset": "text", "tokenizer_vocab_size": 512, "density": 0.5, "run_tokens": 10, "first_tokens": None}
  fake_run.plain_run(tmp_path / "a", steps=3, data=data | {"something_new": 1})
  cells = Page(report(tmp_path / "a")).cells
  for name, value in (
    ("Data set", "text"),
    ("Vocabulary of the tokenizer", "512"),
    ("Positions that hold text", "50.00 %"),
    ("Tokens of all steps, with padding", "10"),
    ("something new", "1"),
  ):
    assert cells[cells.index(name) + 1] == value
  assert not set(data) - {"dataset"} & set(cells) and "Beginning of the first batch" not in cells


def test_pictures_have_their_numbers_as_text(demo):
  folder, text = demo
  shown, run = Page(text), history.load(str(folder))
  loss, speed, details = shown.alts
  first, last = run.steps["loss"][[0, -1]]
  assert f"training from {first:.4g} at step 1 to {last:.4g} at step 60" in loss and "2 to 3 slices used" in loss
  assert (
    "median" in speed
    and "tokens per second" in speed
    and "Learning rate: at most 0.000978, at the end 0.0001." in details
  )


def test_a_run_that_is_still_going_on_and_knows_little(tmp_path):
  run = fake_run.FakeRun(tmp_path / "young", slices=1, vocab_size=None, unigram_entropy=None, config=None)
  run.step(1)
  run.close()
  shown = Page(report(tmp_path / "young"))
  assert "Not ended" in shown.text and "Not recorded." in shown.text
  assert "recover" not in shown.text and "Sample" not in shown.text


def test_the_end_shown_is_that_of_the_newest_process(no_pictures, tmp_path):
  first = fake_run.FakeRun(tmp_path / "a", steps=4, slices=1)
  first.step(1)
  first.end(42, step=1)
  second = fake_run.FakeRun(tmp_path / "a", steps=4, slices=1, wall=1.8e9 + 100)
  second.step(2)
  second.close()
  assert "Not ended" in report(tmp_path / "a")


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


def test_a_watchdog_ended_the_run(no_pictures, tmp_path):
  run = fake_run.FakeRun(tmp_path / "a", steps=4, slices=1)
  run.step(1)
  run.after(9.0, "hang", step=1, silent_seconds=9.0, operation="save")
  run.close()
  text = report(tmp_path / "a")
  assert "Stopped by the watchdog (exit code 134)" in text and "Save did not finish." in text


def test_the_end_of_a_run_reads_its_files_once(no_pictures, tmp_path, monkeypatch, capsys):
  fake_run.plain_run(tmp_path / "a", steps=3)
  read = []
  monkeypatch.setattr(history, "load", lambda directory, load=history.load: read.append(directory) or load(directory))
  page.write_or_warn(str(tmp_path / "a"), log.get(None), with_goodput=True, with_page=True)
  goodput_line, drawing, report_line = without_times(capsys.readouterr().out).splitlines()
  assert goodput_line.startswith("goodput: ") and report_line == f"Report: {tmp_path}/a/report.html"
  assert drawing == "Drawing the report ..."
  assert len(read) == 1


def test_a_report_that_fails_is_a_warning(tmp_path, monkeypatch, capsys):
  fake_run.plain_run(tmp_path / "a", steps=3)
  for name in ("plots", "style"):
    monkeypatch.delitem(sys.modules, f"trainer.report.{name}", raising=False)
    monkeypatch.delattr(f"trainer.report.{name}", raising=False)
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  page.write_or_warn(str(tmp_path / "a"), log.get(None), with_goodput=False, with_page=True)
  assert "\nwarning: no report: ModuleNotFoundError" in without_times(capsys.readouterr().out)


def test_restarts_and_bad_losses_are_drawn(tmp_path):
  first = fake_run.FakeRun(tmp_path / "long", steps=4000, slices=1)
  for step in range(1, 2000):
    first.step(step)
  first.step(2000, error=float("nan"))
  first.close()
  second = fake_run.FakeRun(tmp_path / "long", steps=4000, slices=1, wall=1.8e9 + 9000)
  for step in range(1900, 4001):
    second.step(step)
  second.end(130, step=4000)
  shown = Page(report(tmp_path / "long"))
  assert "Stopped by Ctrl-C (exit code 130)." in shown.text and "4,000 of 4,000" in shown.text


def test_a_table_of_very_many_events_is_cut(no_pictures, tmp_path):
  run = fake_run.FakeRun(tmp_path / "a", steps=1, slices=1)
  run.step(1)
  for step in range(3000):
    run.after(0.1, "snapshot", step=step, seconds=0.1)
  run.close()
  text = report(tmp_path / "a")
  assert "The last 1,000 of 3,003 events" in text and text.count("<td>snapshot</td>") == 1000


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
    "from trainer.observe import log, metrics, events, progress, throughput\n"
    "from trainer.observe import watchdog, files\n"
    "from trainer.report import goodput, history, page, plots\n"
    "import trainer.tools.report\n"
    "print(sorted(name for name in sys.modules if name.split('.')[0] in ('jax', 'jaxlib', 'tensorboardX', 'rich')))\n"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
  assert done.stdout == "[]\n"
