"""receipt.jsonl: what each committed step of a run computed, in lines that are chained by hash (`receipt_lines.py`)."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from input_pipeline import storage
from input_pipeline.batch import DataError
from trainer.observe import environment, files
from trainer.observe.metrics import read_metrics
from trainer.run.plugins import Opened, Plugin
from trainer.trust.receipt_lines import FILE, METRICS, Line, sealed

NUMBERS = ("loss", "grad_norm", "weights")  # of the record of a step: in a line `weights` is `tokens`
_PLACE = re.compile(rb'"(after|step)":(\d+)[,}]')
_TAIL = 1 << 21  # bytes that hold the last line: one with a state has 80 bytes for each array


def bits(number: float) -> str:
  """The bits of a number of the computation, which is a float32; "nan" if it is not a number."""
  try:
    return "nan" if math.isnan(number) else struct.pack(">f", number).hex()
  except OverflowError:  # of a record that another program has changed
    return "nan"


def numbers(record: Line) -> dict[str, str]:
  """The fields of a line that the record of a step in metrics.jsonl has too."""
  found = {name: bits(float(record[name])) for name in NUMBERS if record.get(name) is not None}
  return {"tokens" if name == "weights" else name: value for name, value in found.items()}


class ReceiptWriter(Plugin):
  """receipt_state_period."""

  def recorders(self) -> Sequence[Writer]:
    return [Writer(self.run)] if self.config.observe.receipt_state_period else ()


class Writer:
  """A Recorder that writes receipt.jsonl. A step that is done again removes its line and all that follow it."""

  def __init__(self, run: Opened) -> None:
    self._run, self._directory = run, run.config.run_directory
    self._lines: files.LineFile | None = None  # opened at the first step, when it is known where the lines go on
    self._waiting: list[str] = []  # lines that a full disk has refused
    self._step, self._hash = -1, ""  # of the last line
    self._failing = False

  def write(self, fields: dict[str, Any], line: str) -> None:
    if "loss" not in fields:
      return
    step = int(fields["step"])
    try:
      if self._lines is None or step != self._step + 1:
        self._go_on_at(step)
      self._append(step, fields, fields["proof"] or {})
    except OSError as error:
      if not self._failing:
        self._run.log.warning(f"{FILE} cannot be written: {error}. Training goes on, and each step tries again.")
      self._failing = True

  def _append(self, step: int, record: Line, more: Line) -> None:
    self._put({"step": step, **numbers(record), **more})
    self._step = step

  def _put(self, fields: Line) -> None:
    assert self._lines is not None
    line, self._hash = sealed(fields, self._hash)
    self._waiting.append(line)
    while self._waiting and self._lines.append(self._waiting[0]):
      del self._waiting[0]

  def _go_on_at(self, step: int) -> None:
    """Makes `step` the next line: removes the lines from this step on, and adds lines that are missing before it."""
    self.close(None)
    self._waiting.clear()
    files.cut_lines(self._directory, FILE, lambda line: _is_before(line, step))
    last = list(files.read_last_json_lines(self._directory, FILE, _TAIL))
    self._hash = last[-1].get("hash", "") if last else ""
    places = (line.get("step", line.get("after")) for line in reversed(last))
    found = next((place for place in places if isinstance(place, int)), None)
    # Without any line: an object store may have the metrics of the primary before this one, and not its receipt.
    after = self._run.earlier_step() if found is None else found
    missing: dict[int, Line] = {}
    if after + 1 < step:  # lost with the process, the disk or the object store that had them
      records = (record for record in read_metrics(self._directory) if "loss" in record)
      missing = {record["step"]: record for record in records if after < record["step"] < step}
    self._step = min(missing, default=step) - 1 if found is None else found
    self._lines = files.open_lines(self._directory, FILE)
    self._put({"after": self._step, **head(self._run)})
    for before, record in sorted(missing.items()):
      self._append(before, record, {"from": METRICS, "examples": self._examples(before)})

  def _examples(self, step: int) -> str:
    """The digest of the examples of a step, which are read again; "" if they cannot be read."""
    try:
      return self._run.data.train.tally(step - 1, hashes=True).hex
    except DataError:
      return ""

  def flush(self, *, wait: bool) -> None:
    if self._lines is not None:
      self._lines.flush()

  def close(self, exit_code: int | None) -> None:
    if self._lines is not None:
      self._lines.close()
    self._lines = None

  def join(self) -> None:
    """Does nothing: `close` waits."""


def _is_before(line: bytes, step: int) -> bool:
  """Whether a line stays when `step` is done again. A damaged line stays, as evidence, unless it is a torn last one."""
  found = _PLACE.search(line)
  return line.endswith(b"\n") and (found is None or int(found[2]) + (found[1] == b"after") < step)


def head(run: Opened) -> Line:
  """Which run this is, which process writes the lines, and what they were computed with."""
  config = run.config
  code = environment.describe()
  return {
    "run_id": run.run_id,
    "config": config.flat(),
    "data": run.data.identity,
    "code": {"version": code["versions"]["trainer"], "git_commit": code["git_commit"]},
    "versions": code["versions"],
    "host": code["host"],
    "process": run.events.process,
    "devices": _devices(run),
    "computes": "rows" if run.cluster.recovers_in_process else "shares",
  }


def _devices(run: Opened) -> Line:
  cluster = run.cluster
  device = next(iter(cluster.slices.values()))[0]
  return {
    "cluster": cluster.kind,
    "slices": cluster.num_slices,
    "devices_per_slice": cluster.devices_per_slice,
    "platform": device.platform,
    "kind": device.device_kind,
  }


def read(directory: str) -> Iterator[bytes]:
  """The lines of a receipt, each with its newline, unless it is torn."""
  if not storage.is_address(directory):
    with (Path(directory) / FILE).open("rb") as file:
      yield from file
    return
  for line in files.read_lines(directory, FILE):
    yield line.encode() + b"\n"
