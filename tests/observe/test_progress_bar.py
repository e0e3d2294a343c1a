from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import textwrap

from tests.support.command import without_times

from trainer.observe import log, progress_bar
from trainer.observe.metrics import StepRecord, format_step_line
from trainer.observe.progress_bar import Progress


def record(step: int) -> StepRecord:
  return StepRecord(step=step, seconds=0.1, loss=9.0 - step, grad_norm=1.0, lr=1e-3, tokens=64, slices=2, eta=9.0)


def test_without_a_terminal_the_first_every_period_and_the_last_step_are_plain_lines(tmp_path, capsys):
  with Progress(log.get(str(tmp_path)), total_steps=7, total_slices=3, log_period=2) as progress:
    for step in range(1, 8):
      progress.step(record(step))
  printed = capsys.readouterr().out
  assert without_times(printed).splitlines() == [format_step_line(record(step)) for step in (1, 2, 4, 6, 7)]
  assert (tmp_path / "log.txt").read_text() == printed


def test_without_a_terminal_a_long_round_of_local_steps_has_a_line_in_every_minute(tmp_path, capsys, monkeypatch):
  now = 0.0
  monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now)
  with Progress(log.get(str(tmp_path)), total_steps=99, total_slices=3, log_period=99) as progress:
    for step in range(20):
      progress.under_way(step)
      now += 10
    progress.step(record(20))
    now += 59
    progress.under_way(20)
  told = [line for line in capsys.readouterr().out.splitlines() if "comes with those of its round" in line]
  assert [line.split("step ")[1].split("/99 is done")[0] for line in told] == ["6", "12", "18"]


def test_in_a_terminal_a_bar_is_drawn_and_the_file_has_the_plain_lines(tmp_path):
  code = f"""
    import time
    from trainer.observe import log
    from trainer.observe.metrics import StepRecord
    from trainer.observe.progress_bar import Progress
    out = log.get({str(tmp_path)!r})
    with Progress(out, total_steps=40, total_slices=3, log_period=1, eval_interval=20) as progress:
      for step in range(1, 41):
        time.sleep(0.02)
        progress.step(StepRecord(step=step, seconds=0.02, loss=9.0 - step / 10, grad_norm=1.0, lr=1e-3, tokens=64,
                                 slices=3 if step < 20 else 2, tokens_per_second_per_device=1234.0, eta=7.0))
        out.detail(f"step={{step}} of every step")
        if step == 20:
          out.line("Slice down event detected. Retrying. [bold]not markup[/bold]")
    out.line("after the bar")
  """
  main, terminal = pty.openpty()
  environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "40"}
  command = [sys.executable, "-c", textwrap.dedent(code)]
  with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
    os.close(terminal)
    screen = b""
    while True:
      try:
        chunk = os.read(main, 65536)
      except OSError:  # the other end is closed
        break
      if not chunk:
        break
      screen += chunk
    assert process.wait(timeout=30) == 0, process.stderr.read()
  os.close(main)
  text = screen.decode()
  assert "step 40/40" in text and "slices 3/3" in text and "slices 2/3" in text and "1,234 tokens/s/device" in text
  assert "[bold]not markup[/bold]" in text and text.rstrip().endswith("after the bar")
  lines = re.findall(r"completed step: (\d+), ", text)
  assert lines == ["1", "20", "40"] and "of every step" not in text  # the first, an evaluated and the last step
  assert text.count("eta 0:00:07") < 25  # five times a second, not every step
  lines = without_times((tmp_path / "log.txt").read_text()).splitlines()
  assert sum(line.startswith("completed step: ") for line in lines) == 40
  assert sum(line.endswith("of every step") for line in lines) == 40
  assert lines[40] == "Slice down event detected. Retrying. [bold]not markup[/bold]" and lines[-1] == "after the bar"
