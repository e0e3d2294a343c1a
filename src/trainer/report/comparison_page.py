"""The page that compares several runs: their losses in one picture, their numbers, and the keys that differ."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.observe import files
from trainer.observe.metrics import format_duration
from trainer.report import compare, goodput, incidents, markup
from trainer.report.history import Run


def write(runs: Sequence[Run], path: str) -> None:
  """Writes the comparison to an HTML file that loads nothing. ConfigError if a run has no completed step."""
  directory, _, name = path.rpartition("/")
  files.write_text(directory or ".", name, markup.page("Comparison of runs", body(runs)))


def body(runs: Sequence[Run]) -> str:
  """The comparison as the body of an HTML page. The first run is the one that the others are compared with."""
  from trainer.report import overlay, plots, style  # matplotlib: a second to import

  for run in runs:
    run.require_steps()
  names, results = labels(runs), [goodput.compute(run) for run in runs]
  draw = lambda size: style.svg(plots.styled(overlay.losses, runs, results, names, size))
  wide, narrow = draw(style.WIDE), draw(style.NARROW)
  images = markup.picture("Losses of the runs over steps and over wall time", wide, narrow)
  return (
    f"<h1>{markup.count(len(runs), 'run')}</h1>{images}<h2>Numbers</h2>{_numbers(runs, results, names)}"
    f"<h2>Configuration</h2>{_differences(runs, names)}"
  )


def labels(runs: Sequence[Run]) -> list[str]:
  """A name for each run that no other run of the page has."""
  names = [run.name for run in runs]
  return [run.directory if names.count(run.name) > 1 else run.name for run in runs]


def _numbers(runs: Sequence[Run], results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
  """A column per run, so that the page of two runs fits a phone."""
  columns = [_facts(run, result, runs[0]) for run, result in zip(runs, results)]
  rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
  return markup.table(("", *names), rows)


def _facts(run: Run, result: dict[str, Any], first: Run) -> dict[str, str]:
  happened = incidents.find(run)
  speeds = run.tokens_per_second()
  speeds = speeds[np.isfinite(speeds)]
  facts = {
    "steps": f"{run.steps[-1]['step']:,.0f}",
    "training loss": f"{run.steps[-1]['loss']:.4f}",
    "evaluation loss": f"{run.evals[-1]['eval_loss']:.4f}" if len(run.evals) else "",
    "tokens per second (median)": f"{np.median(speeds):,.0f}" if len(speeds) else "",
    "wall time": format_duration(result["wall_seconds"]),
    "goodput": f"{result['goodput_percent']:.2f} %",
    "slices lost": f"{len(run.of_kind('slice_down')):,}",
    "steps done again": f"{result['steps_lost']:,}",
    "time lost by events": markup.duration(sum(incident.own_seconds or 0.0 for incident in happened)),
  }
  return facts | {"losses against the first run": "" if run is first else _difference(first, run)}


def _difference(first: Run, run: Run) -> str:
  found = compare.of_runs(first, run)
  return "no step in common" if found is None else str(found)


def _differences(runs: Sequence[Run], names: Sequence[str]) -> str:
  """The keys whose values are not the same in all runs."""
  values: list[dict[str, Any]] = [run.start.get("config") or {} for run in runs]
  keys = dict.fromkeys(key for own in values for key in own)
  different = [key for key in keys if len({str(own.get(key)) for own in values}) > 1]
  if not all(values):
    unknown = ", ".join(name for name, own in zip(names, values) if not own)
    return f"<p>Not recorded: {html.escape(unknown)}.</p>"
  if not different:
    return "<p>All keys have the same values.</p>"
  return markup.table(("key", *names), [[key, *(str(own.get(key, "")) for own in values)] for key in different])
