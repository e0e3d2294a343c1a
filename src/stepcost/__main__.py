"""Prints how much of the communication of compiled programs their schedules hide.

  python -m stepcost FILE ... --slices N --devices-per-slice M --chip v5e

Prints a table of what one execution computes and sends, and how long it takes, with one column per file. A file holds
the text of a scheduled HLO module: `compiled.as_text()` of any program that JAX has compiled.

A time that includes transfers with an unknown bandwidth is unknown: give --dcn-gbps.

Exit codes: 0, or 2: an argument is wrong or contradicts a file, or a file cannot be read or is damaged.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import signal
import sys
from collections.abc import Sequence
from types import MappingProxyType

from stepcost import chips, collectives, costs, hlo, prices, simulation
from stepcost.collectives import Collective
from stepcost.costs import Costs, Fusion
from stepcost.formats import fusion_line, milliseconds, size, transfer_lines
from stepcost.hlo import Module
from stepcost.hlo_events import Channel
from stepcost.prices import Rates
from stepcost.simulation import Timeline

# The smallest and the largest value of each number. The TPU compiler accepts 511 slices, and the largest TPU slice has
# 18,432 devices.
_LIMITS = MappingProxyType(
  {
    "slices": (1, 1024),
    "devices_per_slice": (1, 32_768),
    "clock_ghz": (0.01, 100),
    "dcn_gbps": (0.001, 1_000_000),
    "transfers": (0, 1_000_000),
    "fusions": (0, 1_000_000),
  }
)
_WRITE_AGAIN = "write the file again"


@dataclasses.dataclass(frozen=True)
class Measured:
  """What one file contains."""

  costs: Costs
  collectives: list[Collective]
  timeline: Timeline
  fusions: list[Fusion]


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the table, and returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("files", nargs="+", type=pathlib.Path, help="texts of scheduled HLO modules")
  parser.add_argument("--slices", type=_whole, required=True)
  parser.add_argument("--devices-per-slice", type=_whole, required=True)
  parser.add_argument("--chip", required=True, help="v4, v5e, v5p, v6e, 7x, or the name of a GPU such as H100")
  parser.add_argument("--clock-ghz", type=_real, help="clock for the compiler's cycles, instead of the chip's clock")
  parser.add_argument("--dcn-gbps", type=_real, help="Gbit/s of the data center network per device")
  parser.add_argument(
    "--transfers", type=_whole, default=0, metavar="COUNT", help="also list the most exposed transfers"
  )
  parser.add_argument(
    "--fusions", type=_whole, default=0, metavar="COUNT", help="also list the fusions with most cycles"
  )
  args = parser.parse_args(argv)
  try:
    rates = _rates(args)
    measured = [_measure(path, args, rates) for path in args.files]
  except (OSError, ValueError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  print(_assumptions(rates))
  for line in table([path.name for path in args.files], measured, rates):
    print(line)
  for path, found in zip(args.files, measured):
    fusions = [fusion_line(fusion, rates.chip) for fusion in found.fusions]
    problems = [f"not in these times: {problem}" for problem in found.timeline.problems]
    for line in (*problems, *transfer_lines(found.timeline, args.transfers), *fusions):
      print(f"{path.name}: {line}")
  return 0


def _whole(text: str) -> int:
  return int(_plain(text))


def _real(text: str) -> float:
  return float(_plain(text))


_whole.__name__, _real.__name__ = "whole number", "number"  # argparse prints them


def _plain(text: str) -> str:
  """`text`, if its digits are 0 to 9: Python reads the digits of every script."""
  if not text.isascii():
    raise argparse.ArgumentTypeError(f"{text} is not a number in the digits 0 to 9")
  return text


def _rates(args: argparse.Namespace) -> Rates:
  """Returns the rates that the arguments ask for. Raises ValueError if an argument is wrong."""
  chip = chips.find(args.chip)
  if chip is None:
    raise ValueError(f"--chip={args.chip}: unknown. Choose one of {', '.join(chip.name for chip in chips.CHIPS)}.")
  for name, (least, most) in _LIMITS.items():
    value = getattr(args, name)
    if value is not None and not least <= value <= most:  # also refuses nan
      raise ValueError(f"--{name.replace('_', '-')}={value}: must be at least {least} and at most {most:,}.")
  if args.clock_ghz is not None:
    chip = dataclasses.replace(chip, clock_hz=args.clock_ghz * 1e9)
  rates = prices.rates(chip)
  return rates if args.dcn_gbps is None else dataclasses.replace(rates, dcn=args.dcn_gbps * 1e9 / 8)


def _measure(path: pathlib.Path, args: argparse.Namespace, rates: Rates) -> Measured:
  """Raises ValueError if the file does not hold a scheduled HLO module of a program for these slices."""
  try:
    text = path.read_text()
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: damaged or not a text: {error.reason} at byte {error.start}; {_WRITE_AGAIN}.") from error
  if "is_scheduled=true" not in text.partition("\n")[0]:
    raise ValueError(
      f"{path}: not the text of a scheduled HLO module: is_scheduled=true is not in its first line. Use the text of a "
      "compiled program (compiled.as_text())."
    )
  try:
    module = hlo.parse(text)
  except ValueError as error:
    raise ValueError(f"{path}: damaged or cut off: {error}; {_WRITE_AGAIN}.") from error
  try:
    _check_devices(module, args.slices, args.devices_per_slice)
    slice_of = [position // args.devices_per_slice for position in range(args.slices * args.devices_per_slice)]
    found = collectives.find(module, slice_of)
    _check_slices(module, found, args.slices)
    timeline = simulation.simulate(module, slice_of, rates)
    return Measured(costs.count(module), found, timeline, costs.costliest_fusions(module, args.fusions))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def _check_devices(module: Module, slices: int, devices_per_slice: int) -> None:
  """Raises ValueError if `module` is not a program for this many devices."""
  if collectives.has_transfers_between_slices(module):  # a program of one slice; all slices run it
    if devices_per_slice != module.devices:
      raise ValueError(
        f"--devices-per-slice={devices_per_slice}, and each slice of this program has {module.devices} devices. Set "
        f"--devices-per-slice={module.devices}."
      )
  elif slices * devices_per_slice != module.devices:
    raise ValueError(
      f"--slices={slices} x --devices-per-slice={devices_per_slice} is {slices * devices_per_slice} devices, and this "
      f"program is for {module.devices}. Give two numbers whose product is {module.devices}."
    )


def _check_slices(module: Module, found: Sequence[Collective], slices: int) -> None:
  """Raises ValueError if a transfer of `module` joins more than `slices` slices. It may join fewer, along one axis."""
  joined = max((c.group for c in found if c.crosses_slices), default=1)
  if collectives.has_transfers_between_slices(module) and joined > slices:
    raise ValueError(
      f"--slices={slices}, and a transfer of this program joins {joined}. Set --slices={joined} or more."
    )


def _assumptions(rates: Rates) -> str:
  clock = f"{rates.chip.clock_hz / 1e9:g} GHz" if rates.chip.clock_hz else "no clock"
  dcn = "unknown" if rates.dcn is None else f"{rates.dcn * 8 / 1e9:g} Gbit/s"
  return (
    f"{rates.chip.name}: {clock}, {rates.chip.peak_flops / 1e12:g} TFLOP/s, HBM "
    f"{rates.chip.hbm_bandwidth / 1e9:g} GB/s, links {rates.links / 1e9:g} GB/s, DCN {dcn} per device"
  )


def table(names: Sequence[str], measured: Sequence[Measured], rates: Rates) -> list[str]:
  """Returns a Markdown table with one column per file."""
  rows = [_rows(found, rates) for found in measured]
  lines = [f"| per device and step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
  return lines + [f"| {name} | {' | '.join(cells[name] for cells in rows)} |" for name in rows[0]]


def _rows(found: Measured, rates: Rates) -> dict[str, str]:
  """Returns the cells of one file, by the name of their row. A time that includes an unknown time is unknown."""
  timeline, clock = found.timeline, rates.chip.clock_hz
  fusions = found.costs.cycles / clock if clock else None
  known = lambda seconds: "unknown" if seconds is None else milliseconds(seconds)
  exposed = {c: None if timeline.needed(c) is None else timeline.exposed[c] for c in Channel}
  dcn = exposed[Channel.DCN]
  across = [c for c in found.collectives if c.crosses_slices]
  inside = {kind: size(_payload(found.collectives, kind)) for kind in collectives.KINDS[:4]}
  return {
    "cycles of fusions": f"{found.costs.cycles:.3e}" + (f" ({milliseconds(fusions)})" if fusions else ""),
    "HBM traffic": size(found.costs.device_bytes),
    **{f"inside a slice: {kind} payload": text for kind, text in inside.items()},
    "between slices: operands": size(sum(c.operand_bytes for c in across)),
    "between slices: sent": size(sum(c.sent for c in across)),
    "DCN needed": known(timeline.needed(Channel.DCN)),
    "DCN exposed": known(dcn),
    "links needed": known(timeline.needed(Channel.LINKS)),
    "links exposed": known(exposed[Channel.LINKS]),
    "host exposed": known(exposed[Channel.HOST]),
    "on-chip prefetch exposed": known(exposed[Channel.MEMORY]),
    "other cores exposed": known(exposed[Channel.CORES]),
    "cycles + exposed DCN": known(None if fusions is None or dcn is None else fusions + dcn),
    **{f"computation {basis}": milliseconds(seconds) for basis, seconds in timeline.computation.items()},
    "step time": known(None if None in exposed.values() else timeline.seconds),
  }


def _payload(found: Sequence[Collective], kind: str) -> float:
  return sum(c.bytes * c.times for c in found if c.kind == kind and not c.crosses_slices)


if __name__ == "__main__":
  signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this command without a message
  sys.exit(main())
