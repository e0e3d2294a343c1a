"""Times the tools' text generation on a CPU next to transformers: the same weights, type, threads and prompts.

    JAX_PLATFORMS=cpu taskset -c 0 .venv-oldest/bin/python -m end_to_end.benchmarks.generate [--models small,100m]

Needs torch and transformers. A model has random weights, written as a Hugging Face folder that both load. For each
number of rows and length of the prompts it prints the tokens per CPU second of the prompts (prefill: up to the first
new token) and of the new tokens after the first (decode), the best of `--rounds`, and our number divided by theirs.
Greedy, without a stop. Both must give the same tokens in float32.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
from end_to_end.benchmarks.common import positive, positives
from tests.support import hf_folders

from input_pipeline.tokenizer import ByteTokenizer
from trainer.models import generation
from trainer.weights import sources
from trainer.weights.model import Model

SAMPLING = generation.Sampling(temperature=0)
MODELS = {
  # As configs/quickstart.yml.
  "small": {"base_emb_dim": 192, "base_num_decoder_layers": 4, "base_num_query_heads": 3, "base_num_kv_heads": 1,
            "base_mlp_dim": 512, "head_dim": 64, "vocab_size": 4096},
  "100m": {"base_emb_dim": 640, "base_num_decoder_layers": 12, "base_num_query_heads": 10, "base_num_kv_heads": 5,
           "base_mlp_dim": 1920, "head_dim": 64, "vocab_size": 32000},
}  # fmt: skip


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("--models", default="small,100m", help=f"of {', '.join(MODELS)} (default: all)")
  parser.add_argument("--rows", type=positives, default=[1, 8])
  parser.add_argument("--prompts", type=positives, default=[16, 512], help="their lengths")
  parser.add_argument("--tokens", type=positive, default=64)
  parser.add_argument("--rounds", type=positive, default=3)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
  arguments = parser.parse_args()
  print(f"jax {jax.__version__}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.get_num_threads()} threads, {arguments.dtype}, {arguments.tokens} new tokens")  # fmt: skip
  print("model  rows  prompt   prefill: ours   theirs  ratio   decode: ours   theirs  ratio")
  for name in arguments.models.split(","):
    with tempfile.TemporaryDirectory() as folder:
      ours, theirs = _load(name, Path(folder) / "hf", arguments.dtype)
    for rows in arguments.rows:
      for length in arguments.prompts:
        prompts = np.random.default_rng(0).integers(0, ours.functions.cfg.vocab_size, (rows, length))
        cells = _compare(ours, theirs, prompts, arguments.tokens, arguments.rounds, arguments.dtype == "float32")
        speeds = "   ".join(f"{x:12.1f} {y:8.1f} {x / y:6.2f}" for x, y in cells)
        print(f"{name:5} {rows:5} {length:7}   {speeds}", flush=True)


def _load(name: str, folder: Path, dtype: str) -> tuple[Model, Any]:
  """The same random model here and in transformers."""
  cfg = hf_folders.model("qwen3-tied", **MODELS[name])
  hf_folders.write_folder(folder, cfg, dtype, shards=1)
  source = sources.open_source(str(folder))
  cfg = source.model.model_copy(update={"dtype": dtype, "scan_layers": False})
  ours = Model.on_one_device(cfg, source.load, ByteTokenizer(), str(folder), jax.devices()[0], source.longest)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
  )
  return ours, theirs.eval()


def _compare(
  ours: Model, theirs: Any, prompts: np.ndarray, tokens: int, rounds: int, is_exact: bool
) -> list[tuple[float, float]]:
  """Tokens per CPU second (ours, theirs) of the prompts and of the new tokens after the first."""

  def run_ours(count: int) -> np.ndarray:
    size = ours.functions.cfg.vocab_size
    steps = generation.stream(ours.functions, ours.params, prompts.tolist(), count, vocab_size=size, sampling=SAMPLING)
    return np.array(list(steps)).T

  def run_theirs(count: int) -> np.ndarray:
    with torch.no_grad():
      ids = torch.tensor(prompts)
      found = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
      )
    return found[:, prompts.shape[1] :].numpy()

  first, second = run_ours(tokens), run_theirs(tokens)  # compiles, and warms up
  if is_exact and not np.array_equal(first, second):
    raise SystemExit("the tokens differ")
  run_ours(1)
  best = {run: [_best(run, count, rounds) for count in (1, tokens)] for run in (run_ours, run_theirs)}
  sizes = prompts.size, len(prompts) * (tokens - 1)
  times = {run: (one, all - one) for run, (one, all) in best.items()}
  return [(size / times[run_ours][i], size / times[run_theirs][i]) for i, size in enumerate(sizes)]


def _best(run: Callable[[int], Any], count: int, rounds: int) -> float:
  """The least CPU seconds of `rounds` calls."""
  found = []
  for _ in range(rounds):
    begin = time.process_time()
    run(count)
    found.append(time.process_time() - begin)
  return min(found)


if __name__ == "__main__":
  main()
