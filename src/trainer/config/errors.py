"""The mistakes of a configuration: collected, so that one command reports all of them, and how messages name things.

A mistake is a ConfigError, also one in the data. The exit code is 2.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator

from input_pipeline.input_errors import ConfigError as ConfigError
from input_pipeline.input_errors import require as require
from input_pipeline.input_errors import shorten as shorten


def how_to_install(extra: str) -> str:
  """The remedy for a missing package that `extra` of pyproject.toml has, as the beginning of a sentence."""
  return f"Run bash setup.sh --{extra} in a clone, or install the wheel with it (pip install 'WHEEL[{extra}]')"


class Problems:
  """Collects messages, so that one command reports all its independent mistakes at once."""

  def __init__(self) -> None:
    self._messages: list[str] = []

  def add(self, messages: Iterable[str]) -> None:
    """Adds messages, each with value, rule and remedy. A message that is here already is not added."""
    self._messages = list(dict.fromkeys([*self._messages, *messages]))

  @contextlib.contextmanager
  def collect(self, prefix: str = "") -> Iterator[None]:
    """Adds the messages of a ConfigError that the block raises, after `prefix`, and continues after the block."""
    try:
      yield
    except ConfigError as error:
      self.add(f"{prefix}{message}" for message in error.messages)

  def raise_any(self) -> None:
    """Raises one ConfigError with all messages. Does nothing if there are none."""
    require(self._messages)


def nearest(word: str, names: Iterable[str]) -> str | None:
  """The name most similar to `word`, or None if no name is similar enough to be what was meant."""
  lowered = {name.lower(): name for name in names}
  found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.8)
  return lowered[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
  """'Did you mean X?' with a trailing space, or '' if no name is similar."""
  name = nearest(word, names)
  return f"Did you mean {name}? " if name else ""


def counted(count: int, noun: str) -> str:
  """ "1 slice", "3 slices"."""
  return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
