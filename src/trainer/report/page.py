"""report.html and loss.png: what a person wants to see of a run, in one file that needs nothing else."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from trainer.observe import files
from trainer.observe.metrics import format_duration
from trainer.report.goodput import BUCKETS
from trainer.report.history import Events, Run

REPORT_FILE = "report.html"
PICTURE_FILE = "loss.png"

_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #66707a; --line: #dde1e5; --paper: #fff; --card: #f5f6f8;
  --good: #00734f; --bad: #b23c00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --line: #2f363d; --paper: #15181c;
  --card: #1e2328; --good: #35cfa0; --bad: #ff8a4c; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 1000px; margin: 0 auto; padding: 28px 20px 60px; overflow-wrap: break-word; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 10px; padding-bottom: 6px; border-bottom: 1px solid var(--line); }
p { margin: 6px 0; } .sub, figcaption, th { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); } .good, .bad { font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; margin: 20px 0; }
.tiles div { background: var(--card); border-radius: 8px; padding: 10px 12px; font-size: 13px; color: var(--soft); }
.tiles b { display: block; font-size: 19px; line-height: 1.3; color: var(--ink); font-variant-numeric: tabular-nums; }
figure { margin: 28px 0; } img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; }
td, th { padding: 5px 18px 5px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { font-weight: 500; font-size: 13px; vertical-align: bottom; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.facts { width: 100%; } .facts td:first-child { width: 1%; color: var(--soft); white-space: nowrap; }
.facts td { overflow-wrap: anywhere; }
.name { white-space: nowrap; } .key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; background: var(--line); margin: 14px 0; }
summary { cursor: pointer; padding: 4px 0; }
pre { background: var(--card); border-radius: 8px; padding: 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 640px) { body { padding: 18px 14px 40px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .meaning { display: none; } td, th { padding-right: 14px; } }
@media print { details > * { display: block; } }
""".strip()

# Buckets of goodput: name and colour.
_BUCKETS = {
  "steps": ("steps that count", "#009e73"),
  "compile": ("compilation", "#56b4e9"),
  "init": ("start-up", "#0072b2"),
  "eval": ("evaluation", "#cc79a7"),
  "profile": ("profile", "#7d5fb8"),
  "checkpoint": ("checkpoint (blocking)", "#f0e442"),
  "snapshot": ("snapshot (blocking)", "#c9bd3a"),
  "restore": ("restore", "#e69f00"),
  "data_wait": ("waiting for data", "#8c6d31"),
  "wait_slices": ("waiting for slices", "#b35806"),
  "steps_lost": ("steps lost", "#d55e00"),
  "down": ("no process", "#4a525a"),
  "other": ("other", "#a8b0b8"),
}

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

# Exit code -> what it means, and whether that is as it should be.
_ENDS = {
  0: ("Complete", "good"),
  1: ("Failed", "bad"),
  2: ("Refused: wrong configuration or input", "bad"),
  42: ("Stopped by SIGTERM after a checkpoint; the same command resumes it", "sub"),
  130: ("Stopped by Ctrl-C", "sub"),
}

_MOST_ROWS = 1000  # of a table; a million events would make a page that no browser opens

Rows = Iterable[Sequence[Any]]


def write(run: Run, goodput: dict[str, Any]) -> str:
  """Writes report.html and loss.png into the run directory and returns the report's path.

  goodput: the result of goodput.compute. ConfigError if the run has no completed step.
  """
  from trainer.report import plots, style  # matplotlib: a second to import

  run.require_steps()
  pictures: dict[str, tuple[bytes, bytes]] = {}
  for name, draw, arguments in (
    ("Loss over steps", plots.loss_over_steps, (run,)),
    ("Loss and speed over wall time", plots.over_time, (run, goodput)),
    ("Gradient norm and learning rate", plots.optimizer, (run,)),
  ):
    wide, narrow = (plots.styled(draw, *arguments, size) for size in (style.WIDE, style.NARROW))
    pictures[name] = (style.svg(wide), style.svg(narrow))
    if draw is plots.loss_over_steps:
      files.write_bytes(run.directory, PICTURE_FILE, style.png(wide))
  files.write_text(run.directory, REPORT_FILE, _page(run, goodput, pictures))
  return f"{run.directory.rstrip('/')}/{REPORT_FILE}"


