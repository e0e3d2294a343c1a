"""Times what a user waits for: --help, the imports, and a small run's first completed step without and with a cache.

    python -m end_to_end.benchmarks.startup [--rounds 3] [key=value ...]

Every figure is of a process of its own, from its start. "cached" is the second start with the same jax_cache_dir. The
CPU seconds (all threads, the whole process) tell a busy machine from a slow program. Modules are counted, too.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from end_to_end.benchmarks.arguments import positive

ROOT = Path(__file__).parents[2]
SMALL = (
  "model_name=qwen3-0.6b override_model_config=true base_num_decoder_layers=4 base_emb_dim=256 base_num_query_heads=4 "
  "base_num_kv_heads=2 base_mlp_dim=1024 head_dim=64 vocab_size=4096 dataset_type=synthetic per_device_batch_size=8 "
  "max_target_length=512 steps=1 enable_checkpointing=false dtype=float32"
).split()
IMPORTS = "import sys, trainer.train, trainer.session, trainer.elastic.retry; print(len(sys.modules))"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("keys", nargs="*", help="configuration of the run, beside its own")
  parser.add_argument("--rounds", type=positive, default=3)
  args = parser.parse_args()
  figures: dict[str, list[tuple[float, float]]] = {}
  modules = 0
  for round_ in range(args.rounds):
    with tempfile.TemporaryDirectory() as folder:
      run = ["-m", "trainer", "configs/base.yml", *SMALL, f"base_output_directory={folder}", *args.keys]
      cache = f"jax_cache_dir={folder}/cache"
      subprocess.run([sys.executable, *run, "run_name=a", cache], env=_environment(), cwd=ROOT, capture_output=True)
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


def _environment() -> dict[str, str]:
  return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT / "src")}


def _time(command: list[str], until: str | None) -> tuple[float, float, str]:
  """Returns seconds until a line with `until` (None: until the end), its CPU seconds, and what it printed."""
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  started, wall = time.monotonic(), None
  process = subprocess.Popen(
    [sys.executable, *command],
    env=_environment(),
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  printed = []
  assert process.stdout is not None
  for line in process.stdout:
    printed.append(line)
    if until is not None and wall is None and until in line:
      wall = time.monotonic() - started
  if process.wait() or (until is not None and wall is None):
    sys.exit(f"{' '.join(command)} ended with {process.returncode}:\n{''.join(printed[-30:])}")
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return wall or time.monotonic() - started, cpu, "".join(printed)


if __name__ == "__main__":
  main()
