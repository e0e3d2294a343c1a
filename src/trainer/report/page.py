"""report.html and loss.png: what a person wants to see of a run, in one file that needs nothing else."""

from __future__ import annotations

import base64
import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.observe import files
from trainer.observe.log import Log
from trainer.observe.metrics import format_duration
from trainer.report import history
from trainer.report.history import Run

REPORT_FILE = "report.html"
PICTURE_FILE = "loss.png"

_CSS = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; }
body { max-width: 1000px; margin: 2em auto; padding: 0 1em; }
h1 { margin-bottom: 0; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; } .sub { color: #666; }
img { width: 100%; height: auto; } table { border-collapse: collapse; font-size: 14px; } .wide { overflow-x: auto; }
td, th { padding: .2em .9em .2em 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eee; }
.numbers { display: flex; flex-wrap: wrap; gap: .8em 2.4em; margin: 1.2em 0; }
.numbers b { display: block; font-size: 22px; }
pre { background: #f6f6f6; padding: 1em; white-space: pre-wrap; overflow-wrap: anywhere; }
""".strip()

# Columns of the table of recoveries: field of the `recovery` event, heading.
_RECOVERY = (
  ("event", "event"),
  ("slice", "slice"),
  ("step_before", "step before"),
  ("step_after", "after"),
  ("steps_lost", "steps lost"),
  ("tokens_lost", "tokens lost"),
  ("slices_after", "slices"),
  ("tier", "restored from"),
  ("detect_seconds", "detect s"),
  ("wait_seconds", "wait s"),
  ("restore_seconds", "restore s"),
  ("compile_seconds", "compile s"),
  ("first_step_seconds", "first step s"),
  ("seconds", "total s"),
  ("compilations", "compilations"),
)


def write(run_directory: str) -> str:
  """Writes report.html and loss.png into the run directory and returns the report's path.

  ValueError if the run has no completed step.
  """
  from trainer.report import plots  # matplotlib: a second to import

  run = history.load(run_directory)
  picture = plots.loss_over_steps(run)
  files.write_bytes(run_directory, PICTURE_FILE, picture)
  pictures = {
    "Loss": picture,
    "Time": plots.over_time(run),
    "Goodput": plots.goodput_bar(run),
    "Optimizer": plots.optimizer(run),
  }
  files.write_text(run_directory, REPORT_FILE, _page(run, pictures))
  return f"{run_directory.rstrip('/')}/{REPORT_FILE}"


def write_or_warn(run_directory: str, log: Log) -> None:
  """`write` at the end of a run, with a line in the log. Whatever fails becomes a warning: the run is what counts."""
  try:
    log.line(f"Report: {write(run_directory)}")
  except Exception as error:  # noqa: BLE001 - a picture must not turn a complete run into a failed one
    log.warning(f"no report: {error!r}; `python -m trainer.tools.report {run_directory}` tries again")


@dataclasses.dataclass(frozen=True)
class Comparison:
  """How far the losses of two runs differ, over the steps that both have."""

  largest: float  # largest of |a - b| / max(|a|, |b|); nan and inf count as equal to themselves only
  at_step: int
  common_steps: int
  equal_steps: int  # steps whose losses are equal to the last bit

  def __str__(self) -> str:
    if self.equal_steps == self.common_steps:
      return f"all {self.common_steps} losses equal to the last bit"
    return f"largest relative difference {self.largest:.1e} (step {self.at_step}) over {self.common_steps} steps"


def compare(run_directories: Sequence[str], path: str | None = None) -> Comparison:
  """Compares the loss curves of two runs; with `path`, also draws both in one picture (PNG) with their events.

  ValueError unless there are two runs with a step in common.
  """
  if len(run_directories) != 2:
    raise ValueError(f"two run directories can be compared, {len(run_directories)} were given")
  runs = [history.load(directory) for directory in run_directories]
  losses = [{record["step"]: record["loss"] for record in run.steps} for run in runs]
  common = sorted(losses[0].keys() & losses[1].keys())
  if not common:
    raise ValueError(f"{run_directories[0]} and {run_directories[1]} have no step in common")
  difference = [(step, _relative(losses[0][step], losses[1][step])) for step in common]
  at_step, largest = max(difference, key=lambda item: item[1])
  result = Comparison(largest, at_step, len(common), sum(value == 0 for _, value in difference))
  if path is not None:
    from trainer.report import plots

    directory, _, name = path.rpartition("/")
    files.write_bytes(directory or ".", name, plots.comparison(runs, difference, str(result)))
  return result


def _relative(a: float, b: float) -> float:
  if a == b or (math.isnan(a) and math.isnan(b)):
    return 0.0
  if not (math.isfinite(a) and math.isfinite(b)):
    return math.inf
  return abs(a - b) / max(abs(a), abs(b))


def _page(run: Run, pictures: dict[str, bytes]) -> str:
  title = html.escape(run.name)
  parts = [
    f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_CSS}</style></head>',
    f'<body><h1>{title}</h1><p class="sub">{html.escape(_subtitle(run))}</p>{_numbers(run)}',
  ]
  for name, data in pictures.items():
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    parts.append(f'<img alt="{name}" src="{source}">')
  recoveries = run.of_kind("recovery")
  if recoveries:
    rows = ([_cell(event.get(field)) for field, _ in _RECOVERY] for event in recoveries)
    parts.append(f'<h2>Recoveries</h2><div class="wide">{_table([head for _, head in _RECOVERY], rows)}</div>')
  samples = run.of_kind("sample")
  if samples:
    prompt, text = (html.escape(str(samples[-1].get(key) or "")) for key in ("prompt", "text"))
    parts.append(
      f"<h2>Sample</h2><p>The trained model continues the prompt (bold):</p><pre><b>{prompt}</b>{text}</pre>"
    )
  times = (
    (name, f"{run.goodput['seconds'][name]:.2f}", f"{share:.2f} %") for name, share in run.goodput["percent"].items()
  )
  parts.append(f"<h2>Wall time</h2>{_table(('bucket', 'seconds', 'share'), times)}")
  parts.append(f"<h2>Configuration</h2>{_details(run.start.get('config'))}")
  parts.append(f"<h2>Versions</h2>{_details(run.start.get('versions'))}")
  listed = ((e["time"][:19], e["kind"], _fields(e)) for e in run.events if e["kind"] != "run_start")
  parts.append(f"<h2>Events</h2><details><summary>{len(run.events)} events</summary>")
  parts.append(f"{_table(('time (UTC)', 'kind', 'fields'), listed)}</details></body></html>")
  return "\n".join(parts) + "\n"


def _subtitle(run: Run) -> str:
  start, parts = run.start, []
  if start.get("parameters"):
    parts.append(f"{start['parameters'] / 1e6:,.1f} million parameters")
  if start.get("devices"):
    kind = start.get("device_kind") or start.get("platform") or ""
    devices, slices = (
      f"{n} {what}{'s' * (n != 1)}" for n, what in ((start["devices"], "device"), (run.total_slices, "slice"))
    )
    parts.append(f"{devices} ({kind}) in {slices}")
  if start.get("time"):
    parts.append(f"last started {start['time'][:19]} UTC")
  ends = run.of_kind("run_end")
  parts.append(f"ended with exit code {ends[-1].get('exit')}" if ends else "not ended")
  return ", ".join(parts)


def _numbers(run: Run) -> str:
  """The row of big numbers."""
  last = run.steps[-1]
  speeds = sorted(speed for speed in run.tokens_per_second() if math.isfinite(speed))
  numbers = [
    ("steps", f"{last['step']:,}" + (f" of {run.start['steps']:,}" if run.start.get("steps") else "")),
    ("training loss", f"{last['loss']:.4f}"),
  ]
  if run.evals:
    numbers.append(("evaluation loss", f"{run.evals[-1]['eval_loss']:.4f}"))
  if run.start.get("unigram_eval_loss"):
    numbers.append(("unigram model, evaluation", f"{run.start['unigram_eval_loss']:.4f}"))
  numbers.append(("tokens", f"{last['tokens']:,}"))
  if speeds:
    numbers.append(("tokens/s (median)", f"{speeds[len(speeds) // 2]:,.0f}"))
  if last.get("mfu") is not None:
    numbers.append(("MFU (last step)", f"{100 * last['mfu']:.1f} %"))
  numbers += [
    ("wall time", format_duration(run.goodput["wall_seconds"])),
    ("goodput", f"{run.goodput['goodput_percent']:.2f} %"),
    ("steps lost", str(run.goodput["steps_lost"])),
  ]
  return '<div class="numbers">' + "".join(f"<div><b>{v}</b>{html.escape(k)}</div>" for k, v in numbers) + "</div>"


def _details(values: dict[str, Any] | None) -> str:
  if not values:
    return "<p>Not recorded.</p>"
  rows = ((key, str(value)) for key, value in values.items())
  return f"<details><summary>{len(values)} entries</summary>{_table(('key', 'value'), rows)}</details>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
  body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
  return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
  if value is None:
    return ""
  if isinstance(value, list):
    return ", ".join(map(_cell, value))
  return f"{value:.3f}" if isinstance(value, float) and abs(value) >= 1e-3 else str(value)


def _fields(event: dict[str, Any]) -> str:
  hidden = {"kind", "run", "process", "time", "wall", "monotonic"}
  return ", ".join(f"{key}={_cell(value)}" for key, value in event.items() if key not in hidden)
