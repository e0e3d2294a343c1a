"""Checks of output and data folders. They create nothing."""

from __future__ import annotations

import importlib.util
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from input_pipeline import data_files, places, remote, storage
from input_pipeline.folders import LeftOut, as_path
from input_pipeline.options import DataOptions
from trainer.config import mixture_files
from trainer.config.errors import ConfigError, Problems, how_to_install, shorten
from trainer.config.schema import Config, DataSection, ObserveSection

# The packages of which one is needed to write to each kind of address. Other object stores are refused: whether commits
# are reliable there is untested.
_WRITERS = {"gs": ("gcsfs", "tensorflow"), "s3": ("s3fs",)}
_EXTRA_OF = {"gs": "gcs", "s3": "s3"}
# The files and folders of a run's folder.
_RUN_FILES = (
  "log.txt events.jsonl metrics.jsonl receipt.jsonl config.yml goodput.json goodput_records.jsonl report.html loss.png"
)
_RUN_FOLDERS = "checkpoints tokenizer tensorboard metrics profile wandb"
# Service that needs a package: the package. The extra of this project that has it has the service's name.
_PACKAGES = {"wandb": "wandb", "goodput": "ml_goodput_measurement"}


def extras(observe: ObserveSection) -> Iterator[tuple[str, str, str]]:
  """(key=value, package, extra) of each key whose value needs a package of an extra."""
  for service, package in _PACKAGES.items():
    if observe.sends_to(service):
      yield f"services={service}", package, service


def check(config: Config, problems: Problems) -> None:
  """Adds to `problems` output folders that cannot be written, packages that are missing, data that cannot be read."""
  run, checkpoint, data = config.run, config.checkpoint, config.data
  local = checkpoint.local_checkpoint_directory
  with problems.collect():
    _check_run_name(run.run_name)
    _check_run(config)
  with problems.collect():
    _check_parameters(config)
  with problems.collect():
    if run.jax_cache_dir:
      # Only its kind is checked: JAX warns if it cannot write there, and a read-only home must not prevent training.
      _check_folder("jax_cache_dir", run.jax_cache_dir, run.jax_cache_dir)
  with problems.collect():
    if checkpoint.enable_emergency_checkpoint and local and "://" not in local:
      _check_output("local_checkpoint_directory", local, local)
  for given, package, extra in extras(config.observe):
    with problems.collect():
      if not is_installed(package):
        raise ConfigError(
          f"{given}: needs the package {package}, which is not installed.\n{how_to_install(extra)}, or remove the key."
        )
  if data.dataset_type != "synthetic":
    _check_sources(data, problems)


def _check_run(config: Config) -> None:
  """The run's folder can be written, and Orbax can find checkpoints in it."""
  run = config.run
  if not run.base_output_directory:
    raise ConfigError("base_output_directory is empty: a run needs a folder.\nUse base_output_directory=runs.")
  _check_output("base_output_directory", run.base_output_directory, config.run_directory)
  _check_run_directory(config.run_directory)
  if config.checkpoint.enable_checkpointing:
    _check_pattern("run_name", run.run_name, run.run_name)
    _check_pattern("base_output_directory", run.base_output_directory, str(places.at(config.run_directory)))


def _check_parameters(config: Config) -> None:
  """load_parameters_path is a folder, unless the run has begun: a restored run ignores it."""
  place = config.run.load_parameters_path
  begun = any(os.path.exists(f"{config.run_directory}/{name}") for name in ("run_id", "checkpoints"))
  if place.startswith("s3://"):
    remote.require_bucket(f"load_parameters_path={shorten(place)}", place)
  if not place or storage.is_address(place) or begun:
    return
  folders = (re.sub(r"@[0-9]+$", "", place), place)
  if not any(os.path.isdir(as_path(folder, "load_parameters_path=")) for folder in folders):
    remote.require_address(f"load_parameters_path={shorten(place)}", place, None)
    raise ConfigError(
      f"load_parameters_path={shorten(place)}: there is no such folder.\n"
      "Give a Hugging Face folder, RUN_DIR or RUN_DIR@STEP."
    )


