"""Times the start of a run: --help, the imports, and the first completed step without and with a compilation cache.

    python -m end_to_end.benchmarks.startup [--rounds 3] [key=value ...]

Each number is measured in a new process, from its start. "cached" is the second start with the same jax_cache_dir. The
CPU seconds (all threads, the whole process) show whether the machine was busy or the program slow. Also prints the
number of imported modules.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time

from end_to_end.benchmarks.common import positive, run_and_time_lines
from tests.support.command import ROOT

SMALL = (
  "model_name=qwen3-0.6b override_model_config=true base_num_decoder_layers=4 base_emb_dim=256 base_num_query_heads=4 "
  "base_num_kv_heads=2 base_mlp_dim=1024 head_dim=64 vocab_size=4096 dataset_type=synthetic per_device_batch_size=8 "
  "max_target_length=512 steps=1 enable_checkpointing=false dtype=float32"
).split()
IMPORTS = "import sys, trainer.train, trainer.run.session, trainer.elastic.retry; print(len(sys.modules))"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("keys", nargs="*", help="configuration of the run, in addition to its own")
  parser.add_argument("--rounds", type=positive, default=3)
  args = parser.parse_args()
  figures: dict[str, list[tuple[float, float]]] = {}
  modules = 0
  for round_ in range(args.rounds):
    with tempfile.TemporaryDirectory() as folder:
      run = ["-m", "trainer", "configs/base.yml", *SMALL, f"base_output_directory={folder}", *args.keys]
      cache = f"jax_cache_dir={folder}/cache"
      _time([*run, "run_name=a", cache])  # fills the cache
      for name, command, until in (
        ("--help", ["-m", "trainer", "--help"], None),
        ("imports", ["-c", IMPORTS], None),
        ("first step, cold", [*run, "run_name=b", "jax_cache_dir="], "completed step: 1,"),
        ("first step, cached", [*run, "run_name=c", cache], "completed step: 1,"),
      ):
        wall, cpu, printed = _time(command, until)
        figures.setdefault(name, []).append((wall, cpu))
        if name == "imports":
          modules = int(printed)
    print(f"round {round_ + 1} of {args.rounds} done", file=sys.stderr)
  for name, times in figures.items():
    walls, cpus = zip(*times)
    print(f"{name:20} median {statistics.median(walls):.2f} s, least {min(walls):.2f} s; CPU seconds {min(cpus):.2f}")
  print(f"modules imported before the first step: {modules}")


def _time(command: list[str], until: str | None = None) -> tuple[float, float, str]:
  """Returns seconds until a line that contains `until` (None: until the end), CPU seconds, and the printed text."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  start = time.monotonic()
  lines = run_and_time_lines([sys.executable, *command], {"PYTHONPATH": str(ROOT / "src")})
  total = time.monotonic() - start
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  printed = "".join(line for _, line in lines)
  if until is None:
    return total, cpu, printed
  return next(seconds for seconds, line in lines if until in line), cpu, printed


if __name__ == "__main__":
  main()
