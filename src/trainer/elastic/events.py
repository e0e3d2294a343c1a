"""What an exception means: one table from the runtime's error texts to what is done about them, with the reasons.

A lost slice must lead to a recovery, and nothing else may: a bug that is retried as if a slice had died burns hours.
Texts that have both causes count as a loss only when a health check really misses a slice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import jax

from trainer.cluster import Cluster, View


class SliceHang(Exception):
  """A step did not finish, and the health check misses slices of the view."""


class Kind(StrEnum):
  SLICE_DOWN = "slice_down"
  HANG = "hang"
  UNKNOWN = "unknown"  # of the runtime, on a healthy view: tried once more; at the same step again it is no accident
  DETERMINISTIC = "deterministic"  # the same program on the same data fails again
  FATAL = "fatal"  # not an error of the runtime


@dataclass(frozen=True)
class Event:
  """A classified exception."""

  kind: Kind
  reason: str
  lost: frozenset[int] = frozenset()  # slices of the view that the health check missed

  @property
  def is_slice_loss(self) -> bool:
    return self.kind in (Kind.SLICE_DOWN, Kind.HANG)


class _Means(StrEnum):
  LOSS = "loss"
  MAYBE = "maybe"
  NEVER = "never"


# First match wins: errors nest ("INTERNAL: Error dispatching computation: DATA_LOSS: ..."), the specific comes first.
_TABLE: tuple[tuple[str, _Means, str], ...] = (
  (r"DATA_LOSS", _Means.LOSS, "memory of a slice is gone"),
  (r"RESOURCE_EXHAUSTED|[Oo]ut of memory|Exceeded .* capacity", _Means.NEVER, "out of memory: it will be again"),
  (r"Mosaic|Triton|failed to compile|[Cc]ompilation fail|Compile", _Means.NEVER, "the program does not compile"),
  (r"RET_CHECK|Check failed", _Means.NEVER, "an invariant of the compiler or runtime is broken"),
  (r"\bnan\b|NaN|non-finite", _Means.NEVER, "the numbers are not finite: they will be again"),
  (r"INVALID_ARGUMENT|FAILED_PRECONDITION", _Means.NEVER, "the program is wrong: shapes, types or donated buffers"),
  (r"UNIMPLEMENTED|OUT_OF_RANGE|ALREADY_EXISTS", _Means.NEVER, "the program asks for what is not there"),
  (r"PERMISSION_DENIED|UNAUTHENTICATED", _Means.NEVER, "credentials do not come by trying again"),
  (r"[Gg]loo|Connection (closed|reset|refused)|Socket closed", _Means.MAYBE, "the network or a peer failed"),
  (r"UNAVAILABLE|ABORTED|CANCELLED", _Means.MAYBE, "a worker, or the way to it, is gone or restarts"),
  (r"DEADLINE_EXCEEDED|[Tt]imed out|[Tt]imeout", _Means.MAYBE, "a lost slice, or only a slow one"),
  (r"NOT_FOUND", _Means.MAYBE, "a buffer of a lost slice, or a missing file"),
  (r"INTERNAL|UNKNOWN", _Means.MAYBE, "a lost slice, or a failing kernel"),
)


def classify(error: BaseException, cluster: Cluster, view: View) -> Event:
  """What the exception of an attempt on `view` means. May run a health check of the slices."""
  if isinstance(error, SliceHang):
    return Event(Kind.HANG, str(error), _missing(cluster, view))
  if isinstance(error, FloatingPointError):
    return Event(Kind.DETERMINISTIC, "the numbers are not finite: they will be again")
  runtime_error = _runtime_error(error)
  if runtime_error is None:
    return Event(Kind.FATAL, f"{type(error).__name__} is not an error of the runtime")
  if cluster.is_slice_loss(runtime_error):
    return Event(Kind.SLICE_DOWN, f"{cluster.kind} says so", _missing(cluster, view))
  means, reason = _look_up(str(runtime_error))
  if means is _Means.NEVER:
    return Event(Kind.DETERMINISTIC, reason)
  missing = _missing(cluster, view)
  if means is _Means.LOSS or missing:
    return Event(Kind.SLICE_DOWN, reason, missing)
  return Event(Kind.UNKNOWN, f"{reason}, but every slice is alive")


def _look_up(text: str) -> tuple[_Means, str]:
  for pattern, means, reason in _TABLE:
    if re.search(pattern, text):
      return means, reason
  return _Means.MAYBE, "a text that is not in the table"


def _runtime_error(error: BaseException | None) -> jax.errors.JaxRuntimeError | None:
  """The runtime's error that `error` is or came after: checkpoint threads wrap what they catch, and closing them fails
  in its own words once a slice is gone."""
  while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
    error = error.__cause__ or error.__context__
  return error


def _missing(cluster: Cluster, view: View) -> frozenset[int]:
  return frozenset(view.slices) - cluster.alive()
