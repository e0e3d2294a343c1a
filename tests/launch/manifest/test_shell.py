"""The printed commands in a real shell: the program receives exactly the arguments, and SIGTERM reaches it at once."""

from __future__ import annotations

import signal
import subprocess

import pytest
from tests.launch.manifest.cases import COMMON, ELASTIC, PLACE, render

# Stands for xpk, gcluster and python: writes its arguments to a file; as python it then waits for SIGTERM.
STAND_IN = """#!/bin/bash
printf '%s\\0' "$@" >"$RECORD"
if [ "${0##*/}" = python ]; then trap 'exit 42' TERM; echo ready; while :; do sleep 0.01; done; fi
"""


@pytest.fixture
def shell(tmp_path):
  """Starts bash with the stand-ins first in PATH."""
  for name in ("xpk", "gcluster", "python"):
    (tmp_path / name).write_text(STAND_IN)
    (tmp_path / name).chmod(0o755)
  environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RECORD": str(tmp_path / "record")}
  started = []

  def start(text: str) -> subprocess.Popen:
    process = subprocess.Popen(["bash", "-c", text], env=environment, stdout=subprocess.PIPE, text=True)
    started.append(process)
    return process

  yield start
  for process in started:
    process.kill()
    process.wait()
    process.stdout.close()


def recorded(folder) -> list[str]:
  return (folder / "record").read_text().split("\0")[:-1]


@pytest.mark.parametrize("target", ["xpk", "gcluster"])
def test_odd_values_survive_two_shells(shell, tmp_path, target):
  odd = [
    "sample_prompt=a 'b' \"c\" $HOME `id` \\ #",
    "local_checkpoint_directory=",
    "eval_dataset_path=gs://bucket/x y",
  ]
  arguments = [target, *f"{COMMON} {ELASTIC} {PLACE} --elastic-slices 1".split(), *odd]
  shell(render(arguments)).wait(timeout=20)
  command = next(word for word in recorded(tmp_path) if word.startswith("--command=")).removeprefix("--command=")
  process = shell(command)
  assert process.stdout.readline() == "ready\n"
  assert [word for word in recorded(tmp_path) if "=" in word][-3:] == odd
  process.send_signal(signal.SIGTERM)
  assert process.wait(timeout=20) == 42


def test_a_line_break_is_refused():
  with pytest.raises(ValueError, match="Put the key into the YAML file"):
    render([*f"xpk {COMMON} {PLACE}".split(), "sample_prompt=a\nb"])
