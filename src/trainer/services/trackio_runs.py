"""services=trackio: the run in trackio, which keeps runs in SQLite files of this machine (`trackio show` displays it).

trackio's own environment variables decide where the files are (TRACKIO_DIR), or to which server the run goes instead
(TRACKIO_SERVER_URL, TRACKIO_SPACE_ID). TRACKIO_PROJECT names the project, as for Hugging Face's Trainer.
"""

from __future__ import annotations

import uuid
from typing import Any

from trainer import cluster
from trainer.observe.log import Log
from trainer.services.service import EVALUATED, ServiceRun


class TrackioRun:
  """A Service: the run's part of this process."""

  def __init__(self, run: ServiceRun, log: Log) -> None:
    """Begins or continues the run. Raises trackio's errors."""
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    project = cluster.inherited_environment().get("TRACKIO_PROJECT", "trainer")
    # trackio finds a run by its name: two runs in different folders may have the same one.
    name = f"{run.name}-{(run.id or uuid.uuid4().hex)[:6]}"
    self._run: Any = trackio.init(project, name=name, resume="allow", config=dict(run.config), embed=False)
    self.last_step = self._run._next_step - 1 if self._run._next_step else 0
    self.last_evaluation = self.last_step
    if self._run._is_local and self.last_step:
      evaluated = f"max(json_extract(metrics, '$.\"{EVALUATED}\"'))"
      query = f"SELECT {evaluated} AS step FROM metrics WHERE run_id = '{self._run.id}'"
      found = SQLiteStorage.query_project(project, query)["rows"]
      self.last_evaluation = int(found[0]["step"] or 0)
    log.line(f"trackio: run {name} of project {project}. `trackio show --project {project}` displays it")

  def add(self, step: int, scalars: dict[str, float]) -> None:
    self._run.log(scalars, step=step)

  def finish(self, exit_code: int | None) -> None:
    self._run.finish()
