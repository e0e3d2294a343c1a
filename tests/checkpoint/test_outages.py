"""Storage that does not answer, or answers with an error of a library: one error of ours, and memory is enough."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from tests.support import toy_state
from tests.support.command import ROOT, cpu_environment

from input_pipeline import data_files, documents, places, remote, storage
from input_pipeline.places import Place
from input_pipeline.storage import StorageError
from trainer.checkpoint import background, retention, run_folder, together
from trainer.checkpoint.checkpoint_errors import CheckpointError
from trainer.checkpoint.snapshot import Snapshots
from trainer.checkpoint.state_backup import Candidate
from trainer.commands import print_error
from trainer.config import ConfigError, load
from trainer.drivers.one_controller import OneController
from trainer.run.attempt import Attempt
from trainer.run.session import Session
from trainer.world import SingleWorld


class HttpError(Exception):
  """As gcsfs raises it."""

  def __init__(self, code: int) -> None:
    super().__init__(f"backend error, {code}")
    self.code = code


class RefusedByHub(Exception):
  """As requests, httpx and huggingface_hub raise it."""

  def __init__(self, code: int) -> None:
    super().__init__(f"{code} for hf://datasets/a")
    self.response = SimpleNamespace(status_code=code)


@pytest.fixture
def bucket(monkeypatch):
  """gs:// in memory. bucket.failing: the error that every call raises."""

  class Bucket(MemoryFileSystem):
    store: dict = {}  # noqa: RUF012 -- as in MemoryFileSystem
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    failing: Exception | None = None

    @classmethod
    def _strip_protocol(cls, path):
      return MemoryFileSystem._strip_protocol(str(path).removeprefix("gs://"))

    def info(self, path, **options):
      self._fail()
      return super().info(path, **options)

    def ls(self, path, detail=True, **options):
      self._fail()
      return super().ls(path, detail, **options)

    def cat_file(self, path, *args, **options):
      self._fail()
      return super().cat_file(path, *args)

    def pipe_file(self, path, value, **options):
      self._fail()
      return super().pipe_file(path, value, **options)

    def _fail(self):
      if Bucket.failing is not None:
        raise Bucket.failing

  monkeypatch.setitem(_registry, "gs", Bucket)
  monkeypatch.setattr(storage, "ANSWER_SECONDS", 0.2)
  return Bucket


@pytest.mark.parametrize(
  ("cause", "passes"),
  [
    (HttpError(503), True),
    (HttpError(401), False),
    (OSError("Forbidden: o"), False),
    (TimeoutError(), True),
    (ConnectionResetError(errno.ECONNRESET, "reset"), True),
    (PermissionError(errno.EACCES, "Permission denied"), False),
    (ValueError("UNAVAILABLE: CURL error"), True),
    (type("TransportError", (Exception,), {"__module__": "httpx2._exceptions"})("Name or service not known"), True),
    (RefusedByHub(503), True),
    (RefusedByHub(403), False),
  ],
)
def test_each_foreign_error_becomes_ours(bucket, cause, passes):
  bucket.failing = cause
  for call in (Place("gs://bucket/x").exists, lambda: list(Place("gs://bucket/x").iterdir())):
    with pytest.raises(StorageError, match="gs://bucket/x cannot be") as raised:
      call()
    assert raised.value.passes == passes and raised.value.cause is cause and raised.value.__suppress_context__


def test_not_found_because_of_the_network_is_an_outage(bucket):
  bucket.failing = FileNotFoundError("gs://bucket/x")
  assert not Place("gs://bucket/x").exists()
  bucket.failing.__cause__ = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
  with pytest.raises(StorageError, match="gs://bucket/x cannot be found: Connection refused") as raised:
    Place("gs://bucket/x").exists()
  assert raised.value.passes


def test_all_tries_together_have_the_time_of_an_answer(monkeypatch):
  monkeypatch.setattr(storage, "ANSWER_SECONDS", 0.5)
  tries, began = [], time.monotonic()

  def work():
    tries.append(storage.seconds())
    time.sleep(min(0.15, tries[-1]))
    raise ConnectionResetError(errno.ECONNRESET, "reset") if len(tries) < 2 else TimeoutError

  with pytest.raises(StorageError, match="cannot be read: reset"):  # and not that nothing came in the rest of the time
    storage.perform("read", "gs://bucket/x", work)
  assert len(tries) >= 2 and tries == sorted(tries, reverse=True) and tries[1] < tries[0] <= 0.5
  assert time.monotonic() - began < 1


