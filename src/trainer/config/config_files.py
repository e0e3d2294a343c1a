"""Configuration files: where they are found, and how a flat YAML mapping is read with its line numbers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from input_pipeline import folders, storage
from input_pipeline.places import Place
from input_pipeline.storage import StorageError
from trainer.config.errors import ConfigError, Problems, nearest, shorten

PARENT_KEY = "base_config"
CONFIG_FILE = "config.yml"  # of a run: every key with its value


def package_root() -> Path:
  """The folder of the package, which has configs/ in a clone and in an installation."""
  return Path(__file__).resolve().parents[1]


def is_in_package(path: str) -> bool:
  """Whether every installation has the file, because it belongs to this package."""
  return ".." not in Path(path).parts and not Path(path).is_absolute() and (package_root() / path).is_file()


def check_current_folder() -> None:
  """Raises ConfigError if the current folder has been removed: relative paths mean nothing there."""
  try:
    Path.cwd()
  except FileNotFoundError:
    raise ConfigError("The current folder no longer exists.\nChange to a folder that exists: cd /") from None


def path_of(value: str) -> Path | Place:
  """The path of a local file, or of one at an address such as gs://BUCKET/NAME."""
  return Place(value) if storage.is_address(value) else folders.as_path(value, "file ")


def search_folders() -> list[Path]:
  """The folders in which a relative path is searched, in order: current folder, package."""
  return [Path.cwd(), package_root()]


def find(path: str, roots: Sequence[Path], what: str) -> Path:
  """The first existing file `folder/path`; ConfigError with the folders and similar files if there is none."""
  given = folders.as_path(path, f"{what} ")
  candidates = [root / given for root in roots]
  for candidate in candidates:
    if os.path.isfile(candidate):  # unlike Path.is_file, False in a folder without permission to search
      return candidate
  for candidate in candidates:
    if os.path.isdir(candidate):
      raise ConfigError(f"{path}: the {what} must be a YAML file, and this is a folder.\nGive a file in it.")
  siblings = {
    str(Path(path).parent / entry.stem): str(Path(path).parent / entry.name)
    for candidate in candidates
    if os.path.isdir(candidate.parent) and os.access(candidate.parent, os.R_OK)
    for entry in sorted(candidate.parent.iterdir())
    if entry.suffix in (".yml", ".yaml")
  }
  near = nearest(str(Path(path).with_suffix("")), siblings)  # a common .yml makes no two names similar
  there = f"YAML files there: {', '.join(list(siblings.values())[:8])}. " if siblings else ""
  hint = f"Did you mean {siblings[near]}? " if near else there
  names = {Path.cwd(): "here", package_root(): f"in {package_root()}"}
  places = " or ".join(dict.fromkeys(names.get(root) or shown(root) for root in roots))
  raise ConfigError(
    f"{path}: there is no such {what}.\n{hint}A relative path starts {places}; the program's own files are in "
    "configs/, such as configs/base.yml."
  )


def shown(path: Path | Place) -> str:
  """The path for a message: relative to the current folder or to the package if it is below one of them."""
  if not isinstance(path, Path):
    return str(path)
  for root in (Path.cwd(), package_root()):
    if path.is_relative_to(root):
      return str(path.relative_to(root))
  return str(path)


def read_yaml(path: Path | Place) -> dict[str, tuple[str | None, str]]:
  """{key: (text, origin)} of a flat YAML mapping; origin is file and line.

  YAML's null is the empty text. A list or a mapping is None.
  """
  root = _composed(path)
  if root is None:
    raise ConfigError(f"{shown(path)}: has no keys.\nWrite one `key: value` on each line, or {{}} for the defaults.")
  return _flat_mapping(root, shown(path))


def read_groups(path: Path) -> dict[str, tuple[dict[str, tuple[str | None, str]], str]]:
  """{name: (flat mapping as of `read_yaml`, origin)} of a YAML or JSON mapping from names to flat mappings."""
  root = _composed(path)
  if root is None:
    return {}
  origins = _flat_mapping(root, shown(path))
  groups = {}
  for key_node, value_node in root.value:
    origin = origins[key_node.value][1]
    if not isinstance(value_node, yaml.MappingNode):
      raise ConfigError(f"{origin}: {shorten(key_node.value)} is not a mapping.\nWrite its keys below it, indented.")
    groups[key_node.value] = _flat_mapping(value_node, shown(path)), origin
  return groups


def _composed(path: Path | Place) -> yaml.MappingNode | None:
  """The mapping in a YAML file; None for an empty file."""
  name = shown(path)
  try:
    root = yaml.compose(path.read_bytes().decode("utf-8"), Loader=yaml.SafeLoader)
  except yaml.MarkedYAMLError as error:
    line = error.problem_mark.line + 1 if error.problem_mark else 1
    problem = error.problem or error.context
    raise ConfigError(f"{name} line {line}: not valid YAML: {problem}.\nWrite one `key: value` on each line.") from None
  except RecursionError:
    raise ConfigError(f"{name}: is nested too deep.\nKeys are flat: write one `key: value` on each line.") from None
  except StorageError:
    raise
  except FileNotFoundError:
    raise ConfigError(f"{name}: there is no such file.") from None
  except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
    reason = str(error).splitlines()[0]
    raise ConfigError(f"{name}: cannot be read as YAML text: {reason}.\nGive a UTF-8 text file.") from None
  if root is not None and not isinstance(root, yaml.MappingNode):
    raise ConfigError(f"{name}: holds no `key: value` lines.\nA configuration is a flat mapping; see configs/base.yml.")
  return root


def _flat_mapping(root: yaml.MappingNode, name: str) -> dict[str, tuple[str | None, str]]:
  """The entries of a mapping whose keys are scalars and unique; ConfigError with all other keys."""
  result: dict[str, tuple[str | None, str]] = {}
  problems = Problems()
  for key_node, value_node in root.value:
    line = key_node.start_mark.line + 1
    origin = f"{name} line {line}"
    key = key_node.value
    if not isinstance(key_node, yaml.ScalarNode):
      problems.add([f"{origin}: the key is a list or a mapping.\nWrite one `key: value` on each line."])
    elif key in result:
      problems.add([f"{shorten(key)} is given twice: {result[key][1]} and line {line}.\nRemove one of them."])
    elif not isinstance(value_node, yaml.ScalarNode):
      result[key] = (None, origin)
    else:
      null = value_node.style is None and value_node.value in ("", "~", "null", "Null", "NULL")
      result[key] = ("" if null else value_node.value, origin)
  problems.raise_any()
  return result
