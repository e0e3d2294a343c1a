"""Rules for tracked files: content, size of functions, repeated code; and that lock, README and CI agree."""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from tests.support import needs

import trainer

ROOT = pathlib.Path(__file__).parents[1]
BINARY = {".png"}
# Hosts that a reader may be sent to. Package indexes and mirrors depend on the machine and do not belong here.
HOSTS = {"arxiv.org", "github.com", "www.apache.org", "www.w3.org"}


@functools.cache
def tracked() -> tuple[pathlib.Path, ...]:
  """Every file under version control."""
  listing = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, timeout=60)
  if listing.returncode != 0:
    pytest.skip("not a git checkout: there are no tracked files to look at")
  files = tuple(ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file())
  assert ROOT / "pyproject.toml" in files
  return files


def found(pattern: str) -> list[str]:
  """The places where text files match `pattern`, as "path:line: match"."""
  matcher = re.compile(pattern)
  return [
    f"{path.relative_to(ROOT)}:{number}: {match.group()}"
    for path in tracked()
    if path.suffix not in BINARY
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    for match in matcher.finditer(line)
  ]


def test_text_is_ascii():
  assert found(r"[^\x00-\x7f]") == []


def test_no_path_of_one_machine():
  assert found(r"(?<![\w./~])/(" + "|".join(["work", "root", "Users", r"home/\w"]) + r")(?=/|\b)(?!\w)") == []


def test_urls_lead_to_known_places():
  hosts = found(r"https?://[^\s/)>\"'`]+")
  assert [hit for hit in hosts if hit.rpartition("//")[2] not in HOSTS] == []


