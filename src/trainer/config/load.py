"""argv -> Config. Precedence, lowest first:

schema default < base_config parents < YAML < model YAML < command line. The values of a named model are fixed: a key to
which the user's YAML or the command line gives another value is an error, or wins with override_model_config=true.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from input_pipeline import folders, remote
from input_pipeline.places import Place
from input_pipeline.storage import is_address
from trainer.config import config_files, paths, validate
from trainer.config.errors import ConfigError, Problems, did_you_mean, shorten
from trainer.config.keys import (
  DILOCO,
  DILOCO_SWITCH,
  SWITCHES,
  Given,
  all_fields,
  all_keys,
  as_key,
  convert,
  is_answered,
  resolve,
)
from trainer.config.schema import MODEL_VALUES, Config, ModelSection, listed

USAGE = "Usage: python -m trainer CONFIG.yml key=value ..."


def load(argv: Sequence[str], *, check_paths: bool = True, repeats: bool = True) -> Config:
  """The resolved configuration of ["CONFIG.yml", "key=value", ...].

  Raises ConfigError with all independent mistakes. Reads files, creates none, touches no device. check_paths=False
  leaves out the checks of output and data folders, for tools that need only the numbers. repeats: of a key that is
  given twice the last value counts, for programs that append to arguments; False: two values are an error.
  """
  return load_with_origins(argv, check_paths=check_paths, repeats=repeats)[0]


def load_with_origins(
  argv: Sequence[str], *, check_paths: bool = True, repeats: bool = True
) -> tuple[Config, dict[str, str]]:
  """Like `load`, and {key: where its value was given}, such as "configs/quickstart.yml:5" or "command line".

  A key that has its default because nobody gave it a value is not in the second one.
  """
  if isinstance(argv, str) or not all(isinstance(argument, str) for argument in argv):
    raise TypeError(f"load takes a list of arguments, such as ['configs/base.yml', 'steps=5'], not {argv!r}")
  config_files.check_current_folder()
  path, given = _read(argv, repeats)
  given.update(_model_values(given, path))
  if not given.get("run_name", Given("", "")).value:
    given["run_name"] = Given(Path(path).stem, "the config file's name")
  given |= _tokenizer_of_parameters(given)
  given |= _services(given)
  given |= _local_steps(given)
  config = _build(given)
  problems = Problems()
  validate.check(config, problems)
  if check_paths:
    paths.check(config, problems)
  problems.raise_any()
  return config, {name: re.sub(r" line (\d+)$", r":\1", given[name].origin) for name in all_fields() if name in given}


def _read(argv: Sequence[str], repeats: bool) -> tuple[Path | Place, dict[str, Given]]:
  """The config file, and the values of the file and the command line by key."""
  if not argv or ("=" in argv[0] and not os.path.isfile(argv[0])) or argv[0].startswith("-"):
    found = f"{shorten(argv[0])}: the first argument" if argv else "The first argument"
    raise ConfigError(f"{found} must be a config file.\n{USAGE}; start from configs/base.yml.")
  problems = Problems()
  path: Path | Place | None = None
  lower: dict[str, Given] = {}
  with problems.collect():
    if is_address(argv[0]):
      remote.require_address(argv[0], argv[0])
      path = Place(argv[0])
    else:
      path = config_files.find(argv[0], config_files.search_folders(), "config file")
    lower = _read_with_parents(path, ())
  command = _command_line(argv, problems, repeats)
  problems.raise_any()
  assert path is not None
  return path, _over(_without_useless(lower, command), command)


def _command_line(argv: Sequence[str], problems: Problems, repeats: bool) -> dict[str, Given]:
  """The values of the arguments after the config file, by key."""
  values: dict[str, Given] = {}
  left = list(argv[1:])
  while left:
    argument = left.pop(0)
    given, equals, value = argument.partition("=")
    name = given.lstrip("-")
    text = value if equals else None
    if not equals and (argument.startswith("--") or is_answered(name)):
      text = _detached(left)
    with problems.collect():
      if name.replace("_", "-").lstrip("-") == "print-config":
        raise ConfigError(f"{shorten(argument)}: --print-config takes no value.\nWrite --print-config alone.")
      if name == config_files.PARENT_KEY:
        raise ConfigError(f"{shorten(argument)}: {name} belongs in a YAML file, not here.\nWrite it in {argv[0]}.")
      if not name or not (equals or argument.startswith("-") or is_answered(name)):
        raise ConfigError(f"{shorten(argument)}: expected key=value after the config file.\n{USAGE}")
      name, text = as_key(name, text)
      key = resolve(name, "command line")
      if text is None:
        raise ConfigError(f"{shorten(argument)}: the key {key.name} needs a value.\nWrite {key.name}=VALUE.")
      found = convert(key, text, "command line")
      if not repeats and key.name != "custom_remat" and values.get(key.name, found) != found:
        raise ConfigError(
          f"{shorten(argument)}: {key.name} is given twice, first with {shorten(str(values[key.name].value))}.\n"
          "Remove one of them."
        )
      values = _over(values, {key.name: found})
  return values


def _detached(left: list[str]) -> str | None:
  """Takes the value of `--key value` or `key = value` from the arguments that are left; None: there is none."""
  if left and left[0] == "=":
    left.pop(0)
  if not left or left[0].startswith("--") or "=" in left[0].lstrip("="):
    return None
  return left.pop(0).lstrip("=")


def _read_with_parents(path: Path | Place, children: tuple[str, ...], *, of_model: bool = False) -> dict[str, Given]:
  """The values of a YAML file over those of its base_config, which may have a base_config too. of_model: the file that
  model_name names."""
  if os.path.realpath(path) in children:
    raise ConfigError(f"{config_files.shown(path)}: its base_config leads back to itself.\nRemove a base_config line.")
  raw = config_files.read_yaml(path)
  parent, _ = raw.pop(config_files.PARENT_KEY, ("", ""))
  problems = Problems()
  values: dict[str, Given] = {}
  # base.yml, an edited copy of it, and config.yml of a run list every model key.
  is_table = ModelSection.model_fields.keys() - MODEL_VALUES <= raw.keys()
  entries = _typed(raw, problems, of_model=of_model or is_table)
  with problems.collect():
    if parent is None:
      raise ConfigError(f"{config_files.shown(path)}: base_config is a list or a mapping.\nGive one file.")
    if parent:
      beside = [] if isinstance(path, Place) else [path.parent]
      folders = [*beside, config_files.package_root() / "configs"]
      parent_file = config_files.find(parent, folders, "base_config")
      values = _read_with_parents(parent_file, (*children, os.path.realpath(path)), of_model=of_model)
  problems.raise_any()
  if is_table and not _is_resolved(entries, path, children):  # a default that it repeats is not a choice of the user
    repeats = lambda name, value: name in all_fields() and value.value == all_fields()[name].default
    entries = {name: replace(value, explicit=not repeats(name, value)) for name, value in entries.items()}
  return _over(_without_useless(values, entries), entries)


def _over(lower: dict[str, Given], higher: dict[str, Given]) -> dict[str, Given]:
  """`lower` with the values of `higher`, which has precedence. For custom_remat this holds for each activation."""
  values = {name: value for name, value in lower.items() if name not in SWITCHES or "services" not in higher} | higher
  if (name := "custom_remat") in lower.keys() & higher.keys():
    values[name] = replace(higher[name], value=f"{lower[name].value},{higher[name].value}")
  return values


def _without_useless(lower: dict[str, Given], higher: dict[str, Given]) -> dict[str, Given]:
  """`lower` without the values of keys that a choice in `higher`, which has precedence, disables.

  A user who gives eval_steps=0 over a YAML need not know that the YAML has an eval_interval, and cannot remove it.
  """
  useless = {
    name
    for choice, needed, names in (*validate.EFFECTS, ("eval_steps", range(1, sys.maxsize), "eval_interval"))
    if choice in higher and higher[choice].explicit and higher[choice].value not in needed
    for name in names.split()
  }
  return {name: value for name, value in lower.items() if name not in useless}


def _is_resolved(entries: dict[str, Given], path: Path | Place, children: tuple[str, ...]) -> bool:
  """Whether --print-config has written this file, which has every model key and names a model.

  Else it is a copy of base.yml to which a model_name was added. A printed file has the model's values, and some are no
  defaults; the copy has only defaults. Where the copy has a default, the model's value counts. Where a printed file has
  one, the default counts: the user has replaced the model's value, with override_model_config.
  """
  if not entries["override_model_config"].value or entries["model_name"].value == "default":
    return False
  model_path = _find_model(str(entries["model_name"].value), entries["model_name"].origin, path)
  model = _read_with_parents(model_path, (*children, os.path.realpath(path)), of_model=True)
  models = {name: value.value for name, value in model.items() if name in entries}
  return any(entries[name].value == value != all_fields()[name].default for name, value in models.items())


def _typed(raw: dict[str, tuple[str | None, str]], problems: Problems, *, of_model: bool) -> dict[str, Given]:
  """The entries of a YAML file as values of their keys. of_model: in a file that may have values of a model."""
  values: dict[str, Given] = {}
  for name, (text, origin) in raw.items():
    with problems.collect():
      given, (name, text) = name, as_key(name, text)
      if text is None and not is_answered(name):
        raise ConfigError(f"{origin}: {shorten(name)} holds a list or a mapping.\nKeys are flat: write `key: value`.")
      key = resolve(name, origin, of_model=of_model)
      if text is None:
        raise ConfigError(
          f"{origin}: {key.name} holds a list or a mapping, and a key has one value.\n"
          f"Write `{key.name}: value`. Several text files go into one folder."
        )
      if key.name in values and given == name:  # several activations may be given
        raise ConfigError(f"{key.name} is given twice: {values[key.name].origin} and {origin}.\nRemove one of them.")
      values = _over(values, {key.name: convert(key, text, origin)})
  return values


def _model_values(given: dict[str, Given], config_path: Path | Place) -> dict[str, Given]:
  """The values that the named model adds to `given` or replaces there."""
  name = str(given["model_name"].value) if "model_name" in given else "default"
  if name == "default":
    return {}
  path = _find_model(name, given["model_name"].origin, config_path)
  model = _read_with_parents(path, (), of_model=True)
  allowed = ModelSection.model_fields.keys() - {"model_name", "override_model_config"}
  problems = Problems()
  problems.add(
    f"{value.origin}: {key} is not a key of the model.\nMove it to the configuration's own YAML."
    for key, value in model.items()
    if key not in allowed
  )
  problems.raise_any()
  override = "override_model_config" in given and bool(given["override_model_config"].value)
  explicit = {key: value for key, value in given.items() if value.explicit}
  conflicts = {key: value for key, value in model.items() if key in explicit and explicit[key].value != value.value}
  if conflicts and not override:
    shown = [
      f"{key}={given[key].value} ({given[key].origin}) instead of {value.value}" for key, value in conflicts.items()
    ]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    raise ConfigError(
      f"model_name={shorten(name)} fixes these keys in {config_files.shown(path)}: {'; '.join(shown[:4])}{more}.\n"
      "Remove the keys, or set override_model_config=true to use your values."
    )
  return {key: value for key, value in _without_useless(model, explicit).items() if key not in conflicts}


def _tokenizer_of_parameters(given: dict[str, Given]) -> dict[str, Given]:
  """The tokenizer beside the parameters of load_parameters_path, with the tokens that its run had around documents,
  unless another is given."""
  place = given.get("load_parameters_path")
  chosen = {name for name, value in given.items() if value.explicit}
  if place is None or not place.value or chosen & {"tokenizer_type", "tokenizer_path"}:
    return {}
  given_folder = str(place.value)
  folders_of_it = dict.fromkeys(path.rstrip("/") for path in (given_folder, re.sub(r"@[0-9]+$", "", given_folder)))
  origin = f"load_parameters_path, {place.origin}"
  records = ("tokenizer.json", "trainer_export.json"), ("tokenizer/tokenizer.json", "config.yml")
  for folder, (name, record) in itertools.product(folders_of_it, records):
    if paths.is_file("load_parameters_path", f"{folder}/{name}"):
      found = {"tokenizer_type": "bpe", "tokenizer_path": f"{folder}/{name}"}
      if paths.is_file("load_parameters_path", f"{folder}/{record}"):
        told = config_files.read_yaml(config_files.path_of(f"{folder}/{record}"))
        found |= {key: text for key in ("bos_token", "eos_token") if (text := told.get(key, ("", ""))[0])}
      return {key: Given(value, origin) for key, value in found.items() if key not in chosen}
  return {}


def _services(given: dict[str, Given]) -> dict[str, Given]:
  """The key services after MaxText's switches, which are removed from `given`."""
  if not (switches := {name: given.pop(name) for name in SWITCHES if name in given}):
    return {}
  default = all_keys()["services"].default
  services = listed(str(given["services"].value if "services" in given else default))
  for name, switch in switches.items():
    services = [service for service in services if service != SWITCHES[name] or switch.value]
    services += [SWITCHES[name]] * (bool(switch.value) and SWITCHES[name] not in services)
  origin = ", ".join(f"{name}={str(switch.value).lower()} ({switch.origin})" for name, switch in switches.items())
  return {"services": Given(",".join(services), origin)}