def test_data_that_cannot_be_read_now_is_no_fault_of_the_file():
  def end(error):
    with documents.naming(Path("a.txt")):
      raise error

  outage = StorageError("read", "gs://b/a.txt", HttpError(503))
  for error in (outage, pickle.loads(pickle.dumps(outage)), OSError(errno.EIO, "Input/output error")):
    with pytest.raises(StorageError, match=r"a.txt cannot be read: ") as raised:  # of a worker process, too
      end(error)
    assert raised.value.passes
  with pytest.raises(ConfigError, match="Fix or remove it"):
    end(IsADirectoryError(errno.EISDIR, "Is a directory"))


def test_libraries_print_no_tracebacks_of_what_they_raise(monkeypatch):
  names = ["gcsfs", "s3fs.core", "fsspec.prefetcher"]
  for name in ("gcsfs", "s3fs", "fsspec"):
    logger = logging.getLogger(name)
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    logger.manager._clear_cache()
  assert all(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in names)
  storage.system("memory://any")
  assert not any(logging.getLogger(name).isEnabledFor(logging.ERROR) for name in names)


def test_python_prints_nothing_of_the_buffer_of_an_upload_that_was_cut_off(monkeypatch):
  told: list = []
  monkeypatch.setattr(sys, "unraisablehook", told.append)
  hook = background._WithoutClosedLoops()
  for owner in (io.BytesIO(), None):
    hook(SimpleNamespace(exc_type=BufferError, exc_traceback=None, object=owner))
  assert [unraisable.object for unraisable in told] == [None]


def test_only_not_found_means_that_a_folder_was_moved(tmp_path, monkeypatch):
  run_folder.establish(str(tmp_path), SingleWorld())

  def stale(*args, **options):
    raise OSError(errno.ESTALE, "Stale file handle")

  monkeypatch.setattr(storage, "_AGAIN_SECONDS", 0.01)
  with monkeypatch.context() as patch:
    patch.setattr(Path, "stat", stale)
    with pytest.raises(StorageError, match="Stale file handle"):
      run_folder.require(str(tmp_path), "another", "step 7 could not be saved")
  with pytest.raises(CheckpointError, match="was moved, deleted or replaced"):
    run_folder.require(str(tmp_path), "another", "step 7 could not be saved")


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
  place = places.at(str(tmp_path / "x"))
  place.write_text("before")

  def full(self, data):
    with self.open("wb") as file:
      file.write(data[:2])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  monkeypatch.setattr(Path, "write_bytes", full)
  with pytest.raises(StorageError, match="No space left") as raised:
    place.write_text("after")
  assert raised.value.is_full and place.read_text() == "before" and os.listdir(tmp_path) == ["x"]


def test_a_save_that_storage_refuses_is_a_warning(bucket):
  recorder = toy_state.Recorder()
  bucket.failing = HttpError(503)
  cfg = toy_state.config(checkpoint_period=1)
  tiers = toy_state.backups(cfg, "gs://bucket/run", run_id="id", recorder=recorder)
  tiers.completed(1)
  assert not tiers.save(1, toy_state.state(1), {})
  assert "step 1 could not be saved" in recorder.lines[-1] and "Training goes on" in recorder.lines[-1]


def test_after_a_recovery_in_an_outage_the_training_does_not_wait_for_a_list(bucket, monkeypatch):
  bucket.failing = HttpError(503)
  monkeypatch.setattr("trainer.checkpoint.backups._LOOK_SECONDS", 0.1)
  monkeypatch.setattr(storage, "ANSWER_SECONDS", 60.0)
  cfg, recorder = toy_state.config(checkpoint_period=10), toy_state.Recorder()
  tiers = toy_state.backups(cfg, "gs://bucket/run", run_id="id", recorder=recorder)
  tiers.completed(16)
  assert not tiers.due(16) and not recorder.lines, "a save of step 16 would fail too"
  monkeypatch.setattr(storage, "ANSWER_SECONDS", 0.2)
  assert not tiers.save(20, toy_state.state(20), {})
  assert "The storage cannot tell which checkpoints it has" in recorder.lines[-1]


