"""Every operation on storage with every way in which storage fails, on gs://, s3:// and a local disk.

  python -m end_to_end.storage [--stores gs,s3,local] [--failures 503,reset,...] [--at-once 4] [--keep FOLDER]

For each store and failure, one run of 40 steps on two simulated slices begins, and the storage fails from step 8 to 25:
meanwhile it saves, deletes old checkpoints, writes its records and its receipt, loses a slice and recovers. Then the
storage fails again, for one command after the other: a start of the same run, the list of checkpoints, an export, the
report, an evaluation, and a run whose data is there. Prints what was expected and seen, and a table for each store.
Exits with 1 if they differ, or if a failure has hit nothing.

The stores are emulators (tests.support.object_stores), and each store and failure has a relay of its own (relay.py).
On a local disk the calls of `input_pipeline.storage` fail. Deadlines are 10 s instead of a minute. Processes are forked
from one that has imported everything, and most of the time they wait, so several failures are tried at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import importlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from end_to_end.relay import FAILURES, Relay
from tests.support import object_stores
from tests.support.command import PRINTED_STEP, ROOT, TINY, last_of_each
from tests.support.forked_runs import Forked, Server, StandaloneServer

from input_pipeline import places
from trainer.observe.files import read_json_lines

STORES = ("gs", "s3", "local")
LOCAL = ("time-out", "ESTALE", "EIO", "ENOSPC", "EACCES", "slow", "hidden newest")
MILD = ("slow", "hidden newest")  # everything succeeds
FOR_EVER = ("refused", "EACCES")  # the same command cannot succeed later: exit code 2
COMMANDS = (("list", "export"), ("report", "evaluate"), ("data", "start"))  # two at a time
ANSWER_SECONDS = 10.0
STEPS, LOST_AT, FIRST, LAST = 40, 16, 8, 25
HUNG_SECONDS = 900.0  # for a command; none may take so long, but on a busy machine a slow store makes a run long
KEYS = (
  "cluster=simulated num_slices=2 devices_per_slice=1 elastic_enabled=true elastic_min_slice_count=1 snapshot_period=1 "
  f"steps={STEPS} fault_injection=slice_down@{LOST_AT}:1:prepared log_period=1 checkpoint_period=5 "
  f"max_num_checkpoints_to_keep=2 dataset_type=text dataset_path={ROOT / 'README.md'} "
  "vocab_size=258 learning_rate_schedule_steps=1000 "
  "enable_checkpointing=true eval_steps=0 run_name=run per_device_batch_size=2"
).split()


@dataclasses.dataclass
class Store:
  """A store that fails in one way. place, environment: of its processes. fail: makes it fail, or ("") work. hit: how
  many calls have failed. direct: the same place for this process, where nothing fails."""

  name: str
  failure: str
  place: str
  environment: Mapping[str, str]
  fail: Callable[[str], object]
  hit: Callable[[], int]


@contextlib.contextmanager
def opened(name: str, url: str, failure: str, folder: Path) -> Iterator[Store]:
  """url: of the emulator."""
  part = failure.replace(" ", "_")
  if url:
    with Relay(url).running() as relay:
      environment = object_stores.environment(name, relay.url)
      place = f"{name}://bucket/{part}"
      yield Store(name, failure, place, environment, lambda mode: setattr(relay, "mode", mode), lambda: relay.failed)
    return
  mode, hits = folder / "mode", folder / "hits"
  mode.write_text("")
  hits.touch()
  place = str(folder / "disk")
  yield Store(name, failure, place, {"STORAGE_MODE": str(mode)}, mode.write_text, lambda: hits.stat().st_size)


# ---- what a process does


def child(arguments: list[str]) -> int:
  """Runs a command: its module and arguments. Storage has short deadlines; a local disk fails as the file STORAGE_MODE
  says."""
  from input_pipeline import storage

  for name, library in (("STORAGE_EMULATOR_HOST", "gcsfs"), ("AWS_ENDPOINT_URL", "s3fs")):
    if name in os.environ:
      importlib.import_module(library)  # on a busy machine this takes as long as the short deadline
  storage.ANSWER_SECONDS, storage.TOLD_AFTER_SECONDS, storage._AGAIN_SECONDS = ANSWER_SECONDS, 1.0, 0.2
  if path := os.environ.get("STORAGE_MODE"):
    told, perform = Path(path), storage.perform
    storage.perform = lambda operation, address, work: perform(  # type: ignore[assignment]
      operation, address, lambda: failing(told, operation, address, work)
    )
  return int(importlib.import_module(arguments[0]).main(arguments[1:]))


def failing(told: Path, operation: str, address: str, work: Callable[[], object]) -> object:
  """work(), or its failure on the local disk, below the folder of the runs."""
  mode = told.read_text()
  needs_space = operation == "written" or (operation == "made" and not os.path.exists(address))
  if "/disk" not in address or not mode or (mode == "ENOSPC" and not needs_space):
    return work()
  with told.with_name("hits").open("a") as file:
    file.write(".")
  if mode == "slow":
    time.sleep(0.1)
  elif mode != "hidden newest":
    number = getattr(errno, mode, errno.ETIMEDOUT)
    raise OSError(number, os.strerror(number))
  found = work()
  if mode == "hidden newest" and operation == "listed" and address.endswith("/checkpoints"):
    newest = max((int(name) for name in found if name.isdigit()), default=None)  # type: ignore[attr-defined]
    return [name for name in found if name != str(newest)]  # type: ignore[attr-defined]
  return found


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


class Cell:
  """One store with one failure. folder: for what its processes print. cache: of compiled programs and tokens of all."""

  def __init__(self, store: Store, folder: Path, server: Server, cache: Path) -> None:
    self._store, self._folder, self._server = store, folder, server
    self._keys = [*TINY, *KEYS, f"jax_cache_dir={cache}", f"dataset_cache_directory={cache}"]

  def rows(self) -> Iterator[Row]:
    for operation, (ok, expected, seen) in (self._run() | self._commands()).items():
      yield Row(self._store.name, self._store.failure, operation, expected, seen, "" if ok else seen)

  def _start(self, name: str, command: Sequence[str]) -> Forked:
    (self._folder / f"{name}.txt").touch()
    argv = ["--child", *command]
    return self._server.run("end_to_end.storage", argv, self._store.environment, self._folder / f"{name}.txt")

  def _command(self, *keys: str) -> list[str]:
    return ["trainer.__main__", *last_of_each([*self._keys, f"base_output_directory={self._store.place}", *keys])]

  def _printed(self, name: str) -> str:
    return (self._folder / f"{name}.txt").read_text(errors="replace")

  def _steps(self) -> set[int]:
    return {int(step) for step in PRINTED_STEP.findall((self._folder / "run.txt").read_bytes())}

  def _run(self) -> dict[str, tuple[bool, str, str]]:
    """A run whose storage fails from step FIRST to LAST."""
    store = self._store
    process = self._start("run", self._command())
    deadline, mode = time.monotonic() + HUNG_SECONDS, ""
    while process.poll() is None and time.monotonic() < deadline:
      wanted = store.failure if FIRST <= max(self._steps(), default=0) < LAST else ""
      if wanted != mode:
        store.fail(mode := wanted)
      time.sleep(0.05)
    process.kill()
    code = process.wait()
    store.fail("")
    text = self._printed("run")
    done = self._steps()
    restored = re.findall(r"[Rr]ecovered .*|restored from .*", text)
    all_done = "Lost after step" in text and done == set(range(1, STEPS + 1))
    seen = f"{len(done)} steps" + (", from memory" if "restored from snapshot" in "".join(restored) else "")
    facts = {
      "save": (code == 0 and store.hit() > 0, "exit 0", f"exit {code}, {store.hit()} calls hit"),
      "restore in a recovery": (all_done and "memory" in seen, f"{STEPS} steps, from memory", seen),
      "output": ("Traceback" not in text, "no traceback", "a traceback" if "Traceback" in text else "none"),
    }
    return facts | (self._left() if code == 0 else {})

  def _left(self) -> dict[str, tuple[bool, str, str]]:
    """What the run has left, once the storage works."""
    directory = f"{self._store.place}/run"
    steps = sorted({line["step"] for line in read_json_lines(directory, "metrics.jsonl") if "loss" in line})
    receipt = {line["step"] for line in read_json_lines(directory, "receipt.jsonl") if "step" in line}
    names = [place.name for place in (places.at(directory) / "checkpoints").iterdir()]
    checkpoints = sorted(int(name) for name in names if name.isdigit())
    every = set(range(1, STEPS + 1))
    return {
      "records": (steps == sorted(every), f"{STEPS} steps", f"{len(steps)} steps"),
      "receipt": (receipt == every, f"{STEPS} steps", f"{len(receipt)} steps"),
      "retention": (
        checkpoints[-1:] == [STEPS] and len(checkpoints) <= 3,
        f"the newest is {STEPS}",
        " ".join(map(str, checkpoints)),
      ),
    }

  def _commands(self) -> dict[str, tuple[bool, str, str]]:
    """Commands on the run, while the storage fails all the time."""
    store, folder = self._store, self._folder
    data = places.at(f"{store.place}/text/a.txt")
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_text("some lines of text\n" * 2000)
    own = [f"base_output_directory={folder / 'other'}", f"dataset_cache_directory={folder / 'tokens'}"]
    own += ["dataset_type=text", f"dataset_path={data}", "steps=2", "enable_checkpointing=false"]
    run = f"{store.place}/run"
    of_command = {
      "start": self._command("fault_injection=", f"steps={STEPS + 2}"),
      "list": ["trainer.tools.checkpoints", run],
      "export": ["trainer.tools.export_hf", run, str(folder / "export")],
      "report": ["trainer.tools.report", run],
      "evaluate": ["trainer.tools.evaluate", run, "eval_steps=1"],
      "data": self._command("fault_injection=", *own),
    }
    facts = {}
    for names in COMMANDS:
      store.fail(store.failure)
      processes = {name: self._start(name, of_command[name]) for name in names}
      deadline = time.monotonic() + HUNG_SECONDS
      for process in processes.values():
        while process.poll() is None and time.monotonic() < deadline:
          time.sleep(0.1)
        process.kill()
      store.fail("")
      facts |= {name: self._judged(name, process.wait()) for name, process in processes.items()}
    return facts

  def _judged(self, name: str, code: int) -> tuple[bool, str, str]:
    failure, is_local = self._store.failure, self._store.name == "local"
    # On a local disk, data are read without `storage`; only what is written needs space.
    works = failure in MILD or (is_local and name == "data")
    works |= failure == "ENOSPC" and name not in ("start", "report")
    expected = {0} if works else {2} if failure in FOR_EVER else {1}
    text = self._printed(name)
    wrong = "a traceback" if "Traceback" in text else ""
    wrong = wrong or ("no message" if code and "error: " not in text else "")
    seen = f"exit {code}, {len(text.splitlines())} lines" + (f", {wrong}" if wrong else "")
    return code in expected and not wrong, f"exit {'/'.join(map(str, sorted(expected)))}", seen


def table(rows: Sequence[Row], store: str) -> str:
  """One store in Markdown: operations and failures."""
  mine = [row for row in rows if row.store == store]
  failures, operations = ([*dict.fromkeys(getattr(row, name) for row in mine)] for name in ("failure", "operation"))
  of = {(row.operation, row.failure): row for row in mine}
  cell = lambda row: "-" if row is None else row.seen.partition(",")[0] + " WRONG" * bool(row.wrong)
  lines = [f"| {store} | {' | '.join(failures)} |", "|---" * (len(failures) + 1) + "|"]
  lines += [f"| {name} | {' | '.join(cell(of.get((name, each))) for each in failures)} |" for name in operations]
  return "\n".join(lines)


def main() -> int:
  if sys.argv[1:2] == ["--child"]:
    return child(sys.argv[2:])
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--stores", default=",".join(STORES))
  parser.add_argument("--failures", default="", help="default: all of the store")
  parser.add_argument("--at-once", type=int, default=4, help="how many failures are tried at a time")
  parser.add_argument("--keep", help="a folder for what processes print; default: a temporary one")
  options = parser.parse_args()
  root = Path(options.keep or tempfile.mkdtemp(prefix="storage-"))
  rows: list[Row] = []
  server = StandaloneServer()

  def play(name: str, url: str, failure: str) -> None:
    folder = root / name / failure.replace(" ", "_")
    folder.mkdir(parents=True, exist_ok=True)
    with opened(name, url, failure, folder) as store:
      for row in Cell(store, folder, server, root / "cache").rows():
        rows.append(row)
        print(f"{row.store:5} {row.failure:13} {row.operation:22} {row.expected:26} {row.seen:40} "
              f"{'WRONG' if row.wrong else 'ok'}", flush=True)  # fmt: skip

  stores, began = options.stores.split(","), time.monotonic()
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
  with contextlib.ExitStack() as stack:
    pool, futures = ThreadPoolExecutor(options.at_once), []
    stack.callback(pool.shutdown, cancel_futures=True)
    for name in stores:
      url = "" if name == "local" else stack.enter_context(object_stores.running(name))
      os.environ.update(object_stores.environment(name, url) if url else {})  # of this process: nothing fails
      for failure in options.failures.split(",") if options.failures else FAILURES if url else LOCAL:
        futures.append(pool.submit(play, name, url, failure))
    stack.callback(server.close)  # at the end, or after an interruption, first
    for future in futures:
      future.result()
  print(*(table(rows, name) for name in stores), sep="\n\n")
  wrong = [row for row in rows if row.wrong]
  print(f"{len(rows)} checks in {time.monotonic() - began:.0f} s, {len(wrong)} not as expected; what the processes "
        f"printed is in {root}")  # fmt: skip
  return 1 if wrong else 0


if __name__ == "__main__":
  sys.exit(main())
