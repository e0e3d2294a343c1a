"""Functions that the processes of a world run. Two processes form a slice: 0 and 1 slice 0, 2 and 3 slice 1."""

from __future__ import annotations

import shutil
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from tests.support import toy_state

from input_pipeline import tally
from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from input_pipeline.tally import Tally
from trainer import world as world_lib
from trainer.checkpoint import emergency, run_folder
from trainer.checkpoint.backups import Backups
from trainer.checkpoint.checkpoint_errors import NonFiniteState
from trainer.parallel.mesh import DATA, FSDP, TENSOR
from trainer.process.stop import Stop
from trainer.program.feed import Feed
from trainer.program.step import abstract_batch

PER_SLICE = 4  # devices


def slices() -> dict[int, list[jax.Device]]:
  devices = jax.devices()
  return {i: devices[i * PER_SLICE : (i + 1) * PER_SLICE] for i in range(max(1, len(devices) // PER_SLICE))}


def mesh() -> Mesh:
  per_slice = min(PER_SLICE, len(jax.devices()))
  return Mesh(np.array(jax.devices()).reshape(-1, per_slice), ("data", "fsdp"))


def host(path: Path, index: int | None = None) -> Path:
  """The local disk of one host."""
  return path / f"host{jax.process_index() if index is None else index}"


def tiers(path: Path, recorder: toy_state.Recorder | None = None, **changes) -> Backups:
  recorder = recorder or toy_state.Recorder()
  cfg = toy_state.config(
    **{
      "checkpoint_period": 2,
      "enable_emergency_checkpoint": True,
      "local_checkpoint_directory": str(host(path)),
      "local_checkpoint_period": 1,
    }
    | changes
  )
  return toy_state.backups(cfg, str(path / "run"), slices=slices(), recorder=recorder, world=world_lib.of_jax())


def expect(path: Path, step: int, tier: str, **changes) -> toy_state.Recorder:
  recorder = toy_state.Recorder()
  restored = tiers(path, recorder, **changes).restore_newest(toy_state.abstract(toy_state.values(), mesh()))
  assert restored is not None, recorder.lines
  assert (restored.step, restored.tier) == (step, tier), (restored.step, restored.tier, recorder.lines)
  toy_state.assert_same_bits(restored.state, toy_state.values(step))
  assert restored.meta["tokens"] == step
  return recorder


def together(name: str) -> None:
  multihost_utils.sync_global_devices(name)


def wipe(path: Path, *hosts: int) -> None:
  together("before wipe")
  if jax.process_index() in hosts:
    shutil.rmtree(host(path))
  together("after wipe")


def refill(path: Path) -> None:
  """Gives every host its saved files back."""
  together("before refill")
  shutil.rmtree(host(path), ignore_errors=True)
  shutil.copytree(path / f"copy{jax.process_index()}", host(path))
  together("after refill")


def losses(path: Path) -> None:
  """Saves up to step 3 (persistent: 2), then every kind of loss of local copies."""
  t = tiers(path)
  for step in (1, 2, 3):
    assert t.save(step, toy_state.state(step, mesh()), {"tokens": step})
  t.close()
  shutil.copytree(host(path), path / f"copy{jax.process_index()}")
  expect(path, 3, "emergency")
  for lost in [(0,), (2, 3), (0, 3), (1, 2)]:  # a host, a slice, different parts on different slices
    wipe(path, *lost)
    expect(path, 3, "emergency")
    refill(path)
  wipe(path, 1, 3)  # both copies of the same parts
  expect(path, 2, "persistent")
  wipe(path, 0, 2)  # now every local copy is lost
  expect(path, 2, "persistent")
  refill(path)
  swap(path)
  damage(path)


def swap(path: Path) -> None:
  """Hosts return in another order: a process finds the files of another process on its disk."""
  me, count = jax.process_index(), jax.process_count()
  shutil.rmtree(host(path))
  together("swap")
  shutil.copytree(path / f"copy{(me + 1) % count}", host(path))
  together("swapped")
  expect(path, 3, "emergency")
  refill(path)


def damage(path: Path) -> None:
  if jax.process_index() == 1:
    file = emergency.folder(str(host(path)), str(path / "run")) / run_folder.read(str(path / "run")) / "3.s0.p1.bin"
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
  together("damaged")
  expect(path, 3, "emergency")


def persistent(path: Path) -> None:
  """Persistent only: round trip, one replica reading, one process failing to read, a state that is not finite."""
  only = {"enable_emergency_checkpoint": False}
  t = tiers(path, **only)
  for step in (2, 4, 6):
    t.save(step, toy_state.state(step, mesh()), {"tokens": step})
  bad = toy_state.state(8, mesh())
  bad["low"] = jax.jit(lambda x: x.at[0].set(np.inf))(bad["low"])
  t.save(8, bad, {"tokens": 8})
  try:
    t.wait()
    raise AssertionError("the infinite state was saved")
  except NonFiniteState:
    pass
  t.close()
  expect(path, 6, "persistent", **only)
  expect(path, 6, "persistent", enable_single_replica_ckpt_restoring=True, **only)
  together("read")
  if jax.process_index() == 0:
    victim = max((path / "run" / "checkpoints" / "6").rglob("d/*"), key=lambda p: p.stat().st_size)
    victim.write_bytes(victim.read_bytes()[:-1])
  together("damaged")
  recorder = expect(path, 4, "persistent", **only)
  assert any("bytes instead of" in line for line in recorder.lines), recorder.lines


def big_state(step: int) -> dict[str, jax.Array]:
  values = {"w": np.random.default_rng(step).standard_normal((1024, 1024)).astype(np.float32)}
  return toy_state.place(values, mesh())


def count_bytes(path: Path) -> None:
  """Prints what each process reads in a restore of 4 MiB, with every replica reading and with one."""
  for single in (False, True):
    run = path / str(single)
    t = tiers(run, enable_emergency_checkpoint=False, enable_single_replica_ckpt_restoring=single)
    t.save(2, big_state(2), {})
    t.close()
    meta = t._persistent.verify(2)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), big_state(2))
    before = toy_state.bytes_read()
    state = t._persistent.load(2, target, meta)
    print(f"single={single} read={toy_state.bytes_read() - before}", flush=True)
    toy_state.assert_same_bits(state, {"w": np.random.default_rng(2).standard_normal((1024, 1024)).astype(np.float32)})


def preempted(path: Path, stop: Stop) -> None:
  """Trains until any process gets SIGTERM, then saves one checkpoint at the agreed step."""
  t = tiers(path, enable_emergency_checkpoint=False, checkpoint_period=10**6)
  stop.join_run(world_lib.of_jax().stop_agreed, saves=True, several=jax.process_count() > 1, log=print)
  state = toy_state.state(0, mesh())
  add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1 if x.dtype == np.int32 else x, tree))
  for step in range(1, 10**6):
    state = add(state)
    jax.block_until_ready(state)
    print(f"step {step}", flush=True)
    if stop.requested(step):
      t.save(step, state, {"tokens": step}, last=True)
      t.close()
      restored = tiers(path, enable_emergency_checkpoint=False).restore_newest(
        toy_state.abstract(toy_state.values(), mesh())
      )
      assert restored is not None and int(restored.state["step"]) == step == restored.step
      print(f"stopped at {step}, committed {restored.step}", flush=True)
      return


