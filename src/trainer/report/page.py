"""report.html and loss.png: what a person wants to see of a run, in one file that needs nothing else."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from trainer.observe import files
from trainer.observe.log import Log
from trainer.observe.metrics import format_duration
from trainer.report import goodput as goodput_lib
from trainer.report import history, incidents, markup, sections
from trainer.report.history import RunHistory
from trainer.report.incidents import Incident

REPORT_FILE = "report.html"
PICTURE_FILE = "loss.png"

_TILE_LETTERS = 13  # of the number in a tile; a longer one gets two columns, so that no line breaks inside it

# Exit code -> what it means, and whether that is as it should be.
_ENDS = {
  0: ("Complete", "good"),
  1: ("Failed", "bad"),
  2: ("Refused: wrong configuration or input", "bad"),
  42: ("Stopped by a signal after a checkpoint; the same command resumes it", "sub"),
  130: ("Stopped by Ctrl-C", "sub"),
}


def write_or_warn(run_directory: str, log: Log, *, with_goodput: bool, with_page: bool) -> None:
  """Writes what a run leaves at its end, from its files: goodput.json and the report page, with a log line for each.

  Any failure becomes a warning: a figure or a picture must not turn a complete run into a failed one.
  """
  try:
    run = history.load(run_directory)
    result = goodput_lib.compute(run)
    if with_goodput:
      goodput_lib.write(run, result, log)
    if with_page:
      log.line("Drawing the report ...")
      log.line(f"Report: {write(run, result)}")
  except Exception as error:  # noqa: BLE001 - see above
    log.warning(f"no report: {error!r}; `python -m trainer.tools.report {run_directory}` tries again")


def write(run: RunHistory, goodput: dict[str, Any]) -> str:
  """Writes report.html and loss.png into the run directory and returns the report's path.

  goodput: the result of goodput.compute. ConfigError if the run has no completed step.
  """
  text, picture = body(run, goodput)
  files.write_bytes(run.directory, PICTURE_FILE, picture)
  files.write_text(run.directory, REPORT_FILE, markup.page(run.name, text))
  return f"{run.directory.rstrip('/')}/{REPORT_FILE}"


def body(run: RunHistory, goodput: dict[str, Any]) -> tuple[str, bytes]:
  """The report as the body of an HTML page, and the picture of the losses as PNG. Arguments as for `write`."""
  from trainer.report import plots, style  # matplotlib: a second to import

  run.require_steps()
  draws = ((plots.loss_over_steps, run), (plots.over_time, run, goodput), (plots.details, run))
  figures = [plots.styled(*draw) for draw in draws]
  pictures = "".join(
    markup.picture(caption, style.svg(figure))
    for caption, figure in zip(sections.captions(run, goodput), figures, strict=True)
  )
  return sections_of(run, goodput, pictures), style.png(figures[0])


def sections_of(run: RunHistory, goodput: dict[str, Any], pictures: str) -> str:
  happened = incidents.find(run)
  parts = [
    f"{_summary(run, happened)}{_tiles(run, goodput)}{pictures}",
    sections.evaluation_sets(run),
    sections.incidents(run, happened),
    sections.goodput(goodput),
    _sample(run),
    _started(run),
    sections.configuration(run.start.get("config"), run.start.get("origins") or {}),
    sections.events(run),
  ]
  return "\n".join(filter(None, parts))


def _summary(run: RunHistory, happened: list[Incident]) -> str:
  """How the run ended, what it has lost, and in one line what ran where."""
  end, tone = _end(run)
  lost = [markup.count(len(run.steps), "step")]
  if run.total_slices > 1:
    lost.append(f"{markup.count(incidents.slices_lost(run), 'slice')} lost")
  lost.append(f"{markup.duration(sum(incident.own_seconds or 0.0 for incident in happened))} lost")
  lost.append(f"{sum(incident.tokens or 0 for incident in happened):,} tokens lost")
  facts = []
  if run.start.get("parameters"):
    facts.append(f"{markup.magnitude(run.start['parameters'])} parameters")
  if run.start.get("devices"):
    kind = run.start.get("device_kind") or run.start.get("platform") or "unknown"
    facts.append(
      f"{markup.count(run.start['devices'], 'device')} ({kind}) in {markup.count(run.total_slices, 'slice')}"
    )
  if run.start.get("time"):
    facts.append(f"Last start: {run.start['time'][:19].replace('T', ' ')} UTC")
  return markup.macros().summary(run.name, end, tone, lost, facts)


def _end(run: RunHistory) -> tuple[str, str]:
  """A sentence on how the newest process ended, and its class in the style sheet."""
  if run.end is None:
    if run.events and run.events[-1]["kind"] == "hang" and "operation" in run.events[-1]:
      return "Stopped by the watchdog (exit code 134); the same command resumes it.", "bad"
    return "Not ended: the run is still going on, or its process was killed.", "sub"
  code = int(run.end["exit"])
  text, tone = _ENDS.get(code, ("Ended", "bad"))
  return f"{text} (exit code {code}).", tone


def _tiles(run: RunHistory, goodput: dict[str, Any]) -> str:
  last = run.steps[-1]
  speeds = run.tokens_per_second()
  speeds = speeds[np.isfinite(speeds)]
  loss, of_steps = run.last_loss()
  tiles = [("steps", run.progress()), (f"training loss, {of_steps}", f"{loss:.4f}")]
  if len(run.evals):
    tiles.append((f"evaluation loss (step {run.evals[-1]['step']:,.0f})", f"{run.evals[-1]['eval_loss']:.4f}"))
  if len(run.evals) and run.start.get("unigram_eval_loss"):
    tiles.append(("evaluation loss of a unigram model", f"{run.start['unigram_eval_loss']:.4f}"))
  tiles.append(("tokens", f"{last['tokens']:,.0f}"))
  if len(speeds):
    tiles.append(("tokens per second (median)", f"{np.median(speeds):,.0f}"))
  if math.isfinite(last["mfu"]):
    tiles.append(("MFU (last step)", f"{100 * last['mfu']:.1f} %"))
  tiles += [
    (f"wall time{goodput_lib.without_pauses(goodput)}", format_duration(goodput["wall_seconds"])),
    ("goodput", f"{goodput['goodput_percent']:.2f} %"),
    ("steps done again", f"{goodput['steps_lost']:,}"),
  ]
  return markup.macros().tiles(tiles, _TILE_LETTERS)


def _sample(run: RunHistory) -> str:
  samples = run.of_kind("sample")
  if not samples:
    return ""
  return markup.macros().sample(*(str(samples[-1].get(key) or "") for key in ("prompt", "text")))


def _started(run: RunHistory) -> str:
  """Which data, and how, where and with which code the newest process was started."""
  start = run.start
  data = start.get("data")
  facts = {"Command": start.get("command"), "Host": start.get("host"), "Commit": start.get("git_commit")}
  facts["Versions"] = ", ".join(f"{package} {version}" for package, version in (start.get("versions") or {}).items())
  known = {name: value for name, value in facts.items() if value}
  section, facts = markup.macros().section, markup.macros().facts
  return section("Data", sections.data(data) if data else "") + section("Start", facts(known) if known else "")
