"""Types of command-line options, for argparse. Python's own also read digits of other scripts, nan and inf."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def whole(least: int = -(2**31), most: int = 2**31 - 1) -> Callable[[str], int]:
  def convert(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and least <= int(text) <= most):
      raise argparse.ArgumentTypeError(f"{text} must be a whole number of at least {least} and at most {most}")
    return int(text)

  return convert


def real(least: float, most: float) -> Callable[[str], float]:
  return _number(lambda number: least <= number <= most, f"of at least {least:g} and at most {most:g}")


def positive(most: float) -> Callable[[str], float]:
  return _number(lambda number: 0 < number <= most, f"above 0 and at most {most:g}")


def _number(allows: Callable[[float], bool], rule: str) -> Callable[[str], float]:
  def convert(text: str) -> float:
    try:
      number = float(text) if text.isascii() else math.nan
    except ValueError:
      number = math.nan
    if not allows(number):
      raise argparse.ArgumentTypeError(f"{text} must be a number {rule}")
    return number

  return convert
