"""The error for mistakes of the user, here and in the trainer, and the wording that its messages share."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

_MOST_SHOWN = 10


class ConfigError(ValueError):
  """One or more mistakes of the user, in options or in data. Each message has the value, the rule and the remedy."""

  def __init__(self, *messages: str) -> None:
    self.messages = messages
    super().__init__(messages[0] if len(messages) == 1 else _numbered(messages))


def _numbered(messages: tuple[str, ...]) -> str:
  shown = [
    f"({number}) " + textwrap.indent(message, "    ").lstrip()
    for number, message in enumerate(messages[:_MOST_SHOWN], 1)
  ]
  more = [f"... and {len(messages) - _MOST_SHOWN} more."] if len(messages) > _MOST_SHOWN else []
  return "\n".join([f"{len(messages)} mistakes in the configuration:", *shown, *more])


def require(messages: Iterable[str]) -> None:
  """Raises ConfigError with the messages that a rule yields. Does nothing if it yields none."""
  if found := tuple(messages):
    raise ConfigError(*found)


def shorten(text: str) -> str:
  """`text` for a message: only its beginning if it is long."""
  return text if len(text) <= 80 else f"{text[:60]}..."
