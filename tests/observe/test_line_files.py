"""The object-store side of the line files, through a bucket that refuses what real ones refuse."""

from __future__ import annotations

import threading
import time

import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import _registry

from input_pipeline import storage
from trainer.observe import files


@pytest.fixture
def bucket(tmp_path, monkeypatch):
  """gs:// is a folder whose objects are written whole; appending is an error, and `broken` makes every write one.

  While `answers` is not set, a write hangs.
  """

  class Bucket(LocalFileSystem):
    protocol = ("gcs", "gs")
    broken = False
    error: Exception = RuntimeError("503 backend error")
    answers = threading.Event()
    writes = 0
    cachable = False

    def __init__(self, **options):
      super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path):
      path = str(path)
      return str(tmp_path / path.removeprefix("gs://")) if path.startswith("gs://") else path

    def open(self, path, mode="rb", **options):
      assert mode in ("r", "rb", "w", "wb"), f"object stores cannot open with {mode}"
      if "w" in mode:
        if Bucket.broken:
          raise Bucket.error
        Bucket.answers.wait()
        Bucket.writes += 1
      return super().open(path, mode, **options)

  Bucket.answers.set()
  monkeypatch.setitem(_registry, "gs", Bucket)
  return Bucket


def test_lines_are_written_to_numbered_parts_and_read_in_order(bucket, tmp_path):
  lines = files.ObjectLines("gs://b/run", "log.txt", period=60, part_bytes=100)
  for i in range(20):
    lines.append(f"line {i:03d}")
    if i % 3 == 0:
      lines.flush()
  lines.close()
  parts = sorted(path.name for path in (tmp_path / "b/run").iterdir())
  assert parts == ["log.txt.000000", "log.txt.000001"]
  assert list(files.read_lines("gs://b/run", "log.txt")) == [f"line {i:03d}" for i in range(20)]


def test_an_outage_loses_nothing_and_is_reported_once(bucket, capsys):
  lines = files.ObjectLines("gs://b/run", "x", period=60, part_bytes=10)
  lines.append("before")
  bucket.broken = True
  for i in range(3):
    lines.append(f"during {i}")
    lines.flush()
  bucket.broken = False
  lines.append("after")
  lines.close()
  assert list(files.read_lines("gs://b/run", "x")) == ["before", "during 0", "during 1", "during 2", "after"]
  assert capsys.readouterr().err.count("503 backend error") == 1


def test_a_save_does_not_wait_for_records_in_an_outage(bucket, monkeypatch, capsys):
  """Their thread tries again; a line about each try would fill the screen."""
  monkeypatch.setattr(storage, "TOLD_AFTER_SECONDS", 0.0)
  lines = files.ObjectLines("gs://b/run", "x", period=60)
  lines.append("one")
  bucket.broken, bucket.error, began = True, TimeoutError(), time.monotonic()
  monkeypatch.setattr(files, "LONGEST_WAIT_SECONDS", 0.5)
  monkeypatch.setattr(files, "_SHORT_WAIT_SECONDS", 0.1)
  for _ in range(5):
    lines.flush()
  assert time.monotonic() - began < 5 and capsys.readouterr().err.count("\n") == 1
  bucket.broken = False
  lines.flush()
  assert list(files.read_lines("gs://b/run", "x")) == ["one"]
  lines.close()


def test_a_store_that_does_not_answer_does_not_hold_the_end(bucket, monkeypatch, capsys):
  monkeypatch.setattr(files, "LONGEST_WAIT_SECONDS", 0.2)
  lines = files.ObjectLines("gs://b/run", "x", period=60)
  lines.append("last")
  bucket.answers.clear()
  try:
    began = time.monotonic()
    lines.close()
    lines.close()
    assert time.monotonic() - began < 10
  finally:
    bucket.answers.set()
  warning = "warning: gs://b/run/x: no answer for 0.2 s; its last lines are lost\n"
  assert capsys.readouterr().err == warning


@pytest.mark.parametrize("torn", ['{"a": ', "[2", "", "3", '{"a": 2}, {"a": 3}'])
def test_only_the_torn_line_is_skipped(tmp_path, torn):
  whole = [f'{{"a": {i}}}' for i in range(200)]
  (tmp_path / "x").write_text("\n".join([*whole[:100], torn, *whole[100:]]) + "\n")
  assert [record["a"] for record in files.read_json_lines(str(tmp_path), "x")] == list(range(200))
