"""gs:// and s3:// through the real code, against an emulator of each (needs: bash setup.sh --dev)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.support import needs, object_stores
from tests.support.command import ROOT, cpu_environment


@pytest.fixture(scope="module", params=object_stores.NEEDS)
def bucket(request):
  """(scheme, changes to the environment of processes) for which SCHEME://bucket is empty."""
  for package in object_stores.NEEDS[request.param]:
    pytest.importorskip(package)
  with object_stores.running(request.param) as url:
    yield request.param, object_stores.environment(request.param, url) | {"XLA_FLAGS": os.environ["XLA_FLAGS"]}


@pytest.fixture
def run(server, bucket, tmp_path) -> Callable[..., list[str]]:
  """run(action, ...): the output of each action. One process does all actions."""
  log = tmp_path / "printed.txt"

  def start(*actions: str, code: int = 0) -> list[str]:
    log.unlink(missing_ok=True)
    process = server.run("tests.checkpoint.bucket_run", " ; ".join(actions).split(), bucket[1], log)
    assert process.wait(200) == code, log.read_text()
    return re.split("^--- ", log.read_text(), flags=re.MULTILINE)[1:]

  return start


@pytest.mark.slow
def test_saves_keeps_restores_and_falls_back(run, bucket):
  run_folder = f"{bucket[0]}://bucket/runs/a"
  saves = f"save {run_folder} 1 4", f"files {run_folder}/checkpoints", f"restore {run_folder} 4"
  _, files, restored = run(*saves)
  names = files.split()[1:]
  assert {name.split("/")[0] for name in names} == {"2", "3", "4"}
  sealed = ("commit_success.txt", "meta.json", "manifest.json")
  assert {f"{step}/{name}" for step in (2, 3, 4) for name in sealed} <= {*names}
  assert f"Found commit_success file. Keeping {run_folder}/checkpoints/4/." in restored

  # Killed before the commit: without a marker and a manifest it is not a checkpoint. The next start removes the folder.
  run(f"die_in_save {run_folder} 5", code=9)
  if not needs.deleted:
    listed, watched = run(f"list_checkpoints {run_folder}", f"watch {bucket[0]}://bucket/runs/watched")
    states = "\n".join(" ".join(line.split()[-9:]) for line in listed.splitlines())
    assert "checkpoint committed, all files are as they were written" in states
    assert re.search(r"^4 .* [\d.]+ (s|min) +checkpoint", listed, re.MULTILINE), listed  # and not ? as its age
    assert "its save did not finish; perhaps a process writes it now" in listed
    assert [line.partition(",")[0] for line in watched.splitlines()[-2:]] == ["step 2 of 9", "step 3 of 9"]
  data = max(name for name in names if name.startswith("4/state/ocdbt.process_0/d/"))
  before, restored, after, _, fallen, *_ = run(
    f"files {run_folder}/checkpoints",
    f"restore {run_folder} 4",
    f"files {run_folder}/checkpoints",
    # A damaged object is detected, and the step can be saved again after the fallback.
    f"damage {run_folder}/checkpoints/{data}",
    f"restore {run_folder} 3",
    f"save {run_folder} 4 4",
    f"restore {run_folder} 4",
  )
  unfinished = {name for name in before.split() if name.startswith("5/")}
  assert unfinished and "5/commit_success.txt" not in unfinished
  assert f"Removed 1 from {run_folder}/checkpoints: 5 (its save did not finish)." in restored
  assert not any(name.startswith("5/") for name in after.split()) and "4/meta.json" in after
  assert f"Moved checkpoint 4 to {run_folder}/checkpoints_rejected/4" in fallen

  # Killed when all files are there and the marker is not: the next start commits the step.
  run(f"die_before_commit {run_folder} 5", code=9)
  (restored,) = run(f"restore {run_folder} 5")
  assert f"Committed {run_folder}/checkpoints/5: its save had ended after it had written all files." in restored


def run_program(program, bucket, folder):
  """What the program, which gets `folder` as its argument, prints."""
  scheme, changes = bucket
  command, environment = [sys.executable, "-c", program, str(folder), scheme], cpu_environment(changes)
  result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
  assert result.returncode == 0, result.stderr
  return result.stdout


READ_DOCUMENTS = """
import json, pathlib, sys
import fsspec
from tests.support.data_files import everything, load
from trainer.config import ConfigError

folder, scheme = pathlib.Path(sys.argv[1]), sys.argv[2]
lines = [json.dumps({"text": f"document {number}"}) for number in range(50)]
folder.joinpath("a.jsonl").write_text("\\n".join(lines))
fsspec.filesystem(scheme).put(f"{folder}/a.jsonl", "bucket/data/deep/a.jsonl")
loaders = [
  load(folder / str(number), grain_train_files=path, grain_file_type="jsonl")
  for number, path in enumerate((f"{folder}/a.jsonl", f"{scheme}://bucket/data", f"{scheme}://bucket/d*/*/*.jsonl"))
]
assert everything(loaders[0]) == everything(loaders[1]) == everything(loaders[2])
assert len({loader.fingerprint() for loader in loaders}) == 1
for address in (f"{scheme}://bucket/none", f"{scheme}://other-bucket/data"):
  try:
    load(folder, grain_train_files=address, grain_file_type="jsonl")
  except ConfigError as error:
    print(error)
"""


def test_documents_are_read(bucket, tmp_path):
  printed = run_program(READ_DOCUMENTS, bucket, tmp_path)
  assert f"grain_train_files={bucket[0]}://bucket/none: '{bucket[0]}://bucket/none' has no files" in printed
  assert f"grain_train_files={bucket[0]}://other-bucket/data" in printed
