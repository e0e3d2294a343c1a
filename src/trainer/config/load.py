"""argv -> Config. Precedence, lowest first:

schema default < base_config parents < YAML < model YAML < command line. A named model's values are fixed: a key that
the user's YAML or the command line gives with another value is an error, or wins with override_model_config=true.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from trainer.config import files, paths, validate
from trainer.config.errors import ConfigError, did_you_mean, shorten
from trainer.config.keys import Given, all_keys, convert, resolve
from trainer.config.schema import Config, ModelSection

USAGE = "Usage: python -m trainer CONFIG.yml key=value ..."


def load(argv: list[str], *, check_paths: bool = True) -> Config:
  """The resolved configuration of `CONFIG.yml key=value ...`; ConfigError on any mistake.

  Reads files, creates none; touches no device. check_paths=False leaves out the checks of output and data folders,
  for tools that only need the numbers.
  """
  files.check_here()
  path, command = _split(argv)
  given = _with_effect(_read_with_parents(path, ()), command) | command
  given.update(_model_values(given, path))
  if not given.get("run_name", Given("", "")).value:
    given["run_name"] = Given(path.stem, "the config file's name")
  config = _build(given)
  validate.check(config)
  if check_paths:
    paths.check_paths(config)
  return config


def _split(argv: list[str]) -> tuple[Path, dict[str, Given]]:
  """The config file and the command line's values by key."""
  if not argv or "=" in argv[0]:
    found = f"{shorten(argv[0])}: the first argument" if argv else "The first argument"
    raise ConfigError(f"{found} must be a config file.\n{USAGE}; start from configs/base.yml.")
  path = files.find(argv[0], files.search_folders(), "config file")
  command: dict[str, Given] = {}
  for argument in argv[1:]:
    name, equals, text = argument.partition("=")
    name = name.lstrip("-") if equals else name
    if not equals:
      raise ConfigError(f"{shorten(argument)}: expected key=value after the config file.\n{USAGE}")
    if name.replace("_", "-") == "print-config":
      raise ConfigError(f"{shorten(argument)}: --print-config takes no value.\nWrite --print-config alone.")
    if name == files.PARENT_KEY:
      raise ConfigError(f"{argument}: {name} belongs in a YAML file, not here.\nWrite it in {argv[0]}.")
    key = resolve(name, "command line")
    # The last one wins, as with MaxText: scripts append to the arguments that they were given.
    command[key.name] = convert(key, text, "command line")
  return path, command


def _read_with_parents(path: Path, children: tuple[Path, ...]) -> dict[str, Given]:
  """The values of a YAML file over those of its base_config, that one's base_config, ..."""
  if path.resolve() in children:
    raise ConfigError(f"{files.shown(path)}: its base_config leads back to itself.\nRemove a base_config line.")
  raw = files.read_yaml(path)
  parent, _ = raw.pop(files.PARENT_KEY, ("", ""))
  values: dict[str, Given] = {}
  if parent:
    folders = [path.parent, files.repository_root() / "configs"]
    values = _read_with_parents(files.find(parent, folders, "base_config"), (*children, path.resolve()))
  own = _typed(raw)
  # base.yml, or an edited copy of it, lists every model key: where it repeats a default it chooses nothing.
  table = ModelSection.model_fields.keys() <= own.keys() and not _is_resolved(own, path, children)
  for name, value in own.items():
    restated = table and value.value == all_keys()[name].default
    own[name] = replace(value, explicit=not restated)
  return _with_effect(values, own) | own


def _with_effect(lower: dict[str, Given], higher: dict[str, Given]) -> dict[str, Given]:
  """`lower` without the values that a choice in `higher`, which goes over it, leaves without an effect.

  Who says eval_steps=0 over a YAML need not know that it has an eval_interval, and cannot take that line out.
  """
  useless = {
    name
    for choice, needed, names in (*validate.EFFECTS, ("eval_steps", range(1, sys.maxsize), "eval_interval"))
    if choice in higher and higher[choice].explicit and higher[choice].value not in needed
    for name in names.split()
  }
  return {name: value for name, value in lower.items() if name not in useless}


