"""Speed of the loader for each kind of data, compared with plain grain and with a pipeline of grain on the same files.

    python -m end_to_end.benchmarks.data [--documents 20000] [--length 1024] [--examples 3000] [--draws 10000000]

Writes documents of token ids (lognormal lengths, median 400) as ArrayRecord, Parquet and JSONL, and as windows that
trainer.tools.tokenize has packed. Prints examples and MB of tokens per CPU second, so that other work of the machine
matters little: of the preparation, and of reading shuffled examples of --length tokens. "grain, records" reads shuffled
records without packing. "MapDataset of examples" gives the same records to a loader as a dataset in Python, read by
grain. "grain, first fit" reads, shuffles, and packs by first fit, as the grain pipeline of MaxText does. Each line is
the best of three rounds, in turn. Then one source of short examples gives --draws examples, and the memory of the
process is printed after 1, 5, 10, 20, 50 and 100 % of them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from end_to_end.benchmarks.common import cpu_seconds, positive

from input_pipeline import datasets, packages
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions
from trainer.tools.tokenize import part, writing

VOCAB = 50_000
ROUNDS = 3
BATCH = 8


def write(folder: Path, documents: list[np.ndarray]) -> None:
  import pyarrow
  from pyarrow import parquet

  writer = packages.array_record().ArrayRecordWriter(str(folder / "data.array_record"), "group_size:1")
  for document in documents:
    writer.write(document.astype("<u2").tobytes())
  writer.close()
  parquet.write_table(pyarrow.table({"text": [document.tolist() for document in documents]}), folder / "data.parquet")
  with (folder / "data.jsonl").open("w") as file:
    file.writelines(json.dumps({"text": document.tolist()}) + "\n" for document in documents)


def section(folder: Path, name: str, kind: str, length: int, packing: str) -> DataOptions:
  return DataOptions(
    dataset_type="grain", grain_train_files=str(folder / name), grain_file_type=kind, max_target_length=length,
    packing=packing, dataset_cache_directory=str(folder / "cache" / kind),
  )  # fmt: skip


def opened(cfg: DataOptions) -> Loader:
  with contextlib.redirect_stdout(io.StringIO()):
    return make_loader(cfg, vocab_size=VOCAB, global_batch_size=BATCH, split="train", log=lambda line: None)


def write_windows(folder: Path, length: int) -> None:
  (folder / "windows").mkdir()
  splits = datasets.find(section(folder, "data.array_record", "arrayrecord_uint16", length, "best_fit"))
  job = part.TokenizeJob(splits, None, VOCAB, length, "best_fit", "windows", 0)
  for number, pieces in enumerate(writing.cut(splits["train"], 10**9)):
    part.write(job, "train", pieces, folder / "windows" / f"{number}.array_record", lambda tokens: None)


def of_loader(loader: Loader, examples: int) -> Iterator[int]:
  """Yields the tokens of each batch that count in the loss."""
  for step in range(-(-examples // BATCH)):
    yield int(loader.batch(step).weights.sum())


def of_grain(folder: Path, length: int, examples: int, pack: bool) -> Iterator[int]:
  """Yields the tokens of records, or of packed examples in batches, of a pipeline of grain."""
  source = grain.sources.ArrayRecordDataSource([str(folder / "data.array_record")])
  records = grain.MapDataset.source(source).shuffle(seed=0).repeat()
  if not pack:
    for index in range(examples):
      yield len(records[index]) // 2
    return
  tokens: Any = records.map(lambda record: {"tokens": np.frombuffer(record, "<u2").astype(np.int32)[: length + 1]})
  packed = grain.experimental.FirstFitPackIterDataset(
    tokens.to_iter_dataset(), length_struct={"tokens": length + 1}, num_packing_bins=8 * BATCH
  )
  batches = iter(packed.batch(BATCH))
  for _ in range(-(-examples // BATCH)):
    yield int((next(batches)["tokens_segment_ids"] > 0).sum())


def of_map_dataset(folder: Path, length: int) -> Loader:
  """The first T + 1 tokens of each record as an example of a MapDataset, shuffled by grain."""

  def example(record: bytes) -> dict[str, np.ndarray]:
    tokens = np.frombuffer(record, "<u2")[: length + 1]
    return {"tokens": tokens[:-1], "targets": tokens[1:]}

  source = grain.sources.ArrayRecordDataSource([str(folder / "data.array_record")])
  dataset = grain.MapDataset.source(source).map(example).shuffle(seed=0)
  cfg = section(folder, "", "arrayrecord", length, "none")
  return make_loader(cfg, vocab_size=VOCAB, global_batch_size=BATCH, split="train", dataset=dataset)


def speeds(readers: dict[str, Callable[[], Iterator[int]]], examples: int) -> None:
  """Prints examples and MB of tokens (2 bytes each) per CPU second of each reader."""
  best = dict.fromkeys(readers, (0.0, 0.0))
  for _ in range(ROUNDS):
    for name, reader in readers.items():
      began = time.process_time()
      tokens = sum(reader())
      seconds = time.process_time() - began
      best[name] = max(best[name], (examples / seconds, 2e-6 * tokens / seconds))
  for name, (rate, megabytes) in best.items():
    print(f"{name:30} {rate:10,.0f} examples {megabytes:8.1f} MB of tokens per CPU second")


def memory() -> float:
  """Resident MiB of this process."""
  return int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def draw(folder: Path, draws: int) -> None:
  loader = opened(section(folder, "data.array_record", "arrayrecord_uint16", 8, "split"))
  steps = -(-draws // BATCH)
  shown = {steps * share // 1000 for share in (10, 50, 100, 200, 500, 1000)}
  began = time.process_time()
  for step in range(1, steps + 1):
    loader.batch(step)
    if step in shown:
      seconds = time.process_time() - began
      print(f"{step * BATCH:12,} draws: {memory():.1f} MiB, {seconds:.0f} CPU seconds", flush=True)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--documents", type=positive, default=20_000)
  parser.add_argument("--length", type=positive, default=1024)
  parser.add_argument("--examples", type=positive, default=3000)
  parser.add_argument("--draws", type=positive, default=10_000_000)
  args = parser.parse_args()
  random = np.random.default_rng(0)
  lengths = np.clip(random.lognormal(np.log(400), 1, args.documents), 2, 50_000).astype(int)
  documents = [random.integers(0, VOCAB, length) for length in lengths]
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write(folder, documents)
    print(f"{args.documents:,} documents, {2e-6 * lengths.sum():.1f} MB of tokens")
    readers: dict[str, Callable[[], Iterator[int]]] = {}
    for kind, file in (
      ("arrayrecord_uint16", "data.array_record"), ("parquet", "data.parquet"), ("jsonl", "data.jsonl"),
    ):  # fmt: skip
      for packing in ("split", "best_fit", "none"):
        cfg = section(folder, file, kind, args.length, packing)
        began = cpu_seconds()
        loader = opened(cfg)
        if packing != "none" or kind != "arrayrecord_uint16":
          seconds = cpu_seconds() - began
          print(f"prepare {kind}, {packing:10} {2e-6 * lengths.sum() / seconds:8.1f} MB of tokens per CPU second")
        readers[f"{kind}, {packing}"] = lambda loader=loader: of_loader(loader, args.examples)
    write_windows(folder, args.length)
    windows = opened(section(folder, "windows", "arrayrecord_windows", args.length, "none"))
    readers["arrayrecord_windows, best_fit"] = lambda: of_loader(windows, args.examples)
    mapped = of_map_dataset(folder, args.length)
    readers["MapDataset of examples"] = lambda: of_loader(mapped, args.examples)
    readers["grain, records"] = lambda: of_grain(folder, args.length, args.examples, False)
    readers["grain, first fit"] = lambda: of_grain(folder, args.length, args.examples, True)
    speeds(readers, args.examples)
    draw(folder, args.draws)


if __name__ == "__main__":
  main()