def _page(run: Run, goodput: dict[str, Any], pictures: dict[str, tuple[bytes, bytes]]) -> str:
  title = html.escape(run.name)
  parts = [
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{title}</title><style>{_CSS}</style></head>",
    f"<body><h1>{title}</h1>{_summary(run)}{_tiles(run, goodput)}",
    *(_picture(name, *sizes) for name, sizes in pictures.items()),
    _goodput(goodput),
    _recoveries(run),
    _sample(run),
    _started(run),
    f"<h2>Configuration</h2>{_folded(run.start.get('config'))}",
    _events(run),
    "</body></html>",
  ]
  return "\n".join(filter(None, parts)) + "\n"


def _summary(run: Run) -> str:
  """How the run ended, and in one line what ran where."""
  end, tone = _end(run)
  facts = []
  if run.start.get("parameters"):
    facts.append(f"{_magnitude(run.start['parameters'])} parameters")
  if run.start.get("devices"):
    kind = run.start.get("device_kind") or run.start.get("platform") or "unknown"
    facts.append(f"{_count(run.start['devices'], 'device')} ({kind}) in {_count(run.total_slices, 'slice')}")
  if run.start.get("time"):
    facts.append(f"Last start: {run.start['time'][:19].replace('T', ' ')} UTC")
  return f'<p class="{tone}">{end}</p><p class="sub">{html.escape(". ".join(facts))}</p>'


def _end(run: Run) -> tuple[str, str]:
  """A sentence on how the newest process ended, and its class in the style sheet."""
  ends = [event for event in run.of_kind("run_end") if event["process"] == run.start.get("process", event["process"])]
  if not ends:
    return "Not ended: the run is still going on, or its process was killed.", "sub"
  code = int(ends[-1]["exit"])
  text, tone = _ENDS.get(code, ("Ended", "bad"))
  return f"{text} (exit code {code}).", tone


def _tiles(run: Run, goodput: dict[str, Any]) -> str:
  """The big numbers."""
  last = run.steps[-1]
  speeds = run.tokens_per_second()
  speeds = speeds[np.isfinite(speeds)]
  total = run.start.get("steps")
  tiles = [
    ("steps", f"{last['step']:,.0f}" + (f" of {total:,}" if total else "")),
    ("training loss", f"{last['loss']:.4f}"),
  ]
  if len(run.evals):
    tiles.append(("evaluation loss", f"{run.evals[-1]['eval_loss']:.4f}"))
  if run.start.get("unigram_eval_loss"):
    tiles.append(("evaluation loss of a unigram model", f"{run.start['unigram_eval_loss']:.4f}"))
  tiles.append(("tokens", f"{last['tokens']:,.0f}"))
  if len(speeds):
    tiles.append(("tokens per second (median)", f"{np.median(speeds):,.0f}"))
  if math.isfinite(last["mfu"]):
    tiles.append(("MFU (last step)", f"{100 * last['mfu']:.1f} %"))
  tiles += [
    ("wall time", format_duration(goodput["wall_seconds"])),
    ("goodput", f"{goodput['goodput_percent']:.2f} %"),
    ("steps lost", f"{goodput['steps_lost']:,}"),
  ]
  return '<div class="tiles">' + "".join(f"<div><b>{v}</b>{html.escape(k)}</div>" for k, v in tiles) + "</div>"


def _picture(name: str, wide: bytes, narrow: bytes) -> str:
  sources = (f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}" for data in (wide, narrow))
  image, phone = sources
  return (
    f'<figure><picture><source media="(max-width: 640px)" srcset="{phone}"><img alt="{name}" src="{image}"></picture>'
    "</figure>"
  )


def _goodput(goodput: dict[str, Any]) -> str:
  """Where the wall time went: one bar of 100 %, and a row for each of its parts."""
  shares = [(bucket, share) for bucket, share in goodput["percent"].items() if share > 0]
  shares.sort(key=lambda item: list(_BUCKETS).index(item[0]))
  parts = [(*_BUCKETS[bucket], BUCKETS[bucket], goodput["seconds"][bucket], share) for bucket, share in shares]
  bar = "".join(
    f'<span title="{name}: {share:.2f} %" style="width:{share}%;background:{color}"></span>'
    for name, color, _, _, share in parts
  )
  rows = "".join(
    f'<tr><td class="name"><span class="key" style="background:{color}"></span> {name}</td>'
    f'<td class="number">{seconds:,.2f} s</td>'
    f'<td class="number">{share:.2f} %</td><td class="sub meaning">{html.escape(meaning)}</td></tr>'
    for name, color, meaning, seconds, share in parts
  )
  return (
    f"<h2>Where the wall time went</h2><p>{goodput['goodput_percent']:.2f} % of "
    f"{format_duration(goodput['wall_seconds'])} (hours:minutes:seconds) were steps that count.</p>"
    f'<div class="bar">{bar}</div><div class="scroll"><table>{rows}</table></div>'
  )