def test_an_unfinished_thought_has_an_owner():
  assert found(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b(?!\(\w+\))") == []


# ---- the source code

LONGEST_FUNCTION = 60  # lines, with signature and docstring
READ_AS_A_PAGE = {"src/trainer/train.py: run"}  # may be longer
SHORTEST_REPETITION = 8  # lines


def sources() -> list[pathlib.Path]:
  return sorted((ROOT / "src").rglob("*.py"))


def long_functions(name: str, text: str) -> set[str]:
  """The functions in `text` with more than LONGEST_FUNCTION lines: "name: function"."""
  functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
  return {f"{name}: {node.name}" for node in functions if node.end_lineno - node.lineno >= LONGEST_FUNCTION}


def repetitions(texts: dict[str, str]) -> list[list[str]]:
  """Groups of places ("name:line") where the same SHORTEST_REPETITION lines start.

  Spaces do not count, nor do lines without a letter or digit.
  """
  places: dict[tuple[str, ...], list[str]] = {}
  for name, text in texts.items():
    lines = [(number, " ".join(line.split())) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if re.search(r"\w", line)]
    for start in range(len(lines) - SHORTEST_REPETITION + 1):
      block = tuple(line for _, line in lines[start : start + SHORTEST_REPETITION])
      places.setdefault(block, []).append(f"{name}:{lines[start][0]}")
  return [found for found in places.values() if len(found) > 1]


def test_functions_are_short():
  names = {str(path.relative_to(ROOT)): path.read_text() for path in sources()}
  too_long = set().union(*(long_functions(name, text) for name, text in names.items()))
  assert too_long <= READ_AS_A_PAGE


def test_no_block_of_code_stands_twice():
  assert repetitions({str(path.relative_to(ROOT)): path.read_text() for path in sources()}) == []


# ---- the lock

LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(python: str) -> dict[str, str]:
  """Package -> pinned version, as `python` on Linux gets them."""
  environment = {"python_version": python[: python.rindex(".")], "python_full_version": python, "sys_platform": "linux"}
  chosen = {}
  for line in LOCK.splitlines():
    if line and not line.startswith(("#", "    --hash=sha256:")):
      requirement = Requirement(line.removesuffix(" \\"))
      (specifier,) = requirement.specifier
      assert specifier.operator == "==" and not requirement.url, line
      if requirement.marker is None or requirement.marker.evaluate(environment):
        name = requirement.name.lower().replace("_", "-")
        assert name not in chosen, f"{name} is pinned twice for Python {python}"
        chosen[name] = specifier.version
  return chosen


def test_the_lock_names_versions_with_hashes_and_no_address():
  assert "://" not in LOCK
  pinned = re.findall(r"^[\w.-]+==[^\n]*\n", LOCK, re.MULTILINE)
  assert pinned == re.findall(r"^([\w.-]+==[^\n]* \\\n)(?: +--hash=sha256:[0-9a-f]{64})", LOCK, re.MULTILINE)
  assert LOCK.count("--hash=") > 10 * len(pinned), "hashes of some files are missing, as on a mirror"
  assert not re.search(r"^-", LOCK, re.MULTILINE), "an option such as an index belongs to the machine"


@pytest.mark.parametrize("python", ["3.11.0", "3.12.1", "3.13.0"])
def test_the_lock_pins_what_pyproject_asks_for(python):
  chosen = pins(python)
  extras = PROJECT["optional-dependencies"]
  for text in [*PROJECT["dependencies"], *(text for packages in extras.values() for text in packages)]:
    requirement = Requirement(text)
    name = requirement.name.lower().replace("_", "-")
    assert name in chosen, f"{text} is not in requirements.lock: its head says how to renew it"
    assert requirement.specifier.contains(chosen[name]), f"{text} but the lock has {chosen[name]}"


def imported_packages() -> set[str]:
  """Top-level names that src imports, those inside functions included."""
  names: set[str] = set()
  for path in (ROOT / "src").rglob("*.py"):
    for node in ast.walk(ast.parse(path.read_text())):
      if isinstance(node, ast.Import):
        names |= {alias.name.partition(".")[0] for alias in node.names}
      elif isinstance(node, ast.ImportFrom) and node.module:
        names.add(node.module.partition(".")[0])
  return names


@needs.workshop
def test_src_imports_every_core_dependency():
  """A package that no code imports does not belong in the core dependencies."""
  module = {"orbax-checkpoint": "orbax", "array-record": "array_record", "protobuf": "google", "pyyaml": "yaml"}
  needed = {Requirement(text).name for text in PROJECT["dependencies"]}
  imported = imported_packages()
  assert {name for name in needed if module.get(name, name) not in imported} == set()


def test_the_version_is_known_without_an_installation():
  """From a source tree alone, and without importing anything else."""
  code = "import sys, trainer; print(trainer.__version__, 'jax' in sys.modules)"
  command = [sys.executable, "-S", "-c", code]
  result = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT / "src")})
  assert (result.stdout, result.stderr) == (f"{trainer.__version__} False\n", "")
  assert re.fullmatch(r"\d+\.\d+\.\d+(\.\w+)?", trainer.__version__)


@pytest.mark.parametrize("extra", ["tpu", "gpu", "gcs"])
def test_an_installation_for_accelerators_can_write_to_gs(extra):
  assert "gcsfs" in {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}


# ---- the two commands


def test_commands_in_documents_use_the_environment():
  """A reader who has not activated the environment can copy every command."""
  plain = found(r"(?<![/\w])python -m (trainer|end_to_end|pytest)(?! config\.yml key=value)\b[^\n]*")
  assert [hit for hit in plain if re.match(r"(README|CONTRIBUTING|docs/.*)\.md:|configs/", hit)] == []


@needs.workshop
def test_every_path_that_the_documents_name_exists():
  """`src/...`, `configs/...` and the like in README.md, CONTRIBUTING.md and docs/, in backquotes or as a link."""
  missing = []
  for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
    if page.match("docs/how_to/add_*") or page.match("docs/benchmarks/*"):
      continue  # they name files that they make, and files of other projects
    text = page.read_text()
    linked = [(page.parent, target) for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text)]
    quoted = [(ROOT, path) for path in re.findall(r"`((?:src|configs|docs|tests|\.ci)/[\w./-]*\w)`", text)]
    missing += [f"{page.name}: {path}" for base, path in linked + quoted if not (base / path).exists()]
  assert missing == []
