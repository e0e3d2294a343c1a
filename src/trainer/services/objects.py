"""services=gcs_metrics: the records of a run as immutable objects, for object stores, which cannot append to files."""

from __future__ import annotations

from input_pipeline import places
from trainer.observe.log import Log


class MetricsObjects:
  """A Destination: one immutable object of JSON lines per `period` steps: metrics_step_000001_to_step_000010.txt."""

  def __init__(self, directory: str, period: int, log: Log) -> None:
    self._directory, self._period, self._log = directory, period, log
    self._pending: list[tuple[int, str]] = []

  def add(self, step: int, line: str) -> None:
    if self._pending and step != self._pending[-1][0] + 1:  # a rewind: the pending steps become their own object
      self._put()
    self._pending.append((step, line))
    if step % self._period == 0:
      self._put()

  def flush(self) -> None:
    """Nothing: metrics.jsonl has what waits here."""

  def close(self, exit_code: int | None) -> None:
    if self._pending:
      self._put()

  def _put(self) -> None:
    """Writes one object. An error is a warning: the next object may succeed."""
    first, last = self._pending[0][0], self._pending[-1][0]
    text = "".join(f"{line}\n" for _, line in self._pending)
    self._pending = []
    try:
      _put_object(self._directory, f"metrics_step_{first:06d}_to_step_{last:06d}", text)
    except OSError as error:
      self._log.warning(f"cannot write a metrics object under {self._directory}: {error}")


def _put_object(directory: str, stem: str, text: str) -> None:
  """Writes {stem}.txt, or {stem}.1.txt and so on where steps are done again: an object is never replaced."""
  root = places.at(directory)
  root.mkdir(exist_ok=True)  # not the run's own folder, which may have been moved
  path, again = root / f"{stem}.txt", 0
  while path.exists():
    again += 1
    path = root / f"{stem}.{again}.txt"
  path.write_text(text)
