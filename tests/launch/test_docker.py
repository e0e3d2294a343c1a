"""The Dockerfile and its scripts, as far as no container is needed. end_to_end/replay_dockerfile.py does the rest."""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest
from end_to_end import replay_dockerfile
from tests.support import dockerfile

from trainer.launch.manifest import options

ROOT = pathlib.Path(__file__).parents[2]
STAGES = dockerfile.parse((ROOT / "docker/Dockerfile").read_text())
EXTRA = {"cpu": "gcs", "gpu": "gpu", "tpu": "tpu"}
TARGETS = tuple(EXTRA)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_packages_before_code_and_does_not_run_as_root(target):
  (packages, code) = [step.option("from") for step in STAGES[target].instructions if step.keyword == "COPY"]
  assert (packages, code) == (f"packages-{target}", "code")
  (install,) = [step.text for step in STAGES[packages].instructions if step.keyword == "RUN"]
  assert "--constraint requirements.lock" in install and f"{EXTRA[target]} arrow $EXTRAS" in install
  assert dockerfile.last(STAGES, target, "USER") == "1000:1000"
  assert dockerfile.exec_form(dockerfile.last(STAGES, target, "ENTRYPOINT"))[:3] == ["tini", "-g", "--"]
  environment = dockerfile.environment(STAGES, target)
  assert environment["PATH"].startswith("/opt/venv/bin:/usr/local/bin:") and environment["HOME"] == "/home/trainer"
  assert {stage.name for stage in dockerfile.order(STAGES, target)} >= {"packages", "code", "runtime", target}


def test_all_stages_have_one_pinned_base():
  bases = {stage.base for stage in STAGES.values()} - STAGES.keys()
  assert len(bases) == 1
  name, _, tag = bases.pop().partition(":")
  assert name == "python" and re.fullmatch(r"3\.13\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", tag)


def test_every_copied_file_is_sent_to_docker_and_nothing_else_is():
  copied = {
    source
    for stage in STAGES.values()
    for step in stage.instructions
    if step.keyword == "COPY" and not step.option("from")
    for source in step.words[:-1]
  }
  assert all((ROOT / source).exists() and replay_dockerfile.sent_to_docker(source) for source in copied)
  lines = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
  assert {line[1:] for line in lines if line.startswith("!")} == copied
  assert not any(map(replay_dockerfile.sent_to_docker, (".git", "tests", ".venv", "runs")))


def test_the_extras_of_a_build_are_those_that_a_manifest_knows():
  """With those that every image has, these are all extras of which a run on a pod can need a package."""
  extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
  assert set(options.EXTRAS) == extras - {"arrow", "fast", "gcs", "gpu", "tpu", "standin", "prometheus", "dev"}


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


def test_the_reader_refuses_what_it_cannot_replay():
  with pytest.raises(ValueError, match="line 2: ADD is not one of"):
    dockerfile.parse("FROM a AS b\nADD x /x\n")
  with pytest.raises(ValueError, match="a stage needs a name"):
    dockerfile.parse("FROM a\n")
  with pytest.raises(ValueError, match="no value for this name"):
    dockerfile.parse("FROM $BASE AS b\n")


def test_lines_and_environments_are_read_as_docker_reads_them():
  text = (
    "# note\nARG B=x:1\nFROM ${B} AS one\nENV A=1 \\\n  # inside\n  P=$PATH:/a\nRUN true\nENV A=2\nFROM one AS two\n"
    'ARG E="f g"\nRUN true\n'
  )
  stages = dockerfile.parse(text)
  assert stages["one"].base == "x:1"
  assert [step.line for step in stages["one"].instructions] == [4, 7, 8]
  assert dockerfile.environment(stages, "one", before=7)["A"] == "1"
  assert [dockerfile.environment(stages, "two", 11, given)["E"] for given in ({}, {"E": "h"})] == ["f g", "h"]
  assert dockerfile.environment(stages, "two") == {
    "A": "2",
    "PATH": dockerfile.SYSTEM_PATH,
    "P": dockerfile.SYSTEM_PATH + ":/a",
  }


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_has_no_complaint():
  result = subprocess.run(["hadolint", "docker/Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
  assert (result.returncode, result.stdout) == (0, "")
