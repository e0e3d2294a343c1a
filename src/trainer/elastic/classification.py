"""Classifies the exceptions that end an attempt.

A lost slice leads to a recovery. Nothing else does: retrying a bug as if a slice had died wastes hours. The error texts
are in `runtime_errors`; a health check decides about the texts that have several causes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from trainer.cluster import Cluster, ProxyLost, View
from trainer.process import runtime_errors
from trainer.process.runtime_errors import Meaning


class SliceHang(Exception):
  """Work did not finish in time, and `slices` of the view do not answer health checks."""

  def __init__(self, message: str, slices: Iterable[int] = ()) -> None:
    super().__init__(message)
    self.slices = frozenset(slices)


class SliceWrong(Exception):
  """`slices` of the view compute wrongly, and do not take part any more; none: it is not known which slice does."""

  def __init__(self, message: str, slices: Iterable[int]) -> None:
    super().__init__(message)
    self.slices = frozenset(slices)


class Kind(StrEnum):
  SLICE_DOWN = "slice_down"
  HANG = "hang"
  UNKNOWN = "unknown"  # a runtime error on a healthy view: retried once; the second time at the same step it is raised
  DETERMINISTIC = "deterministic"  # the same program on the same data fails again
  DISCONNECTED = "disconnected"  # the Pathways proxy is lost, and every slice with it
  FATAL = "fatal"  # not a runtime error


@dataclass(frozen=True)
class Event:
  """A classified exception."""

  kind: Kind
  reason: str
  lost: frozenset[int] = frozenset()  # slices of the view whose memory is lost

  @property
  def is_slice_loss(self) -> bool:
    return self.kind in (Kind.SLICE_DOWN, Kind.HANG)


def classify(error: BaseException, cluster: Cluster, view: View) -> Event:
  """The event behind an exception that ended an attempt on `view`. Makes a health check if a slice may be lost. A slice
  that does not answer outweighs every error text: after a loss the runtime may raise any of them. If the text was
  right, the next attempt fails again, on a healthy view."""
  if isinstance(error, FloatingPointError):
    return Event(Kind.DETERMINISTIC, "a number is not finite")
  try:
    if isinstance(error, SliceHang):
      return Event(Kind.HANG, str(error), cluster.lost(view, error.slices))
    if isinstance(error, SliceWrong) and error.slices:
      return Event(Kind.SLICE_DOWN, str(error), cluster.lost(view, error.slices))
    found = runtime_errors.find(error)
    if found is None:
      return Event(Kind.FATAL, f"{type(error).__name__} is not a runtime error")
    return _classify_text(str(found), cluster, view)
  except ProxyLost as lost_proxy:
    return Event(Kind.DISCONNECTED, str(lost_proxy))


def _classify_text(text: str, cluster: Cluster, view: View) -> Event:
  meaning, reason = runtime_errors.explain(text)
  if meaning is Meaning.DISCONNECTED:
    return Event(Kind.DISCONNECTED, reason)
  lost = cluster.lost(view, runtime_errors.slices_lost(text))
  if lost:
    return Event(Kind.SLICE_DOWN, reason, lost)
  if meaning is Meaning.LOSS:
    return Event(Kind.SLICE_DOWN, reason)
  if meaning is Meaning.PERMANENT:
    return Event(Kind.DETERMINISTIC, reason)
  return Event(Kind.UNKNOWN, f"{reason}, but every slice is alive")
