"""Times persistent checkpoints of a state of a given size: the wait of the training thread, and restores.

    JAX_PLATFORMS=cpu python -m end_to_end.benchmarks.checkpoint [--parameters 100e6] [--saves 3] [--folder FOLDER]

The state has fp32 weights and the two moments of Adam (12 bytes per parameter), sharded over 8 devices. The step is a
number of Adam updates with gradients computed from the weights, so that it takes about a second. The benchmark prints
the time of a step without a save, and of a copy of the state to the host. For asynchronous saves it prints how long the
training thread was blocked, the time of the whole save, and the time of steps during a save. Then it restores onto 1,
2, 4 and 8 devices, each in a new process, compares all bits, and prints the growth of the peak memory (VmHWM) divided
by the size of the state.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from end_to_end.benchmarks.common import positive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer import world as world_lib
from trainer.checkpoint.arrays import state_tree
from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.tiers import Tiers
from trainer.config.schema import CheckpointSection

DEVICES = 8
STEP = 1
WIDTH, FFW, VOCAB = 1024, 3072, 16384  # the number of layers follows from the number of parameters
# Name -> shape of a weight in one layer.
LAYER = {
  "query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH // 2), "value": (WIDTH, WIDTH // 2), "out": (WIDTH, WIDTH),
  "wi_0": (WIDTH, FFW), "wi_1": (WIDTH, FFW), "wo": (FFW, WIDTH), "norm": (WIDTH,),
}  # fmt: skip
EACH = sum(math.prod(shape) for shape in LAYER.values())
MIN_PARAMETERS = VOCAB * WIDTH + EACH  # with fewer, the overhead of a restore hides the memory of the state


def shapes(parameters: float) -> dict[str, Any]:
  """Returns shapes of decoder weights with about so many parameters, with stacked layers."""
  layers = max(1, round((parameters - VOCAB * WIDTH) / EACH))
  return {"embedding": (VOCAB, WIDTH), "layers": {name: (layers, *shape) for name, shape in LAYER.items()}}


def abstract(parameters: float, devices: int) -> dict[str, Any]:
  """Returns the abstract state on the first `devices` devices. All arrays except norms are sharded over them."""
  mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, devices), ("data", "fsdp"))

  def one(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    spec = (
      PartitionSpec(None, "fsdp") if len(shape) > 2 else PartitionSpec("fsdp") if shape[0] == VOCAB else PartitionSpec()
    )
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

  def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)

  weights = jax.tree.map(one, shapes(parameters), is_leaf=is_shape)
  step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
  return {"params": weights, "opt_state": {"mu": weights, "nu": weights}, "step": step}


def values(leaf: int, index: tuple[slice, ...], shape: tuple[int, ...]) -> np.ndarray:
  """Returns part `index` of array number `leaf`: cheap numbers, all different, independent of the sharding."""
  grid = np.zeros((), np.uint32)
  for part, size in zip(index, shape):
    grid = grid[..., None] * np.uint32(size) + np.arange(*part.indices(size), dtype=np.uint32)
  words = (grid + np.uint32(leaf)) * np.uint32(2654435761)
  words = (words >> np.uint32(9)) | np.uint32(0x3F000000)  # floats in [0.5, 1)
  return words.view(np.float32)


def fill(target: Any) -> Any:
  leaves, tree = jax.tree.flatten(target)
  made = []
  for number, x in enumerate(leaves):
    if x.dtype == jnp.int32:
      made.append(jax.device_put(np.int32(STEP), x.sharding))
    else:
      call = lambda index, number=number, x=x: values(number, index, x.shape)
      made.append(jax.make_array_from_callback(x.shape, x.sharding, call))
  return jax.tree.unflatten(tree, made)


def update(state: Any) -> Any:
  """Returns the state after one step: 12 Adam updates, which keep the values in range."""

  def once(_: jax.Array, state: Any) -> Any:
    mu = jax.tree.map(lambda w, m: 0.9 * m + 0.1 * jnp.tanh(w), state["params"], state["opt_state"]["mu"])
    nu = jax.tree.map(lambda w, v: 0.99 * v + 0.01 * w * w, state["params"], state["opt_state"]["nu"])
    params = jax.tree.map(lambda w, m, v: w - 1e-4 * m / (jnp.sqrt(v) + 1e-8), state["params"], mu, nu)
    return {"params": params, "opt_state": {"mu": mu, "nu": nu}, "step": state["step"]}

  state = jax.lax.fori_loop(0, 12, once, state)
  return state | {"step": state["step"] + 1}


def rss(key: str) -> int:
  """Returns VmHWM or VmRSS of this process in bytes (Linux)."""
  for line in Path("/proc/self/status").read_text().splitlines():
    if line.startswith(key):
      return int(line.split()[1]) * 1024
  raise AssertionError(key)


def config(**changes: Any) -> CheckpointSection:
  return CheckpointSection(checkpoint_period=1, max_num_checkpoints_to_keep=2, **changes)


def saves(folder: Path, parameters: float, count: int) -> int:
  """Measures `count` asynchronous saves during_save steps, after one that is not counted; the state's bytes."""
  target = abstract(parameters, DEVICES)
  size = state_tree.state_bytes(target)
  state = fill(target)
  writer = Persistent(f"{folder}/kept/checkpoints", config(async_checkpointing=False), world=world_lib.of_jax())
  writer.save(STEP, state, {"tokens": 0})  # what the restores read
  writer.close()
  step = jax.jit(update, donate_argnums=0)
  state = jax.block_until_ready(step(state))
  without_save = []
  for _ in range(4):
    begin = time.monotonic()
    state = jax.block_until_ready(step(state))
    without_save.append(time.monotonic() - begin)
  copies = []
  for _ in range(3):
    begin = time.monotonic()
    held = [
      np.array(shard.data) for x in jax.tree.leaves(state) for shard in x.addressable_shards if not shard.replica_id
    ]
    copies.append(time.monotonic() - begin)
    del held
  events: list[dict[str, Any]] = []
  tiers = Tiers(
    config(),
    f"{folder}/run",
    emit=lambda kind, **fields: events.append({"kind": kind} | fields),
    world=world_lib.of_jax(),
  )
  blocked, during_save = [], []
  for number in range(1, count + 2):
    begin = time.monotonic()
    tiers.maybe_save(number, state, {"tokens": 0})
    blocked.append(time.monotonic() - begin)
    done = len(events)
    while len(events) == done:
      begin = time.monotonic()
      state = jax.block_until_ready(step(state))
      during_save.append((number, time.monotonic() - begin))
  tiers.close()
  whole = [event["seconds"] for event in events if event["kind"] == "checkpoint_saved"]
  show = lambda x: f"{statistics.median(x):.2f} s ({min(x):.2f} to {max(x):.2f})"
  print(f"| state | {size / 1e9:.3f} GB in {len(jax.tree.leaves(state))} arrays on {DEVICES} devices |")
  print(f"| step without a save | {show(without_save)} |")
  print(f"| copy of the state to the host, shard by shard | {show(copies)} |")
  print(f"| training thread blocked by an asynchronous save | {show(blocked[1:])} |")
  print(f"| the same, first save of the process | {blocked[0]:.2f} s |")
  print(f"| whole asynchronous save, to the commit | {show(whole[1:])} |")
  print(f"| step during a save | {show([seconds for number, seconds in during_save if number > 1])} |", flush=True)
  return size


