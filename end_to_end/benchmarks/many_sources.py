"""Threads, memory and seconds of a mixture of many sources in all formats, opened as a run opens it.

    python -m end_to_end.benchmarks.many_sources [--sources 64] [--documents 500] [--batches 200]

Writes sources with documents of different lengths, in turn as Parquet of text, zstd JSONL of text, ArrayRecord of text
and ArrayRecord of token ids, and a mixture of all of them with different weights. Then three processes, one after the
other, read the configuration of this mixture with packing=best_fit, check and open its data like `python -m trainer`,
and read --batches batches with its prefetch thread: a first start, which prepares the data, a later start, and a later
start with the first source alone. Prints for each: seconds to read the configuration and to open the data, threads
while it reads, the highest resident memory of the process, and batches of 64 examples per second. Seconds of imports,
and the processes that prepare the data, are printed apart.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from end_to_end.benchmarks.common import positive
from tests.support.command import ROOT

from input_pipeline import packages

BATCH = 64
VOCAB = 258  # of the byte tokenizer
LENGTH = 256
_WORDS = "the of and to in is that for it as was with be by on not he his but at are this have from".split()

# A process that opens the data of a configuration as a run does, without JAX, which has threads and memory of its own.
READER = """
import json, re, resource, sys, time
began = time.perf_counter()
import pydantic
from trainer.config import load, mixture
from input_pipeline.loader import check, make_loader
from input_pipeline.prefetch import Prefetcher
imported, cpu = time.perf_counter(), time.process_time()
batches, batch, arguments = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
def status(name):
  return int(re.search(name + r":\\s+(\\d+)", open("/proc/self/status").read())[1])
config = load(arguments)
sources = mixture.read(config.data)
check([source.options for source in sources] or [config.data], config.model.vocab_size)
loader = make_loader(config.data, vocab_size=config.model.vocab_size, global_batch_size=batch, split="train",
                     mixture=sources, log=lambda line: None)
opened, opened_cpu = time.perf_counter(), time.process_time()
others = resource.getrusage(resource.RUSAGE_CHILDREN)
with Prefetcher(loader.batch, 0, batches) as steps:
  threads = max(status("Threads") for _ in steps)
read = time.perf_counter()
result = {"import_seconds": imported - began, "open_seconds": opened - imported, "open_cpu_seconds": opened_cpu - cpu,
          "others_cpu_seconds": others.ru_utime + others.ru_stime, "others_mebibytes": others.ru_maxrss / 1024,
          "threads": threads, "mebibytes": status("VmHWM") / 1024, "batches_per_second": batches / (read - opened),
          "counts": loader.examples_by_source(batches)}
print("RESULT " + json.dumps(result))
"""


def write_sources(folder: Path, sources: int, documents: int) -> dict[str, dict[str, Any]]:
  """Writes `sources` sources of `documents` documents. Returns the content of the file of the mixture."""
  random = np.random.default_rng(0)
  formats = (_parquet, _jsonl, _array_record_text, _array_record_tokens)
  mixture = {}
  for number in range(sources):
    name = f"source{number:03}"
    lengths = np.clip(random.lognormal(np.log(40), 1, documents), 1, 2000).astype(int)
    texts = [f"{number} " + " ".join(_WORDS[k] for k in random.integers(0, len(_WORDS), n)) for n in lengths]
    kind, path = formats[number % len(formats)](folder / name, texts)
    mixture[name] = {"weight": 1 + number % 5, "grain_file_type": kind, "grain_train_files": str(path)}
  return mixture


def _parquet(path: Path, texts: Sequence[str]) -> tuple[str, Path]:
  import pyarrow
  from pyarrow import parquet

  path = path.with_suffix(".parquet")
  parquet.write_table(pyarrow.table({"text": list(texts)}), path, row_group_size=100)
  return "parquet", path


def _jsonl(path: Path, texts: Sequence[str]) -> tuple[str, Path]:
  import pyarrow

  path = path.with_suffix(".jsonl.zst")
  lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
  path.write_bytes(pyarrow.Codec("zstd").compress(lines.encode(), asbytes=True))
  return "jsonl", path


def _array_record_text(path: Path, texts: Sequence[str]) -> tuple[str, Path]:
  return "arrayrecord_text", _array_record(path, [text.encode() for text in texts])


def _array_record_tokens(path: Path, texts: Sequence[str]) -> tuple[str, Path]:
  records = [np.frombuffer(text.encode(), np.uint8).astype("<u2").tobytes() for text in texts]
  return "arrayrecord_uint16", _array_record(path, records)


def _array_record(path: Path, records: Sequence[bytes]) -> Path:
  path = path.with_suffix(".array_record")
  writer = packages.array_record().ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()
  return path


def keys(folder: Path, mixture: dict[str, dict[str, Any]]) -> list[str]:
  """The arguments of a run that trains on the mixture."""
  path = folder / f"mixture{len(mixture)}.yml"
  path.write_text(json.dumps(mixture))
  values = f"dataset_type=grain packing=best_fit grain_train_mixture_config_path={path} vocab_size={VOCAB} eval_steps=0"
  values += f" max_target_length={LENGTH} dataset_cache_directory={folder}/cache base_output_directory={folder}/runs"
  return ["configs/base.yml", *values.split()]


def start(folder: Path, mixture: dict[str, dict[str, Any]], batches: int) -> dict[str, Any]:
  """The figures of a process that opens the mixture and reads `batches` batches."""
  command = [sys.executable, "-c", READER, str(batches), str(BATCH), *keys(folder, mixture)]
  result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(re.search(r"^RESULT (.*)$", result.stdout, re.MULTILINE)[1])


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--sources", type=positive, default=64)
  parser.add_argument("--documents", type=positive, default=500)
  parser.add_argument("--batches", type=positive, default=200)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    mixture = write_sources(folder, args.sources, args.documents)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{args.sources} sources of {args.documents} documents, {size / 1e6:.1f} MB")
    first_source = {"source000": mixture["source000"]}
    starts = {"first start": mixture, "later start": mixture, "later start, one source": first_source}
    for label, sources in starts.items():
      found = start(folder, sources, args.batches)
      print(
        f"{label:24} open {found['open_seconds']:6.2f} s ({found['open_cpu_seconds']:.2f} CPU s; imports "
        f"{found['import_seconds']:.2f} s; other processes {found['others_cpu_seconds']:.2f} CPU s, at most "
        f"{found['others_mebibytes']:.1f} MiB each), "
        f"{found['threads']:3} threads, {found['mebibytes']:6.1f} MiB, {found['batches_per_second']:6.1f} batches/s",
        flush=True,
      )


if __name__ == "__main__":
  main()
