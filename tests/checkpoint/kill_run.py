"""A toy training run that resumes by itself, and a server that starts many of them without importing JAX each time.

`python -m tests.checkpoint.kill_run` reads lines "folder steps" and for each forks a process that does the run; it
prints "started PID", and "ended STATUS" when that process has ended. JAX is imported before the fork and used after it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint  # noqa: F401 -- imported once, before the fork
from tests.support import toy_state

from trainer import world as world_lib


def train(folder: Path, steps: int) -> None:
  """Trains to the end, with a local save after every step and a persistent save after every second step."""
  jax.config.update("jax_num_cpu_devices", 8)
  jax.config.update("jax_compilation_cache_dir", str(folder.parent / "cache"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  cfg = toy_state.config(
    checkpoint_period=2,
    max_num_checkpoints_to_keep=2,
    enable_emergency_checkpoint=True,
    local_checkpoint_directory=str(folder / "ram"),
    local_checkpoint_period=1,
  )
  mesh = toy_state.mesh(2, 4)
  recorder = toy_state.Recorder()
  lines = recorder.lines
  tiers = toy_state.backups(
    cfg,
    str(folder / "run"),
    slices={0: jax.devices()[:4], 1: jax.devices()[4:]},
    recorder=recorder,
    world=world_lib.of_jax(),
  )
  start = {"w": np.ones((128, 128), np.float32), "m": np.zeros((128, 128), np.float32), "step": np.int32(0)}
  restored = tiers.restore_newest(toy_state.abstract(start, mesh))
  state = restored.state if restored else toy_state.place(start, mesh)
  with (folder / "log.txt").open("a") as log:
    log.write("\n".join(lines) + "\n")

  def update(state):
    gradient = jnp.sin(state["w"] * 1.7 + state["step"].astype(jnp.float32))
    m = 0.9 * state["m"] + gradient
    return {"w": state["w"] - 0.01 * m, "m": m, "step": state["step"] + 1}, jnp.sum(gradient)

  compiled = jax.jit(update, donate_argnums=0)
  with (folder / "losses.jsonl").open("a") as losses:
    for step in range((restored.step if restored else 0) + 1, steps + 1):
      state, loss = compiled(state)
      losses.write(json.dumps({"step": step, "loss": float(loss).hex()}) + "\n")
      losses.flush()
      tiers.save(step, state, {"tokens": step}, last=step == steps)
  tiers.close()
  np.savez(folder / "final.npz", **{name: np.asarray(x) for name, x in state.items()})


def serve() -> None:
  for line in sys.stdin:
    folder, steps = line.split()
    pid = os.fork()
    if pid == 0:
      try:
        train(Path(folder), int(steps))
      except BaseException as error:  # noqa: BLE001 -- a forked child must not return into the server
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
      os._exit(0)
    print(f"started {pid}", flush=True)
    print(f"ended {os.waitpid(pid, 0)[1]}", flush=True)


if __name__ == "__main__":
  serve()
