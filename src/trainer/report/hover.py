"""Pictures of a page, with the values that its script shows under the pointer; the pictures need no script."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from trainer.report import markup, plots, style
from trainer.report.style import Size


def picture(text: str, sizes: Sequence[Size], draw: Callable[..., Figure], *arguments: Any) -> tuple[str, Figure]:
  """The <figure> of what draw(*arguments, size) returns for each of `sizes`, and the last of these figures.

  text: what the picture shows, for readers who do not see it. sizes: from narrow to wide.
  """
  figures = [plots.styled(draw, *arguments, size) for size in sizes]
  images = [(size.screen, style.svg(figure)) for size, figure in zip(sizes, figures)]  # this computes the layout
  *others, widest = (areas(figure) for figure in figures)
  for index, area in enumerate(widest):
    area["boxes"] = [*(boxes[index]["boxes"][0] for boxes in others), *area["boxes"]]
  return markup.picture(html.escape(text), images, html.escape(json.dumps(widest, separators=(",", ":")))), figures[-1]


def areas(figure: Figure) -> list[dict[str, Any]]:
  """The parts of a figure that have labelled curves: Axes with a common horizontal axis are one part.

  Returns for each: label (of the horizontal axis), limits (of it), boxes ([[left, top, right, bottom]], shares of the
  picture), curves ([name, style of matplotlib, xs, ys], null where a curve has a gap).
  """
  found = []
  for first in figure.axes:
    axes = sorted(first.get_shared_x_axes().get_siblings(first), key=figure.axes.index)
    lines = [line for axis in axes for line in axis.get_lines() if not str(line.get_label()).startswith("_")]
    box = Bbox.union([axis.get_position() for axis in axes])
    if lines and first is axes[0]:
      label = next((axis.get_xlabel() for axis in reversed(axes) if axis.get_xlabel()), "").partition(",")[0]
      shares = [round(share, 4) for share in (box.x0, 1 - box.y1, box.x1, 1 - box.y0)]
      found.append(
        {"label": label, "limits": list(axes[0].get_xlim()), "boxes": [shares], "curves": [*map(_curve, lines)]}
      )
  return found


def _curve(line: Line2D) -> list[Any]:
  points = np.asarray(line.get_xydata(), np.float64).T.tolist()
  xs, ys = ([float(f"{value:.7g}") if math.isfinite(value) else None for value in values] for values in points)
  return [line.get_label(), line.get_drawstyle(), xs, ys]
