"""Compares the simulated schedule with steps that were measured on TPUs, without a TPU.

    python -m end_to_end.benchmarks.calibration TEXTS [--maxtext MAXTEXT_PYTHON] [--rows NAME ...]

calibration.yml has the rows: measured seconds, MaxText's keys and flags, and their source. The text of the compiled
step of a row is TEXTS/NAME.hlo. With --maxtext, a text that is missing is compiled by MaxText's own `train_compile` (4
to 20 minutes on one core). MAXTEXT_PYTHON is the Python of an environment with MaxText (Python 3.12, pip install
'maxtext[tpu]'). Prints a Markdown table. "agrees with" are the cycles that an instruction of attention kernels would
have to take so that the simulated step takes as long as the measured one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import yaml

from stepcost import chips, hlo, prices, simulation, topologies
from stepcost.hlo import Module
from stepcost.prices import Basis, Rates

HERE = pathlib.Path(__file__).parent
DATA = HERE / "calibration.yml"
COMPILE_LIMIT = 3000  # seconds
COMMON_KEYS = (
  "run_name=calibration base_output_directory=. enable_checkpointing=false dataset_type=synthetic steps=30 "
  "skip_jax_distributed_system=true log_config=false"
).split()
COLUMNS = (
  *("step", "measured", "simulated, kernels at the peak", "simulated", "simulated / measured"),
  *("attention kernels", "agrees with", "HBM", "seconds to compile", "compiled with changes"),
)


@dataclasses.dataclass(frozen=True)
class Row:
  """One measured step."""

  name: str
  topology: str
  slices: int
  seconds: float
  source: str
  changed: str
  keys: tuple[str, ...]
  flags: tuple[str, ...]

  @property
  def version(self) -> str:
    """The kind of chip, as in the name of the topology."""
    return self.topology.split("-")[0].removeprefix("tpu")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("texts", type=pathlib.Path, help="folder of the compiled texts")
  parser.add_argument("--maxtext", metavar="MAXTEXT_PYTHON", help="compiles the texts that are missing")
  parser.add_argument("--rows", nargs="*", default=[], help="default: all of calibration.yml")
  args = parser.parse_args()
  rows = [row for row in read_rows() if not args.rows or row.name in args.rows]
  if unknown := set(args.rows) - {row.name for row in rows}:
    parser.error(f"--rows {' '.join(sorted(unknown))}: not in calibration.yml")
  args.texts.mkdir(parents=True, exist_ok=True)
  print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
  for row in rows:
    text = args.texts / f"{row.name}.hlo"
    problem = "" if text.exists() else compile_row(row, text, args.maxtext)
    if problem:
      print(f"| {row.name} | {problem} |{' |' * (len(COLUMNS) - 2)}", flush=True)
      continue
    module = hlo.parse(text.read_text())
    print(table_row(row, module, json.loads(text.with_suffix(".json").read_text())), flush=True)


def read_rows() -> list[Row]:
  """Returns the rows of calibration.yml. Keys and flags may be lists of lists, because groups are shared."""
  rows = yaml.safe_load(DATA.read_text())["rows"]
  flat = lambda value: tuple(item for part in value for item in (part if isinstance(part, list) else [part]))
  return [
    Row(**{"slices": 1, "changed": "", **row, "keys": flat(row["keys"]), "flags": flat(row["flags"])}) for row in rows
  ]


def compile_row(row: Row, text: pathlib.Path, python: str | None) -> str:
  """Writes the compiled text of `row`. Returns "", or why there is none."""
  if python is None:
    return "no text; give --maxtext"
  home = subprocess.run([python, "-c", "import maxtext; print(maxtext.__path__[0])"], capture_output=True, text=True)
  base = "".join(home.stdout.strip().splitlines()[-1:])
  place = [f"compile_topology={row.topology}", f"compile_topology_num_slices={row.slices}"]
  environment = {
    **os.environ,
    **topologies.COMPILER_ENVIRONMENT,
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",
    "LIBTPU_INIT_ARGS": " ".join(row.flags),
  }
  # -P: this folder has modules with names of the standard library.
  program = [python, "-P", str(HERE / "maxtext_step.py"), str(text.resolve())]
  try:
    done = subprocess.run(
      [*program, f"{base}/configs/base.yml", *COMMON_KEYS, *row.keys, *place],
      cwd=text.parent,
      env=environment,
      capture_output=True,
      text=True,
      timeout=COMPILE_LIMIT,
    )
  except subprocess.TimeoutExpired:
    return f"did not compile in {COMPILE_LIMIT} s"
  return "" if done.returncode == 0 else " ".join((done.stderr.strip().splitlines() or ["failed"])[-1].split())[:300]


def table_row(row: Row, module: Module, compiled: dict[str, float]) -> str:
  """Returns one line of the table."""
  rates = rates_of(row)
  at_peak, times = (play(module, row, given) for given in (with_cycles(rates, 0.0), rates))
  kernels = times.computation[Basis.ATTENTION] + times.computation[Basis.KERNEL]
  cycles = agreeing_cycles(row, module)
  cells = (
    *(row.name, f"{row.seconds:.3f} s", f"{at_peak.seconds:.3f} s", f"{times.seconds:.3f} s"),
    *(f"{times.seconds / row.seconds:.3f}", f"{kernels:.3f} s"),
    f"{cycles:.2f}" if cycles else "none",
    f"{compiled['bytes'] / rates.chip.hbm_bytes:.0%}",
    *(f"{compiled['compile_seconds']:.0f}", row.changed or "no"),
  )
  return f"| {' | '.join(cells)} |"


def rates_of(row: Row) -> Rates:
  chip = chips.find(row.version)
  assert chip is not None, row.topology
  return prices.rates(chip)


def with_cycles(rates: Rates, cycles: float) -> Rates:
  return dataclasses.replace(rates, calibration=dataclasses.replace(rates.calibration, cycles=cycles))


def play(module: Module, row: Row, rates: Rates) -> simulation.Timeline:
  place = topologies.resolve(row.topology)
  devices = place.chips * rates.chip.devices_per_chip
  return simulation.simulate(module, [index // devices for index in range(row.slices * devices)], rates)


def agreeing_cycles(row: Row, module: Module) -> float | None:
  """Returns the cycles of an instruction of attention kernels with which the simulated step takes as long as measured.

  None if there are none. A slower kernel never makes a step faster, so halving the interval finds them.
  """
  low, high = 0.01, 10.0
  seconds = lambda cycles: play(module, row, with_cycles(rates_of(row), cycles)).seconds
  if not seconds(low) < row.seconds < seconds(high):
    return None
  for _ in range(16):
    middle = (low + high) / 2
    low, high = (low, middle) if seconds(middle) > row.seconds else (middle, high)
  return (low + high) / 2


if __name__ == "__main__":
  sys.exit(main())
