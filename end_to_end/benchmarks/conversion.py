"""Times the import and the export of a Hugging Face folder next to `cp -r` of the same folder.

    JAX_PLATFORMS=cpu .venv/bin/python -m end_to_end.benchmarks.conversion [--gigabytes 4] [--rounds 3]

A dense model of random bfloat16 weights, Qwen3-1.7B with another number of layers. The three take turns, on one file
system and with a warm page cache; each includes a sync. Prints the seconds of each, the shares of the export's check
of the logits and of the syncs, and the speed of import and export divided by that of `cp -r`. The start of a Python
process is not included.
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
from unittest import mock

import jax.numpy as jnp
import numpy as np
from end_to_end.benchmarks.common import positive
from tests.support import hf_folders

from trainer.tools import export_hf, import_hf
from trainer.weights import export, hf_config, names, safetensors

SIZES = {"base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 8, "base_mlp_dim": 6144,
         "head_dim": 128, "vocab_size": 151936}  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--gigabytes", type=positive, default=4)
  parser.add_argument("--rounds", type=positive, default=3)
  parser.add_argument("--folder", help="on the file system to measure (default: the one of temporary files)")
  arguments = parser.parse_args()
  with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
    _measure(Path(name), arguments.gigabytes, arguments.rounds)


def _measure(folder: Path, gigabytes: int, rounds: int) -> None:
  source, copy, run, back = (folder / name for name in ("hf", "copy", "run", "back"))
  size = _write_model(source, gigabytes)
  works = {
    "cp -r": (copy, lambda: subprocess.check_call(["cp", "-r", str(source), str(copy)])),
    "import": (run, lambda: _main(import_hf.main, source, run)),
    "export": (back, lambda: _main(export_hf.main, run, back)),
  }
  ratios: dict[str, list[float]] = {}
  for _ in range(rounds):
    seconds = {name: _seconds(target, work) for name, (target, work) in works.items()}
    with mock.patch.object(export, "_self_check", lambda *_: "no check"):
      seconds["export, no check"] = _seconds(back, works["export"][1])
    shutil.rmtree(run)
    print(f"{size / 1e9:.2f} GB:", ", ".join(f"{name} {taken:.1f} s" for name, taken in seconds.items()), flush=True)
    for name, taken in seconds.items():
      ratios.setdefault(name, []).append(seconds["cp -r"] / taken)
  for name, values in ratios.items():
    print(f"{name}: {statistics.median(values):.2f} times the speed of cp -r ({min(values):.2f} to {max(values):.2f})")


def _main(main: Callable[[list[str]], int], *folders: Path) -> None:
  assert main([str(folder) for folder in folders]) == 0


def _seconds(target: Path, work: Callable[[], object]) -> float:
  """The seconds of `work` and of a sync of what it has written to `target`."""
  shutil.rmtree(target, ignore_errors=True)
  subprocess.check_call(["sync", "-f", str(target.parent)])
  begin = time.perf_counter()
  work()
  subprocess.check_call(["sync", "-f", str(target)])
  return time.perf_counter() - begin


def _write_model(folder: Path, gigabytes: int) -> int:
  """Writes a folder of about this size; returns the bytes of its weights."""
  per_layer = 2 * (2048 * (2 * 2048 + 2 * 1024) + 3 * 2048 * 6144)
  layers = round((gigabytes * 1e9 - 2 * 151936 * 2048) / per_layer)
  cfg = hf_folders.model("qwen3-tied", base_num_decoder_layers=layers, **SIZES)
  shapes = {weight.theirs[0]: weight.their_shape for weight in names.weights(cfg).values()}
  bf16 = np.dtype(jnp.bfloat16)
  block = np.random.default_rng(0).normal(0, 0.02, 1 << 24).astype(bf16)
  folder.mkdir()
  with (folder / "model.safetensors").open("wb") as file:
    file.write(safetensors.header({name: (bf16, shape) for name, shape in shapes.items()}))
    for name, shape in shapes.items():
      safetensors.write(file, np.resize(block, shape), bf16, name)
  config = hf_config.build(cfg, "bfloat16", {"bos_token_id": None, "eos_token_id": None})
  (folder / "config.json").write_text(json.dumps(config))
  return (folder / "model.safetensors").stat().st_size


if __name__ == "__main__":
  main()
