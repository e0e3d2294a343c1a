"""The command: help and --print-config are quick and import nothing heavy; a mistake is one message and exit 2."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import trainer

SECONDS = 1.0
HEAVY = ("jax", "numpy", "orbax", "grain", "tensorflow", "rich")


def run(*argv: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
  """`python -m trainer argv` in the current directory."""
  environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1])}
  command = [sys.executable, *python, "-m", "trainer", *argv]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def cpu_seconds() -> float:
  """Processor time of the finished children, which unlike the clock does not depend on what else is running."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
  ("argv", "words"),
  [(["--help"], "  steps=1000\n"), (["configs/base.yml", "steps=5", "--print-config"], "\nsteps: 5\n")],
)
def test_printing_is_quick_and_imports_nothing_heavy(argv, words):
  imported = run(*argv, python=("-X", "importtime"))
  assert imported.returncode == 0
  assert words in imported.stdout
  modules = set(re.findall(r"\| +(\w+)", imported.stderr))
  assert {"trainer", "pydantic"} <= modules
  assert not modules & set(HEAVY)
  fastest = float("inf")
  for _ in range(3):
    before = cpu_seconds()
    run(*argv)
    fastest = min(fastest, cpu_seconds() - before)
  assert fastest < SECONDS


def test_a_stdout_that_is_closed_or_knows_ascii_only(tmp_path):
  config = tmp_path / "c.yml"
  config.write_text('sample_prompt: "\\u65e5"\n', encoding="utf-8")
  environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1]), "PYTHONIOENCODING": "ascii"}
  command = [sys.executable, "-m", "trainer", str(config), "--print-config"]
  printed = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
  assert (printed.returncode, printed.stderr) == (0, "")
  assert "\\u65e5" in printed.stdout
  closed = ["bash", "-c", 'exec "$@" >&-', "-", *command]
  result = subprocess.run(closed, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
  assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
  "argv",
  [
    ["configs/base.yml", "learning_rat=1e-3"],
    ["configs/base.yml", "steps=many"],
    ["configs/base.yml", "attention=flsh"],
    ["configs/bse.yml"],
    ["configs/base.yml", "base_output_directory=/dev/null/runs"],
    ["configs/base.yml", "devices_per_slice=4", "per_device_batch_size=0.3"],
    ["configs/base.yml", "num_slices=2", "devices_per_slice=4", "ici_tensor_parallelism=3"],
    ["configs/base.yml", "model_name=llama3-8b", "max_target_length=8193"],
    ["configs/base.yml", "dataset_path=."],
    [],
  ],
  ids=" ".join,
)
def test_a_mistake_is_one_message_exit_2_and_nothing_on_disk(argv, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  result = run(*argv)
  assert result.returncode == 2
  assert "Traceback" not in result.stderr
  assert list(tmp_path.iterdir()) == []
  if argv:
    assert 2 <= len(result.stderr.splitlines()) <= 5
    assert result.stderr.startswith("error: ")
    assert result.stdout == ""


def test_a_folder_that_is_gone_is_said_to_be(tmp_path, monkeypatch):
  gone = tmp_path / "gone"
  gone.mkdir()
  monkeypatch.chdir(gone)
  gone.rmdir()
  result = run("configs/base.yml")
  assert result.returncode == 2
  assert result.stderr == "error: The current folder no longer exists.\nChange to one that does: cd /\n"


def test_a_reader_that_has_seen_enough_of_the_help():
  environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1])}
  read, write = os.pipe()
  os.close(read)
  command = [sys.executable, "-m", "trainer", "--help"]
  result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
  os.close(write)
  assert (result.returncode, result.stderr) == (0, "")
