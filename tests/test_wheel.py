"""The wheel works without the repository: the models, the demo, the version; and its name is not another project's."""

from __future__ import annotations

import functools
import re
import tomllib

import pytest
import yaml
from tests.support import needs
from tests.support.wheel import ROOT, build, run_in
from tests.test_layering import PACKAGES

import trainer


@pytest.fixture(scope="module")
def wheel(once):
  return once("wheel", build) / "site"


@pytest.fixture
def run(wheel, tmp_path):
  """Runs `python ARGUMENTS` in an empty folder."""
  return functools.partial(run_in, tmp_path, wheel)


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
  assert all((wheel / name / "py.typed").exists() for name in PACKAGES)


def test_the_metadata_is_complete_and_names_no_place_that_does_not_exist():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  pythons = {text.rpartition(" ")[2] for text in project["classifiers"] if "Python :: 3." in text}
  assert pythons == {"3.11", "3.12", "3.13"} and project["authors"] and project["keywords"]
  assert "](" not in project["readme"]["text"] and "urls" not in project
  citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
  labels = (ROOT / "docker/Dockerfile").read_text()
  assert citation["version"] == trainer.__version__ and citation["license"] == project["license"]
  assert f'org.opencontainers.image.version="{trainer.__version__}"' in labels
  assert 'image.source="$SOURCE"' in labels and 'image.revision="$REVISION"' in labels


@needs.workshop
def test_messages_name_this_project_and_extras_that_it_has():
  project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
  texts = {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}
  extras = {extra for text in texts.values() for extra in re.findall(r"how_to_install\(['\"](\w+)['\"]\)", text)}
  extras |= {extra for text in texts.values() for extra in re.findall(r"\bextra=\"(\w+)\", reason", text)}
  assert {"arrow", "gpu", "ray", "tpu"} <= extras <= project["optional-dependencies"].keys()
  offered = re.search(r"^    (--dev .*)\)$", (ROOT / "setup.sh").read_text(), re.MULTILINE)[1].split(" | ")
  assert {name.removeprefix("--") for name in offered} == project["optional-dependencies"].keys()
  pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *texts]
  wrong = [path for path in pages if re.search(r"['\"]trainer\[", path.read_text()) or "-e '.[" in path.read_text()]
  assert wrong == []
