"""How long the steps of a run wait for their data.

    python -m end_to_end.benchmarks.data_wait [--steps 30] [CONFIG.yml key=value ...]

Starts `python -m trainer` with a configuration (default: configs/quickstart.yml) for --steps steps in a new folder.
Prints the seconds that all steps except the first one took and waited for their batch, from metrics.jsonl: in all, and
the largest share of one step.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

from end_to_end.benchmarks.common import positive
from tests.support.command import ROOT

from trainer.observe.metrics import read_metrics


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--steps", type=positive, default=30)
  parser.add_argument("arguments", nargs="*", default=["configs/quickstart.yml"], metavar="CONFIG.yml key=value")
  args = parser.parse_intermixed_args()
  with tempfile.TemporaryDirectory() as folder:
    keys = [f"base_output_directory={folder}", "run_name=run", f"steps={args.steps}", "eval_interval=-1"]
    command = [sys.executable, "-m", "trainer", *args.arguments, *keys]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    steps = [step for step in read_metrics(f"{folder}/run") if "seconds" in step][1:]
  waited, seconds = sum(step["data_wait"] for step in steps), sum(step["seconds"] for step in steps)
  largest = max(steps, key=lambda step: step["data_wait"] / step["seconds"])
  print(f"{len(steps)} steps of {seconds / len(steps):.3f} s waited {waited:.5f} of {seconds:.1f} s for their data:")
  print(
    f"{100 * waited / seconds:.4f} %; the largest share of a step is "
    f"{100 * largest['data_wait'] / largest['seconds']:.4f} % (step {largest['step']})"
  )


if __name__ == "__main__":
  main()
