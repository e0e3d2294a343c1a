"""Processes that prepare data: same errors as in the trainer, and a lost process leaves nothing behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.support.data_files import TEXTS, write_jsonl

from input_pipeline import cache, workers
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions
from input_pipeline.workers import WorkerLost, Workers
from trainer.config.errors import ConfigError


def opened(folder: Path, path: Path, **more: str) -> Loader:
  keys = {"dataset_type": "grain", "grain_train_files": str(path), "grain_file_type": "jsonl", "max_target_length": 24}
  section = DataOptions(**keys, **more, dataset_cache_directory=str(folder))
  return make_loader(section, vocab_size=300, global_batch_size=4, split="train", log=lambda line: None)


def test_the_same_data_and_the_same_error_as_in_this_process(tmp_path, monkeypatch):
  good = Path(write_jsonl(tmp_path / "good", "text", TEXTS))
  bad = tmp_path / "bad.jsonl"
  bad.write_bytes(good.read_bytes() + b"{}\n")
  want = opened(tmp_path / "here", good)
  with pytest.raises(ConfigError, match=r"bad\.jsonl:42: no field") as here:
    opened(tmp_path / "here", bad)
  monkeypatch.setattr(workers, "_SMALL", 0)
  found = opened(tmp_path / "there", good)
  assert (found.fingerprint(), found.next_examples(0)) == (want.fingerprint(), want.next_examples(0))
  with pytest.raises(ConfigError) as there:
    opened(tmp_path / "there", bad)
  assert str(there.value) == str(here.value)
  entries = [sorted(path.name for path in (tmp_path / folder).glob("corpus-*")) for folder in ("here", "there")]
  assert entries[0] == entries[1] and len(entries[0]) == 1


def processes(pool: Workers) -> list[subprocess.Popen]:
  return [worker._process for worker in pool._all]


def test_a_process_that_is_lost_leaves_no_entry_and_no_process(tmp_path):
  with Workers(1) as pool:
    assert pool.call(functools.partial(int, "1"), "it reads") == 1
    with pytest.raises(ValueError, match="invalid literal") as error:
      pool.call(functools.partial(int, "x"), "it reads")
    assert "in serve" in error.value.__notes__[0]  # the stack in the process

    def build(folder: Path) -> None:
      (folder / "half").write_text("")
      pool.call(functools.partial(os._exit, 9), "it read A")

    with pytest.raises(WorkerLost, match="A process ended with code 9 while it read A"):
      cache.entry(str(tmp_path), "name", build=build, fault=lambda folder: None, log=print)
    assert list(tmp_path.iterdir()) == []
    answers = pool.each(lambda seconds: pool.call(functools.partial(time.sleep, seconds), "it sleeps"), [0, 600])
    assert next(answers) == (0, None)
  assert [process.poll() for process in processes(pool)] == [9, -signal.SIGKILL]
  with pytest.raises(WorkerLost, match="have been stopped before it reads"):
    pool.call(os.getpid, "it reads")


PRINTING = """
import functools, sys
from input_pipeline import progress, workers
with workers.Workers(1) as pool:
  pool.call(functools.partial(progress.tell, "Preparing caf\\u00e9 \\udce9"), "it prints")
  pool.call(functools.partial(progress.tell, "again"), "it prints")
sys.stderr.write("done")
"""


def test_neither_a_lost_terminal_nor_an_odd_name_ends_the_work(tmp_path):
  """The read end of its pipe is closed; or its encoding is ASCII."""
  closed, ours = os.pipe()
  os.close(closed)
  environment = os.environ | {"PYTHONIOENCODING": "ascii"}
  run = functools.partial(subprocess.run, [sys.executable, "-c", PRINTING], stderr=subprocess.PIPE, env=environment)
  lost = run(stdout=ours, timeout=60)
  os.close(ours)
  assert (lost.returncode, lost.stderr) == (0, b"done")
  shown = run(stdout=subprocess.PIPE, timeout=60)
  assert (shown.returncode, shown.stderr) == (0, b"done")
  assert b"Preparing caf\\xe9 \\udce9\n" in shown.stdout and shown.stdout.endswith(b"again\n")
