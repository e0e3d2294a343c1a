"""Sections of the report page: evaluation sets, incidents and their cost, goodput, configuration, events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from trainer.observe.metrics import format_duration
from trainer.report import markup
from trainer.report.goodput import BUCKETS, without_pauses
from trainer.report.history import Events, RunHistory
from trainer.report.incidents import Incident

# Buckets of goodput: name and colour.
_BUCKETS = {
  "steps": ("steps that count", "#009e73"),
  "compile": ("compilation", "#56b4e9"),
  "init": ("start-up", "#0072b2"),
  "eval": ("evaluation", "#cc79a7"),
  "profile": ("profile", "#7d5fb8"),
  "rehearsal": ("waiting for a rehearsed fault", "#999933"),
  "checkpoint": ("checkpoint (blocking)", "#f0e442"),
  "snapshot": ("snapshot (blocking)", "#c9bd3a"),
  "restore": ("restore", "#e69f00"),
  "data_wait": ("waiting for data", "#8c6d31"),
  "wait_slices": ("waiting for slices", "#b35806"),
  "detect": ("detecting faults", "#8f3b6d"),
  "steps_lost": ("steps done again", "#d55e00"),
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

# Field of the description of the data (input_pipeline.loader): name.
_DATA = {
  "dataset": "Data set",
  "tokenizer": "Tokenizer",
  "tokenizer_vocab_size": "Vocabulary of the tokenizer",
  "bos_token": "Before each document",
  "eos_token": "After each document",
  "first_tokens": "Beginning of the first batch",
  "tokens": "Tokens in an epoch",
  "examples": "Examples in an epoch",
  "density": "Positions that hold text",
  "run_tokens": "Tokens of all steps, with padding",
  "epochs": "Epochs of the run",
}

_MOST_ROWS = 1000  # of a table; a million events would make a page that no browser opens


def incidents(run: RunHistory, happened: list[Incident]) -> str:
  """What happened besides training, one row per incident: what, why, and its cost."""
  if not happened:
    return markup.macros().section("What happened", "No slice was lost, and no process ended early.")
  shown = happened[-_MOST_ROWS:]
  some = f" The last {len(shown):,} are shown." if len(shown) < len(happened) else ""
  tokens = sum(incident.tokens or 0 for incident in happened)
  seconds = markup.duration(sum(incident.own_seconds or 0.0 for incident in happened))
  text = f"{markup.count(len(happened), 'event')} cost {seconds}, {tokens:,} tokens together.{some}"
  return markup.macros().incidents(text, shown, _phases(run))


def captions(run: RunHistory, result: dict[str, Any]) -> list[str]:
  """What the three pictures show, with their numbers, for readers who do not see them."""
  steps, speeds = run.steps, run.tokens_per_second()
  ends = f"from {steps[0]['loss']:.4g} at step {steps[0]['step']:,.0f} to {steps[-1]['loss']:.4g} at step "
  loss = f"Loss over steps and tokens: training {ends}{steps[-1]['step']:,.0f}"
  if len(run.evals):
    loss += f", evaluation from {run.evals[0]['eval_loss']:.4g} to {run.evals[-1]['eval_loss']:.4g}"
  if run.total_slices > 1:
    loss += f"; {steps['slices'].min():.0f} to {steps['slices'].max():.0f} slices used"
  speed = f"Loss and speed over {format_duration(result['wall_seconds'])} of wall time{without_pauses(result)}"
  if np.isfinite(speeds).any():
    speed += f": median {np.nanmedian(speeds):,.0f} tokens per second"
  details = (
    f"Step times: median {np.median(steps['seconds']):.3g} s, 99 % {np.percentile(steps['seconds'], 99):.3g} s. "
    f"Gradient norm: from {steps[0]['grad_norm']:.3g} to {steps[-1]['grad_norm']:.3g}. "
    f"Learning rate: at most {steps['lr'].max():.3g}, at the end {steps[-1]['lr']:.3g}"
  )
  if run.has_experts:
    last = steps[-1]
    details += (
      f". Tokens of an expert, relative to an even load: {last['router_load_max']:.3g} for the most used, "
      f"{last['router_load_min']:.3g} for the least used, at the end; no token is dropped"
    )
  return [f"{text}." for text in (loss, speed, details)]


def data(values: dict[str, Any]) -> str:
  """Which data the run reads; a field that does not apply is left out."""
  known = {key: value for key, value in values.items() if value is not None}
  if isinstance(known.get("density"), float):
    known["density"] = f"{100 * known['density']:.2f} %"
  return markup.macros().facts({_DATA.get(key, key.replace("_", " ")): value for key, value in known.items()})


def evaluation_sets(run: RunHistory) -> str:
  """The last and the lowest loss of each evaluation set, if there are several."""
  rows = []
  for name, column in run.eval_sets.items():
    known = np.isfinite(column)
    losses, steps = column[known], run.evals["step"][known]
    if len(losses):
      rows.append((name, *(f"{losses[n]:.4f} (step {steps[n]:,.0f})" for n in (-1, int(np.argmin(losses))))))
  table = markup.macros().table(("set", "last loss", "lowest loss"), rows[:_MOST_ROWS])
  return markup.macros().section("Evaluation sets", table) if rows else ""


def _phases(run: RunHistory) -> str:
  """The numbers of the recovery records, folded."""
  recoveries = run.of_kind("recovery")
  if not recoveries:
    return ""
  rows = ([markup.cell(event.get(field), field) for field, _ in _RECOVERY] for event in recoveries[-_MOST_ROWS:])
  table = markup.macros().table([heading for _, heading in _RECOVERY], rows)
  return markup.macros().folded(f"The parts of {markup.count(len(recoveries), 'recovery', 'recoveries')}", table)


def goodput(result: dict[str, Any]) -> str:
  """Where the wall time went: one bar of 100 %, and a row for each of its parts. result: of goodput.compute."""
  buckets = [
    {"name": name, "color": color, "width": share, "share": f"{share:.2f}", "seconds": result["seconds"][bucket]}
    | {"meaning": BUCKETS[bucket]}
    for bucket, (name, color) in _BUCKETS.items()
    if (share := result["percent"][bucket]) > 0
  ]
  text = (
    f"{result['goodput_percent']:.2f} % of {format_duration(result['wall_seconds'])} "
    f"(hours:minutes:seconds{without_pauses(result)}) were steps that count."
  )
  return markup.macros().goodput(text, buckets)


def configuration(values: dict[str, Any] | None, origins: dict[str, str]) -> str:
  """Every key with its value and where the value comes from; the keys that somebody gave come first."""
  macros, parts = markup.macros(), []
  given = [(key, markup.scalar(value), origins[key]) for key, value in (values or {}).items() if key in origins]
  rest = {key: markup.scalar(value) for key, value in (values or {}).items() if key not in origins}
  if given:
    parts = [macros.folded(f"{markup.count(len(given), 'key')} given", macros.table(("key", "value", "from"), given))]
  if rest:
    label = " with default values" if origins else ""
    parts.append(macros.folded(f"{markup.count(len(rest), 'key')}{label}", macros.facts(rest)))
  return macros.section("Configuration", "".join(parts))


def events(run: RunHistory) -> str:
  """The records of events.jsonl, folded."""
  kept: Events = [event for event in run.events if event["kind"] != "run_start"]
  shown = kept[-_MOST_ROWS:]
  some = f"The last {len(shown):,} of " if len(shown) < len(kept) else ""
  macros = markup.macros()
  table = macros.table(("time (UTC)", "kind", "fields"), _event_rows(shown))
  return macros.section("Events", macros.folded(f"{some}{markup.count(len(kept), 'event')}", table))


def _event_rows(shown: Events) -> Iterator[tuple[str, str, str]]:
  hidden = {"kind", "run", "process", "time", "wall", "monotonic"}
  for event in shown:
    fields = ", ".join(f"{key}={markup.cell(value, key)}" for key, value in event.items() if key not in hidden)
    yield str(event.get("time", ""))[:19].replace("T", " "), event["kind"], fields
