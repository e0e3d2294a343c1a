"""Times a step of slices that are processes of their own beside one step over the same devices with gloo.

    python -m end_to_end.benchmarks.process_step [--slices 1,2,3] [--sizes 5,100] [--rounds 3]

Nothing fails here: the difference is what slices that can be lost cost. Both programs have one process and one CPU
device per slice, the same model, and the same rows per slice. The processes of the second are joined by
jax.distributed into one JAX world. The programs take turns, so that a busy machine slows both. A step's time is the
median of the recorded steps of all rounds, without the first SKIPPED of each.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from end_to_end.benchmarks.common import positive, positives
from tests.support import process_runs
from tests.support.command import Run, wait_for_exit
from tests.support.process_runs import ProcessRun

from trainer import config
from trainer.config.counts import parameter_count
from worlds.addresses import free_port

SKIPPED = 5  # steps
COMMON = "enable_checkpointing=false per_device_batch_size=2 base_num_query_heads=4 base_num_kv_heads=2".split()
MODELS = {  # millions of parameters: the model, and the steps of a round
  5: (
    "base_num_decoder_layers=4 base_emb_dim=256 head_dim=64 base_mlp_dim=768 vocab_size=4096 max_target_length=128",
    40,
  ),
  100: (
    "base_num_decoder_layers=12 base_emb_dim=768 head_dim=192 base_mlp_dim=2304 vocab_size=8192 max_target_length=64",
    15,
  ),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--slices", type=positives, default=[1, 2, 3])
  parser.add_argument("--sizes", type=positives, default=list(MODELS), help="millions of parameters: 5, 100")
  parser.add_argument("--rounds", type=positive, default=3)
  options = parser.parse_args()
  if unknown := set(options.sizes) - MODELS.keys():
    parser.error(f"--sizes {sorted(unknown)}: there are models of {list(MODELS)} million parameters")
  print("| parameters | slices | processes | one jit, gloo | ratio |\n|---|---|---|---|---|")
  for size in options.sizes:
    model, steps = MODELS[size]
    keys = [*COMMON, *model.split(), f"steps={steps}"]
    for slices in options.slices:
      with tempfile.TemporaryDirectory(prefix="process-step-") as directory:
        ours, theirs, parameters = measure(Path(directory), keys, slices, options.rounds)
      print(
        f"| {parameters / 1e6:.1f} M | {slices} | {1e3 * ours:.0f} ms | {1e3 * theirs:.0f} ms | {ours / theirs:.2f} |",
        flush=True,
      )


def measure(folder: Path, keys: Sequence[str], slices: int, rounds: int) -> tuple[float, float, int]:
  """Returns the seconds of a step as processes, in one jit, and the number of parameters."""
  keys = [*keys, f"jax_cache_dir={folder / 'compiled'}"]
  ours, theirs = list[float](), list[float]()
  for number in range(rounds):
    run = ProcessRun(folder / f"processes-{number}", keys, slices=slices)
    with run.launched() as supervisor:
      assert run.wait(supervisor, 1800) == 0, run.tail()
    ours += seconds(run)
    single = Run(folder / f"jit-{number}", [*process_runs.KEYS, *keys, f"num_slices={slices}", "elastic_enabled=false"])
    run_in_one_world(single, slices)
    theirs += seconds(single)
  model = config.load(single.argv()).model
  return statistics.median(ours), statistics.median(theirs), parameter_count(model)


def run_in_one_world(run: Run, processes: int) -> None:
  """Runs the command in processes that jax.distributed joins. Raises AssertionError if one fails."""
  world = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(processes)}
  if processes == 1:
    world = {}
  started = [run.start(**world, JAX_PROCESS_ID=str(rank)) if world else run.start() for rank in range(processes)]
  codes = [wait_for_exit(process, 1800) for process in started]
  assert not any(codes), f"{codes}: {run.printed[-3000:]}"


def seconds(run: Run) -> list[float]:
  """The seconds of the steps after the first ones."""
  return [
    record["seconds"] for record in run.records("metrics") if record.get("step", 0) > SKIPPED and "loss" in record
  ]


if __name__ == "__main__":
  main()
