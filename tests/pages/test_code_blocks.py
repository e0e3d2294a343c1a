"""The commands, YAML and links of the documents work: commands are parsed by the code that would run them."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import re
import shlex

import pytest
import yaml
from tests.support import needs

from trainer.config.keys import all_keys, preflight_options
from trainer.config.load import load
from trainer.config.schema import PreflightOptions

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONFIGURED = {"trainer", "trainer.tools.preflight", "trainer.tools.elastic_demo", "trainer.tools.tokenize"}
CONFIGURED |= {"trainer.launch.local", "trainer.launch.ray"}


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
  """(language, text) of the code blocks of a page."""
  return re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str, tuple[str, ...]]]:
  """(page, module, arguments) of every `python -m MODULE ...` and `torchrun ... -m MODULE ...` in a code block."""
  found = []
  for page in PAGES:
    if page.match("docs/how_to/add_*") or page.match("docs/how_to/change_*"):
      continue  # test_how_to.py runs them, on the code that they change
    for language, text in blocks(page):
      for line in re.sub(r" *\\\n *", " ", text).splitlines() if language in ("", "bash") else []:
        if match := re.search(r"(?:/python|torchrun .*?) -m (trainer[\w.]*|end_to_end[\w.]*)((?: +(?!&).*)?)", line):
          words = re.split(r"  +[A-Za-z0-9]| &", match[2].rstrip())[0]  # a remark after two spaces, or another command
          words = re.sub(r"\b(BUCKET|REGISTRY|CLUSTER|PROJECT)\b", lambda name: name[0].lower(), words)
          found.append((page.name, match[1], tuple(shlex.split(words, comments=True))))
  return found


COMMANDS = commands()


def test_the_documents_have_commands():
  assert len(COMMANDS) > 20 and {"trainer", "trainer.launch.manifest"} <= {module for _, module, _ in COMMANDS}


def file_of(module: str) -> pathlib.Path:
  spec = importlib.util.find_spec(module)
  assert spec is not None and spec.origin is not None, module
  path = pathlib.Path(spec.origin)
  return path.with_name("__main__.py") if path.name == "__init__.py" else path


def literals(module: str) -> set[str]:
  """Every text in the source of a module and of the files in its folder: the options are among them."""
  path = file_of(module)
  return {
    node.value
    for file in path.parent.glob("*.py")
    for node in ast.walk(ast.parse(file.read_text()))
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
  }


def split(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
  """The config file and its keys, and the options. Words that stand for something get a value."""
  words = ["configs/quickstart.yml" if word in ("CONFIG.yml", "my_run.yml") else word for word in arguments]
  names = {word.partition("=")[0].replace(".", "_").replace("preflight_", "", 1) for word in words if "=" in word}
  options = {name.replace("preflight_", "", 1) for name in PreflightOptions.model_fields}
  assert names - {"key"} <= {*all_keys(), *options}, names
  keys = [word for word in words if "=" in word and not word.startswith("-") and word != "key=value"]
  return [word for word in words if word.endswith(".yml")] + keys, [word for word in words if word.startswith("--")]


@pytest.mark.parametrize(("page", "module", "arguments"), COMMANDS, ids=[f"{c[0]}-{i}" for i, c in enumerate(COMMANDS)])
def test_a_command_of_the_documents_is_accepted(page, module, arguments, capsys):
  if {*module.split(".")} & {*needs.deleted}:
    pytest.skip("a command that this fork has deleted")
  if module == "trainer.launch.manifest":
    from trainer.launch.manifest.__main__ import main as manifest  # here: a fork may have deleted it

    assert manifest(list(arguments)) == 0, capsys.readouterr().err
    return
  if module in CONFIGURED and any(word.endswith(".yml") for word in arguments):
    config, options = split(arguments)
    load(preflight_options(config)[1] if module == "trainer.tools.preflight" else config, check_paths=False)
  else:
    options = [word for word in arguments if word.startswith("--")]
  known = literals(module) | {"--help", "--print-config"}
  assert {option.partition("=")[0] for option in options} <= known, f"{page}: {module} has no such option"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_of_the_documents_is_valid(page):
  for language, text in blocks(page):
    if language == "yaml":
      assert isinstance(yaml.safe_load(text), dict)


def anchors(page: pathlib.Path) -> set[str]:
  """The names that a link can give a heading: lower case, words joined by -."""
  text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
  titles = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
  return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page):
  broken = []
  for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
    path, _, anchor = target.partition("#")
    file = (page.parent / path) if path else page
    if not file.exists() or (anchor and anchor not in anchors(file)):
      broken.append(target)
  assert broken == []
