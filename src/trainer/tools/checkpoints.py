"""`python -m trainer.tools.checkpoints RUN_DIR`: lists the checkpoints of a run, finished or not, local, gs:// or s3://.

Each line is a checkpoint, a save that did not finish, a damaged checkpoint with the reason, or the local copies of
a step on this host. The run may go on meanwhile: nothing is changed. --verify reads all files of each checkpoint, and
compares them with its manifest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.filesize import decimal

from input_pipeline import storage
from input_pipeline.places import Place
from trainer import commands
from trainer.checkpoint import checksums, run_folder
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.checkpoint.step_folders import COMMIT, MANIFEST, StepFolders, step_number
from trainer.config.errors import ConfigError
from trainer.observe import files, screen
from trainer.observe.events import read_events
from trainer.observe.metrics import METRICS_FILE
from trainer.world import SINGLE_WORLD

_AGES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))


@dataclasses.dataclass(frozen=True)
class SavedEntry:
  """A line of the table. wall: epoch seconds when it was written."""

  name: str
  size: int
  wall: float
  kind: str
  state: str


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  help_text = "{base_output_directory}/{run_name}, local, gs:// or s3://"
  parser.add_argument("run_directory", metavar="RUN_DIR", type=os.path.expanduser, help=help_text)
  parser.add_argument("--verify", action="store_true", help="read all files of each checkpoint")
  show = lambda options: print("\n".join(describe(options.run_directory.rstrip("/"), verify=options.verify)))
  return commands.main(parser, show, argv)


def describe(run: str, *, verify: bool = False) -> Iterator[str]:
  """The lines that the tool prints. Raises ConfigError if `run` is not the folder of a run."""
  folder = run_folder.folder(run)
  events = read_events(run)
  if not events and not (folder / "checkpoints").exists():
    raise ConfigError(f"{run} is not the folder of a run. Give base_output_directory/run_name")
  folders = StepFolders(f"{run}/checkpoints", SINGLE_WORLD, lambda line: None)
  rows = [*_checkpoints(folders, verify), *_rejected(folders), *_local_copies(run, events)]
  sizes = {kind: sum(row.size for row in rows if row.kind == kind) for kind in dict.fromkeys(row.kind for row in rows)}
  free = "" if storage.is_address(run) else f"; free on this disk: {decimal(shutil.disk_usage(run).free)}"
  yield f"{run}: {', '.join(f'{kind} {decimal(size)}' for kind, size in sizes.items()) or 'no checkpoint'}{free}"
  yield from _last_writer(run, events)
  if rows:
    yield ""
    yield from _table(rows)


def _checkpoints(folders: StepFolders, verify: bool) -> Iterator[SavedEntry]:
  written = folders.is_being_written()  # asked before: a save that ends meanwhile is shown as committed
  unfinished = {
    True: "a process writes now",
    False: "the next save or start removes it",
    None: "perhaps a process writes it now",
  }
  for path, why in sorted(folders.states().items(), key=lambda item: step_number(item[0].name)):
    with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
      state = why and f"{why}; {unfinished[written]}"
      if not why:
        state = f"committed{_verified(folders, int(path.name)) if verify else ''}"
      elif "did not finish" not in why:
        state = why
      marker = path / COMMIT
      size = _manifest_size(path) if not why else _size_of(path)
      yield SavedEntry(path.name, size, _written(marker if marker.exists() else path), "checkpoint", state)


def _verified(folders: StepFolders, step: int) -> str:
  try:
    folders.verify(step)
  except (Rejected, OSError) as reason:
    return ", deleted by retention meanwhile" if folders.is_gone(step) else f", damaged: {reason}"
  return ", all files are as they were written"


def _rejected(folders: StepFolders) -> Iterator[SavedEntry]:
  for path, reason in folders.rejected().items():
    yield SavedEntry(path.name, _size_of(path), _written(path), "rejected", reason)


def _local_copies(run: str, events: Sequence[dict[str, Any]]) -> Iterator[SavedEntry]:
  """The copies of this run on this host, by step, and all copies of each earlier run in this folder."""
  configs = [event["config"] for event in events if isinstance(event.get("config"), dict)]
  config: dict[str, Any] = configs[-1] if configs else {}
  if not (config.get("enable_emergency_checkpoint") and (root := config.get("local_checkpoint_directory"))):
    return
  from trainer.checkpoint.local_copies import ENTRY, folder  # imports jax

  place, mine = folder(root, run), run_folder.read(run)
  for path in sorted(place.iterdir()) if place.is_dir() else ():
    found: dict[str, list[Any]] = {}
    for file in path.iterdir() if path.is_dir() else ():
      if match := ENTRY.fullmatch(file.name):
        found.setdefault(match[1] if path.name == mine else "", []).append(file)
    for step, parts in sorted(found.items(), key=lambda item: step_number(item[0])):
      slices = sorted({int(match[2]) for match in map(ENTRY.fullmatch, (part.name for part in parts)) if match})
      state = f"slices {', '.join(map(str, slices))} in {path}" if step else f"of an earlier run in {path}"
      stats = [part.stat() for part in parts]
      yield SavedEntry(step or "-", sum(x.st_size for x in stats), max(x.st_mtime for x in stats), "local copy", state)


def _last_writer(run: str, events: Sequence[dict[str, Any]]) -> Iterator[str]:
  """A line about the process that wrote the newest record."""
  records = [*events, *files.read_last_json_lines(run, METRICS_FILE)]
  timed = [record for record in records if isinstance(record.get("wall"), int | float)]
  if not timed:  # imported parameters
    return
  last = max(timed, key=lambda record: record["wall"])
  mine = [event for event in events if event.get("process") == last.get("process")]
  host = next((event["host"] for event in reversed(mine) if event.get("host")), "?")
  end = next((event.get("exit") for event in reversed(mine) if event["kind"] == "run_end"), None)
  ended = "it trains, or was killed" if end is None else f"it ended with exit code {end}"
  at = f" at step {last['step']}" if "step" in last else ""
  yield f"last record: {_age(last['wall'])} ago{at}, by process {last.get('process')} on host {host}; {ended}"


def _table(rows: Sequence[SavedEntry]) -> Iterator[str]:
  cells = [("STEP", "SIZE", "AGE", "KIND", "STATE")]
  cells += [(row.name, decimal(row.size), _age(row.wall), row.kind, " ".join(row.state.split())) for row in rows]
  widths = [max(len(line[column]) for line in cells) for column in range(4)]
  for name, size, age, kind, state in cells:
    yield f"{name:<{widths[0]}}  {size:>{widths[1]}}  {age:>{widths[2]}}  {kind:<{widths[3]}}  {state}"


def _manifest_size(path: Place) -> int:
  """Bytes of a committed step, without a question for each file; as `_size_of` if its manifest is damaged."""
  try:
    entries = checksums.parse(checksums.read(path / MANIFEST), MANIFEST)
    return sum(int(entry["bytes"]) for entry in entries.values())
  except (Rejected, KeyError, TypeError, ValueError):
    return _size_of(path)


def _size_of(path: Place) -> int:
  """Bytes of all files below a folder; files that are deleted meanwhile count nothing."""
  total = 0
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    for name in checksums.walk(path):
      with contextlib.suppress(FileNotFoundError):
        total += (path / name).stat().size
  return total


def _written(path: Place) -> float:
  """When a file or folder was written, in epoch seconds; 0.0: an object store has no such times for folders."""
  try:
    return path.stat().modified
  except OSError:
    return 0.0


def _age(wall: float) -> str:
  if not wall:
    return "?"
  seconds = max(0.0, time.time() - wall)
  for length, unit in _AGES:
    if seconds >= length:
      return f"{seconds / length:.3g} {unit}"
  return f"{seconds:.0f} s"


if __name__ == "__main__":
  screen.command(main)
