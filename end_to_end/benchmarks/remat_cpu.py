"""Times training steps on a CPU with each candidate of remat_policy=auto, one after the other in every round.

    python -m end_to_end.benchmarks.remat_cpu [--rounds 12] [key=value ...]

Without keys, the model of the quickstart with synthetic data. Prints the median CPU seconds and wall seconds of a step,
and the memory of its temporaries. CPU seconds depend less on other work of the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import jax
from end_to_end.benchmarks.common import positive

from input_pipeline.loader import make_loader
from trainer.config.load import load
from trainer.preflight.remat_choice import CANDIDATES
from trainer.program import program


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rounds", type=positive, default=12)
  parser.add_argument("keys", nargs="*")
  args = parser.parse_args()
  jax.config.update("jax_platforms", "cpu")
  config = load(["configs/quickstart.yml", "dataset_type=synthetic", *args.keys], check_paths=False)
  data = config.data
  devices = [jax.devices()[:1]]
  rows = program.global_batch_size(config, 1, 1)
  loader = make_loader(data, vocab_size=config.model.vocab_size, global_batch_size=rows, split="train")
  steps: dict[str, Any] = {}
  for policy in CANDIDATES:
    prog = program.build(config.with_values(remat_policy=policy), devices, 1)
    compiled = prog.compile()
    steps[policy] = compiled, program.Feed(loader, prog)(0)
    print(f"{policy}: {compiled.memory_analysis().temp_size_in_bytes / 2**20:,.0f} MiB of temporaries", flush=True)
  state = prog.init(jax.random.key(0))
  seconds: dict[str, list[tuple[float, float]]] = {policy: [] for policy in steps}
  for _ in range(args.rounds + 1):
    for policy, (compiled, batch) in steps.items():
      jax.block_until_ready(state)
      cpu, wall = time.process_time(), time.perf_counter()
      state, metrics = compiled(state, batch)
      jax.block_until_ready((state, metrics))
      seconds[policy].append((time.process_time() - cpu, time.perf_counter() - wall))
  for policy, times in seconds.items():  # the first step of each policy warms up
    cpu, wall = (statistics.median(values) for values in zip(*times[1:]))
    print(f"{policy}: {cpu:.3f} CPU seconds, {wall:.3f} s")


if __name__ == "__main__":
  main()
