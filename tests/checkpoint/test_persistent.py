"""The persistent tier: a restored state has the saved bits, on any mesh and in any layout of layers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint._src.futures import future
from orbax.checkpoint._src.path import async_path
from tests.support import toy_state

import trainer
from input_pipeline.storage import StorageError
from trainer.checkpoint import run_folder
from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.checkpoint_errors import CheckpointError, NonFiniteState, Rejected
from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.state_backup import RunContext
from trainer.world import SingleWorld

ROOT = pathlib.Path(__file__).parents[2]
MODES = ["auto", "commit_file"]


def restore(tier, step, abstract):
  return tier.load(step, abstract, tier.verify(step))


@pytest.mark.parametrize("mode, asynchronous", [("auto", True), ("commit_file", False)])
def test_round_trip(tmp_path, caplog, mode, asynchronous):
  tier = Persistent(
    str(tmp_path / "c"), toy_state.config(async_checkpointing=asynchronous), RunContext(SingleWorld()), atomicity=mode
  )
  assert tier.save(7, toy_state.state(1), {"tokens": 70, "cursor": {"next_example": 5}})
  if asynchronous:
    tier.wait()
  assert tier.steps() == [7]
  meta = tier.verify(7)
  assert meta["tokens"] == 70 and meta["cursor"] == {"next_example": 5} and meta["step"] == 7
  assert meta["versions"]["jax"] == jax.__version__ and meta["versions"]["trainer"] == trainer.__version__
  toy_state.assert_same_bits(
    tier.load(7, toy_state.abstract(toy_state.values(1), toy_state.mesh(2, 4)), meta), toy_state.values(1)
  )
  assert [line.getMessage() for line in caplog.records if line.name == "absl" and line.levelname == "WARNING"] == []
  tier.wait()
  tier.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> str:
  """A folder with checkpoint 1."""
  folder = str(tmp_path_factory.mktemp("saved") / "c")
  tier = Persistent(folder, toy_state.config(), RunContext(SingleWorld()))
  tier.save(1, toy_state.state(1), {})
  tier.wait()
  tier.close()
  return folder


@pytest.mark.parametrize(("data", "fsdp"), [(1, 1), (2, 1), (1, 4), (4, 2), (1, 8)])
def test_restores_onto_other_meshes(saved, data, fsdp):
  tier = Persistent(saved, toy_state.config(), RunContext(SingleWorld()))
  want = toy_state.values(1)
  target = toy_state.abstract(want, toy_state.mesh(data, fsdp))
  got = restore(tier, 1, target)
  toy_state.assert_same_bits(got, want)
  assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, target)
  tier.wait()
  tier.close()


def test_the_lines_of_the_page_read_a_checkpoint_with_orbax_alone_on_one_device(saved, tmp_path):
  """The folder was written by eight devices: Orbax asks for as many, unless it reads into numpy."""
  page = (ROOT / "docs" / "checkpoints.md").read_text()
  lines = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1].replace(
    "runs/quickstart/checkpoints/200/state", f"{saved}/1/state"
  )
  assert lines.count("\n") <= 10 and "trainer" not in lines
  lines += f"assert jax.device_count() == 1\nnp.savez({str(tmp_path / 'found.npz')!r}, **arrays)\n"
  environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
  subprocess.run([sys.executable, "-c", lines], env=environment, check=True, timeout=240)
  found = np.load(tmp_path / "found.npz")
  want = toy_state.values(1)
  for name in ("embedding", "layers.mlp.w", "layers.norm"):
    value = want["params"]
    for part in name.split("."):
      value = value[part]
    np.testing.assert_array_equal(found[f"params.{name}"], value)
  np.testing.assert_array_equal(found["big"], want["big"])
  assert len(found) == len(jax.tree.leaves(want))


def test_a_hundred_arrays_on_eight_devices_are_saved_with_one_program_of_checksums(tmp_path):
  """A hundred programs of checksums at once could deadlock the devices."""
  values = {f"array {i}": np.full((8, 1 + i % 2), i, np.float32) for i in range(100)}
  tier = Persistent(str(tmp_path / "c"), toy_state.config(), RunContext(SingleWorld()))
  programs = fingerprint._program.cache_info().misses
  tier.save(1, toy_state.place(values, toy_state.mesh(2, 4)), {})
  tier.wait()
  assert fingerprint._program.cache_info().misses == programs + 1
  toy_state.assert_same_bits(restore(tier, 1, toy_state.abstract(values, toy_state.mesh(2, 4))), values)
  tier.close()


def test_state_may_be_donated_while_it_is_written(tmp_path):
  tier = Persistent(str(tmp_path / "c"), toy_state.config(), RunContext(SingleWorld()))
  state = toy_state.state(3)
  destroy = jax.jit(lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0)
  for step in (1, 2, 3):
    tier.save(step, state, {})
    destroy(state)
    state = toy_state.state(3)
  tier.wait()
  for step in (1, 2, 3):
    toy_state.assert_same_bits(
      restore(tier, step, toy_state.abstract(toy_state.values(3), toy_state.mesh(2, 4))), toy_state.values(3)
    )
  tier.wait()
  tier.close()


def test_behind_a_proxy_a_save_reads_everything_first(tmp_path):
  """A slice that hangs leaves no half-written folder behind, and no thread that could finish the save later."""
  asked = []

  def fetch(work, what):
    asked.append(what)
    if len(asked) == 1:
      raise TimeoutError("slices [1] do not answer")
    return work()

  tier = Persistent(str(tmp_path / "c"), toy_state.config(), RunContext(SingleWorld(), fetch=fetch))
  state = toy_state.state(1)
  with pytest.raises(TimeoutError):
    tier.save(1, state, {})
  tier.wait()
  assert not list((tmp_path / "c").iterdir())
  assert tier.save(1, state, {})
  tier.wait()
  assert asked == ["the copy of step 1 for its save"] * 2
  whole = toy_state.abstract(toy_state.values(), toy_state.mesh(2, 2))
  toy_state.assert_same_bits(restore(tier, 1, whole), toy_state.values(1))
  tier.close()


def test_retention_keeps_newest_multiples_and_best(tmp_path):
  cfg = toy_state.config(max_num_checkpoints_to_keep=2, checkpoint_keep_period=4, checkpoint_keep_best=1)
  state, losses = toy_state.state(), {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 5.0, 6: None, 7: None}
  tier = Persistent(str(tmp_path / "c"), cfg, RunContext(SingleWorld()))
  for step, loss in losses.items():
    tier.save(step, state, {}, metric=loss)
    if step == 3:  # a resumed run reads the losses back
      tier.wait()
      tier.close()
      tier = Persistent(str(tmp_path / "c"), cfg, RunContext(SingleWorld()))
  tier.wait()
  assert tier.steps() == [2, 4, 6, 7]
  assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["2", "4", "6", "7"]
  tier.wait()
  tier.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_a_state_that_is_not_finite_is_never_committed(tmp_path, mode, value):
  tier = Persistent(str(tmp_path / "c"), toy_state.config(), RunContext(SingleWorld()), atomicity=mode)
  tier.save(1, toy_state.state(), {})
  state = toy_state.state(2)
  state["opt_state"][0]["nu"]["embedding"] = state["opt_state"][0]["nu"]["embedding"].at[3, 1].set(value)
  tier.save(2, state, {})
  with pytest.raises(
    NonFiniteState, match=r"step 2 is not finite \(1 arrays, the first opt_state.0.nu.embedding\)"
  ) as raised:
    tier.wait()
  assert raised.value.__cause__ is not raised.value
  assert tier.steps() == [1] and [p.name for p in (tmp_path / "c").iterdir()] == ["1"]
  tier.wait()
  tier.close()


def test_wrong_shape_and_missing_array_are_rejected_with_their_names(tmp_path):
  tier = Persistent(str(tmp_path / "c"), toy_state.config(), RunContext(SingleWorld()))
  tier.save(1, toy_state.state(), {})
  tier.wait()
  wide = toy_state.values()
  wide["params"]["embedding"] = np.zeros((16, 16), np.float32)
  with pytest.raises(Rejected, match=r"params.embedding has shape \[16, 8\] where the state wants \[16, 16\]"):
    restore(tier, 1, toy_state.abstract(wide, toy_state.mesh(2, 4)))
  more = toy_state.values() | {"new": np.zeros(3)}
  with pytest.raises(Rejected, match="it has no array new"):
    restore(tier, 1, toy_state.abstract(more, toy_state.mesh(2, 4)))
  less = toy_state.values()
  del less["low"]
  with pytest.raises(Rejected, match="1 arrays that the state lacks: low"):
    restore(tier, 1, toy_state.abstract(less, toy_state.mesh(2, 4)))
  tier.wait()
  tier.close()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_folder_that_was_moved_away_fails_the_save_and_is_not_made_again(tmp_path, replaced):
  run = tmp_path / "base" / "run"
  tier = Persistent(
    str(run / "checkpoints"),
    toy_state.config(),
    RunContext(SingleWorld(), run_folder.establish(str(run), SingleWorld())),
  )
  tier.save(1, toy_state.state(1), {})
  tier.wait()
  run.parent.rename(tmp_path / "moved")
  if replaced:
    run_folder.establish(str(run), SingleWorld())
  with pytest.raises(CheckpointError, match="was moved, deleted or replaced during the run"):
    tier.save(2, toy_state.state(2), {})
  tier.close()
  assert not (run / "checkpoints").exists()


def test_a_save_whose_folder_vanishes_leaves_no_thread_of_orbax_behind(tmp_path, monkeypatch):
  """Such threads waited for five minutes, with the arrays of the save, and so did the end of the process."""
  root = tmp_path / "c"
  tier = Persistent(str(root), toy_state.config(), RunContext(SingleWorld()))
  tier.save(1, toy_state.state(1), {})
  tier.wait()
  signals = [future.synchronization.HandlerAwaitableSignal.STEP_DIRECTORY_CREATION]
  other = future._SignalingThread(
    target=lambda: None, send_signals=[], receive_signals=signals, timeout_secs=60, operation_id="of another program"
  )
  other.start()
  mkdir, before = async_path.mkdir, {*threading.enumerate()}

  async def vanish(path, **options):
    if path.parent != root:  # the folder of the arrays, in the folder of the step
      shutil.rmtree(root)
      root.touch()
    return await mkdir(path, **options)

  monkeypatch.setattr(async_path, "mkdir", vanish)
  with pytest.raises(CheckpointError, match="step 2 could not be saved"):
    tier.save(2, toy_state.state(2), {})
    tier.wait()
  left = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
  for thread in left:
    thread.join(10)
  assert not [thread.name for thread in left if thread.is_alive()]
  tier.close()
  assert other.is_alive() and not other._cancelled, "another save of this process was cancelled"
  future.set_signals(signals, operation_id="of another program")
  other.join(10)


def test_a_deletion_that_is_killed_anywhere_is_completed(tmp_path, monkeypatch):
  """A real kill found it: the mark of the deletion went first, and the rest was kept as a damaged checkpoint."""
  for calls in range(100):
    root = tmp_path / str(calls)
    for name in ("state/d/part", "state/manifest", "meta.json", "manifest.json", "commit_success.txt"):
      (root / "20" / name).parent.mkdir(parents=True, exist_ok=True)
      (root / "20" / name).write_text("content")
    counter = itertools.count()

    def until_killed(call, *args, calls=calls, counter=counter, **options):
      if next(counter) >= calls:
        raise KeyboardInterrupt
      return call(*args, **options)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
      for name in ("unlink", "remove", "rmdir"):
        patch.setattr(os, name, functools.partial(until_killed, getattr(os, name)))
      assert Persistent(str(root), toy_state.config(), RunContext(SingleWorld()))._delete("20")
      break  # nothing was left to kill
    after = Persistent(str(root), toy_state.config(), RunContext(SingleWorld()))
    assert after.steps() == [] and after.unfinished() == {} and os.listdir(root) == []
  assert 5 < calls < 99


class OneOfTwo:
  """A process of two, each in a thread."""

  size = 2

  def __init__(self, rank, values, barrier):
    self.rank, self.is_primary, self._values, self._barrier = rank, rank == 0, values, barrier

  def gather(self, value):
    self._values[self.rank] = value
    self._barrier.wait(timeout=30)
    values = list(self._values)
    self._barrier.wait(timeout=30)
    return values


@pytest.mark.parametrize("method", ["_committed", "verify"])
@pytest.mark.parametrize("failing", [0, 1])
def test_storage_that_fails_for_one_process_is_an_error_on_both(tmp_path, method, failing):
  def failure(*args):
    raise StorageError("read", "gs://b/x", OSError("503"))

  values, barrier = [None, None], threading.Barrier(2)
  tiers = [
    Persistent(str(tmp_path), toy_state.config(), RunContext(OneOfTwo(rank, values, barrier))) for rank in (0, 1)
  ]
  for tier in tiers:
    tier._committed, tier.verify = lambda name: True, lambda *args: {}
  setattr(tiers[failing], method, failure)
  with ThreadPoolExecutor(2) as pool:
    errors = [future.exception(timeout=60) for future in [pool.submit(tier.damage, 4) for tier in tiers]]
  asked = method == "verify" or failing == 0  # only the primary asks whether a step is committed
  assert [type(error) for error in errors] == ([CheckpointError] * 2 if asked else [type(None)] * 2)
  assert all("503" in str(error) for error in errors if error)


@pytest.mark.parametrize("listed", [([2], []), ([], [2]), (OSError("503"), [2])])
def test_two_processes_that_list_different_checkpoints_make_up_the_same_save(tmp_path, listed):
  """Object stores and NFS may show them at different times. A save by one process alone would never end."""

  def steps(found):
    if isinstance(found, OSError):
      raise found
    return found

  values, barrier = [None, None], threading.Barrier(2)
  cfg = toy_state.config(checkpoint_period=2)
  tiers = [toy_state.backups(cfg, str(tmp_path), world=OneOfTwo(rank, values, barrier), run_id="x") for rank in (0, 1)]
  for tier, found in zip(tiers, listed):
    tier._persistent.steps = lambda found=found: steps(found)
  with ThreadPoolExecutor(2) as pool:
    for future in [pool.submit(tier.completed, 3) for tier in tiers]:
      future.result(timeout=60)
  assert [tier.due(3) for tier in tiers] == [listed[0] == []] * 2  # an outage makes up for no save
