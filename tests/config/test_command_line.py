"""The command line: help and --print-config are fast and import nothing heavy; a mistake ends with exit code 2."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import trainer
from trainer.config.cli import print_config
from trainer.config.load import load, load_with_origins

SECONDS = 1.0
HEAVY = ("jax", "numpy", "orbax", "grain", "tensorflow", "rich")


def run(*argv: str, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
  """`python -m trainer argv` in the current directory."""
  environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1])}
  command = [sys.executable, *python, "-m", "trainer", *argv]
  return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def cpu_seconds() -> float:
  """CPU time of the finished child processes. Unlike the clock it does not depend on other running processes."""
  usage = resource.getrusage(resource.RUSAGE_CHILDREN)
  return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
  ("argv", "words"),
  [(["--help"], "  steps=1000\n"), (["configs/base.yml", "steps=5", "--print-config"], "\nsteps: 5  ")],
)
def test_help_and_print_config_are_fast_and_import_nothing_heavy(argv, words):
  imported = run(*argv, python=("-X", "importtime"))
  assert imported.returncode == 0
  assert words in imported.stdout
  modules = set(re.findall(r"\| +(\w+)", imported.stderr))
  assert {"trainer", "pydantic"} <= modules
  assert not modules & set(HEAVY)
  fastest = float("inf")
  tries = 3
  while fastest >= SECONDS and tries:
    before, tries = cpu_seconds(), tries - 1
    run(*argv)
    fastest = min(fastest, cpu_seconds() - before)
  assert fastest < SECONDS


def test_stdout_may_be_closed_or_ascii_only(tmp_path):
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
  [["configs/bse.yml"], ["configs/base.yml", "num_slices=2", "devices_per_slice=4", "ici_tensor_parallelism=3"]],
  ids=" ".join,
)
def test_a_mistake_gives_one_message_exit_code_2_and_no_files(argv, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv("HOME", str(tmp_path))
  result = run(*argv)
  assert result.returncode == 2
  assert "Traceback" not in result.stderr
  assert list(tmp_path.iterdir()) == []
  assert 2 <= len(result.stderr.splitlines()) <= 5
  assert result.stderr.startswith("error: ")
  assert result.stdout == ""


def test_no_arguments_print_a_short_usage_and_exit_2():
  result = run()
  assert (result.returncode, result.stdout) == (2, "")
  assert result.stderr.startswith("Usage: python -m trainer CONFIG.yml")
  assert len(result.stderr.splitlines()) <= 10


def test_a_removed_current_folder_is_named(tmp_path, monkeypatch):
  gone = tmp_path / "gone"
  gone.mkdir()
  monkeypatch.chdir(gone)
  gone.rmdir()
  result = run("configs/base.yml")
  assert result.returncode == 2
  assert result.stderr == "error: The current folder no longer exists.\nChange to a folder that exists: cd /\n"


def test_a_reader_may_close_the_pipe_before_the_end_of_the_help():
  environment = os.environ | {"PYTHONPATH": str(Path(trainer.__file__).parents[1])}
  read, write = os.pipe()
  os.close(read)
  command = [sys.executable, "-m", "trainer", "--help"]
  result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, env=environment)
  os.close(write)
  assert (result.returncode, result.stderr) == (0, "")


def test_print_config_says_where_each_value_comes_from(tmp_path):
  (tmp_path / "parent.yml").write_text("vocab_size: 512\nsteps: 3\n")
  (tmp_path / "a.yml").write_text("base_config: parent.yml\n\nsteps: 4  # a comment\nrun_name: 'x # y'\n")
  config, origins = load_with_origins([str(tmp_path / "a.yml"), "learning_rate=0.5"])
  assert origins == {
    "vocab_size": f"{tmp_path}/parent.yml:1",
    "steps": f"{tmp_path}/a.yml:3",
    "run_name": f"{tmp_path}/a.yml:4",
    "learning_rate": "command line",
  }
  text = print_config(config, origins)
  lines = [[part.strip() for part in line.rsplit("  # ", 1)] for line in text.splitlines()]
  assert ["steps: 4", f"{tmp_path}/a.yml:3"] in lines
  assert {origin for _, origin in lines} == {*origins.values(), "default"}
  (tmp_path / "printed.yml").write_text(text)
  assert load([str(tmp_path / "printed.yml")]) == config
