"""Measures the CPU seconds of a step of one controller with k of N slices alive, against the rows that are computed.

    python -m end_to_end.benchmarks.elastic_rows [--slices 8] [--rounds 8] [key=value ...]

All simulated slices share the cores of this machine, so a step needs the CPU seconds of all rows of all slices
together. Real slices compute at the same time: their step takes as long as the rows of one slice. So this shows what a
step of unequal micro-batches costs beyond its rows. Without keys, the model of the quickstart with synthetic data and
four rows a device.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from end_to_end.benchmarks.common import positive

KEYS = ("dataset_type=synthetic", "per_device_batch_size=4")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--slices", type=positive, default=8)
  parser.add_argument("--rounds", type=positive, default=8)
  parser.add_argument("keys", nargs="*")
  args = parser.parse_args()
  total = args.slices
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={total}"
  os.environ["JAX_PLATFORMS"] = "cpu"
  import jax

  from input_pipeline.loader import make_loader
  from trainer.config.load import load
  from trainer.program import program

  config = load(["configs/quickstart.yml", *KEYS, *args.keys], check_paths=False)
  size = program.global_batch_size(config, total, 1)
  loader = make_loader(config.data, vocab_size=config.model.vocab_size, global_batch_size=size, split="train")
  steps: dict[int, Any] = {}
  for alive in range(total, (total - 1) // 2, -1):
    prog = program.build(config, [[device] for device in jax.devices()[:alive]], total)
    steps[alive] = prog, prog.compile(), program.Feed(loader, prog)(0), prog.init(jax.random.key(0))
  seconds: dict[int, list[float]] = {alive: [] for alive in steps}
  for _ in range(args.rounds + 1):
    for alive, (prog, compiled, batch, state) in steps.items():
      began = time.process_time()
      state, _ = jax.block_until_ready(compiled(state, batch))
      seconds[alive].append(time.process_time() - began)
      steps[alive] = prog, compiled, batch, state
  whole = None
  print("alive | rows of a device | speed by rows | CPU seconds per computed row | relative")
  for alive, times in seconds.items():  # the first step of each program warms up
    plan = steps[alive][0].plan
    per_row = statistics.median(times[1:]) / plan.rows.size
    whole = whole or per_row
    rows = " + ".join(str(group.shape[2]) for group in plan.groups for _ in range(len(group)))
    print(f"{alive} | {rows} | {plan.relative_throughput:.1%} | {per_row:.4f} | {per_row / whole:.3f}")


if __name__ == "__main__":
  main()
