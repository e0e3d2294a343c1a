from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import textwrap

from tests.support.command import without_times

from trainer.observe import log, screen


def test_a_line_is_the_same_on_stdout_and_in_the_file(tmp_path, capsys):
  out = log.get(str(tmp_path / "run"))
  out.line("completed step: 8, seconds: 0.159")
  out.warning("a slice is slow")
  out.detail("of every step")
  out.record("only in the file")
  printed = capsys.readouterr().out
  assert re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d .*\n){3}$", printed)
  assert without_times(printed) == "completed step: 8, seconds: 0.159\nwarning: a slice is slow\nof every step\n"
  assert (tmp_path / "run" / "log.txt").read_text() == f"{printed}{printed[:20]}only in the file\n"
  out.close()


def test_redirect_moves_only_the_screen(tmp_path, capsys):
  out, shown = log.get(str(tmp_path)), []
  out.redirect(shown.append, details=False)
  out.line("one")
  out.detail("shown by the display itself")
  out.redirect(None)
  out.line("two")
  assert list(map(without_times, shown)) == ["one"] and without_times(capsys.readouterr().out) == "two\n"
  assert without_times((tmp_path / "log.txt").read_text()) == "one\nshown by the display itself\ntwo\n"


def test_a_terminal_without_the_character_gets_an_escape(tmp_path, monkeypatch):
  raw = io.BytesIO()
  monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
  screen.protect()
  out = log.get(str(tmp_path))
  out.line("a \u2713 and a lone \udc80")
  assert raw.getvalue()[20:] == b"a \\u2713 and a lone \\udc80\n"
  assert (tmp_path / "log.txt").read_bytes()[20:] == "a \u2713 and a lone \\udc80\n".encode()


def test_every_line_printed_before_a_kill_is_in_the_file(tmp_path):
  code = f"""
    import itertools
    from trainer.observe import log
    out = log.get({str(tmp_path)!r})
    for i in itertools.count():
      out.line(f"line {{i}}")
  """
  with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as process:
    for _ in range(500):
      process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
  lines = without_times((tmp_path / "log.txt").read_text()).split("\n")[:-1]
  assert len(lines) >= 500 and lines == [f"line {i}" for i in range(len(lines))]


def test_a_full_disk_leaves_whole_lines_and_no_half_files(tmp_path):
  """By a limit on the size of the process's files, which is lifted again."""
  code = f"""
    import resource
    from trainer.observe import files
    lines = files.open_lines({str(tmp_path)!r}, "a.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1004, -1))
    for number in range(200):
      lines.append(f"line {{number:03}}")
    try:
      files.write_bytes({str(tmp_path)!r}, "b.png", bytes(2000))
    except OSError:
      resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
      lines.append("there is room again")
  """
  command = [sys.executable, "-c", textwrap.dedent(code)]
  result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
  assert result.stderr.count("warning: cannot write") == 1
  assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
  written = (tmp_path / "a.jsonl").read_text().splitlines()
  assert written == [*(f"line {number:03}" for number in range(111)), "there is room again"]
