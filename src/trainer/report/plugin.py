"""The plug-in that writes what a run leaves at its end: goodput.json and the report."""

from __future__ import annotations

from trainer.report import page
from trainer.run.plugins import Plugin


class Report(Plugin):
  """enable_pathways_goodput, enable_report."""

  def ends(self, code: int) -> None:
    observe = self.config.observe
    with_page = code == 0 and observe.enable_report
    if observe.enable_pathways_goodput or with_page:
      page.write_or_warn(
        self.config.run_directory, self.run.log, with_goodput=observe.enable_pathways_goodput, with_page=with_page
      )
