"""trainer.tools.tokenize: its output has the documents of its input, whoever is killed while it is written."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.support.command import is_running
from tests.support.data_files import LENGTH, TEXTS, TOKENS, everything, load, write_gzip, write_jsonl, write_parquet

from input_pipeline import array_record, datasets
from input_pipeline.documents import Piece
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import ByteTokenizer
from trainer.config.errors import ConfigError
from trainer.tools.tokenize import part as part_lib
from trainer.tools.tokenize import writing
from trainer.tools.tokenize.__main__ import main
from trainer.tools.tokenize.part import TokenizeJob

ROOT = Path(__file__).parents[2]
LIMIT = 120  # seconds


def job_of(records: str, packing: str = "split", vocab_size: int = 300, **keys: str | int) -> TokenizeJob:
  cfg = DataOptions(dataset_type="grain", **keys)
  tokenizer = ByteTokenizer() if vocab_size == 300 else None
  return TokenizeJob(datasets.find(cfg), tokenizer, vocab_size, LENGTH, packing, records, cfg.max_bad_records)


def write_all(job: TokenizeJob, folder: Path, part_bytes: int) -> list[bytes]:
  """The records of all parts of the training split, written in this process."""
  folder.mkdir()
  records = []
  for number, pieces in enumerate(writing.cut(job.splits["train"], part_bytes)):
    path = folder / f"{number}.array_record"
    counts = part_lib.write(job, "train", pieces, path, lambda tokens: None)
    piece = Piece(path.name, path, 0, path.stat().st_size)
    records.append(array_record.Records([path], [array_record.count(piece)]))
    assert len(records[-1]) == counts["records"]
  found = [part[number] for part in records for number in range(len(part))]
  for part in records:
    part.close()
  return found


@pytest.mark.parametrize(("write", "kind", "parts"), [
  (write_jsonl, "jsonl", 10), (write_gzip, "jsonl", 1), (write_parquet, "parquet", 3),
])  # fmt: skip
@pytest.mark.parametrize("values", [TEXTS, TOKENS], ids=["text", "tokens"])
def test_parts_have_all_documents_in_order(tmp_path, write, kind, parts, values):
  keys = {"grain_train_files": write(tmp_path / "data", "body", values), "grain_file_type": kind}
  keys["train_data_columns"] = "body"
  job = job_of("documents", vocab_size=300 if values is TEXTS else 70_000, **keys)
  size = sum(piece.size for piece in job.splits["train"].pieces)
  found = len(list(writing.cut(job.splits["train"], size // 12)))
  assert found >= parts if parts > 1 else found == 1
  records = write_all(job, tmp_path / "parts", size // 12)
  want = [np.array([256, *text.encode(), 257]) for text in TEXTS] if values is TEXTS else TOKENS
  dtype = "<u2" if values is TEXTS else "<i4"
  assert [np.frombuffer(record, dtype).tolist() for record in records] == [ids.tolist() for ids in want]
  assert write_all(job, tmp_path / "whole", 10**9) == records


@pytest.mark.parametrize("packing", ["split", "best_fit", "none"])
def test_windows_are_read_in_place_as_if_they_had_been_prepared(tmp_path, packing):
  keys = {"grain_train_files": write_jsonl(tmp_path / "data", "text", TEXTS), "grain_file_type": "jsonl"}
  want = everything(load(tmp_path, packing=packing, **keys))
  write_all(job_of("windows", packing, **keys), tmp_path / "parts", 10**9)
  found = {"grain_train_files": f"{tmp_path}/parts", "grain_file_type": "arrayrecord_windows"}
  assert everything(load(tmp_path, **found)) == want and len(want) > 15
  with pytest.raises(ConfigError, match=r"record 0 of .*it has \d+ tokens.*Set max_target_length=\d+"):
    load(tmp_path, max_target_length=8, **found)
  with pytest.raises(ConfigError, match=r"record 0 of .*it has the token \d+, but"):
    load(tmp_path, vocab_size=100, **found)


# ---- the command


def command(source: Path, output: Path, *arguments: str) -> list[str]:
  keys = [f"dataset_path={source}", "max_target_length=64", "eval_fraction=0.1", "vocab_size=300"]
  keys += [f"dataset_cache_directory={source.parent / 'cache'}", f"base_output_directory={source.parent / 'runs'}"]
  options = ["--output", str(output), "--part-megabytes=0.03", "--processes=2", *arguments]
  return [sys.executable, "-m", "trainer.tools.tokenize", "configs/base.yml", "tokenizer_type=byte", *keys, *options]


def start(source: Path, output: Path, *arguments: str) -> subprocess.Popen:
  return subprocess.Popen(
    command(source, output, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT
  )


def finished(process: subprocess.Popen) -> tuple[int, str]:
  text, _ = process.communicate(timeout=LIMIT)
  return process.returncode, text


def corpus(folder: Path, files: int = 24, lines: int = 500) -> Path:
  (folder / "text").mkdir(parents=True)
  for number in range(files):
    text = "".join(f"line {line} of file {number}\n" for line in range(lines))
    (folder / "text" / f"{number:02}.txt").write_text(text)
  return folder / "text"


def tree(folder: Path) -> dict[str, str]:
  """{file: hash of its content} of all files, hidden files included."""
  return {
    path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


def children(pid: int) -> list[int]:
  """Processes that `pid` has started."""
  return [int(text) for task in Path(f"/proc/{pid}/task").iterdir() for text in (task / "children").read_text().split()]


def wait_until(condition, seconds: float = 60) -> None:
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, "it has not happened"
    time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc")
def test_killed_at_any_moment_and_restarted_it_writes_the_same_bytes(tmp_path):
  source, output = corpus(tmp_path, files=96), tmp_path / "killed"
  code, text = finished(start(source, tmp_path / "undisturbed"))
  assert code == 0, text
  want = tree(tmp_path / "undisturbed")
  manifest = json.loads((tmp_path / "undisturbed" / "manifest.json").read_text())
  assert len(manifest["files"]["train"]) >= 30
  assert all(want[file["file"]] == file["sha256"] for files in manifest["files"].values() for file in files)

  process = start(source, output)  # a worker is killed
  wait_until(lambda: len(children(process.pid)) == 2)
  os.kill(children(process.pid)[1], signal.SIGKILL)
  code, text = finished(process)
  assert code == 1 and re.search(r"A process ended with code -9 while it wrote part \d+ of (train|eval)", text), text

  done = lambda: len(list(output.glob(".unfinished/*-*.json")))
  for parts in (0, 2, 5):
    process = start(source, output)
    wait_until(lambda parts=parts: (output / ".unfinished").is_dir() and done() >= parts)
    time.sleep(random.Random(parts).uniform(0, 0.02))
    workers = children(process.pid)
    process.kill()
    assert process.wait(LIMIT) == -signal.SIGKILL
    process.stdout.close()
    wait_until(lambda workers=workers: not any(is_running(worker) for worker in workers))
    assert not (output / "manifest.json").exists()

  code, text = finished(start(source, output, "--processes=1"))
  assert code == 0 and re.search(r"[1-9]\d* of \d+ parts are complete already", text), text
  assert tree(output) == want


def test_a_complete_folder_is_left_alone_and_other_commands_are_refused(tmp_path):
  source, output = corpus(tmp_path, files=3), tmp_path / "output"
  code, text = finished(start(source, output))
  assert code == 0 and f"grain_train_files={output / 'train'}" in text, text
  before = tree(output)

  def again(*arguments: str, to: Path = output) -> tuple[int, str]:
    return run_in_process(command(source, to, *arguments)[3:])

  assert again() == (0, "")
  code, text = again("--records=windows")
  assert code == 2 and "records: documents -> windows" in text and "packing: None -> split" in text, text
  changed = source / "00.txt"
  changed.write_text(changed.read_text().replace("line 7", "line 8"))
  code, text = again()
  assert code == 2 and f"was made from other documents: {changed}, or a file after it, has changed" in text, text
  (source / "99.txt").write_text("one more")
  code, text = again()
  assert code == 2 and re.search(r"inputs.eval: \w{64} -> \w{64}", text), text
  code, text = again(to=source)
  assert code == 2 and "is not empty: it has 00.txt" in text, text
  assert tree(output) == before


def run_in_process(arguments: list[str]) -> tuple[int, str]:
  """(exit code, text on stderr) of a command that starts no workers."""
  import contextlib
  import io

  errors = io.StringIO()
  with contextlib.redirect_stderr(errors):
    return main(arguments), errors.getvalue()
