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
a { color: inherit; } p { margin: 6px 0; } .lead { font-size: 17px; } .sub, figcaption, th { color: var(--soft); }
h1 + .scroll { margin-top: 16px; }
.good { color: var(--good); } .bad { color: var(--bad); } .good, .bad { font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); gap: 10px; margin: 20px 0; }
.tiles div { background: var(--card); border-radius: 8px; padding: 10px 12px; font-size: 13px; color: var(--soft); }
.tiles b { display: block; font-size: 19px; line-height: 1.3; color: var(--ink); font-variant-numeric: tabular-nums; }
figure { margin: 28px 0; position: relative; } img { display: block; width: 100%; height: auto; }
figure i, figure span { position: absolute; display: none; pointer-events: none; }
.read i, .read span { display: block; } figure i { border-left: 1px solid var(--soft); }
figure span { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 6px 10px;
  font-size: 13px; white-space: pre-wrap; max-width: 48%; font-variant-numeric: tabular-nums;
  box-shadow: 0 2px 8px #0003; z-index: 1; }
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
  position: sticky; top: 8px; z-index: 2; } .notice:empty { display: none; }
.late { color: var(--bad); font-weight: 600; }
summary { cursor: pointer; padding: 4px 0; }
pre { background: var(--card); border-radius: 8px; padding: 14px; white-space: pre-wrap; overflow-wrap: anywhere; }
body:has(.compared) { max-width: none; } .compared figure { max-width: 1440px; }
.compared td, .compared th { min-width: 110px; }
.compared td:first-child, .compared th:first-child { position: sticky; left: 0; background: var(--paper);
  max-width: 50vw; font-size: 13px; overflow-wrap: break-word; }
@media (max-width: 640px) { body { padding: 18px 14px 40px; } .tiles { grid-template-columns: 1fr 1fr; gap: 8px; }
  .facts td:first-child { white-space: normal; width: 40%; }
  .meaning { display: none; } td, th { padding-right: 14px; } .unit { display: inline; }
  .story tr:first-child { display: none; } .step { display: inline; margin-left: 12px; }
  .story tr { display: flex; flex-wrap: wrap; gap: 2px 14px; padding: 10px 0; border-bottom: 1px solid var(--line); }
  .story td, .story td.number { border: 0; padding: 0; } .story .when, .story .text { flex: 0 0 100%; }
  .story td:empty { display: none; } .story .number { color: var(--soft); } }
@media print { details > * { display: block; } }
""".strip()

# Shows the values of all curves at the pointer. A page that is made again while it is open needs it only once.
SCRIPT = """
const readable = (x) => x.toLocaleString("en", { maximumSignificantDigits: 5 });
function read(event) {
  const figure = event.target.closest?.("figure"), [line, text] = figure ? figure.querySelectorAll("i, span") : [];
  document.querySelectorAll("figure.read").forEach((other) => other.classList.remove("read"));
  if (!figure) return;
  const frame = figure.getBoundingClientRect(), size = [...figure.querySelectorAll("source")]
    .findIndex((source) => matchMedia(source.media).matches);
  const x = (event.clientX - frame.left) / frame.width, y = (event.clientY - frame.top) / frame.height;
  figure.areas ??= JSON.parse(figure.dataset.values);
  for (const area of figure.areas) {
    const [left, top, right, bottom] = area.boxes.at(size), [low, high] = area.limits;
    if (x < left || x > right || y < top || y > bottom) continue;
    let at = low + (x - left) / (right - left) * (high - low);
    const points = area.curves.filter((curve) => curve[1] == "default").flatMap((curve) => curve[2]);
    const near = (xs) => xs.reduce((a, b) => b !== null && Math.abs(b - at) < Math.abs(a - at) ? b : a, Infinity);
    const reach = (high - low) / Math.min(100, points.length || 1), close = near(points);
    if (Math.abs(close - at) <= reach) at = close;
    const rows = [`${area.label}: ${readable(at)}`];
    for (const [name, style, xs, ys] of area.curves) {
      let index = xs.indexOf(near(xs));
      if (style == "steps-post") index = xs.findLastIndex((one) => one !== null && one <= at);
      else if (style == "steps-pre") index = xs.findIndex((one) => one >= at);
      else if (Math.abs(xs[index] - at) > reach) index = -1;
      if (index >= 0 && ys[index] !== null) rows.push(`${name}: ${readable(ys[index])}`);
    }
    text.textContent = rows.join("\\n");
    const place = left + (at - low) / (high - low) * (right - left);
    line.style.cssText = `left:${100 * place}%;top:${100 * top}%;height:${100 * (bottom - top)}%`;
    const [side, share] = place > 0.5 ? ["right", 1 - place] : ["left", place];
    text.style.cssText = `top:${100 * top}%;${side}:calc(${100 * share}% + 8px)`;
    figure.classList.add("read");
  }
}
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, read);
""".strip()


def page(title: str, body: str) -> str:
  """A whole HTML file that loads nothing, and needs its script only for the values under the pointer."""
  return (
    '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{html.escape(title)}</title><style>{CSS}</style></head>\n<body>{body}\n"
    f"<script>{SCRIPT}</script></body></html>\n"
  )


def picture(text: str, images: Sequence[tuple[int | None, bytes]], values: str) -> str:
  """A figure of SVG files inside the page, the last for screens wider than those (in pixels) of the others.

  text: says what the picture shows. values: JSON, for the script. Both as in attributes of HTML.
  """
  *others, (_, image) = (
    (screen, f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}") for screen, data in images
  )
  sources = "".join(f'<source media="(max-width: {screen}px)" srcset="{data}">' for screen, data in others)
  return (
    f'<figure data-values="{values}"><picture>{sources}<img alt="{text}" src="{image}"></picture>'
    "<i></i><span></span></figure>"
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
    return scalar(value)
  if isinstance(value, int):
    return f"{value:,}"
  if name.endswith("seconds"):
    return "0" if value == 0 else "<0.001" if 0 < value < 0.001 else f"{value:,.3f}"
  return f"{value:,.4g}" if abs(value) < 1e4 or not math.isfinite(value) else f"{value:,.0f}"


def scalar(value: Any) -> str:
  """The value of a key as YAML has it: with every digit, and `true`, not `True`."""
  return str(value).lower() if isinstance(value, bool) else str(value)


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
  """`0 s`, `0.04 s`, `21.6 s`, `0:12:05` from ten minutes on."""
  if seconds == 0:
    return "0 s"
  if seconds >= 600:
    return format_duration(seconds)
  return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def money(amount: float) -> str:
  """Two digits after the point; four where two would show nothing. No currency: chip_hour_price has none."""
  if 0 < amount < 0.0001:
    return "<0.0001"
  return f"{amount:.4f}" if 0 < amount < 0.1 else f"{amount:,.2f}"
