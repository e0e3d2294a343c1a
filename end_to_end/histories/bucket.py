"""A bucket of an emulator of Google Cloud Storage that fails when it is told to, and runs in it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from end_to_end.histories import oracle
from end_to_end.relay import Relay
from tests.support import command, object_stores
from tests.support.process_runs import ProcessRun


class Bucket:
  """gs://bucket, whose objects are files of `root`/bucket. All requests pass a relay, which fails meanwhile."""

  WAYS = ("503", "reset", "time-out", "short read")  # how it fails: Relay.mode

  def __init__(self, relay: Relay, root: Path) -> None:
    self.root, self._relay, self._timer = root, relay, threading.Timer(0.0, lambda: None)
    self.until = 0.0  # when it fails no more, on the monotonic clock

  @property
  def environment(self) -> dict[str, str]:
    """Changes to the environment of a process, for which gs:// is here."""
    return object_stores.environment("gs", self._relay.url)

  def fail(self, seconds: float, way: str) -> None:
    """Fails from now on for so long."""
    self.until = time.monotonic() + seconds
    self._timer.cancel()
    self._relay.mode = way
    self._timer = threading.Timer(seconds, setattr, [self._relay, "mode", ""])
    self._timer.daemon = True
    self._timer.start()


@contextlib.contextmanager
def running(root: Path) -> Iterator[Bucket]:
  with object_stores.running("gs", root) as url, Relay(url).running() as relay:
    yield Bucket(relay, root)


class BucketRun(ProcessRun):
  """A run whose folder is in a bucket. `directory` is where its objects lie as files."""

  def __init__(
    self, bucket: Bucket, folder: Path, keys: Sequence[str], *, environment: Mapping[str, str], **options: Any
  ) -> None:
    own = [*keys, f"base_output_directory=gs://bucket/{folder.name}", "log_period=1"]
    super().__init__(folder, own, environment={**environment, **bucket.environment}, **options)
    self.directory = bucket.root / "bucket" / folder.name / "run"

  def records(self, name: str) -> list[dict[str, Any]]:
    return oracle.records(self.directory / f"{name}.jsonl")

  @property
  def last_step(self) -> int:
    """The last step that was printed: a bucket has the records of a step later."""
    steps = command.PRINTED_STEP.findall(self.log.read_bytes()[-command.TAIL :]) if self.log.exists() else []
    return int(steps[-1]) if steps else 0