def _is_resolved(own: dict[str, Given], path: Path, children: tuple[Path, ...]) -> bool:
  """Whether a file with every model key was resolved from the model that it names, as --print-config writes it.

  Then a default in it is what won over the model with override_model_config. A copy of base.yml to which a model_name
  was added is told from it by its values: where the model has another value than the default, the copy never has it.
  """
  if not own["override_model_config"].value or own["model_name"].value == "default":
    return False
  model_path = _find_model(str(own["model_name"].value), own["model_name"].origin, path)
  model = _read_with_parents(model_path, (*children, path.resolve()))
  return any(own[name].value == value.value != all_keys()[name].default for name, value in model.items() if name in own)


def _typed(raw: dict[str, tuple[str, str]]) -> dict[str, Given]:
  values: dict[str, Given] = {}
  for name, (text, origin) in raw.items():
    key = resolve(name, origin)
    if key.name in values:
      raise ConfigError(f"{key.name} is given twice: {values[key.name].origin} and {origin}.\nRemove one.")
    values[key.name] = convert(key, text, origin)
  return values


def _model_values(given: dict[str, Given], config_path: Path) -> dict[str, Given]:
  """The values that the named model adds to or replaces in `given`."""
  name = str(given["model_name"].value) if "model_name" in given else "default"
  if name == "default":
    return {}
  path = _find_model(name, given["model_name"].origin, config_path)
  model = _read_with_parents(path, ())
  allowed = ModelSection.model_fields.keys() - {"model_name", "override_model_config"}
  for key, value in model.items():
    if key not in allowed:
      raise ConfigError(f"{value.origin}: {key} is not a key of the model.\nMove it to the configuration's own YAML.")
  override = "override_model_config" in given and bool(given["override_model_config"].value)
  explicit = {key: value for key, value in given.items() if value.explicit}
  conflicts = {key: value for key, value in model.items() if key in explicit and explicit[key].value != value.value}
  if conflicts and not override:
    shown = [f"{key}={given[key].value} ({given[key].origin}), {value.value} there" for key, value in conflicts.items()]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    raise ConfigError(
      f"model_name={name} fixes these keys in {files.shown(path)}: {'; '.join(shown[:4])}{more}.\n"
      "Remove the keys, or let them win with override_model_config=true."
    )
  return {key: value for key, value in _with_effect(model, explicit).items() if key not in conflicts}


def _find_model(name: str, origin: str, config_path: Path) -> Path:
  if "/" in name or name.endswith((".yml", ".yaml")):
    return files.find(name, [config_path.parent, *files.search_folders()], "model file (model_name)")
  folders = [folder / "configs" / "models" for folder in files.search_folders()] + [config_path.parent / "models"]
  for folder in folders:
    if (folder / f"{name}.yml").is_file():
      return folder / f"{name}.yml"
  names = sorted({entry.stem for folder in folders if folder.is_dir() for entry in folder.glob("*.yml")})
  raise ConfigError(
    f"model_name={name} ({origin}): there is no such model.\n{did_you_mean(name, names)}"
    f"Models: {', '.join(names)}, or a path to your own YAML, or default."
  )


def _build(given: dict[str, Given]) -> Config:
  """Config with `given` over the defaults; the schema's ranges are checked here."""
  sections: dict[str, dict[str, object]] = {name: {} for name in Config.model_fields}
  for name, value in given.items():
    sections[all_keys()[name].section][name] = value.value
  try:
    return Config.model_validate(sections)
  except ValidationError as error:
    name = str(error.errors()[0]["loc"][-1])
    key, value = all_keys()[name], given[name]
    raise ConfigError(
      f"{name}={shorten(str(value.value))} ({value.origin}): {name} must be {key.bounds}.\n"
      f"Default: {key.default}. {key.description}"
    ) from None
