"""Trains on Tiny Shakespeare with nanoGPT's sizes and budgets: several seeds, and the first one again with kill -9.

  python -m end_to_end.shakespeare --text input.txt [--config configs/shakespeare.yml] [--seeds 5] [--kills 20]

The text is data/tinyshakespeare/input.txt of github.com/karpathy/char-rnn. Its first 90 % are for training and the rest
for evaluation, as in nanoGPT. The run of seed S has init_weights_seed=S and data_shuffle_seed=S. An evaluation uses all
of the rest. The run with kills is seed 0 again: the losses and gradient norms of all steps, the final weights and the
optimizer state must have the same bits. The same command continues seeds that are not complete. JAX_PLATFORMS=cuda
uses a GPU. Exits with 1 if the mean of the best losses is above --bound or a bit differs, with 2 for another text.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path

from tests.support import command
from tests.support.command import Run

from trainer.config.load import load

SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PUBLISHED = {"configs/shakespeare.yml": 1.88, "configs/shakespeare_gpu.yml": 1.4697}  # by nanoGPT
PERIOD = 25  # steps between checkpoints of the run with kills
DAYS = 7 * 86400.0
PLATFORM = {"JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}


def prepare(text: bytes, folder: Path) -> list[str]:
  """Writes train.txt, val.txt and a tokenizer.json of characters to `folder`, and returns the keys that name them."""
  import tokenizers
  from tokenizers import decoders, models

  folder.mkdir(parents=True, exist_ok=True)
  files = {"dataset_path": "train.txt", "eval_dataset_path": "val.txt", "tokenizer_path": "tokenizer.json"}
  cut = int(0.9 * len(text))  # the text is ASCII
  (folder / files["dataset_path"]).write_bytes(text[:cut])
  (folder / files["eval_dataset_path"]).write_bytes(text[cut:])
  vocabulary = {character: id for id, character in enumerate(sorted(set(text.decode())))}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))  # without merges, characters are tokens
  tokenizer.decoder = decoders.Fuse()
  tokenizer.add_special_tokens(["<|endoftext|>"])
  tokenizer.save(str(folder / files["tokenizer_path"]))
  return [f"{key}={folder / name}" for key, name in files.items()]


def make_run(config: str, folder: Path, seed: int, keys: list[str]) -> Run:
  run = Run(folder, [])
  shared = [f"dataset_cache_directory={folder.parent / 'tokens'}", f"jax_cache_dir={folder.parent / 'compiled'}"]
  own = [f"base_output_directory={folder / 'out'}", "run_name=run", "sample_prompt=", "log_period=100"]
  run.keys = [config, *shared, *own, f"init_weights_seed={seed}", f"data_shuffle_seed={seed}", *keys]
  return run


def finish(run: Run) -> None:
  code = command.wait_for_exit(run.start(**PLATFORM), DAYS)
  assert code == 0, f"the command ended with {code}:\n{run.printed[-4000:]}"


def kill(run: Run, kills: int, steps: int) -> None:
  """Kills the run soon after each of `kills` random steps."""
  rng = random.Random(0)
  for step in sorted(rng.sample(range(1, steps), kills)):
    process = run.start(**PLATFORM)
    reached = command.wait_until(process, lambda step=step: run.last_step >= step, DAYS)
    assert reached, f"it ended before it was killed:\n{run.printed[-4000:]}"
    time.sleep(rng.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    print(f"killed after step {run.last_step}; committed: {run.committed_steps()[-1:]}", flush=True)


def evaluations(run: Run) -> dict[int, float]:
  return {record["step"]: record["eval_loss"] for record in run.records("metrics") if "eval_loss" in record}


def draw(runs: list[Run], published: float, path: str) -> None:
  """Draws the evaluation losses of all runs, and the training loss of the first run as means of 20 steps."""
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(7, 3.6), layout="constrained")
  axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per character)", ylim=(1.2, 2.6))
  losses = [loss for _, (loss, _) in sorted(runs[0].losses().items())]
  means = [statistics.mean(losses[at : at + 20]) for at in range(0, len(losses) - 19, 20)]
  axes.plot([20 * at + 10 for at in range(len(means))], means, color="0.75", label="training, seed 0")
  for number, run in enumerate(runs):
    label = f"evaluation, {len(runs)} seeds" if number == 0 else None
    axes.plot(*zip(*sorted(evaluations(run).items())), ".-", color="C0", linewidth=0.8, label=label)
  axes.axhline(published, linestyle=":", color="black", label=f"nanoGPT's evaluation, {published}")
  axes.legend(frameon=False)
  figure.savefig(path, dpi=120)


def report(runs: list[Run], published: float) -> float:
  """Prints the losses of all runs, and returns the mean of the best ones."""
  last, best = [], []
  for seed, run in enumerate(runs):
    found = evaluations(run)
    last.append(found[max(found)])
    best.append(min(found.values()))
    print(f"seed {seed}: evaluation loss {last[-1]:.4f} at step {max(found)}, best {best[-1]:.4f}")
  deviation = statistics.stdev(last) if len(last) > 1 else 0.0
  mean_best = statistics.mean(best)
  print(
    f"{len(runs)} seeds: mean {statistics.mean(last):.4f}, deviation {deviation:.4f}, mean of the best {mean_best:.4f}"
  )
  print(f"nanoGPT: {published}")
  return mean_best


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--text", type=Path, required=True, help="input.txt of Tiny Shakespeare")
  parser.add_argument("--config", default="configs/shakespeare.yml", choices=PUBLISHED)
  parser.add_argument("--seeds", type=int, default=5, help="number of runs; 0 only writes the files that they need")
  parser.add_argument("--kills", type=int, default=20)
  parser.add_argument("--folder", type=Path, default=Path("runs/shakespeare"))
  parser.add_argument("--bound", type=float, default=1.60, help="largest mean of the best evaluation losses")
  parser.add_argument("--draw", metavar="FILE.png", help="draw the losses")
  parser.add_argument("keys", nargs="*", metavar="key=value", help="for all runs")
  given = parser.parse_args()
  text = given.text.read_bytes() if given.text.is_file() else b""
  if hashlib.sha256(text).hexdigest() != SHA256:
    print(
      f"--text {given.text}: not input.txt of Tiny Shakespeare (1,115,394 bytes, sha256 {SHA256}).", file=sys.stderr
    )
    return 2
  folder, published = given.folder.absolute(), PUBLISHED[given.config]
  keys = [*prepare(text, folder), *given.keys]
  steps = load([given.config, *keys]).run.steps
  runs = [make_run(given.config, folder / f"seed-{seed}", seed, keys) for seed in range(given.seeds)]
  for run in runs:
    finish(run)
  if not runs:
    return 0
  failed = report(runs, published) > given.bound
  if given.draw:
    draw(runs, published, given.draw)
  if given.kills:
    shutil.rmtree(folder / "killed", ignore_errors=True)
    killed = make_run(given.config, folder / "killed", 0, [*keys, f"checkpoint_period={PERIOD}"])
    kill(killed, given.kills, steps)
    finish(killed)
    wrong = command.differences(killed, runs[0], steps)
    print(f"{given.kills} kills: {len(wrong)} differences in losses, gradient norms and final state", *wrong, sep="\n")
    failed |= bool(wrong)
  return int(failed)


if __name__ == "__main__":
  sys.exit(main())