def ignoring_preemption(path: Path, stop: Stop) -> None:
  stop.join_run(world_lib.of_jax().stop_agreed, saves=True, several=jax.process_count() > 1)
  print("ready", flush=True)
  for step in range(1, 10**6):
    time.sleep(0.01)
    if stop.requested(step):
      print("asked", flush=True)


def tallies(path: Path) -> None:
  """Rows that several processes hold are counted once, by one of them."""
  devices = np.array(jax.devices())
  for shape in ((1, 4, 1), (2, 1, 2), (1, 1, 4)):
    over = Mesh(devices.reshape(shape), (DATA, FSDP, TENSOR))
    plan = types.SimpleNamespace(groups=[np.array([[3, 0, 1, 2], [7, 5, -1, -1]])], rows=np.arange(8))
    prog: Any = types.SimpleNamespace(mesh=over, batch=(abstract_batch(over, 2, 4, 4),), plan=plan)
    data = DataOptions(dataset_type="synthetic", max_target_length=4)
    loader = make_loader(data, vocab_size=64, global_batch_size=8, split="train")
    feed = Feed(loader, prog)
    _, own = feed.tallied(2, hashes=True)
    rows = [0, 1, 2, 3, 5, 7]
    expected = tally.of_rows(rows, loader.batch(2, np.array(rows)), hashes=True)
    assert Tally.of_sum(np.asarray(feed.over_processes(own.numbers))) == expected, shape
