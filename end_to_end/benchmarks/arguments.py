"""Types of the benchmarks' arguments, for argparse: it prints what is wrong and ends with 2."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f"{text!r}: give a whole number, at least 1")
  return int(text)


def positives(text: str) -> list[int]:
  """Of 1,2,3."""
  try:
    return [positive(part) for part in text.split(",")]
  except argparse.ArgumentTypeError:
    raise argparse.ArgumentTypeError(
      f"{text!r}: give whole numbers with commas between them, each at least 1"
    ) from None