class Memory:
  """A backup in memory with the state of step 3."""

  tier = "snapshot"

  def __init__(self, *errors: Exception | None) -> None:
    self._errors = list(errors or [None])

  def candidates(self) -> list[Candidate]:
    return [Candidate(3, str(i)) for i in range(len(self._errors))]

  def restore(self, candidate, abstract, accept):
    if (error := self._errors[int(candidate.copy)]) is not None:
      raise error
    return "state", {}

  def path(self, candidate: Candidate) -> str:
    return "memory"


class InStorage(Memory):
  tier = "persistent"

  def candidates(self) -> list[Candidate]:
    return [Candidate(5, "0")]


def restored(*backups):
  recorder = toy_state.Recorder()
  found = toy_state.restore_newest(backups, None, recorder)
  assert "checkpoint_rejected" not in recorder.kinds()
  return found


def test_a_recovery_from_memory_needs_no_storage(bucket):
  bucket.failing = HttpError(503)
  cfg, recorder = toy_state.config(), toy_state.Recorder()
  tiers = toy_state.backups(cfg, "gs://bucket/run", run_id="id", snapshots=Memory(), recorder=recorder)
  abstract = toy_state.abstract(toy_state.values(), toy_state.mesh(1, 2))
  assert tiers.restore_newest(abstract, completed=3).step == 3 and not recorder.lines, "no wait for the storage"
  found = tiers.restore_newest(abstract, completed=4)
  assert found.step == 3 and found.tier == "snapshot"
  assert "The persistent backups are left out: gs://bucket/run/checkpoints cannot be listed" in recorder.lines[0]
  alone = toy_state.backups(cfg, "gs://bucket/run", run_id="id", recorder=recorder)
  with pytest.raises(CheckpointError, match="cannot be listed"):  # and no fresh state
    alone.restore_newest(abstract)


def test_a_checkpoint_that_cannot_be_read_now_is_left_out_if_memory_has_a_state():
  assert restored(Memory(), InStorage(CheckpointError("503"))).tier == "snapshot"
  with pytest.raises(CheckpointError, match="503"):
    restored(InStorage(CheckpointError("503")))


def test_an_error_of_the_runtime_says_nothing_about_a_copy():
  blink = jax.errors.JaxRuntimeError("INTERNAL: a receiving slice does not answer")
  assert restored(Memory(blink, None)).tier == "snapshot"  # the copy of another slice
  with pytest.raises(jax.errors.JaxRuntimeError, match="receiving slice"):  # and nothing older
    restored(Memory(blink), SimpleNamespace(tier="persistent", candidates=lambda: [Candidate(1)]))


def test_a_blink_in_the_restore_of_a_snapshot_keeps_the_copy(monkeypatch):
  snapshots = Snapshots(SingleWorld())
  snapshots._whole = SimpleNamespace(step=3, copies={0: {}}, arrays={}, meta={})

  def blink(*args):
    raise jax.errors.JaxRuntimeError("INTERNAL: blink")

  monkeypatch.setattr("trainer.checkpoint.arrays.verified_load.load", blink)
  with pytest.raises(jax.errors.JaxRuntimeError, match="blink"):
    snapshots.restore(Candidate(3, "0"), None, lambda meta: None)
  assert snapshots.candidates() == [Candidate(3, "0")]


def test_a_process_that_has_completed_a_step_takes_no_fresh_state():
  attempt = Attempt.__new__(Attempt)
  attempt.session = SimpleNamespace(snapshots=SimpleNamespace(begin_attempt=lambda *args: None))
  attempt.view, attempt.survivors = SimpleNamespace(slices=(), devices=()), frozenset()
  attempt.backups = SimpleNamespace(restore_newest=lambda *args, **options: None)
  attempt.program = SimpleNamespace(state=None)
  attempt.elastic = SimpleNamespace(last_step=7)
  with pytest.raises(CheckpointError, match="step 7 was completed, and no copy of the state is left"):
    attempt.restore()


def test_a_configuration_is_read_from_a_bucket(bucket):
  place = Place("gs://bucket/run/config.yml")
  with pytest.raises(ConfigError, match="there is no such file"):
    load([str(place)])
  place.write_text("base_config: base.yml\nsteps: 7\nlearning_rate: 0.5")
  config = load([str(place), "steps=8"])
  assert (config.run.steps, config.optimizer.learning_rate, config.run.run_name) == (8, 0.5, "config")
  bucket.failing = HttpError(503)
  with pytest.raises(StorageError, match="cannot be read"):
    load([str(place)])


