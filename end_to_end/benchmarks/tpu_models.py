"""Compiles the training step of every model for TPUs, without a TPU, and prints whether it fits.

    JAX_PLATFORMS=cpu python -m end_to_end.benchmarks.tpu_models [MODEL ...] [--on v6e-64 2] [--keys KEY=VALUE ...]
      [--against docs/benchmarks/tpu.md]

Needs libtpu (bash setup.sh --tpu). Prints a Markdown table with one row per model, for all slices of the topology:
the share of a chip's memory, the time of a step with the communication that its schedule does not hide, and the
least time (roofline).

With --against PAGE, prints instead how much the step times differ from the table of PAGE, which was printed with the
same keys. A difference of more than 3 % in either direction, or a step that no longer fits, ends with exit code 1.
"""

from __future__ import annotations

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Mapping

from end_to_end.benchmarks.common import model_config
from tests.support.command import ROOT

from stepcost import topologies
from trainer.config import ConfigError

SMALL, MEDIUM, LARGE, HUGE = ("v5e-16", "3"), ("v5e-256", "2"), ("v5p-256", "2"), ("v5p-1024", "2")
WHERE = {"qwen3-14b": MEDIUM, "qwen3-32b": MEDIUM, "70b": LARGE, "405b": HUGE}
KEYS = ("per_device_batch_size=1", "max_target_length=2048", "attention=flash", "remat_policy=full")

COLUMNS = (
  *("model", "slices", "memory", "step time", "computation"),
  *("DCN exposed", "links exposed", "MFU", "roofline"),
)
DIFFERENCE = ("model", "slices", "step time of the page", "now", "difference")
ALLOWED = 0.03  # of the step time


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("models", nargs="*", help="default: all of configs/models")
  parser.add_argument("--keys", nargs="*", default=[], help="added to, or instead of, " + " ".join(KEYS))
  parser.add_argument("--on", nargs=2, metavar=("TOPOLOGY", "SLICES"), help="default: depends on the model")
  parser.add_argument("--against", type=pathlib.Path, metavar="PAGE")
  parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)  # model, topology, slices, in a new process
  args = parser.parse_args()
  if args.one:
    try:
      print(_row(args.one[0], args.one[1], int(args.one[2]), args.keys))
    except topologies.TopologyError as error:
      sys.exit(str(error))
    return
  models = args.models or sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))
  for model in models:
    try:
      model_config(model, KEYS, args.keys)
    except ConfigError as error:
      parser.error(str(error))
  before = step_times(args.against.read_text()) if args.against else {}
  if args.against and (missing := set(models) - {model for model, _ in before}):
    parser.error(f"{args.against}: no row for {', '.join(sorted(missing))}")
  columns = DIFFERENCE if args.against else COLUMNS
  print(f"| {' | '.join(columns)} |")
  print("|---" * len(columns) + "|", flush=True)
  failed = 0
  for model in models:
    topology, slices = args.on or next((place for name, place in WHERE.items() if name in model), SMALL)
    command = [sys.executable, "-m", "end_to_end.benchmarks.tpu_models", "--one", model, topology, slices]
    done = subprocess.run([*command, "--keys", *args.keys], capture_output=True, text=True)
    failed += done.returncode != 0 or "too large |" in done.stdout
    if args.against and step_times(done.stdout):
      line, differs = difference(before, step_times(done.stdout))
      failed += differs
      print(line, flush=True)
      continue
    # A table cell is one line, and the end of a traceback matters most.
    print(done.stdout.strip() or f"| {model} | failed: {' '.join(done.stderr.split())[-2000:]} |", flush=True)
  sys.exit(failed > 0)


def step_times(table: str) -> dict[tuple[str, str], float]:
  """Returns (model, slices) -> milliseconds of a step, from the rows of a printed table."""
  rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines() if "|" in line)
  column = COLUMNS.index("step time")
  return {
    (row[0], row[1]): float(row[column].removesuffix(" ms").replace(",", ""))
    for row in rows
    if len(row) == len(COLUMNS) and row[column].endswith(" ms")
  }


def difference(before: Mapping[tuple[str, str], float], now: Mapping[tuple[str, str], float]) -> tuple[str, bool]:
  """Returns the line about the step in `now`, and whether its time differs by more than ALLOWED.

  Raises SystemExit if `before` has no time of this step.
  """
  (step, time), *_ = now.items()
  if step not in before:
    raise SystemExit(f"{' on '.join(step)}: the page has no time of this step")
  change = time / before[step] - 1
  differs = abs(change) > ALLOWED
  return f"| {' | '.join(step)} | {before[step]:,.1f} ms | {time:,.1f} ms | {change:+.1%}{' !' * differs} |", differs


def _row(model: str, topology: str, slices: int, keys: list[str]) -> str:
  """Returns one row of the table."""
  config = model_config(model, KEYS, keys)
  place = topologies.resolve(topology)
  topologies.prepare_environment()
  from stepcost import chips
  from stepcost.formats import milliseconds
  from stepcost.hlo_events import Channel
  from trainer.preflight import analysis

  devices = topologies.devices(place, slices)
  chip = chips.find(devices[0][0].device_kind)
  assert chip is not None
  found = analysis.analyse(config, devices, slices)
  where = f"{topology} x {slices}"
  if isinstance(found, analysis.Refused):
    if not found.too_large:
      raise SystemExit(f"{model} for {where}: {found.reason}")
    return f"| {model} | {where} | {found.reason}, too large |{' |' * (len(COLUMNS) - 3)}"
  memory = found.memory
  share = f"{memory.total / chip.hbm_bytes:.0%}" + ("" if memory.fits(chip) else ", too large")
  line, times = analysis.roofline(found, chip), analysis.timeline(found, chip)
  assert times is not None, "the step on all slices is compiled with full optimization"
  cells = [
    *(model, where, share),
    *(milliseconds(seconds) for seconds in (times.seconds, times.computed)),
    *(milliseconds(times.exposed[channel]) for channel in (Channel.DCN, Channel.LINKS)),
    f"{found.model_flops / chip.peak_flops / times.seconds:.0%}",
    milliseconds(line.seconds),
  ]
  return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
  main()
