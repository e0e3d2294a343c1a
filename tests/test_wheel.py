"""The wheel works without the repository: the models, the demo, the version; and its name is not another project's."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from trainer.config.errors import DISTRIBUTION

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  """The wheel's contents in a folder, and nothing else of the project."""
  folder = tmp_path_factory.mktemp("wheel")
  (folder / "source").mkdir()
  for name in ("pyproject.toml", "README.md", "LICENSE", "src"):  # a copy: setuptools writes build/ beside the sources
    (folder / "source" / name).symlink_to(ROOT / name)
  command = [sys.executable, "-m", "pip", "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
  built = subprocess.run(command, cwd=folder / "source", capture_output=True, text=True, timeout=200)
  assert built.returncode == 0, built.stderr
  (path,) = folder.glob("*.whl")
  zipfile.ZipFile(path).extractall(folder / "site")
  return folder / "site"


@pytest.fixture
def run(wheel, tmp_path):
  """Runs `python ARGUMENTS` in an empty folder, with the wheel in place of the editable installation."""

  def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(wheel)}
    return subprocess.run(
      [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )

  return start


def test_a_model_is_found_by_name(run, wheel):
  printed = run("-m", "trainer", "configs/base.yml", "model_name=qwen3-0.6b", "--print-config")
  assert (printed.returncode, printed.stderr) == (0, "")
  assert re.search(r"base_emb_dim: 1024 +# configs/models/qwen3-0\.6b\.yml:\d+", printed.stdout)
  missing = run("-m", "trainer", "configs/bose.yml")
  assert missing.returncode == 2 and "Did you mean configs/base.yml?" in missing.stderr
  assert f"A relative path starts here or in {wheel}/trainer;" in missing.stderr


def test_every_config_is_in_the_wheel(wheel):
  folders = (ROOT / "src/trainer/configs", wheel / "trainer/configs")
  repository, packed = ({str(path.relative_to(root)) for path in root.rglob("*.*")} for root in folders)
  assert packed == repository and "models/llama3.1-405b.yml" in packed
  assert all((wheel / name / "py.typed").exists() for name in ("trainer", "pathways_standin", "stepcost", "worlds"))


def test_the_elastic_demo_finds_its_configuration(run):
  result = run("-m", "trainer.tools.elastic_demo", "steps=5")
  assert result.returncode == 2 and "fault_injection=slice_down@20:1" in result.stderr


def test_the_version(run):
  printed = run("-m", "trainer", "--version")
  assert (printed.returncode, printed.stdout) == (0, "trainer 0.1.0\n")
  named = run("-c", f"import importlib.metadata as m; print(m.version('{DISTRIBUTION}'))")
  assert named.stdout == "0.1.0\n"


def test_messages_name_this_project_and_extras_that_it_has():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  assert project["name"] == DISTRIBUTION
  texts = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
  extras = {extra for text in texts.values() for extra in re.findall(r"how_to_install\('(\w+)'\)", text)}
  extras |= {extra for text in texts.values() for extra in re.findall(r"\bextra=\"(\w+)\", reason", text)}
  assert {"arrow", "gcs", "ray", "tpu"} <= extras <= project["optional-dependencies"].keys()
  offered = re.search(r"^    (--dev .*)\)$", (ROOT / "setup.sh").read_text(), re.MULTILINE)[1].split(" | ")
  assert {name.removeprefix("--") for name in offered} == project["optional-dependencies"].keys()
  pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *texts]
  wrong = [path for path in pages if re.search(r"['\"]trainer\[", path.read_text()) or "-e '.[" in path.read_text()]
  assert wrong == []
