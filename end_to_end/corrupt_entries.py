"""Random damage to checkpoints and odd entries next to them: a run must always resume from the newest good state.

    JAX_PLATFORMS=cpu python -m end_to_end.corrupt_entries [--trials 20] [--seed 0]

Each trial copies a run with checkpoints in storage (steps 2 to 8) and on the local disk (steps 8 and 9), damages some,
adds odd entries, restores, saves eight more steps under retention and restores again. Prints one line per trial.
Exits with 1 if a trial did not restore the newest good state, raised, or did not delete old checkpoints.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.checkpoint import checksums, emergency
from trainer.checkpoint.tiers import Tiers
from trainer.config.schema import CheckpointSection
from trainer.world import SingleWorld

SAVED = (2, 4, 6, 8)  # steps in storage; each also ends a local period
LOCAL = (8, 9)  # steps on the local disk
MORE = range(10, 18)
KEEP = 4


def state(step: int) -> dict[str, jax.Array]:
  mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "fsdp"))
  rng = np.random.default_rng(step)
  values = {"w": rng.standard_normal((64, 64)).astype(np.float32), "step": np.int32(step)}
  return {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec())) for name, x in values.items()}


def open_tiers(folder: Path, lines: list[str]) -> Tiers:
  cfg = CheckpointSection(
    checkpoint_period=2,
    max_num_checkpoints_to_keep=KEEP,
    enable_emergency_checkpoint=True,
    local_checkpoint_directory=str(folder / "ram"),
    local_checkpoint_period=1,
  )
  slices = {0: jax.devices()[:1]}
  return Tiers(cfg, str(folder / "run"), world=SingleWorld(), run_id="tried", slices=slices, log=lines.append)


def save(tiers: Tiers, steps: range) -> None:
  for step in steps:
    tiers.maybe_save(step, state(step), {"tokens": step})
    tiers.wait()


def prepare(folder: Path) -> None:
  """A run that has saved steps 1 to 9."""
  (folder / "run").mkdir(parents=True)
  (folder / "run" / "run_id").write_text("tried\n")
  tiers = open_tiers(folder, [])
  save(tiers, range(1, 10))
  tiers.close()


# ---- what replaces a file; each returns whether the file is unusable afterwards


def _clear(path: Path) -> None:
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    path.unlink(missing_ok=True)


def truncated(path: Path, rng: random.Random) -> bool:
  data = path.read_bytes()
  path.write_bytes(data[: rng.randrange(len(data))])
  return True


def flipped(path: Path, rng: random.Random) -> bool:
  data = bytearray(path.read_bytes())
  data[0] ^= 1 << rng.randrange(8)  # other bytes may be padding, or the path in commit_success.txt
  path.write_bytes(data)
  return True


def missing(path: Path, rng: random.Random) -> bool:
  path.unlink()
  return True


def a_folder(path: Path, rng: random.Random) -> bool:
  _clear(path)
  path.mkdir()
  return True


def a_loop(path: Path, rng: random.Random) -> bool:
  _clear(path)
  path.symlink_to(path.name)
  return True


def a_pipe(path: Path, rng: random.Random) -> bool:
  _clear(path)
  os.mkfifo(path)
  return True


def a_list(path: Path, rng: random.Random) -> bool:
  """JSON of the wrong kind with the right checksum."""
  path.write_bytes(checksums.dump([1, 2, 3]))
  return True


def not_readable(path: Path, rng: random.Random) -> bool:
  """No permission bits; root reads the file all the same."""
  path.chmod(0)
  return not os.access(path, os.R_OK)


WAYS = (truncated, flipped, missing, a_folder, a_loop, a_pipe, a_list, not_readable)


def hurt_storage(folder: Path, step: int, rng: random.Random) -> tuple[str, bool]:
  """Damages one file of a step in storage, or its folder. Returns what was done and whether the step is lost."""
  root = folder / "run" / "checkpoints" / str(step)
  array = max(root.rglob("d/*"), key=lambda path: path.stat().st_size)
  target = rng.choice([root / "meta.json", root / "manifest.json", root / "commit_success.txt", array, root])
  ways: list[Callable[[Path, random.Random], bool]] = list(WAYS)
  if target == root:
    ways = [a_folder, a_loop, a_pipe]
  way = rng.choice(ways)
  return f"{target.relative_to(folder)}: {way.__name__}", way(target, rng)


def hurt_local(folder: Path, step: int, rng: random.Random) -> tuple[str, bool]:
  target = (
    emergency.folder(folder / "ram", str(folder / "run")) / "tried" / f"{step}.s0.p0.{rng.choice(['json', 'bin'])}"
  )
  way = rng.choice(WAYS)
  return f"{target.name}: {way.__name__}", way(target, rng)


def odd_entry(folder: Path, rng: random.Random) -> str:
  """Adds an entry that is no checkpoint; no state is lost."""
  run, ram = folder / "run" / "checkpoints", emergency.folder(folder / "ram", str(folder / "run")) / "tried"
  name, make = rng.choice(ODD)
  path = (ram if ".s0." in name else folder / "run" if name.startswith("checkpoints_rejected") else run) / name
  if not path.exists() and not path.is_symlink():
    make(path, rng)
  return f"{name}: {make.__name__}"


def copy_of_8(path: Path, rng: random.Random) -> bool:
  source = path.parent / "8"
  if (source / "manifest.json").is_file() and (source / "commit_success.txt").is_file():
    subprocess.run(["cp", "-a", str(source), str(path)], check=True)  # copies pipes as pipes
  return False


def a_file(path: Path, rng: random.Random) -> bool:
  path.write_bytes(b"odd")
  return False


ODD: tuple[tuple[str, Callable[[Path, random.Random], bool]], ...] = (
  ("0050", a_folder),
  ("046", a_file),
  ("08", copy_of_8),
  ("8 (copy)", copy_of_8),
  ("18", copy_of_8),
  ("\u0664\u0662", a_folder),  # Arabic digits
  ("\u00b2", a_file),  # a superscript is a digit to str.isdigit and no number to int()
  ("9" * 200, a_folder),
  ("12", a_loop),
  ("12", a_pipe),
  ("14", a_file),
  ("16", a_folder),
  ("99", a_file),
  ("10.orbax-checkpoint-tmp", a_file),
  ("12.orbax-checkpoint-tmp", a_folder),
  ("14.orbax-checkpoint-tmp", a_loop),
  ("checkpoints_rejected", a_file),
  ("checkpoints_rejected", a_loop),
  ("checkpoints_rejected", a_pipe),
  ("11.s0.p0.json", a_folder),
  ("11.s0.p0.bin", a_pipe),
  ("12.s0.p0.json", a_loop),
  ("13.s0.p0.json.tmp", a_folder),
  ("09.s0.p0.json", a_file),
  ("\u0669.s0.p0.json", a_file),
)


def trial(prepared: Path, folder: Path, seed: int) -> tuple[list[str], list[str]]:
  """(description of the damage, log lines). Raises AssertionError, or the error of the checkpoints."""
  rng = random.Random(seed)
  shutil.copytree(prepared, folder)
  # The name of the local folder has a hash of the run's path in it.
  old = emergency.folder(folder / "ram", str(prepared / "run"))
  old.rename(emergency.folder(folder / "ram", str(folder / "run")))
  stored, local = set(SAVED), set(LOCAL)
  done: list[str] = []
  for step in rng.sample(SAVED, rng.randrange(1, len(SAVED))):  # at least one step in storage stays good
    text, lost = hurt_storage(folder, step, rng)
    done.append(text)
    stored -= {step} if lost else set()
  for step in rng.sample(LOCAL, rng.randrange(3)):
    text, lost = hurt_local(folder, step, rng)
    done.append(text)
    local -= {step} if lost else set()
  done += [odd_entry(folder, rng) for _ in range(rng.randrange(1, 4))]
  lines: list[str] = []
  expect(open_tiers(folder, lines), max(stored | local), lines)
  tiers = open_tiers(folder, lines)
  expect(tiers, max(stored | local), lines)
  save(tiers, MORE)
  tiers.close()
  committed = sorted(int(path.parent.name) for path in (folder / "run" / "checkpoints").glob("1?/commit_success.txt"))
  assert committed == [10, 12, 14, 16], committed
  left = [step for step in SAVED if (folder / "run" / "checkpoints" / str(step)).exists()]
  assert not left, f"retention left {left}"
  expect(open_tiers(folder, lines), MORE[-1], lines)
  return done, lines


def expect(tiers: Tiers, step: int, lines: list[str]) -> None:
  restored = tiers.restore_newest(state(0))
  assert restored is not None, lines
  assert restored.step == step, (restored.step, step, lines)
  for name, x in state(step).items():
    assert np.asarray(restored.state[name]).tobytes() == np.asarray(x).tobytes(), (name, lines)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--trials", type=int, default=20)
  parser.add_argument("--seed", type=int, default=0)
  arguments = parser.parse_args()
  failed = 0
  with tempfile.TemporaryDirectory() as name:
    prepare(Path(name) / "prepared")
    for seed in range(arguments.seed, arguments.seed + arguments.trials):
      folder = Path(name) / str(seed)
      try:
        done, _ = trial(Path(name) / "prepared", folder, seed)
        print(f"{seed}: good; {'; '.join(done)}", flush=True)
      except Exception:  # noqa: BLE001 -- counted and printed
        failed += 1
        print(f"{seed}: FAILED\n{traceback.format_exc()}", flush=True)
      shutil.rmtree(folder, ignore_errors=True)
  print(f"{arguments.trials - failed} of {arguments.trials} trials restored the newest good state and went on")
  return 1 if failed else 0


if __name__ == "__main__":
  sys.exit(main())
