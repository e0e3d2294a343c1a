"""The page that compares several runs: their losses in one picture, their numbers, and the keys that differ."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.config import resume
from trainer.config.schema import OptimizerSection
from trainer.observe import files
from trainer.observe.metrics import format_duration
from trainer.report import compare, goodput, incidents, markup
from trainer.report.history import RunHistory

_DETERMINES_LOSSES = (
  resume.CHANGES_STATE | resume.CHANGES_MODEL | resume.CHANGES_DATA_ORDER | set(OptimizerSection.model_fields)
)


def write(runs: Sequence[RunHistory], path: str) -> None:
  """Writes the comparison of runs that have steps to an HTML file that loads nothing."""
  directory, _, name = path.rpartition("/")
  files.write_text(directory or ".", name, markup.page("Comparison of runs", body(runs)))


def body(runs: Sequence[RunHistory]) -> str:
  """The comparison as the body of an HTML page. The first run is the one that the others are compared with."""
  from trainer.report import hover, overlay, style  # matplotlib: a second to import

  names, results = labels(runs), [goodput.compute(run) for run in runs]
  equal = [name for name, run in zip(names[1:], runs[1:]) if not _other(runs[0], run)]
  ends = "; ".join(f"{name}: {_loss(run)}" for name, run in zip(names, runs))
  text = f"Losses of the runs over steps, tokens and wall time, learning rates and speeds. At the end, {ends}."
  images, _ = hover.picture(text, style.FULL_PAGE, overlay.compared, runs, results, names, equal)
  return (
    f'<div class="compared"><h1>{markup.count(len(runs), "run")}</h1>{images}<h2>Numbers</h2>'
    f"{_numbers(runs, results, names)}<h2>Configuration</h2>{_differences(runs, names)}</div>"
  )


def labels(runs: Sequence[RunHistory]) -> list[str]:
  """A name for each run that no other run of the page has."""
  names = [run.name for run in runs]
  return [run.directory if names.count(run.name) > 1 else run.name for run in runs]


def _numbers(runs: Sequence[RunHistory], results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
  """A column per run, so that the page of two runs fits a phone."""
  columns = [_facts(run, result, runs[0]) for run, result in zip(runs, results)]
  rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
  return markup.table(("", *names), [row for row in rows if any(row[1:])])


def _facts(run: RunHistory, result: dict[str, Any], first: RunHistory) -> dict[str, str]:
  happened = incidents.find(run)
  speeds = run.tokens_per_second()
  speeds = speeds[np.isfinite(speeds)]
  facts = {
    "steps": f"{run.steps[-1]['step']:,.0f}",
    "training loss": _loss(run),
    "evaluation loss": "".join(f"{row['eval_loss']:.4f} (step {row['step']:,.0f})" for row in run.evals[-1:]),
    "tokens per second (median)": f"{np.median(speeds):,.0f}" if len(speeds) else "",
    "wall time": format_duration(result["wall_seconds"]),
    "goodput": f"{result['goodput_percent']:.2f} %",
    "slices lost": f"{incidents.slices_lost(run):,}",
    "steps done again": f"{result['steps_lost']:,}",
    "time lost by events": markup.duration(sum(incident.own_seconds or 0.0 for incident in happened)),
  }
  return facts | {"losses against the first run": "" if run is first else _difference(first, run)}


def _loss(run: RunHistory) -> str:
  loss, of_steps = run.last_loss()
  return f"{loss:.4f} ({of_steps})"


def _difference(first: RunHistory, run: RunHistory) -> str:
  if other := _other(first, run):
    return f"not compared: other {', '.join(other[:3])}{', ...' * (len(other) > 3)}"
  found = compare.of_runs(first, run)
  return "no step in common" if found is None else str(found)


def _other(first: RunHistory, run: RunHistory) -> list[str]:
  """Names of what makes two runs different trainings; [] if their losses should be the same."""
  ours, theirs = (one.start.get("config") or {} for one in (first, run))
  found = [key for key in ours if key in _DETERMINES_LOSSES and ours[key] != theirs.get(key)]
  data, others = ([(one.start.get("data") or {}).get(key) for key in ("tokens", "examples")] for one in (first, run))
  found += ["data"] * (data != others)
  found += ["tokens_per_step"] * (first.start.get("tokens_per_step") != run.start.get("tokens_per_step"))
  _, i, j = np.intersect1d(first.steps["step"], run.steps["step"], assume_unique=True, return_indices=True)
  same = np.array_equal(first.steps["lr"][i], run.steps["lr"][j], equal_nan=True)
  return found or ["learning rates"] * (not same)


def _differences(runs: Sequence[RunHistory], names: Sequence[str]) -> str:
  """The keys whose values are not the same in all runs."""
  values: list[dict[str, Any]] = [run.start.get("config") or {} for run in runs]
  keys = dict.fromkeys(key for keys_of_run in values for key in keys_of_run)
  different = [key for key in keys if len({str(keys_of_run.get(key)) for keys_of_run in values}) > 1]
  if not all(values):
    unknown = ", ".join(name for name, keys_of_run in zip(names, values) if not keys_of_run)
    return f"<p>Not recorded: {html.escape(unknown)}.</p>"
  if not different:
    return "<p>All keys have the same values.</p>"
  return markup.table(
    ("key", *names), [[key, *(markup.scalar(keys_of_run.get(key, "")) for keys_of_run in values)] for key in different]
  )
