"""Packages that only some datasets need, imported when they are used."""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from input_pipeline.input_errors import ConfigError


def load(module: str, *, package: str, extra: str, reason: str) -> Any:
  """The imported `module`. Raises ConfigError, naming what to install, if it is absent. extra: of the trainer."""
  try:
    return importlib.import_module(module)
  except ImportError as error:
    raise ConfigError(
      f"{reason} needs the package {package}, which is not installed ({error}). Run bash setup.sh --{extra} "
      f"(in a clone of the trainer) or python -m pip install {package}."
    ) from error


def array_record() -> Any:
  """The module of ArrayRecord's reader and writer."""
  with uninterrupted():
    from array_record.python import array_record_module
  return array_record_module


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
  """Delays Ctrl-C to the end of the block. While array_record's C++ library loads, it would abort the process."""
  if threading.current_thread() is not threading.main_thread():  # signals interrupt only the main thread
    yield
    return
  pressed: list[int] = []
  handler = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, handler)
  if pressed:
    signal.raise_signal(signal.SIGINT)
