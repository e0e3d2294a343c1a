"""Checks of output and data folders. They look; they create nothing."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from trainer import text_files
from trainer.config.errors import ConfigError, shorten
from trainer.config.schema import Config


def check_paths(config: Config) -> None:
  """ConfigError when an output folder cannot be written or a data path holds nothing usable."""
  run, checkpoint, data = config.run, config.checkpoint, config.data
  _check_run_name(run.run_name)
  if not run.base_output_directory:
    raise ConfigError("base_output_directory is empty: the run's files need a folder.\nUse base_output_directory=runs.")
  _check_output("base_output_directory", run.base_output_directory, config.run_directory)
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
    if data.tokenizer_path and not Path(data.tokenizer_path).expanduser().is_file():
      raise ConfigError(f"tokenizer_path={data.tokenizer_path}: there is no such file.\nGive a tokenizers JSON file.")


def _check_pattern(name: str, value: str, path: str) -> None:
  """Orbax takes the path of a checkpoint for a pattern: in a[x] it would save and then find nothing."""
  if found := re.search(r"[\[\]*?]", path):
    raise ConfigError(
      f"{name}={value}: {path} has a {found[0]!r}, which Orbax takes for a pattern.\nChoose a path without [ ] * ?"
    )


def _check_placeholder(name: str, value: str) -> None:
  if re.search(r"\$\{|\$\(|[<>]", value):
    raise ConfigError(f"{name}={value}: holds a placeholder that nobody filled in.\nWrite the value itself.")


def _check_run_name(name: str) -> None:
  _check_placeholder("run_name", name)
  parts = Path(name).parts
  elsewhere = not parts or ".." in parts or name.startswith(("/", "~")) or "://" in name
  if elsewhere or not name.isprintable() or max(map(len, parts)) > 200:
    raise ConfigError(
      f"run_name={shorten(name)!r}: must be a folder name below base_output_directory.\n"
      "Use up to 200 letters, digits, '-', '_' and '.'."
    )


def _check_output(name: str, value: str, folder: str) -> None:
  """`folder` could be created and written, judged by its nearest existing parent."""
  _check_placeholder(name, value)
  scheme, remote, rest = value.partition("://")
  if remote:
    bucket = rest.partition("/")[0]
    if scheme == "gs" and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", bucket):
      raise ConfigError(f"{name}={value}: '{bucket}' is not a bucket's name.\nWrite gs://BUCKET/FOLDER.")
    return
  path = Path(folder).expanduser().absolute()
  existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
  if not existing.is_dir():
    raise ConfigError(f"{name}={value}: {existing} is a file, not a folder.\nChoose another {name} or run_name.")
  if not _writable(existing):
    raise ConfigError(f"{name}={value}: {existing} cannot be written to.\nChoose a folder that you may write to.")


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
      f"{name}={value}: dataset_type=text reads local files only.\nMount the bucket as a folder, or copy it here."
    )
  path = Path(value).expanduser()
  if not path.exists():
    raise ConfigError(f"{name}={value}: there is no such file or folder.\nGive a file or folder of {kinds}.")
  if path.is_dir():
    try:
      found = any(file.stat().st_size for file in text_files.below(path))
    except (ValueError, OSError) as error:
      raise ConfigError(f"{name}={value}: {error}.\nOr give another folder.") from None
    if not found:
      raise ConfigError(f"{name}={value}: holds no file of {kinds} with text in it.\nGive another folder.")
    return
  if path.suffix not in text_files.SUFFIXES or not path.is_file():
    raise ConfigError(f"{name}={value}: is not a text file that dataset_type=text reads.\nGive one of {kinds}.")
  if path.stat().st_size == 0:
    raise ConfigError(f"{name}={value}: is an empty file.\nGive a file or folder with text in it.")
