"""Times the import and the export of a Hugging Face folder next to `cp -r` of the same folder.

    JAX_PLATFORMS=cpu .venv/bin/python -m end_to_end.benchmarks.conversion [--gigabytes 4] [--rounds 3]

Qwen3-1.7B with another number of layers and random bfloat16 weights, in TMPDIR. The commands take turns, with a warm
page cache and a sync after each, and without the start of Python.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from end_to_end.benchmarks.common import positive
from tests.support import hf_folders

import trainer
from trainer.weights import hf_config, names, safetensors

D, F, V = 2048, 6144, 151936


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--gigabytes", type=positive, default=4)
  parser.add_argument("--rounds", type=positive, default=3)
  arguments = parser.parse_args()
  ratios: list[dict[str, float]] = []
  with tempfile.TemporaryDirectory() as name:
    source, copy, run, back = (Path(name) / part for part in ("hf", "copy", "run", "back"))
    _write_model(source, arguments.gigabytes)
    for _ in range(arguments.rounds):
      seconds = {
        "cp -r": _seconds(copy, lambda: subprocess.check_call(["cp", "-r", str(source), str(copy)])),
        "import": _seconds(run, lambda: trainer.import_folder(str(source), str(run))),
        "export": _seconds(back, lambda: trainer.export_run(str(run), str(back))),
      }
      print(", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items()), flush=True)
      ratios.append({name: seconds["cp -r"] / taken for name, taken in seconds.items()})
  for name in ratios[0]:
    values = sorted(ratio[name] for ratio in ratios)
    print(f"{name}: {statistics.median(values):.2f} times the speed of cp -r ({values[0]:.2f} to {values[-1]:.2f})")


def _seconds(target: Path, work: Callable[[], object]) -> float:
  """The seconds of `work` and of a sync of what it has written to `target`."""
  shutil.rmtree(target, ignore_errors=True)
  subprocess.check_call(["sync", "-f", str(target.parent)])
  begin = time.perf_counter()
  work()
  subprocess.check_call(["sync", "-f", str(target)])
  return time.perf_counter() - begin


def _write_model(folder: Path, gigabytes: int) -> None:
  layers = round((gigabytes * 1e9 / 2 - V * D) / (3 * D * D + 3 * D * F))
  sizes = {"base_emb_dim": D, "base_num_query_heads": 16, "base_num_kv_heads": 8, "base_mlp_dim": F, "head_dim": 128}
  cfg = hf_folders.model("qwen3-tied", base_num_decoder_layers=layers, vocab_size=V, **sizes)
  shapes = {weight.theirs[0]: weight.their_shape for weight in names.weights(cfg).values()}
  dtype = np.dtype(jnp.bfloat16)
  block = np.random.default_rng(0).normal(0, 0.02, 1 << 24).astype(dtype)
  folder.mkdir()
  with (folder / "model.safetensors").open("wb") as file:
    file.write(safetensors.header({name: (dtype, shape) for name, shape in shapes.items()}))
    for name, shape in shapes.items():
      safetensors.write(file, np.resize(block, shape), dtype, name)
  (folder / "config.json").write_text(json.dumps(hf_config.build(cfg, "bfloat16", {})))


if __name__ == "__main__":
  main()
