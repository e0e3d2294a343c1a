"""More files of data than the system lets a process open."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.command import ROOT, Run, cpu_environment
from tests.support.command_runs import KEYS, start_and_train
from tests.support.data_files import write_records

LIMIT, FILES, RECORDS = 256, 400, 4


def write_files(folder: Path, files: int = FILES) -> None:
  """Writes files whose records are examples."""
  folder.mkdir()
  for number in range(files):
    rows = (np.arange(17, dtype="<i4") + number + record for record in range(RECORDS))
    write_records(folder / f"{number:04}", [(row % 256).tobytes() for row in rows])


def limited(argv, changes, log: Path) -> subprocess.Popen:
  """Starts `python -m trainer *argv` with at most LIMIT open files, and fewer until it raises its limit."""
  script = f'ulimit -Sn {LIMIT // 2}; ulimit -Hn {LIMIT}; exec "$@"'
  command = ["bash", "-c", script, "bash", sys.executable, "-m", "trainer", *argv]
  with log.open("ab") as file:
    return subprocess.Popen(command, env=cpu_environment(changes), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)


@pytest.mark.timeout(300)
def test_a_run_reads_more_files_than_it_may_open(tmp_path, compiled):
  write_files(tmp_path / "files")
  data = f"dataset_type=grain grain_file_type=arrayrecord_int32 packing=none grain_train_files={tmp_path}/files"
  places = f"dataset_cache_directory={tmp_path}/cache steps=60 per_device_batch_size=16"
  run = Run(tmp_path / "run", [*KEYS, *data.split(), *places.split(), "checkpoint_period=20", compiled], limited)
  process = start_and_train(run, 1)
  assert re.search(rf"Max open files +{LIMIT} +{LIMIT} ", Path(f"/proc/{process.pid}/limits").read_text())
  assert process.wait(240) == 0, run.printed[-4000:]
  assert run.last_step == 60 and run.committed_steps()[-1] == 60
