"""Checks of output and data folders. They look; they create nothing."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
from pathlib import Path

from trainer import text_files
from trainer.config.errors import ConfigError, shorten
from trainer.config.files import as_path
from trainer.config.schema import Config

# What can write to each kind of address: one of these packages. Other stores are not taken: nobody has tried whether a
# commit can be relied on there.
_WRITERS = {"gs": ("gcsfs", "tensorflow")}
# What a run keeps in its folder, by what it must not be.
_RUN_FILES = "log.txt events.jsonl metrics.jsonl config.yml goodput.json report.html loss.png"
_RUN_FOLDERS = "checkpoints tensorboard metrics profile"


def check_paths(config: Config) -> None:
  """ConfigError when an output folder cannot be written or a data path holds nothing usable."""
  run, checkpoint, data = config.run, config.checkpoint, config.data
  _check_run_name(run.run_name)
  if not run.base_output_directory:
    raise ConfigError("base_output_directory is empty: the run's files need a folder.\nUse base_output_directory=runs.")
  _check_output("base_output_directory", run.base_output_directory, config.run_directory)
  _check_run_directory(config.run_directory)
  if run.jax_cache_dir:
    # JAX only warns where it cannot write there, and a home that is read-only is no reason not to train.
    _check_folder("jax_cache_dir", run.jax_cache_dir, run.jax_cache_dir)
  if checkpoint.enable_checkpointing:
    _check_pattern("run_name", run.run_name, run.run_name)
    absolute = config.run_directory if "://" in config.run_directory else os.path.abspath(config.run_directory)
    _check_pattern("base_output_directory", run.base_output_directory, absolute)
  if checkpoint.enable_emergency_checkpoint:
    _check_output(
      "local_checkpoint_directory", checkpoint.local_checkpoint_directory, checkpoint.local_checkpoint_directory
    )
  if data.dataset_type == "text":
    for name in ("dataset_path", "eval_dataset_path"):
      if getattr(data, name):
        _check_text(name, getattr(data, name))
    if data.tokenizer_path and not os.path.isfile(as_path(data.tokenizer_path, "tokenizer_path=")):
      raise ConfigError(f"tokenizer_path={data.tokenizer_path}: there is no such file.\nGive a tokenizers JSON file.")
    if not data.dataset_cache_directory:
      raise ConfigError("dataset_cache_directory is empty: tokens need a folder.\nUse dataset_cache_directory=tokens.")
    if not _is_address("dataset_cache_directory", data.dataset_cache_directory):  # the cache itself refuses those
      _check_folder("dataset_cache_directory", data.dataset_cache_directory, data.dataset_cache_directory)


def _check_pattern(name: str, value: str, path: str) -> None:
  """Orbax takes the path of a checkpoint for a pattern: in a[x] it would save and then find nothing."""
  if found := re.search(r"[\[\]*?]", path):
    raise ConfigError(
      f"{name}={value}: {path} has a {found[0]!r}, which Orbax takes for a pattern.\nChoose a path without [ ] * ?"
    )


def _check_placeholder(name: str, value: str) -> None:
  if re.search(r"\$[\w{(]|[<>]", value):
    raise ConfigError(f"{name}={value}: holds a placeholder that nobody filled in.\nWrite the value itself.")


def _check_run_name(name: str) -> None:
  _check_placeholder("run_name", name)
  parts = Path(name).parts
  elsewhere = not parts or ".." in parts or name.startswith(("/", "~")) or "://" in name
  if elsewhere or not name.isprintable() or max(len(os.fsencode(part)) for part in parts) > 200:
    raise ConfigError(
      f"run_name={shorten(name)!r}: must be a folder name below base_output_directory.\n"
      "Use a name such as first or team/first: up to 200 characters a folder, and no '..'."
    )


def _check_output(name: str, value: str, folder: str) -> None:
  """`folder` can be written: an address by what is installed, a local one by its nearest existing parent."""
  existing = _check_folder(name, value, folder)
  if existing is not None and not _writable(existing):
    raise ConfigError(f"{name}={value}: {existing} cannot be written to.\nChoose a folder that you may write to.")


def _check_folder(name: str, value: str, folder: str) -> Path | None:
  """The nearest existing parent of the local `folder`, which is a folder; None for an address that can be reached."""
  _check_placeholder(name, value)
  if _is_address(name, value):
    return None
  as_path(value, f"{name}=")  # first, so that a message has what was given
  path = as_path(folder, f"{name}=").absolute()
  existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
  if not os.path.isdir(existing):
    raise ConfigError(f"{name}={value}: {existing} is a file, not a folder.\nChoose another path.")
  return existing


def _is_address(name: str, value: str) -> bool:
  """Whether `value` is an address on an object store, not a local path; ConfigError where nobody can write to it."""
  if "://" not in value and not re.match(r"\w+:/", value):
    return False
  scheme, _, rest = value.partition(":")
  if scheme not in _WRITERS or not rest.startswith("//"):
    written = " or ".join(f"{known}://BUCKET/FOLDER" for known in _WRITERS)
    raise ConfigError(
      f"{name}={shorten(value)}: must be {written}, or a folder of this machine.\n"
      "Write one of these; a local path has no '://', and ./ before a first name that ends in ':'."
    )
  bucket = rest.removeprefix("//").partition("/")[0]
  if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
    raise ConfigError(f"{name}={shorten(value)}: '{bucket}' is not a bucket's name.\nWrite {scheme}://BUCKET/FOLDER.")
  if not value.isprintable() or len(value.encode()) > 500:
    raise ConfigError(f"{name}={shorten(value)!a}: is not a name for objects.\nUse up to 500 printable letters.")
  if not any(map(_is_installed, _WRITERS[scheme])):
    package = _WRITERS[scheme][0]
    raise ConfigError(
      f"{name}={value}: writing to {scheme}:// needs the package {package}, which is not installed.\n"
      f"Run python -m pip install {package} (setup.sh with --tpu or --gpu does), or choose a local folder."
    )
  return True


def _is_installed(package: str) -> bool:
  """Whether it can be imported, without the time that importing it takes."""
  return importlib.util.find_spec(package) is not None


def _check_run_directory(directory: str) -> None:
  """What a local run keeps in its folder can be written where it belongs."""
  if "://" in directory:
    return
  folder = as_path(directory, "base_output_directory=")
  for name in (*_RUN_FILES.split(), *_RUN_FOLDERS.split()):
    path = folder / name
    wanted, found = ("file", "folder") if name in _RUN_FILES.split() else ("folder", "file")
    if os.path.isdir(path) if found == "folder" else os.path.isfile(path):
      raise ConfigError(
        f"{path}: is a {found}, and the run needs a {wanted} of that name.\nMove it away, or choose another run_name."
      )


def _writable(folder: Path) -> bool:
  """Whether a file could be created in `folder`; an unnamed one is tried where the system has them."""
  if not os.access(folder, os.W_OK | os.X_OK):
    return False
  if not hasattr(os, "O_TMPFILE"):
    return True
  try:
    os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600))
  except OSError as error:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOSPC, errno.EDQUOT):
      return False
    # This file system has no unnamed files: one that keeps files at all (FUSE, NFS) has blocks, /proc and /sys none.
    return os.statvfs(folder).f_blocks > 0
  return True


def _check_text(name: str, value: str) -> None:
  """`value` is a text file with bytes in it, or a folder that holds one somewhere."""
  _check_placeholder(name, value)
  kinds = ", ".join(text_files.SUFFIXES)
  if "://" in value:
    raise ConfigError(
      f"{name}={shorten(value)}: dataset_type=text reads local files only.\n"
      "Mount the bucket as a folder, or copy it here."
    )
  path = as_path(value, f"{name}=")
  if not os.path.exists(path):
    raise ConfigError(f"{name}={value}: there is no such file or folder.\nGive a file or folder of {kinds}.")
  if os.path.isdir(path):
    try:
      found = any(file.stat().st_size for file in text_files.below(path))
    except (ValueError, OSError) as error:
      raise ConfigError(f"{name}={value}: {error}.\nOr give another folder.") from None
    if not found:
      raise ConfigError(f"{name}={value}: holds no file of {kinds} with text in it.\nGive another folder.")
    return
  if path.suffix not in text_files.SUFFIXES or not os.path.isfile(path):
    raise ConfigError(f"{name}={value}: is not a text file that dataset_type=text reads.\nGive one of {kinds}.")
  if path.stat().st_size == 0:
    raise ConfigError(f"{name}={value}: is an empty file.\nGive a file or folder with text in it.")
