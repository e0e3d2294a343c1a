"""HTML of the report pages, from the macros of page.html, and numbers as a person reads them."""

from __future__ import annotations

import base64
import functools
import math
from pathlib import Path
from typing import Any

import jinja2

from trainer.observe.metrics import format_duration

_FOLDER = Path(__file__).parent


@functools.cache
def macros() -> Any:
  """The macros of page.html. They escape all text, but not what other macros return."""
  loader = jinja2.FileSystemLoader(_FOLDER)
  environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
  environment.filters.update(cell=cell, duration=duration)
  return environment.get_template("page.html").module


def page(title: str, body: str) -> str:
  """A whole HTML file that loads nothing. body: HTML, as the macros return it."""
  return macros().page(title, (_FOLDER / "page.css").read_text().strip(), body)


def picture(text: str, image: bytes) -> str:
  """A figure with an SVG file inside the page. text: what it shows, for readers who do not see it."""
  return macros().picture(text, f"data:image/svg+xml;base64,{base64.b64encode(image).decode()}")


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
