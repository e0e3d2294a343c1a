"""Types of command-line options, for argparse. Python's own also read digits of other scripts, nan and inf."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int = -(2**31), most: int = 2**31 - 1) -> Callable[[str], int]:
  """A whole number from `least` to `most`."""

  def convert(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and least <= int(text) <= most):
      raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least {least} and at most {most}")
    return int(text)

  return convert


def real(least: float, most: float) -> Callable[[str], float]:
  """A number from `least` to `most`."""

  def convert(text: str) -> float:
    try:
      number = float(text) if text.isascii() else math.nan
    except ValueError:
      number = math.nan
    if not least <= number <= most:
      raise argparse.ArgumentTypeError(f"{text} must be a number of at least {least:g} and at most {most:g}")
    return number

  return convert
