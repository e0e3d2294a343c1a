"""Sizes, times and transfers as text."""

from __future__ import annotations

from stepcost.simulation import Timeline, Transfer


def size(count: float) -> str:
  """Returns text such as "1,037 MB" or "12.3 GB", in decimal units with three digits or more."""
  if count >= 1e10:
    return f"{count / 1e9:,.1f} GB"
  return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"


def milliseconds(seconds: float) -> str:
  return f"{seconds * 1e3:,.1f} ms"


def transfer_lines(t: Timeline, count: int) -> list[str]:
  """Returns the `count` most exposed transfers: what they need, what is exposed, and what is computed meanwhile."""
  exposed = sorted((transfer for transfer in t.transfers if transfer.exposed), key=lambda transfer: -transfer.exposed)
  return [transfer_line(transfer) for transfer in exposed[:count]]


def transfer_line(t: Transfer) -> str:
  needed = "unknown" if t.needed is None else milliseconds(t.needed)
  return (
    f"{t.site.channel} {t.site.kind} x {t.calls:,}, {size(t.site.bytes)} each: needs {needed}, exposed "
    f"{milliseconds(t.exposed)}; meanwhile {milliseconds(t.computed)} of computation"
    + (f", above all {_short(t.longest)}" if t.longest else "")
    + f"; from {_short(t.site.source)}"
  )


def _short(source: str) -> str:
  """Returns the end of the name that JAX gives to an operation: the innermost scope and the operation."""
  return "/".join(source.split("/")[-2:])
