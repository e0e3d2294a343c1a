"""The Dockerfile and its scripts, as far as no container is needed."""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docker/Dockerfile").read_text()


def test_the_base_is_pinned_and_no_image_runs_as_root():
  assert re.search(r"^ARG PYTHON_IMAGE=python:3\.13\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", DOCKERFILE, re.MULTILINE)
  stages = re.split(r"^(?=FROM )", DOCKERFILE, flags=re.MULTILINE)[1:]
  names = {stage.split()[3] for stage in stages}
  assert {stage.split()[1] for stage in stages} <= {"${PYTHON_IMAGE}", *names}
  runtime = next(stage for stage in stages if stage.split()[3] == "runtime")
  assert "\nUSER 1000:1000\n" in runtime
  assert all("USER" not in stage for stage in stages if stage.split()[1] == "runtime")


@pytest.mark.parametrize(
  ("arguments", "expected"),
  [
    (["configs/a.yml", "steps=2"], ["-m", "trainer", "configs/a.yml", "steps=2"]),
    (["-m", "trainer.tools.preflight", "a b.yml"], ["-m", "trainer.tools.preflight", "a b.yml"]),
    ([], ["-m", "trainer"]),
  ],
)
def test_the_entrypoint_starts_the_program_or_another_module(tmp_path, arguments, expected):
  """And its exit code is the program's."""
  (tmp_path / "python").write_text('#!/bin/sh\nprintf "%s|" "$@"\nexit 42\n')
  (tmp_path / "python").chmod(0o755)
  command = [str(ROOT / "docker/entrypoint.sh"), *arguments]
  path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
  result = subprocess.run(command, env=path, capture_output=True, text=True, timeout=60)
  assert (result.stdout.split("|")[:-1], result.returncode) == (expected, 42)
