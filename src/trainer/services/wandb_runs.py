"""services=wandb: the run in Weights & Biases, online, or offline for a later `wandb sync`.

wandb's own environment variables decide where the run goes (WANDB_API_KEY, WANDB_ENTITY, WANDB_BASE_URL, WANDB_MODE)
and name it (WANDB_PROJECT, default trainer; WANDB_NAME, default run_name). Without an API key the run stays offline.
Each process of an offline run leaves a folder `{run}/wandb/offline-run-*`, with the same run id: `wandb sync
{run}/wandb/*` uploads them as one run.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.observe import files
from trainer.observe.log import Log
from trainer.process.signals import PREEMPTED
from trainer.services.service import EVALUATED, ServiceRun

_BLOCK = 1 << 15  # bytes; wandb writes its records in blocks, in the format of LevelDB's log
_TAIL_BLOCKS = 64  # that are read to find the last step of an offline run


class WandbRun:
  """A Service: the run's part of this process."""

  def __init__(self, run_directory: str, run: ServiceRun, log: Log) -> None:
    """Begins or continues the run. Raises wandb's errors."""
    import wandb

    self._temporary = tempfile.mkdtemp(prefix="wandb-") if files.is_object_store(run_directory) else ""
    directory = Path(self._temporary or run_directory)
    run_id = run.id or uuid.uuid4().hex[:12]
    settings = wandb.Settings(console="off", silent=True)
    wandb.setup(settings)  # silent from here on: stdout has the lines of log.txt
    of_user = wandb.setup().settings  # of the environment
    mode = of_user.mode
    if mode == "online" and not wandb.login(prompt=False):
      mode = "offline"
    # As it is now: wandb creates this process's folder, which is empty.
    self.last_step, self.last_evaluation = offline_progress(directory / "wandb", run_id)
    self._run: Any = wandb.init(
      project=of_user.project or "trainer",
      name=of_user.run_name or run.name,
      id=run_id,
      resume="allow",
      mode=mode,
      dir=directory,
      config=dict(run.config),
      reinit="create_new",
      settings=settings,
    )
    self._run.define_metric("evaluation/*", step_metric=EVALUATED)
    if self._run.offline:
      kept = "" if not self._temporary else "; they are lost with this machine: set WANDB_API_KEY"
      log.line(f"wandb is offline. `wandb sync {directory}/wandb/*` uploads the run's files{kept}")
    else:
      self.last_step = self._run.starting_step - 1 if self._run.resumed else 0
      self.last_evaluation = int(self._run.summary.get(EVALUATED, 0))
      log.line(f"wandb: {self._run.url}")

  def add(self, step: int, scalars: dict[str, float]) -> None:
    self._run.log(scalars, step=step, commit=True)

  def finish(self, exit_code: int | None) -> None:
    if exit_code == PREEMPTED:
      self._run.mark_preempting()
    self._run.finish(exit_code=exit_code or 0)
    if self._temporary and not self._run.offline:  # wandb has all of it
      shutil.rmtree(self._temporary, ignore_errors=True)


def offline_progress(directory: Path, run_id: str) -> tuple[int, int]:
  """The last step and the last evaluation (EVALUATED) in the offline folders of a run; 0: none.

  Reads the ends of the files: the records that wandb itself would upload, so a step lost by a kill is not counted.
  """
  files_of_run = directory.glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
  rows = [row for path in files_of_run for row in history(path, _TAIL_BLOCKS)]
  step, evaluated = (max((int(row.get(name, 0)) for row in rows), default=0) for name in ("_step", EVALUATED))
  return step, evaluated


def history(path: Path, blocks: int) -> Iterator[dict[str, Any]]:
  """The rows in the last `blocks` of a .wandb file, in order. A record that a kill has cut short ends them."""
  from wandb.proto import wandb_internal_pb2

  with path.open("rb") as file:
    start = max(0, file.seek(0, 2) // _BLOCK - blocks) * _BLOCK
    file.seek(start)
    data = file.read()
  at, record = (0 if start else 7), None  # the file begins with 7 bytes of wandb
  while at + 7 <= len(data):
    if 0 < (left := -at % _BLOCK) < 7:  # too little for a part of a record: it is in the next block
      at += left
      continue
    length, kind = struct.unpack_from("<HB", data, at + 4)  # after a checksum of 4 bytes
    part = data[at + 7 : at + 7 + length]
    if not kind or len(part) < length:
      return
    at += 7 + length
    whole, first, last = kind == 1, kind == 2, kind == 4
    if whole or first:
      record = b""
    if record is not None:  # else it begins before `start`
      record += part
      if whole or last:
        parsed = wandb_internal_pb2.Record.FromString(record)
        if parsed.HasField("history"):
          items = parsed.history.item
          yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