def _local_steps(given: dict[str, Given]) -> dict[str, Given]:
  """The keys of local steps after MaxText's keys of DiLoCo, which are removed from `given`. As in MaxText, they have no
  effect with enable_diloco=false; without this switch, they mean what they say."""
  switch = given.pop(DILOCO_SWITCH, None)
  values = {name: given.pop(name) for name in DILOCO if name in given}
  found: dict[str, Given] = {}
  for name, (key, default) in DILOCO.items():
    chosen, value = given.get(key), values.get(name)
    if switch is not None and (value is None or not switch.value):
      of_switch = default if switch.value else all_fields()[key].default
      origin = f"{DILOCO_SWITCH}={str(switch.value).lower()}, {switch.origin}"
      value = Given(of_switch, origin, explicit=not switch.value)
    if chosen is not None and chosen.explicit:
      if value is not None and value.explicit and value.value != chosen.value:
        raise ConfigError(
          f"{name}={value.value} ({value.origin}): {key}={chosen.value} ({chosen.origin}) is the same key with another "
          "value.\nRemove one of them."
        )
    elif value is not None:
      found[key] = value
  return found


def _find_model(name: str, origin: str, config_path: Path | Place) -> Path:
  if "/" in name or name.endswith((".yml", ".yaml")):
    return config_files.find(
      name, [Path(config_path).parent, *config_files.search_folders()], "model file (model_name)"
    )
  folders.as_path(f"{name}.yml", "model_name=")
  places = [root / "configs" / "models" for root in config_files.search_folders()]
  places.append(Path(config_path).parent / "models")
  for folder in places:
    if os.path.isfile(folder / f"{name}.yml"):
      return folder / f"{name}.yml"
  names = sorted({entry.stem for folder in places if os.path.isdir(folder) for entry in folder.glob("*.yml")})
  raise ConfigError(
    f"model_name={shorten(name)} ({origin}): there is no such model.\n{did_you_mean(name, names)}"
    f"Models: {', '.join(names)}, or a path to your own YAML, or default."
  )


def _build(given: dict[str, Given]) -> Config:
  """Config with `given` over the defaults. Every value has been converted and is within its range."""
  sections: dict[str, dict[str, object]] = {name: {} for name in Config.model_fields}
  for name, value in given.items():
    sections[all_fields()[name].section][name] = value.value
  config = Config.model_validate(sections)
  # In one form: a table of MaxText's keys with their defaults is no choice.
  default, chosen = ModelSection().activations, config.model.activations
  text = ",".join(f"{name}={choice}" for name, choice in chosen.items() if choice != default.get(name, "remat"))
  return config.with_values(custom_remat=text)
