"""The one kind of error that a wrong configuration raises, and the wording that its causes share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
  """A mistake of the user's: the value given, the rule, the remedy, in a few lines. The program exits with code 2."""


def shorten(text: str) -> str:
  """`text` as a message repeats it: its beginning where it is long."""
  return text if len(text) <= 80 else f"{text[:60]}..."


def nearest(word: str, names: Iterable[str]) -> str | None:
  """The name most like `word`, or None when nothing is close."""
  lowered = {name.lower(): name for name in names}
  found = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=0.6)
  return lowered[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
  """'Did you mean X?' with a trailing space, or '' when nothing is close."""
  name = nearest(word, names)
  return f"Did you mean {name}? " if name else ""


def counted(count: int, noun: str) -> str:
  """ "1 slice", "3 slices"."""
  return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
