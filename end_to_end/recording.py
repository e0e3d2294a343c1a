"""Records `kill -9` of one of three slices in a terminal, and draws the recording for README.

    .venv/bin/python -m end_to_end.recording [--draw FILE.svg]

The picture has the lines of a real run, with the pauses between them. Fields of a step line that are not needed are
left out (...), and so are the lines for scripts and most steps.
"""

from __future__ import annotations

import argparse
import html
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.support.process_runs import ProcessRun

COMMAND = (
  "python -m trainer.launch.local --slices 3 configs/elastic_demo.yml fault_injection= snapshot_period=0 steps=1000"
)
QUIET = ("enable_report=false",)
VICTIM, CALM_STEPS = 1, 40
COLUMNS, LETTER, ROW, MARGIN = 116, 8.43, 21, 18  # LETTER: width of one at 14 px
LONGEST_PAUSE = 1.2  # seconds in the picture

Line = tuple[float, str]  # time, text


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--draw", metavar="FILE.svg", type=Path, help="draw the recording")
  draw = parser.parse_args().draw
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process is left
  with tempfile.TemporaryDirectory(prefix="recording-") as directory:
    lines, killed, pid, seconds, lost = record(Path(directory))
  summary = f"{seconds:.2f} s from kill -9 to the next step, {lost or 'no'} step{'s' * (lost != 1)} lost"
  if draw is not None:
    draw.write_text(picture(scene(lines, killed, pid), summary))
  print(summary)


def record(folder: Path) -> tuple[list[Line], float, int, float, int]:
  """Returns the lines of a run, the time and process id of the kill, seconds until the next step, and steps lost."""
  run = ProcessRun(folder, [])
  lines: list[Line] = []
  ended = threading.Event()
  reader = threading.Thread(target=follow, args=(run.log, lines, ended))
  own = [*QUIET, f"base_output_directory={folder / 'out'}", "run_name=run"]
  supervisor = run.spawn([sys.executable, *COMMAND.split()[1:], *own], {})
  reader.start()
  try:
    run.wait_for(lambda: len(run.active()) == 3 and run.last_step >= CALM_STEPS, supervisor, 300)
    pid, killed = run.workers()[VICTIM], time.time()
    run.send(pid, signal.SIGKILL)
    run.wait_for(lambda: run.count("slice_up") > 0 and len(run.active()) == 3, supervisor, 300)
    last = run.last_step
    run.wait_for(lambda: run.last_step > last + 3, supervisor, 60)
  finally:
    run.end_processes()
    supervisor.wait(30)
    ended.set()
    reader.join()
  records = [record for record in run.records("metrics") if "loss" in record]
  seconds = next(record["wall"] for record in records if record["wall"] > killed and record["slices"] == 2) - killed
  return lines, killed, pid, seconds, sum(event["steps_lost"] for event in run.events("recovery"))


def follow(log: Path, lines: list[Line], ended: threading.Event) -> None:
  """Adds each line of the log with the time at which it came."""
  while not log.exists():
    time.sleep(0.01)
  with log.open() as file:
    while text := file.readline() or not ended.wait(0.005):
      if isinstance(text, str):
        lines.append((time.time(), text.rstrip("\n")))


def scene(lines: list[Line], killed: float, pid: int) -> list[Line]:
  """The lines of the picture: around the kill, and around the return of the slice."""
  lines = [(at, shortened(text)) for at, text in lines if "elastic_manager" not in text]
  steps = [index for index, (_, text) in enumerate(lines) if "completed step: " in text]
  kill = next(index for index in steps if lines[index][0] > killed)
  start = next(index for index, (at, _) in enumerate(lines) if at > killed)
  back = next(index for index, (_, text) in enumerate(lines) if "slice_up" in text)
  before = [index for index in steps if index < start][-4:]
  after = [index for index in steps if index > kill][:3]
  again = [index for index in steps if index > back][:3]
  first = next(index for index, (_, text) in enumerate(lines) if "Devices: " in text)
  gap = (0.0, "...")
  return [
    (lines[first][0] - 1, f"$ {COMMAND}"),
    lines[first],
    gap,
    *(lines[index] for index in before),
    (killed, f"$ kill -9 {pid}"),
    *lines[start : kill + 1],
    *(lines[index] for index in after),
    gap,
    *lines[back : again[0]],
    *(lines[index] for index in again),
  ]


def shortened(text: str) -> str:
  """A line that fits the terminal; of a step line only the fields that show what happens."""
  if "completed step: " in text:
    fields = [field if re.search("step|seconds|loss|slices", field) else "..." for field in text.split(", ")]
    text = ", ".join(field for index, field in enumerate(fields) if field != "..." or fields[index - 1] != "...")
  return text if len(text) <= COLUMNS else f"{text[: COLUMNS - 3]}..."


def picture(lines: list[Line], summary: str) -> str:
  """The lines in a terminal as SVG. They appear one after the other, once; all at once for who wants no motion."""
  width, height = COLUMNS * LETTER + 2 * MARGIN, ROW * (len(lines) + 2) + 2 * MARGIN
  out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img" '
    'font-family="ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="14" fill="#d7dde3">',
    f"<title>{html.escape(summary)}</title>",
    "<style>text{white-space:pre;animation:show 0s both}@keyframes show{from{visibility:hidden}to{visibility:visible}}"
    "@media(prefers-reduced-motion:reduce){text{animation:none}}</style>",
    f'<rect width="{width:.0f}" height="{height}" rx="10" fill="#15181c"/>',
  ]
  delay, previous = 0.0, lines[0][0]
  for number, (at, text) in enumerate(lines):
    pause = at - previous if at and previous else LONGEST_PAUSE
    delay, previous = delay + min(max(0.0, pause), LONGEST_PAUSE), at
    color = "#e6b450" if text.startswith("$") else "#35cfa0" if "Recovered" in text else ""
    out.append(row(number, text, delay, f' fill="{color}"' if color else ""))
  out.append(row(len(lines) + 1, summary, delay + 0.3, ' fill="#ffffff" font-weight="bold"'))
  return "\n".join([*out, "</svg>"]) + "\n"


def row(number: int, text: str, delay: float, look: str) -> str:
  y = MARGIN + ROW * (number + 0.75)
  return f'<text x="{MARGIN}" y="{y:.0f}" style="animation-delay:{delay:.2f}s"{look}>{html.escape(text)}</text>'


if __name__ == "__main__":
  main()
