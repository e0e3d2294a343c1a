"""Colours, sizes and file formats of the plots.

Okabe and Ito's colours: colour-blind readers can tell them apart, and their lightness differs in print. Figures are
built without pyplot, so there is no global state and no display.
"""

from __future__ import annotations

import io
import math
import re
from typing import Any

from matplotlib.figure import Figure

INK, ORANGE, SKY, GREEN = "#1b1f24", "#e69f00", "#56b4e9", "#009e73"
BLUE, VERMILION, PURPLE, BROWN, VIOLET = "#0072b2", "#d55e00", "#cc79a7", "#8c6d31", "#5e3c99"
GREY, LINE, GRID, PAPER = "#66707a", "#aab2ba", "#e4e7ea", "#fffffe"  # PAPER: no other white has this value

# Colour on light paper -> colour on dark paper, for colours that cannot stay.
DARK = {
  INK: "#e6e9ec",
  GREY: "#9aa4ae",
  LINE: "#59636d",
  GRID: "#2b3138",
  PAPER: "#15181c",
  BLUE: "#4aa8e0",
  SKY: "#3c86b5",
  GREEN: "#1fbf92",
  VIOLET: "#9b7bd4",
}

STYLE: dict[Any, Any] = {
  "font.size": 10,
  "font.family": "sans-serif",
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": LINE,
  "axes.formatter.useoffset": False,
  "axes.facecolor": "none",
  "axes.labelcolor": INK,
  "axes.titlecolor": INK,
  "axes.titlelocation": "left",
  "axes.titlesize": 12,
  "axes.titleweight": "bold",
  "text.color": INK,
  "xtick.color": GREY,
  "ytick.color": GREY,
  "grid.color": GRID,
  "figure.facecolor": PAPER,
  "legend.frameon": False,
  "svg.fonttype": "none",
}


def time_unit(seconds: float) -> tuple[float, str]:
  """Seconds and name of the unit for an axis of this length."""
  return (1.0, "seconds") if seconds < 600 else (60.0, "minutes") if seconds < 4 * 3600 else (3600.0, "hours")


def short_number(number: float) -> str:
  """`960`, `12.3M`; empty for nan."""
  for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
    if number >= unit:
      return f"{number / unit:.3g}{name}"
  return f"{number:.0f}" if math.isfinite(number) else ""


def png(figure: Figure) -> bytes:
  buffer = io.BytesIO()
  figure.savefig(buffer, format="png", dpi=144)
  return buffer.getvalue()


def svg(figure: Figure) -> bytes:
  """An SVG file that follows the reader's choice of light or dark."""
  buffer = io.StringIO()
  nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
  figure.savefig(buffer, format="svg", facecolor="none", metadata=nothing)
  text = buffer.getvalue()
  text = text[text.index("<svg") :]
  names = {color: f"var(--c{i})" for i, color in enumerate(DARK)}
  text = re.sub("|".join(DARK), lambda found: names[found[0]], text)
  text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
  light = "".join(f"--c{i}:{color};" for i, color in enumerate(DARK))
  dark = "".join(f"--c{i}:{color};" for i, color in enumerate(DARK.values()))
  css = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
  return re.sub(r"(<svg[^>]*>)", rf"\1{css}", text, count=1).encode()