def _check_sources(data: DataSection, problems: Problems) -> None:
  """The data of the run, of each source of its mixture and of each evaluation set can be read."""
  if data.dataset_type == "grain" and not (
    data.grain_train_files or data.grain_dataset or data.grain_train_mixture_config_path
  ):
    problems.add(["dataset_type=grain: needs data to train on.\nSet grain_train_files, or grain_dataset."])
  _check_data(data, problems)
  sources = lambda: {entry.name: entry.options for entry in mixture_files.read(data)}
  sets = lambda: mixture_files.read_eval_sets(data)
  for what, read in (("source {} of the mixture: ", sources), ("set {} of eval_sets: ", sets)):
    with problems.collect():
      for name, options in read().items():
        with problems.collect(what.format(name)):
          of_source = Problems()
          _check_data(options, of_source)
          of_source.raise_any()


def _check_data(data: DataOptions, problems: Problems) -> None:
  match data.dataset_type:
    case "text":
      for name in ("dataset_path", "eval_dataset_path"):
        with problems.collect():
          if getattr(data, name):
            _check_text(name, getattr(data, name))
    case "grain":
      for name in ("grain_train_files", "grain_eval_files"):
        with problems.collect():
          if value := getattr(data, name):
            _check_placeholder(name, value)
            data_files.find(name, value, data.grain_file_type)
    case "tfds":
      with problems.collect():
        _check_tfds(data.dataset_path)
    case "hf":
      with problems.collect():
        _check_placeholder("dataset_path", data.dataset_path)
        root = as_path(data.dataset_path, "dataset_path=") if data.dataset_path else Path()
        if not any(os.path.isfile(root / name) for name in ("dataset_dict.json", "state.json")):
          raise ConfigError(
            f"dataset_path={shorten(data.dataset_path)}: has neither dataset_dict.json nor state.json.\n"
            "Give a local folder that datasets has saved with save_to_disk."
          )
  with problems.collect():
    path = data.tokenizer_path if data.tokenizer_type == "bpe" else ""
    inside = f"{path.rstrip('/')}/tokenizer.json"
    if path and not is_file("tokenizer_path", path) and (storage.is_address(path) or not is_file("", inside)):
      remote.require_address(f"tokenizer_path={shorten(path)}", path, None)
      raise ConfigError(
        f"tokenizer_path={path}: there is no such file.\nGive a tokenizers JSON file, perhaps {inside}, or a local "
        "folder that has a tokenizer.json."
      )
  with problems.collect():
    folder = data.dataset_cache_directory
    if not folder:
      raise ConfigError("dataset_cache_directory is empty: tokens need a folder.\nUse dataset_cache_directory=tokens.")
    if not _is_address("dataset_cache_directory", folder):  # the cache refuses addresses of object stores itself
      _check_folder("dataset_cache_directory", folder, folder)


def is_file(name: str, value: str) -> bool:
  """Whether the value of the key `name` is a file, local or at an address."""
  if storage.is_address(value):
    return bool(remote.find(name, value, ()))
  return os.path.isfile(as_path(value, f"{name}="))


def _check_pattern(name: str, value: str, path: str) -> None:
  """Refuses [ ] * ?: Orbax would save a checkpoint in a[x], read the path as a pattern, and find nothing."""
  if found := re.search(r"[\[\]*?]", path):
    raise ConfigError(
      f"{name}={value}: {path} has a {found[0]!r}, which Orbax reads as a pattern.\nChoose a path without [ ] * ?"
    )


def _check_placeholder(name: str, value: str) -> None:
  if re.search(r"\$[\w{(]|[<>]", value):
    raise ConfigError(f"{name}={value}: has a placeholder that was not filled in.\nWrite the value itself.")


def _check_run_name(name: str) -> None:
  _check_placeholder("run_name", name)
  parts = Path(name).parts
  outside = not parts or ".." in parts or name.startswith(("/", "~")) or storage.is_address(name)
  blank = any(part != part.strip() for part in parts)
  if outside or blank or not name.isprintable() or max(len(os.fsencode(part)) for part in parts) > 200:
    raise ConfigError(
      f"run_name={shorten(name)!r}: must be a folder name below base_output_directory.\n"
      "Use a name such as first or team/first, without '..', blanks around a folder's name, or more than 200 bytes."
    )


def _check_output(name: str, value: str, folder: str) -> None:
  """Checks that `folder` can be written: an address by the installed packages, a local folder by its nearest parent."""
  existing = _check_folder(name, value, folder)
  if existing is not None and not _writable(existing):
    raise ConfigError(f"{name}={value}: {existing} is not writable.\nChoose a folder that you can write to.")


