"""The plug-in that writes what a run leaves at its end: goodput.json and the report."""

from __future__ import annotations

from trainer.report import page
from trainer.run.plugins import Plugin


class Report(Plugin):
  """services=goodput_json, enable_report."""

  def ends(self, code: int) -> None:
    observe = self.config.observe
    with_page, with_goodput = code == 0 and observe.enable_report, observe.sends_to("goodput_json")
    if with_page or with_goodput:
      page.write_or_warn(self.config.run_directory, self.run.log, with_goodput=with_goodput, with_page=with_page)