def test_a_new_process_says_that_it_begins_again(monkeypatch):
  attempt, lines = Attempt.__new__(Attempt), []
  attempt.config, attempt.program = None, SimpleNamespace(state=None)
  attempt.view, attempt.survivors = SimpleNamespace(slices=(), devices=()), frozenset()
  attempt.backups = SimpleNamespace(restore_newest=lambda *args, **options: None)
  attempt.elastic = SimpleNamespace(last_step=0, uses_snapshots=False)
  attempt.session = SimpleNamespace(
    snapshots=SimpleNamespace(begin_attempt=lambda *args: None),
    metrics=SimpleNamespace(earlier_step=7),
    log=SimpleNamespace(line=lines.append),
    events=SimpleNamespace(emit=lambda *args, **fields: None),
  )
  monkeypatch.setattr("trainer.run.attempt._fresh_state", lambda *args: "fresh")
  monkeypatch.setattr(Attempt, "evaluation_due", lambda self, step: False)
  assert attempt.restore().state == "fresh"
  assert lines == ["No checkpoint is left, though step 7 was completed: the run begins again at step 0."]


def test_nan_is_not_the_best_loss():
  cfg = toy_state.config(max_num_checkpoints_to_keep=1, checkpoint_keep_best=1)
  for order in ([(1, math.nan), (2, 1.0), (3, 2.0)], [(1, 2.0), (2, 1.0), (3, math.nan)]):
    assert retention.kept(dict(order), cfg) == {2, 3}


def test_a_failure_on_one_process_reaches_all():
  class World(SingleWorld):
    def gather(self, value):
      told.append(value)
      return [value]

  told: list = []

  def fail():
    raise StorageError("listed", "gs://bucket/run", HttpError(503))

  for work in (together.together, together.on_primary):
    with pytest.raises(CheckpointError, match="503") as raised:
      work(World(), fail)
    assert storage.failure(raised.value).passes  # so the exit code is 1
  assert told