def _recoveries(run: Run) -> str:
  recoveries = run.of_kind("recovery")
  if not recoveries:
    return ""
  rows = ([_cell(event.get(field), field) for field, _ in _RECOVERY] for event in recoveries[-_MOST_ROWS:])
  heading = f"<h2>{_count(len(recoveries), 'recovery', 'recoveries')}</h2>"
  return f"{heading}{_table([head for _, head in _RECOVERY], rows)}"


def _sample(run: Run) -> str:
  samples = run.of_kind("sample")
  if not samples:
    return ""
  prompt, text = (html.escape(str(samples[-1].get(key) or "")) for key in ("prompt", "text"))
  return f"<h2>Sample</h2><p>The trained model continues the prompt (bold).</p><pre><b>{prompt}</b>{text}</pre>"


def _started(run: Run) -> str:
  """Which data, and how, where and with which code the newest process was started."""
  start = run.start
  data = start.get("data")
  facts = {"Command": start.get("command"), "Host": start.get("host"), "Commit": start.get("git_commit")}
  known = {name: value for name, value in facts.items() if value}
  versions = start.get("versions") or {}
  known |= {"Versions": ", ".join(f"{package} {version}" for package, version in versions.items())} if versions else {}
  return (
    f"<h2>Data</h2>{_facts(data) if data else '<p>Not recorded.</p>'}"
    f"<h2>Start</h2>{_facts(known) if known else '<p>Not recorded.</p>'}"
  )


def _facts(values: dict[str, Any]) -> str:
  rows = "".join(
    f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(_cell(v, k))}</td></tr>" for k, v in values.items()
  )
  return f'<table class="facts">{rows}</table>'


def _folded(values: dict[str, Any] | None) -> str:
  if not values:
    return "<p>Not recorded.</p>"
  keys = _count(len(values), "key")
  plain = {key: str(value) for key, value in values.items()}  # as the run's config.yml has them, every digit
  return f"<details><summary>{keys}</summary>{_facts(plain)}</details>"


def _events(run: Run) -> str:
  events: Events = [event for event in run.events if event["kind"] != "run_start"]
  shown = events[-_MOST_ROWS:]
  some = f"The last {len(shown):,} of " if len(shown) < len(events) else ""
  rows = ((e["time"][:19].replace("T", " "), e["kind"], _fields(e)) for e in shown)
  return (
    f"<h2>Events</h2><details><summary>{some}{_count(len(events), 'event')}</summary>"
    f"{_table(('time (UTC)', 'kind', 'fields'), rows)}</details>"
  )


def _fields(event: dict[str, Any]) -> str:
  hidden = {"kind", "run", "process", "time", "wall", "monotonic"}
  return ", ".join(f"{key}={_cell(value, key)}" for key, value in event.items() if key not in hidden)


def _table(headings: Sequence[str], rows: Rows) -> str:
  head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
  body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
  return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any, name: str = "") -> str:
  """A value for a person: at most four digits of a fraction, thousands apart, small seconds as "<0.001"."""
  if value is None:
    return ""
  if isinstance(value, list):
    return ", ".join(_cell(item) for item in value)
  if isinstance(value, dict):
    return ", ".join(f"{key}: {_cell(item, key)}" for key, item in value.items())
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, int):
    return f"{value:,}"
  if name.endswith("seconds"):
    return "0" if value == 0 else "<0.001" if 0 < value < 0.001 else f"{value:,.3f}"
  return f"{value:,.4g}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:,.0f}"


def _count(number: int, one: str, many: str = "") -> str:
  """`1 slice`, `2 slices`, `1,000 entries`"""
  return f"{number:,} {one if number == 1 else many or one + 's'}"


def _magnitude(number: float) -> str:
  """`45,678`, `3.2 million`, `1.2 billion`"""
  for size, name in ((1e9, "billion"), (1e6, "million")):
    if number >= size:
      return f"{number / size:,.1f} {name}"
  return f"{number:,}"
