"""The work of the tool: finds what is missing in the output folder, and lets processes write it."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from input_pipeline import contents, datasets, describe, prepare, prepared, remote
from input_pipeline.conversations import ChatTokenizer, marked
from input_pipeline.documents import BadRecords, Documents, Piece
from input_pipeline.loader import check
from input_pipeline.storage import is_address
from input_pipeline.tokenizer import Tokenizer
from input_pipeline.workers import Workers, here
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.tools.tokenize import part as part_lib
from trainer.tools.tokenize.output import Output, Part, hashes_of
from trainer.tools.tokenize.part import TokenizeJob
from trainer.tools.tokenize.token_progress import TokenProgress

_PREVIEWED = 20_000  # characters that are tokenised at a time


def run(config: Config, output: str, records: str, part_bytes: int, processes: int) -> None:
  """Writes the dataset of `config` to the folder `output`, or what is missing there.

  Raises ConfigError for wrong input, WorkerLost if a process of this tool was killed.
  """
  data, vocab_size = config.data, config.model.vocab_size
  remote.require_address(f"--output={output}", output)
  if is_address(output):
    raise ConfigError(f"--output={output} is not a local path. Give a folder of this machine.")
  splits, tokenizer = _opened(config)
  is_masked = tokenizer is None and any(one.may_be_masked(data.max_bad_records) for one in splits.values())
  if (is_masked or isinstance(tokenizer, ChatTokenizer)) and records != "windows":
    raise ConfigError(
      f"--records={records}: a record of token ids does not say which tokens of a conversation, or of a document with "
      "a mask, are trained. Use --records=windows."
    )
  parts = [
    Part(split, number, tuple(pieces))
    for split, documents in splits.items()
    for number, pieces in enumerate(cut(documents, part_bytes))
  ]
  job = TokenizeJob(splits, tokenizer, vocab_size, data.max_target_length, data.packing, records, data.max_bad_records)
  for line in [] if isinstance(tokenizer, ChatTokenizer) else describe.documents(job.description()):
    print(line, flush=True)
  folder = Output(Path(os.path.abspath(os.path.expanduser(output))), parts)
  with folder.locked():
    inputs = {split: contents.hash_of(contents.names(documents)) for split, documents in splits.items()}
    folder.begin(job.description() | {"inputs": inputs, "part_bytes": part_bytes}, tokenizer)
    known = _Inputs(job, data.dataset_cache_directory, parts)
    left = [part for part in parts if not folder.has(part)]
    for part in parts:
      if part not in left:
        known.require(part, folder.hashes(part), folder.path(part))
    if len(left) < len(parts):
      print(f"{len(parts) - len(left)} of {len(parts)} parts are complete already.", flush=True)
    if left:
      _write(job, folder, left, processes, known)
    folder.require_few_bad(data.max_bad_records)
    totals = folder.conclude()
  for split, total in totals.items():
    print(f"{split}: {total['documents']:,} documents, {total['tokens']:,} tokens in {total['records']:,} records")
  print(f"Train with {' '.join(_keys(folder.folder, job, splits))}")


def preview(config: Config, count: int) -> None:
  """Prints the first documents for training as the model gets them. Raises ConfigError for wrong input."""
  splits, tokenizer = _opened(config)
  if tokenizer is None:
    raise ConfigError("The documents are token ids. --preview shows documents that this tool tokenises.")
  marks = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
  bad, lost = BadRecords(config.data.max_bad_records, print), prepare.Lost()
  some = itertools.chain.from_iterable(
    prepare.token_groups(prepare.groups(splits["train"], _PREVIEWED, bad), tokenizer, tokenizer.vocab_size, bad, lost)
  )
  for number, document in enumerate(itertools.islice(some, count), 1):
    ids = document if isinstance(document, np.ndarray) else document.whole()
    print(f"--- {number}: {len(ids):,} tokens, {int((ids[1:] >= 0).sum()):,} trained ---")
    print(marked(tokenizer, ids, *marks))
  if isinstance(tokenizer, ChatTokenizer):  # also what was left out
    print(f"--- read: {next(lost.chats.lines())} ---")


def _opened(config: Config) -> tuple[dict[str, Documents], Tokenizer | None]:
  """The documents of each split, and their tokenizer. Raises ConfigError."""
  data, vocab_size = config.data, config.model.vocab_size
  if data.dataset_type == "synthetic" or data.grain_train_mixture_config_path:
    raise ConfigError("Random tokens and mixtures cannot be tokenised. Give the documents of one dataset.")
  check([data], vocab_size)
  splits = datasets.find(data)
  for documents in splits.values():
    if documents.left_out:
      print(f"Not read in {documents.name}: {documents.left_out}", flush=True)
  return splits, prepared.tokenizer_of(data, splits, vocab_size=vocab_size, log=print, call=here)


class _Inputs:
  """The documents of each part, which must stay what they were when the part was written."""

  def __init__(self, job: TokenizeJob, cache_directory: str, parts: Sequence[Part]) -> None:
    self._job, self._directory = job, cache_directory
    self._stamps = {part: contents.Stamps([self._documents(part)]) for part in parts}

  def require(self, part: Part, hashes: Sequence[str], path: Path) -> None:
    """Raises ConfigError if the documents do not have these hashes. Reads them if their files have other stamps."""
    documents = self._documents(part)
    read = lambda: contents.read(documents, self._job.max_bad_records)
    if self._stamps[part].remembered(self._directory, "part", read, print) != contents.identity(documents, hashes):
      raise ConfigError(
        f"{path} was made from other documents: {part.pieces[0].path}, or a file after it, has changed since then. "
        "Give another folder, or remove this one."
      )

  def keep(self, part: Part, hashes: Sequence[str]) -> None:
    """Remembers the hashes of a part that was written now. Raises ConfigError if its files have changed meanwhile."""
    documents = self._documents(part)
    if contents.Stamps([documents]).key != self._stamps[part].key:
      raise ConfigError(
        f"{part.pieces[0].path}, or a file after it, has changed while it was read. Start again when it is complete."
      )
    self._stamps[part].keep(self._directory, "part", contents.identity(documents, hashes), print)

  def _documents(self, part: Part) -> Documents:
    return dataclasses.replace(self._job.splits[part.split], pieces=part.pieces)


def _write(job: TokenizeJob, folder: Output, left: Sequence[Part], processes: int, known: _Inputs) -> None:
  """Lets so many processes write the parts. A part is complete when its counts are recorded."""
  progress = TokenProgress(sum(part.size for part in left))
  with Workers(min(processes, len(left))) as workers:

    def write(part: Part) -> dict[str, Any]:
      work = partial(part_lib.write_in_worker, job, part.split, part.pieces, folder.path(part))
      return workers.call(work, f"it wrote part {part.number} of {part.split}", progress.add_tokens)

    for part, counts in workers.each(write, left):
      known.keep(part, hashes_of(counts))
      folder.finish(part, counts)
      for message in counts["bad"]:
        print(f"A bad record is skipped: {message}", flush=True)
      if counts["lost"]:
        print(f"warning: {counts['file']}: {counts['lost']}", flush=True)
      if counts["bad_records"]:
        folder.require_few_bad(job.max_bad_records)
      progress.add_part(part)
  progress.print()


def cut(documents: Documents, part_bytes: int) -> Iterator[list[Piece]]:
  """Yields the pieces of each part: whole documents, about `part_bytes` of input. Only formats that can be cut are."""
  part: list[Piece] = []
  size = 0
  for piece in documents.pieces:
    for smaller in documents.cut(piece, part_bytes):
      if part and size + smaller.size > part_bytes:
        yield part
        part, size = [], 0
      part.append(smaller)
      size += smaller.size
  if part:
    yield part


def _keys(folder: Path, job: TokenizeJob, splits: dict[str, Documents]) -> list[str]:
  keys = [f"dataset_type=grain grain_file_type={job.file_type} grain_train_files={folder / 'train'}"]
  keys += [f"grain_eval_files={folder / 'eval'}"] if "eval" in splits else []
  keys += [f"max_target_length={job.length}"] if job.records == "windows" else []
  return [*keys, f"vocab_size={job.vocab_size}"]