def _check_folder(name: str, value: str, folder: str) -> Path | None:
  """The nearest existing parent of the local `folder`; None for an address that can be written."""
  _check_placeholder(name, value)
  if _is_address(name, value):
    return None
  as_path(value, f"{name}=")  # first, so that a message shows the value as it was given
  path = as_path(folder, f"{name}=").absolute()
  existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
  if not os.path.isdir(existing):
    raise ConfigError(f"{name}={value}: {existing} is a file, not a folder.\nChoose another path.")
  return existing


def _is_address(name: str, value: str) -> bool:
  """Whether `value` is an address on an object store; ConfigError for an address that cannot be written."""
  remote.require_address(f"{name}={shorten(value)}", value, remote.SCHEMES)
  if not storage.is_address(value):
    return False
  scheme = value.partition(":")[0]
  if not value.isprintable() or len(value.encode()) > 500:
    raise ConfigError(
      f"{name}={shorten(value)!a}: is not a name for objects.\nUse at most 500 bytes of printable characters."
    )
  if not any(map(is_installed, _WRITERS[scheme])):
    package = _WRITERS[scheme][0]
    raise ConfigError(
      f"{name}={value}: writing to {scheme}:// needs the package {package}, which is not installed.\n"
      f"{how_to_install(_EXTRA_OF[scheme])}, or choose a local folder."
    )
  if scheme == "s3":  # that gs:// has the bucket is asked when the run begins
    remote.require_bucket(f"{name}={shorten(value)}", value)
  return True


def is_installed(package: str) -> bool:
  """Whether `package` is installed. It is not imported, which would take seconds."""
  return importlib.util.find_spec(package) is not None


def _check_run_directory(directory: str) -> None:
  """Checks that no file of a local run is a folder in its run folder, and the reverse."""
  if storage.is_address(directory):
    return
  folder = as_path(directory, "base_output_directory=")
  for name in (*_RUN_FILES.split(), *_RUN_FOLDERS.split()):
    path = folder / name
    wanted, found = ("file", "folder") if name in _RUN_FILES.split() else ("folder", "file")
    if os.path.isdir(path) if found == "folder" else os.path.isfile(path):
      raise ConfigError(
        f"{path}: is a {found}, and the run needs a {wanted} with this name.\nMove it away, or choose another run_name."
      )


def _writable(folder: Path) -> bool:
  """Whether a file can be created in `folder`. Tries a temporary file, without a name where this is possible."""
  try:
    with tempfile.TemporaryFile(dir=folder):
      return True
  except OSError:
    return False


def _check_tfds(folder: str) -> None:
  """Checks that `folder` is a dataset that TensorFlow Datasets has prepared."""
  _check_placeholder("dataset_path", folder)
  if storage.is_address(folder) or not os.path.isfile(as_path(folder, "dataset_path=") / "dataset_info.json"):
    raise ConfigError(
      f"dataset_path={folder}: has no dataset_info.json, which dataset_type=tfds reads.\n"
      "Give the local folder of a prepared dataset, such as DATA/NAME/1.0.0."
    )


def _check_text(name: str, value: str) -> None:
  """Checks that `value` is a text file that is not empty, or a folder that contains one."""
  _check_placeholder(name, value)
  kinds = ", ".join(data_files.TEXT_SUFFIXES)
  left = LeftOut()
  if storage.is_address(value):
    if not data_files.text_at_address(name, value, left):
      raise ConfigError(
        f"{name}={shorten(value)}: has no file of {kinds} with text in it{left.note}.\nGive another address."
      )
    return
  path = as_path(value, f"{name}=")
  if not os.path.exists(path):
    remote.require_address(f"{name}={shorten(value)}", value, None)
    raise ConfigError(f"{name}={value}: there is no such file or folder.\nGive a file or folder of {kinds}.")
  if os.path.isdir(path):
    try:
      found = any(file.stat().st_size for file in data_files.text_below(path, left))
    except (ConfigError, OSError) as error:
      raise ConfigError(f"{name}={value}: {error}.\nOr give another folder.") from None
    if not found:
      raise ConfigError(
        f"{name}={value}: contains no file of {kinds} with text in it{left.note}.\nGive another folder."
      )
    return
  if path.suffix.lower() not in data_files.TEXT_SUFFIXES or not os.path.isfile(path):
    raise ConfigError(f"{name}={value}: is not a text file that dataset_type=text reads.\nGive one of {kinds}.")
  if path.stat().st_size == 0:
    raise ConfigError(f"{name}={value}: is an empty file.\nGive a file or folder with text in it.")
