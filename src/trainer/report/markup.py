"""HTML of the report pages: the style sheet, tables, and numbers as a person reads them."""

from __future__ import annotations

import base64
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.observe.metrics import format_duration

Rows = Iterable[Sequence[Any]]

CSS = """
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
.story { width: 100%; margin-bottom: 8px; }
.story .when { white-space: nowrap; font-variant-numeric: tabular-nums; font-size: 13px; }
.story th.number, .story td.number { padding-right: 0; padding-left: 18px; } .unit { display: none; }
.step { display: block; color: var(--soft); }
.name { white-space: nowrap; } .key { display: inline-block; width: 11px; height: 11px; border-radius: 2px; }
.bar { display: flex; height: 26px; border-radius: 6px; overflow: hidden; background: var(--line); margin: 14px 0; }
.notice { background: var(--card); border-radius: 8px; padding: 8px 12px; margin: 0 0 18px;
  position: sticky; top: 8px; }
.late { color: var(--bad); font-weight: 600; }
summary { cursor: pointer; padding: 4px 0; }
pre { background: var(--card); border-radius: 8px; padding: 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 640px) { body { padding: 18px 14px 40px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .meaning { display: none; } td, th { padding-right: 14px; } .unit { display: inline; }
  .story tr:first-child { display: none; } .step { display: inline; margin-left: 12px; }
  .story tr { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 10px 0; border-bottom: 1px solid var(--line); }
  .story td, .story td.number { border: 0; padding: 0; } .story .when, .story .text { flex: 0 0 100%; }
  .story td:empty { display: none; } .story .number { color: var(--soft); } }
@media print { details > * { display: block; } }
""".strip()


def page(title: str, body: str) -> str:
  """A whole HTML file that loads nothing."""
  return (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{html.escape(title)}</title><style>{CSS}</style></head>\n<body>{body}\n</body></html>\n"
  )


def picture(name: str, wide: bytes, narrow: bytes) -> str:
  """A figure of two SVG files, for screens and for phones, inside the page."""
  image, phone = (f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}" for data in (wide, narrow))
  return (
    f'<figure><picture><source media="(max-width: 640px)" srcset="{phone}"><img alt="{name}" src="{image}"></picture>'
    "</figure>"
  )


def folded(summary: str, content: str) -> str:
  """`content` that a click on `summary` shows."""
  return f"<details><summary>{html.escape(summary)}</summary>{content}</details>"


def facts(values: dict[str, Any]) -> str:
  rows = "".join(
    f"<tr><td>{html.escape(str(k))}</td><td>{html.escape(cell(v, k))}</td></tr>" for k, v in values.items()
  )
  return f'<table class="facts">{rows}</table>'


def table(headings: Sequence[str], rows: Rows) -> str:
  head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
  body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
  return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def cell(value: Any, name: str = "") -> str:
  """A value for a person: at most four digits of a fraction, thousands apart, small seconds as "<0.001"."""
  if value is None:
    return ""
  if isinstance(value, list):
    return ", ".join(cell(item) for item in value)
  if isinstance(value, dict):
    return ", ".join(f"{key}: {cell(item, key)}" for key, item in value.items())
  if isinstance(value, bool) or not isinstance(value, int | float):
    return str(value)
  if isinstance(value, int):
    return f"{value:,}"
  if name.endswith("seconds"):
    return "0" if value == 0 else "<0.001" if 0 < value < 0.001 else f"{value:,.3f}"
  return f"{value:,.4g}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:,.0f}"


def count(number: int, one: str, many: str = "") -> str:
  """`1 slice`, `2 slices`, `1,000 entries`"""
  return f"{number:,} {one if number == 1 else many or one + 's'}"


def magnitude(number: float) -> str:
  """`45,678`, `3.2 million`, `1.2 billion`"""
  for size, name in ((1e9, "billion"), (1e6, "million")):
    if number >= size:
      return f"{number / size:,.1f} {name}"
  return f"{number:,}"


def duration(seconds: float) -> str:
  """`0.04 s`, `21.6 s`, `0:12:05` from ten minutes on."""
  if seconds >= 600:
    return format_duration(seconds)
  return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def money(amount: float) -> str:
  """Two digits after the point; four where two would show nothing. No currency: chip_hour_price has none."""
  if 0 < amount < 0.0001:
    return "<0.0001"
  return f"{amount:.4f}" if 0 < amount < 0.1 else f"{amount:,.2f}"