def restore(folder: Path, parameters: float, devices: int) -> dict[str, Any]:
  """Restores the saved step as a run does it, and returns the measurements. Runs in a new process."""
  target = abstract(parameters, devices)
  size = state_tree.state_bytes(target)
  warm = jax.device_put(np.ones(8, np.float32), jax.tree.leaves(target)[-1].sharding)  # the runtime and Orbax are up
  jax.block_until_ready(warm + 1)
  import orbax.checkpoint  # noqa: F401

  tiers = Tiers(config(), f"{folder}/kept", world=world_lib.of_jax())
  before = rss("VmRSS")
  begin = time.monotonic()
  restored = tiers.restore_newest(target)
  seconds = time.monotonic() - begin
  peak = rss("VmHWM") - before
  assert restored is not None and restored.step == STEP
  equal = True
  for number, x in enumerate(jax.tree.leaves(restored.state)):
    for shard in x.addressable_shards:
      want = np.int32(STEP) if x.dtype == jnp.int32 else values(number, shard.index, x.shape)
      equal &= np.asarray(shard.data).tobytes() == want.tobytes()
  return {"devices": devices, "seconds": seconds, "peak": peak, "size": size, "ratio": peak / size, "equal": equal}


def check_folder(parser: argparse.ArgumentParser, folder: Path, only: str) -> None:
  try:
    kept = (folder / "kept" / "checkpoints" / str(STEP)).exists()
    if only == "restores":
      if not kept:
        parser.error(f"--folder {folder}: contains no save. Run --only saves with this folder first")
      return
    if kept:  # a step that exists is not saved again
      parser.error(f"--folder {folder}: contains earlier saves. Give another folder, or --only restores")
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    parser.error(f"--folder {folder}: {error.strerror}. Give a folder that can be written")


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--parameters", type=float, default=100e6)
  parser.add_argument("--saves", type=positive, default=3)
  parser.add_argument("--folder", default="", help="folder to write to; default: a temporary folder")
  parser.add_argument("--only", choices=["saves", "restores", ""], default="", help="run one half, in --folder")
  parser.add_argument("--restore", type=int, default=0, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  if not MIN_PARAMETERS <= arguments.parameters < math.inf:
    parser.error(
      f"--parameters {arguments.parameters:g}: must be at least {MIN_PARAMETERS:,}, an embedding and one layer"
    )
  if arguments.folder and not arguments.restore:
    check_folder(parser, Path(arguments.folder), arguments.only)
  elif arguments.only == "restores":
    parser.error("--only restores needs the --folder of an earlier --only saves")
  jax.config.update("jax_num_cpu_devices", arguments.restore or DEVICES)
  if arguments.restore:
    print(json.dumps(restore(Path(arguments.folder), arguments.parameters, arguments.restore)))
    return 0
  versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "orbax-checkpoint"))
  print(f"Python {platform.python_version()}, {versions}, {jax.devices()[0].device_kind}\n")
  with tempfile.TemporaryDirectory(prefix="checkpoint-benchmark-") as temporary:
    folder = Path(arguments.folder or temporary)
    if arguments.only != "restores":
      print("| save | median (least to most) |\n|---|---|")
      saves(folder, arguments.parameters, arguments.saves)
    if arguments.only == "saves":
      return 0
    print("\n| restore onto | time | peak memory / state | bits equal |\n|---|---|---|---|")
    good = True
    for devices in (1, 2, 4, 8):
      keys = ["--parameters", str(arguments.parameters), "--folder", str(folder), "--restore", str(devices)]
      command = [sys.executable, "-m", "end_to_end.benchmarks.checkpoint", *keys]
      result = subprocess.run(command, capture_output=True, text=True, timeout=1800)
      if result.returncode != 0:
        print(result.stderr[-3000:], file=sys.stderr)
        return 1
      got = json.loads(result.stdout.splitlines()[-1])
      print(f"| {devices} devices | {got['seconds']:.2f} s | {got['ratio']:.2f} | {got['equal']} |", flush=True)
      good &= got["equal"] and got["ratio"] < 1.3
  return 0 if good else 1


if __name__ == "__main__":
  sys.exit(main())
