"""The loader of a run, and a loader that tokenises while it reads, on the same text.

    python -m end_to_end.benchmarks.loader_designs [--copies 1] [--length 1024] [--batch 8] [--epochs 3]

The text is the sources of the Python standard library, in --copies copies, as JSONL. The tokenizer is a BPE of 4,096
ids that is trained on it before. The first loader is that of `python -m trainer` with packing=split: it tokenises and
packs all documents before the first batch, and then reads windows by index. The second one has the design of
torchtitan's HuggingFaceTextDataset, written with NumPy: it reads a document, tokenises it, appends it to a buffer, and
cuts windows from the buffer. In turn, both read --epochs epochs in batches. Prints for each epoch CPU seconds, tokens
per CPU second, and the median and the longest CPU time of a batch: a step that is shorter has to wait.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from end_to_end.benchmarks.common import cpu_seconds, positive

from input_pipeline import corpus
from input_pipeline.documents import BadRecord
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import Tokenizer, load_bpe, train_bpe


def tokenising(file: Path, tokenizer: Tokenizer, length: int, batch: int) -> Iterator[np.ndarray]:
  """Yields batches of windows [batch, length + 1] of one epoch, tokenised while the documents are read."""
  buffer: list[int] = []
  rows: list[np.ndarray] = []
  with file.open() as lines:
    for line in lines:
      assert tokenizer.bos_id is not None
      buffer += [tokenizer.bos_id, *tokenizer.encode(json.loads(line)["text"]), tokenizer.eos_id]
      while len(buffer) > length:
        rows.append(np.array(buffer[: length + 1], np.int32))
        buffer = buffer[length + 1 :]
        if len(rows) == batch:
          yield np.stack(rows)
          rows = []


def of_loader(loader: Loader, batch: int, epoch: int) -> Iterator[np.ndarray]:
  """Yields the tokens of the whole batches of one epoch."""
  assert loader.num_examples is not None
  steps = loader.num_examples // batch
  for step in range(epoch * steps, (epoch + 1) * steps):
    yield loader.batch(step).tokens


def report(label: str, batches: Iterator[np.ndarray], length: int, prepared: float = 0.0) -> None:
  """Reads all batches and prints their cost. prepared: CPU seconds before the first batch."""
  began, times, tokens = time.process_time(), [], 0
  last = began
  for batch in batches:
    now = time.process_time()
    times.append(now - last)
    tokens += len(batch) * length
    last = now
  seconds = prepared + last - began
  print(
    f"{label:38} {seconds:7.2f} CPU s, {tokens / seconds:12,.0f} tokens per CPU second, batch: median "
    f"{1e3 * float(np.median(times)):.2f} ms, longest {1e3 * max(times):.1f} ms",
    flush=True,
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--copies", type=positive, default=1)
  parser.add_argument("--length", type=positive, default=1024)
  parser.add_argument("--batch", type=positive, default=8)
  parser.add_argument("--epochs", type=positive, default=3)
  args = parser.parse_args()
  texts = [text for piece in corpus.find("", "") for text in corpus.documents(piece) if not isinstance(text, BadRecord)]
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "tokenizer.json").write_text(train_bpe(texts[::5], 4096))
    file = folder / "text.jsonl"
    with file.open("w") as lines:
      lines.writelines(json.dumps({"text": text}) + "\n" for text in texts * args.copies)
    tokenizer = load_bpe(str(folder / "tokenizer.json"))
    cfg = DataOptions(
      dataset_type="grain", grain_file_type="jsonl", grain_train_files=str(file), tokenizer_type="bpe",
      tokenizer_path=str(folder / "tokenizer.json"), max_target_length=args.length, packing="split",
      dataset_cache_directory=str(folder / "cache"),
    )  # fmt: skip
    began = cpu_seconds()
    with contextlib.redirect_stdout(io.StringIO()):
      loader = make_loader(cfg, vocab_size=4096, global_batch_size=args.batch, split="train", log=lambda line: None)
    prepared = cpu_seconds() - began
    print(f"{len(texts) * args.copies:,} documents; preparation: {prepared:.2f} CPU s")
    for epoch in range(args.epochs):
      once = 0.0 if epoch else prepared
      label = f"trainer, epoch {epoch + 1}" + ("" if epoch else " with preparation")
      report(label, of_loader(loader, args.batch, epoch), args.length, once)
      label = f"tokenising while reading, epoch {epoch + 1}"
      report(label, tokenising(file, tokenizer, args.length, args.batch), args.length)
    loader.close()


if __name__ == "__main__":
  main()
