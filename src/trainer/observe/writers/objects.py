"""gcs_metrics: the records of a run as immutable objects, for object stores, which cannot append to files."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from trainer.observe.log import Log


class MetricsObjects:
  """One immutable object per `period` steps: {directory}/metrics_step_000001_to_step_000010.txt, JSON lines."""

  def __init__(self, directory: str, period: int, log: Log) -> None:
    self._directory, self._period, self._log = directory, period, log
    self._pending: list[tuple[int, str]] = []
    self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics objects")

  def write(self, step: int, line: str) -> None:
    if self._pending and step != self._pending[-1][0] + 1:  # a rewind: the pending steps become their own object
      self._put()
    self._pending.append((step, line))
    if step % self._period == 0:
      self._put()

  def _put(self) -> None:
    if not self._pending:
      return
    first, last = self._pending[0][0], self._pending[-1][0]
    text = "".join(f"{line}\n" for _, line in self._pending)
    self._pending = []
    self._writer.submit(
      _put_object, self._directory, f"metrics_step_{first:06d}_to_step_{last:06d}", text
    ).add_done_callback(self._report)

  def _report(self, done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
      self._log.warning(f"cannot write a metrics object under {self._directory}: {error}")

  def close(self) -> None:
    self._put()
    self._writer.shutdown(wait=True)


def _put_object(directory: str, stem: str, text: str) -> None:
  """Writes {stem}.txt, or {stem}.1.txt and so on where steps are done again: an object is never replaced."""
  from etils import epath

  root = epath.Path(directory)
  root.mkdir(parents=True, exist_ok=True)
  path, again = root / f"{stem}.txt", 0
  while path.exists():
    again += 1
    path = root / f"{stem}.{again}.txt"
  path.write_text(text)
