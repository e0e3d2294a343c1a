"""Tokens per second of trainer.tools.tokenize, and of the library tokenizers alone on the same text and cores.

    python -m end_to_end.benchmarks.tokenize [--copies 4] [--rounds 3] [--fast]

The text is the sources of the Python standard library, in --copies copies, as JSONL. The tokenizer is a BPE of 4,096
ids that is trained on it before. The tool reads, tokenises, packs and writes windows with one process per core. Its
seconds include the start of all processes. The library encodes the same texts, which are in memory, in batches of about
2 million characters with one thread per core. Prints the best of --rounds rounds, in turn.

--fast: instead of the library, the tool with --fast. The files of both must have the same bytes.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from end_to_end.benchmarks.common import positive
from tests.support.command import ROOT

from input_pipeline import corpus
from input_pipeline.documents import BadRecord
from input_pipeline.tokenizer import load_bpe, train_bpe


def cpu_seconds() -> float:
  """Of this process and of its children that have ended."""
  times = os.times()
  return times.user + times.system + times.children_user + times.children_system


def timed(work: Callable[[], int]) -> tuple[float, float, int]:
  """(tokens per second, tokens per CPU second, tokens)."""
  began, cpu = time.monotonic(), cpu_seconds()
  tokens = work()
  return tokens / (time.monotonic() - began), tokens / (cpu_seconds() - cpu), tokens


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--copies", type=positive, default=4)
  parser.add_argument("--rounds", type=positive, default=3)
  parser.add_argument("--part-megabytes", type=positive, default=2)
  parser.add_argument("--fast", action="store_true")
  args = parser.parse_args()
  texts = [
    text for piece in corpus.find("", "") for text in corpus.documents(piece) if not isinstance(text, BadRecord)
  ] * args.copies
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "tokenizer.json").write_text(train_bpe(texts[: len(texts) // args.copies : 5], 4096))
    with (folder / "text.jsonl").open("w") as file:
      file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    tokenizer = load_bpe(str(folder / "tokenizer.json"))
    keys = f"dataset_type=grain grain_file_type=jsonl grain_train_files={folder}/text.jsonl tokenizer_type=bpe"
    places = f"tokenizer_path={folder}/tokenizer.json dataset_cache_directory={folder} base_output_directory={folder}"

    def tool(output: str, *more: str) -> int:
      options = f"vocab_size=4096 --records=windows --part-megabytes={args.part_megabytes} --output={folder}/{output}"
      command = [sys.executable, "-m", "trainer.tools.tokenize", "configs/base.yml"]
      subprocess.run(
        [*command, *f"{keys} {places} {options}".split(), *more], check=True, cwd=ROOT, capture_output=True
      )
      return manifest(output)["totals"]["train"]["tokens"]

    def manifest(output: str) -> dict[str, Any]:
      return json.loads((folder / output / "manifest.json").read_text())

    def fast(number: int) -> int:
      tokens = tool(f"{number}-fast", "--fast")
      assert manifest(str(number))["files"] == manifest(f"{number}-fast")["files"], "other bytes"  # by their hashes
      return tokens

    def library() -> int:
      tokens, batch, size = 0, [], 0
      for text in texts:
        batch.append(text)
        size += len(text)
        if size > 2_000_000:
          tokens += sum(map(len, tokenizer.encode_batch(batch)))
          batch, size = [], 0
      return tokens + sum(map(len, tokenizer.encode_batch(batch)))

    rounds = []
    for number in range(args.rounds):
      other = functools.partial(fast, number) if args.fast else library
      rounds.append((timed(functools.partial(tool, str(number))), timed(other)))
  print(f"{len(texts):,} documents, {sum(map(len, texts)) / 1e6:.1f} million characters, {os.cpu_count()} cores")
  labels = "trainer.tools.tokenize", "with --fast" if args.fast else "tokenizers alone"
  for label, found in zip(labels, zip(*rounds), strict=True):
    rate, per_cpu, tokens = (max(values) for values in zip(*found))
    print(f"{label:24} {rate:12,.0f} tokens/s {per_cpu:12,.0f} per CPU second ({tokens:,} tokens)")


if __name__ == "__main__":
  main()
