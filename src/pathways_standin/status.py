"""Errors as the protocol has them: a code and a message."""

from __future__ import annotations

import re

# The canonical codes of absl and gRPC.
CODES = {
  "CANCELLED": 1,
  "UNKNOWN": 2,
  "INVALID_ARGUMENT": 3,
  "DEADLINE_EXCEEDED": 4,
  "NOT_FOUND": 5,
  "ALREADY_EXISTS": 6,
  "PERMISSION_DENIED": 7,
  "RESOURCE_EXHAUSTED": 8,
  "FAILED_PRECONDITION": 9,
  "ABORTED": 10,
  "OUT_OF_RANGE": 11,
  "UNIMPLEMENTED": 12,
  "INTERNAL": 13,
  "UNAVAILABLE": 14,
  "DATA_LOSS": 15,
  "UNAUTHENTICATED": 16,
}


class Status(Exception):
  """An error that a client receives as `CODE: message`."""

  def __init__(self, code: str, message: str) -> None:
    """code: a key of CODES."""
    assert code in CODES, code
    super().__init__(f"{code}: {message}")
    self.code, self.message = code, message


def from_code(code: int, message: str) -> Status:
  """The Status of a number of the protocol; UNKNOWN for a number that has no name."""
  return Status(next((name for name, number in CODES.items() if number == code), "UNKNOWN"), message)


def from_error(error: Exception) -> Status:
  """The Status of any exception. Errors of XLA begin with their code; all others are INTERNAL."""
  if isinstance(error, Status):
    return error
  text = str(error)
  match = re.match(r"([A-Z_]+): ", text)
  if match and match[1] in CODES:
    return Status(match[1], text[match.end() :])
  return Status("INTERNAL", f"Pathways stand-in: {type(error).__name__}: {text}")
