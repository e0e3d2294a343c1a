"""services=checkpoint_logger: structured records of how long saves and restores took.

Orbax reports every phase of a save or restore to jax.monitoring. Each report becomes one record, sent to Cloud Logging
if its library is installed and has credentials, otherwise to {run}/checkpoint_timings.jsonl.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

import jax.monitoring

from trainer.observe import files
from trainer.observe.log import Log

TIMINGS_FILE = "checkpoint_timings.jsonl"
LOGGER_NAME = "trainer_checkpoint_timings"
_PREFIXES = ("/jax/orbax/", "/jax/checkpoint/")

Sink = Callable[[dict[str, Any]], object]


class CheckpointTimings:
  """Sends every timing of Orbax, with run and wall time, from entering `with` until leaving it."""

  def __init__(self, run_directory: str, run_name: str, log: Log) -> None:
    self._run_name = run_name
    cloud = _cloud_sink(log)
    self._lines = files.open_lines(None if cloud else run_directory, TIMINGS_FILE)
    self._send: Sink = cloud or (lambda record: self._lines.append(files.dump_json(record)))

  def __enter__(self) -> Self:
    jax.monitoring.register_event_duration_secs_listener(self._on_duration)
    return self

  def __exit__(self, *error: object) -> None:
    jax.monitoring.unregister_event_duration_listener(self._on_duration)
    self._lines.close()

  def _on_duration(self, event: str, duration: float, **labels: str | int) -> None:
    if event.startswith(_PREFIXES):
      self._send({"run": self._run_name, "wall": time.time(), "event": event, "seconds": duration} | labels)


def _cloud_sink(log: Log) -> Sink | None:
  """A sink that sends to Cloud Logging; None if its library or its credentials are missing."""
  try:
    from google.auth.exceptions import DefaultCredentialsError
    from google.cloud import logging as cloud_logging
  except ImportError:
    return None
  try:
    logger = cloud_logging.Client().logger(LOGGER_NAME)
  except DefaultCredentialsError as error:
    log.warning(f"checkpoint timings go to {TIMINGS_FILE}, not to Cloud Logging: {error}")
    return None
  return lambda record: logger.log_struct(record)