def test_the_exit_code_says_whether_the_same_command_may_succeed(capsys):
  passing, refused = (StorageError("listed", "gs://bucket/run", HttpError(code)) for code in (503, 403))
  assert [print_error(passing), print_error(refused), print_error(ConfigError("x"))] == [1, 2, 2]
  assert print_error(FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt")) == 2
  wrapped = ConfigError("weights: cannot be read")
  wrapped.__cause__ = passing
  assert print_error(wrapped) == 1
  printed = capsys.readouterr().err
  assert "error: gs://bucket/run cannot be listed: HttpError: backend error, 503\nCheck the address" in printed
  assert "error: a.txt: No such file or directory\n" in printed


def test_a_refusal_that_passes_is_not_remembered(bucket, monkeypatch):
  monkeypatch.setattr(bucket, "call", lambda self, *args, **options: self._fail(), raising=False)
  bucket.failing = HttpError(503)
  with pytest.raises(StorageError):
    remote.require_bucket("base_output_directory", "gs://bucket/run")
  bucket.failing = HttpError(403)
  with pytest.raises(ConfigError, match="backend error, 403"):
    remote.require_bucket("base_output_directory", "gs://bucket/run")
  bucket.failing = FileNotFoundError("bucket")
  with pytest.raises(ConfigError, match="there is no such bucket"):
    remote.require_bucket("base_output_directory", "gs://bucket/run")
  bucket.failing = None
  remote.require_bucket("base_output_directory", "gs://bucket/run")


@pytest.mark.parametrize("address", ["gs:/bucket/x", "s3://", "gs:bucket", "gs://B/x"])
def test_there_is_one_check_of_addresses(tmp_path, monkeypatch, capsys, address):
  from trainer.tools import checkpoints, export_hf, generate, report, verify, watch
  from trainer.tools.tokenize import __main__ as tokenize

  monkeypatch.chdir(tmp_path)
  if address == "gs:bucket":  # the name of a folder here
    assert run_folder.folder(address) == Place(f"{tmp_path}/gs:bucket")
    return
  (tmp_path / "hf").mkdir()
  keys = ["configs/quickstart.yml", "dataset_type=text", f"dataset_path={ROOT / 'README.md'}"]
  for main, arguments in [
    (export_hf.main, ["hf", address]),
    (export_hf.main, [address, "out"]),
    (generate.main, [address, "text"]),
    (report.main, [address]),
    (watch.main, [address]),
    (verify.main, [address]),
    (checkpoints.main, [address]),
    (tokenize.main, [*keys, "--output", address]),
  ]:
    assert main(arguments) == 2, (main, arguments)
    told = capsys.readouterr().err
    assert told.startswith("error: ") and "Traceback" not in told
  assert os.listdir(tmp_path) == ["hf"]


@pytest.mark.parametrize(
  "keys",
  [
    ["dataset_type=text", "dataset_path=gs:/b/x"],
    ["dataset_type=synthetic", "load_parameters_path=gs:/b/x"],
    ["dataset_type=text", "tokenizer_type=bpe", "tokenizer_path=gs:/b/x"],
  ],
)
def test_an_address_with_one_slash_is_named_for_what_is_read(tmp_path, keys):
  with pytest.raises(ConfigError, match=rf"{keys[-1].split('=')[0]}=gs:/b/.*: must be gs://BUCKET/FOLDER"):
    load(["configs/base.yml", f"base_output_directory={tmp_path}", *keys])
  with pytest.raises(ConfigError, match=r"grain_train_files=gs:/b/\*: must be gs://BUCKET/FOLDER"):
    data_files.find("grain_train_files", "gs:/b/*", "jsonl")


OUTAGE = """
import sys
from input_pipeline import storage
storage.ANSWER_SECONDS, storage.TOLD_AFTER_SECONDS = 3.0, 1.0
module, *arguments = sys.argv[1:]
main = __import__(module, fromlist=["main"]).main
sys.exit(main(arguments))
"""


@pytest.mark.parametrize("scheme, command", [("s3", "report"), ("gs", "run"), ("s3", "dataset")])
def test_a_store_that_is_not_there_is_told_in_one_message(tmp_path, scheme, command):
  closed = "http://" + "127.0.0.1:9"
  names = {"STORAGE_EMULATOR_HOST": closed, "AWS_ENDPOINT_URL": closed, "AWS_ACCESS_KEY_ID": "x"}
  names |= {"AWS_SECRET_ACCESS_KEY": "x", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false"}
  keys = ["configs/quickstart.yml", "dataset_type=text"]
  arguments = {
    "report": ["trainer.tools.report", f"{scheme}://bucket/run"],
    "dataset": ["trainer.__main__", *keys, f"dataset_path={scheme}://bucket/text", f"base_output_directory={tmp_path}"],
    "run": ["trainer.__main__", *keys, f"base_output_directory={scheme}://bucket/runs"],
  }[command]
  result = subprocess.run(
    [sys.executable, "-c", OUTAGE, *arguments], env=cpu_environment(names), cwd=ROOT, capture_output=True, text=True,
    timeout=120, check=False,
  )  # fmt: skip
  assert result.returncode == 1, result
  assert f"Waiting for {scheme}://bucket" in result.stderr and "Traceback" not in result.stderr
  assert f"{scheme}://bucket" in result.stderr.split("error: ")[1] and "Check the address, the network" in result.stderr
  assert len(result.stderr.splitlines()) <= 8, result.stderr


def test_a_full_disk_at_the_beginning_of_the_training_is_a_warning(tmp_path, monkeypatch):
  session, lines = Session.__new__(Session), []
  session.log, session.wrote_config = SimpleNamespace(warning=lines.append), False
  session.config = load(["configs/base.yml", f"base_output_directory={tmp_path}", "run_name=."], check_paths=False)
  with monkeypatch.context() as patch:
    patch.setattr(Path, "write_bytes", lambda *_: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    session._write_config()
  assert not session.wrote_config and "No space left" in lines[0] and "Training goes on" in lines[0]
  session._write_config()
  assert session.wrote_config and "steps: " in (tmp_path / "config.yml").read_text()


def test_a_second_attempt_waits_for_the_restore_of_the_first():
  """Two restores need twice the memory."""
  release, restored = threading.Event(), []

  def fail():
    threading.Timer(0.2, release.set).start()
    raise RuntimeError("does not compile")

  controller = OneController.__new__(OneController)
  controller._compile, controller._wait = fail, SimpleNamespace(result=lambda task: task.result())
  with pytest.raises(RuntimeError, match="does not compile"):
    controller.start(lambda: restored.append(release.wait(10)), lambda start: None)
  assert restored == [True]
