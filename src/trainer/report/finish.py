"""What a run leaves at its end, computed from its files, which are read once."""

from __future__ import annotations

from trainer.observe.log import Log
from trainer.report import goodput, history, page


def write_or_warn(run_directory: str, log: Log, *, with_goodput: bool, with_page: bool) -> None:
  """Writes goodput.json and the report page, as asked, with a log line for each.

  Any failure becomes a warning: a figure or a picture must not turn a complete run into a failed one.
  """
  try:
    run = history.load(run_directory)
    result = goodput.compute(run)
    if with_goodput:
      goodput.write(run, result, log)
    if with_page:
      log.line("Drawing the report ...")
      log.line(f"Report: {page.write(run, result)}")
  except Exception as error:  # noqa: BLE001 - see above
    log.warning(f"no report: {error!r}; `python -m trainer.tools.report {run_directory}` tries again")
