"""The session of a process: which files it writes and when, which input it refuses, and that it closes everything."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path

import jax
import pytest
from tests.support import needs

from trainer import config as config_lib
from trainer import defaults
from trainer.checkpoint import run_folder
from trainer.checkpoint.checkpoint_errors import CheckpointError
from trainer.cluster.simulated import SimulatedCluster
from trainer.config import ConfigError
from trainer.observe.events import read_events
from trainer.observe.metrics import StepRecord
from trainer.process.stop import Stop
from trainer.run.preparation import prepare
from trainer.run.session import open_session
from trainer.world import SingleWorld

KEYS = (
  "configs/base.yml run_name=run steps=4 dataset_type=synthetic base_emb_dim=16 base_num_decoder_layers=1 "
  "base_num_query_heads=2 base_num_kv_heads=1 base_mlp_dim=32 head_dim=8 vocab_size=64 max_target_length=16 "
  "per_device_batch_size=2 num_slices=2 devices_per_slice=2 services= "
  "autocheckpoint_grace_seconds=1 watchdog_timeout_seconds=600"
).split()


class SecondaryWorld(SingleWorld):
  """A process that is not the primary one."""

  rank, size, is_primary = 1, 2, False

  def gather(self, value):
    """The primary's part in world.from_primary: the run id, and no error. It has the same data."""
    return [value if isinstance(value, dict) else [True, ["0123456789ab", ""]], value]


def load(folder: Path, *keys: str):
  return config_lib.load([*KEYS, f"base_output_directory={folder}", *keys])


@contextlib.contextmanager
def opened(folder: Path, *keys: str, world=None, started: float | None = None):
  """The session of a process on two slices of two devices."""
  config = load(folder, *keys)
  devices = jax.devices()
  cluster = SimulatedCluster({0: tuple(devices[:2]), 1: tuple(devices[2:4])}, world)
  begin = time.monotonic() if started is None else started
  with (
    prepare(config, cluster, defaults.extensions()) as prepared,
    open_session(prepared, Stop(), begin) as session,
  ):
    yield session


def kinds(folder: Path) -> list[str]:
  return [event["kind"] for event in read_events(str(folder / "run"))]


def test_the_configuration_is_written_when_the_first_step_can_start(tmp_path):
  """Not before: if a checkpoint refuses the configuration, the old file must stay."""
  with opened(tmp_path, "learning_rate=0.25") as session:
    session.begin()
    assert kinds(tmp_path) == ["run_start"]
    assert not (tmp_path / "run" / "config.yml").exists()
    session.ready(0)
    text = (tmp_path / "run" / "config.yml").read_text()
    assert "learning_rate: 0.25\n" in text
    (tmp_path / "run" / "config.yml").write_text("kept")
    session.begin()
    session.ready(3)
    assert (tmp_path / "run" / "config.yml").read_text() == "kept"
    session.finish(1)
  assert kinds(tmp_path) == ["run_start", "init_done", "init_done", "run_end"]


@needs.workshop
@pytest.mark.parametrize(("code", "enabled", "written"), [(0, True, True), (0, False, False), (42, True, False)])
def test_only_a_complete_run_gets_a_report(tmp_path, code, enabled, written):
  with opened(tmp_path, f"enable_report={str(enabled).lower()}") as session:
    session.metrics.write(StepRecord(step=1, seconds=1.0, loss=4.0, grad_norm=1.0, lr=0.1, tokens=128, slices=2))
    session.finish(code)
  assert (tmp_path / "run" / "report.html").exists() == written
  assert [event["exit"] for event in read_events(str(tmp_path / "run")) if event["kind"] == "run_end"] == [code]


@pytest.mark.parametrize(
  ("keys", "told"),
  [
    (["per_device_batch_size=0.3"], "per_device_batch_size=0.3"),
    (["ici_tensor_parallelism=2", "base_num_query_heads=3", "base_num_kv_heads=3"], "tensor"),
    (["dataset_type=text", "dataset_path={folder}/empty"], "empty"),
    (["base_emb_dim=65536", "base_mlp_dim=262144", "base_num_decoder_layers=100"], "CPU devices, and this"),
  ],
)
def test_wrong_input_is_refused_before_the_run_has_a_folder(tmp_path, keys, told):
  (tmp_path / "empty").mkdir()
  with pytest.raises(ConfigError, match=told), opened(tmp_path, *(key.format(folder=tmp_path) for key in keys)):
    pass
  assert not (tmp_path / "run").exists()


def test_a_second_process_on_the_run_is_refused_until_the_first_has_ended(tmp_path):
  with opened(tmp_path), pytest.raises(ConfigError, match="another process is training in"), opened(tmp_path):
    pass
  with opened(tmp_path):
    pass


def test_an_error_closes_all_threads_and_frees_the_run(tmp_path):
  before = set(threading.enumerate())
  with pytest.raises(RuntimeError, match="in the middle"), opened(tmp_path) as session:
    session.ready(0)
    assert set(threading.enumerate()) - before, "a session has threads of its own"
    raise RuntimeError("in the middle")
  assert set(threading.enumerate()) <= before
  with opened(tmp_path):
    pass


def test_a_process_that_is_not_the_primary_one_writes_no_file(tmp_path):
  with opened(tmp_path):
    before = {path: path.stat().st_size for path in tmp_path.rglob("*")}
    with opened(tmp_path, world=SecondaryWorld()) as secondary:  # only the primary takes the lock
      secondary.begin()
      secondary.ready(0)
      secondary.finish(0)
    assert {path: path.stat().st_size for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("place", ["moved", "deleted", "of another run", "of another launch", "its own"])
def test_the_next_primary_writes_only_in_the_folder_of_its_run(tmp_path, place):
  """It creates no folder, and changes nothing in the folder of another run."""
  folder, identity = tmp_path / "run", "0123456789ab"
  with opened(tmp_path, world=SecondaryWorld()) as session, contextlib.ExitStack() as stack:
    is_ours = stack.enter_context(run_folder.held(str(folder), "launch", 1, print))
    session.folder = run_folder.RunFolder(str(folder), session.folder.run_id, is_ours)
    (folder / "run_id").write_text(identity)
    (folder / "log.txt").write_text("of the first primary\n")
    if place in ("deleted", "of another run"):
      shutil.rmtree(folder)
    elif place != "its own":
      folder.rename(tmp_path / "elsewhere")
    if place.startswith("of another"):
      stack.enter_context(run_folder.held(str(folder), "second", 1, print))
      (folder / "run_id").write_text(identity if place == "of another launch" else "ba9876543210")
      (folder / "log.txt").write_text("of another run\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    if place == "its own":
      session.change_role(True)
      assert kinds(tmp_path) == ["primary"]
    else:
      with pytest.raises(CheckpointError, match=r"records after step 0 could not be taken over: .*run was moved"):
        session.change_role(True)
      session.finish(1)
      assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
      assert folder.exists() == place.startswith("of another")
