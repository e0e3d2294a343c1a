"""Trains random small models on real processes, one of which is killed, and compares each run with two others.

  python -m end_to_end.process_configurations [--count 40] [--first 0]

Seed i determines the model (shapes that do not divide evenly too), dtypes, optimizer, attention, remat policy, the mesh
of a slice, processes per slice, streams of the exchange, evaluations, and which processes are killed or asked to end.
There are two oracles. One process that computes everything (slices that nobody kills, if they have several processes of
several devices each) must have the same losses, evaluations and final state, bit by bit. One controller with simulated
slices, whose step is one compiled program, must have nearly the same losses. After the first run that breaks a rule,
prints the command that repeats it and exits with 1.
"""

from __future__ import annotations

import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.command import Run, differences
from tests.support.forked_runs import Server
from tests.support.process_runs import KEYS, ProcessRun, seeded_command
from tests.support.torchrun_runs import OneWorker

STEPS = 30
LIMIT_SECONDS = 300.0
# Largest relative difference of a loss from another way to sum: of gradients in float32, and of anything shorter. The
# learning rate is large, so rounding grows from step to step: only the first steps are compared so.
CLOSE, ROUNDED, FIRST_STEPS = 1e-4, 1e-2, 5
PROCESSES = 2  # of a slice, in some runs
LANES = ("--processes-per-slice", str(PROCESSES))
POLICIES = (
  "full none minimal minimal_with_context auto save_qkv_proj save_out_proj minimal_offloaded qkv_proj_offloaded"
).split()


@dataclass(frozen=True)
class Plan:
  """One run. keys: without those of the oracles. faults: (step, member, signal)."""

  slices: int
  keys: dict[str, Any]
  options: tuple[str, ...]
  faults: tuple[tuple[int, int, int], ...]

  @property
  def tolerance(self) -> float:
    exact = ("dtype", "weight_dtype", "grad_reduce_dtype")
    rounded = any(self.keys[key] != "float32" for key in exact) or self.keys["quantization"] != ""
    # Muon makes an orthogonal matrix of each gradient, small as it may be.
    return ROUNDED if rounded or self.keys["opt_type"] == "muon" else CLOSE


def plan(seed: int) -> Plan:
  """Returns run `seed`."""
  chance = random.Random(seed)
  pick = lambda *values: chance.choice(values)
  devices, slices = pick(1, 1, 2, 2, 4, 4), pick(2, 3)
  layers, scanned = pick(1, 2, 3, 4), pick("true", "true", "false")
  query_heads, kv_heads = pick((2, 1), (4, 2), (3, 3), (4, 4))
  keys: dict[str, Any] = {
    "devices_per_slice": devices,
    "gradient_accumulation_steps": pick(1, 1, 2, 3),
    "remat_policy": pick(*POLICIES),
    "attention": pick("autoselected", "dot_product", "flash"),
    "dtype": pick("float32", "bfloat16"),
    "weight_dtype": pick("float32", "float32", "bfloat16"),
    "grad_reduce_dtype": pick("float32", "bfloat16"),
    "quantization": pick("", "", "", "int8", "fp8"),
    "opt_type": pick("adamw", "adamw", "adafactor", "muon", "sgd"),
    "logits_via_embedding": pick("true", "false"),
    "use_qk_norm": pick("true", "false"),
    "base_num_decoder_layers": layers,
    "scan_layers": scanned,
    "exchange_streams": pick(1, 1, 2, 3),
    "max_target_length": pick(16, 17, 30, 32),
    "per_device_batch_size": pick(1, 2, 3),
    "vocab_size": pick(61, 64, 128),
    "base_num_query_heads": query_heads,
    "base_num_kv_heads": kv_heads,
    "base_emb_dim": pick(16, 24, 32),
    "base_mlp_dim": pick(32, 48),
    "head_dim": pick(8, 16),
    "checkpoint_period": pick(7, 1000),
    "elastic_min_slice_count": pick(1, 1, -1),
    "steps": STEPS,
  }
  accumulation, rows = keys["gradient_accumulation_steps"], keys["per_device_batch_size"]
  keys["shares_per_slice"] = pick(1, accumulation, accumulation * rows)
  if devices > 1:
    even = {"tensor": kv_heads, "context": keys["max_target_length"], "fsdp": 2, "data": 2}
    axes = [axis for axis, size in even.items() if size % 2 == 0]
    chosen = chance.sample(axes, pick(1, 2, 2) if devices == 4 else 1)
    keys |= {f"ici_{axis}_parallelism": 2 for axis in chosen if axis != "fsdp"}
  if pick(True, False, False):
    keys |= {"eval_interval": pick(5, 7), "eval_steps": 2}
  if keys["opt_type"] != "adafactor":
    keys |= pick({}, {}, {"mu_dtype": "bfloat16"})
  for rare in (
    {"z_loss_multiplier": 1e-3},
    {"use_iota_embed": "true"},
    {"rope_type": "llama3"},
    {"gradient_clipping_threshold": 0},
    {"lr_schedule_type": "wsd"},
    {"reuse_example_batch": 1},
    {"log_period": 3},
  ):
    keys |= rare if chance.random() < 0.2 else {}
  options = LANES if devices > 1 and chance.random() < 0.35 else ()
  options += ("--spares", "1") if chance.random() < 0.2 else ()
  faults = [
    (chance.randrange(2, STEPS - 3), chance.randrange(slices), pick(*[signal.SIGKILL] * 3, signal.SIGTERM))
    for _ in range(pick(1, 2))
  ]
  return Plan(slices, keys, options, tuple(sorted(faults)))


def arguments(keys: dict[str, Any]) -> list[str]:
  return [f"{key}={value}" for key, value in keys.items()]


def train(run: ProcessRun, faults: tuple[tuple[int, int, int], ...] = ()) -> tuple[int, int]:
  """Runs to the end through the faults. Returns the exit code and how many processes they hit."""
  hit = 0
  with run.launched() as supervisor:
    for step, member, number in faults:
      run.wait_for(lambda step=step: run.last_step >= step, supervisor, LIMIT_SECONDS)
      hit += run.kill(member, number)
    return run.wait(supervisor, LIMIT_SECONDS), hit


def distance(run: Run, oracle: Run) -> float:
  """The largest relative difference of a loss of the first steps."""
  ours, theirs = run.losses(), oracle.losses()
  return max(abs(ours[step][0] - theirs[step][0]) / theirs[step][0] for step in range(1, FIRST_STEPS + 1))


def check(folder: Path, seed: int, server: Server) -> tuple[str, list[str]]:
  """Plays run `seed`. Returns a summary, and the rules that are broken."""
  history = plan(seed)
  compiled = f"jax_cache_dir={folder / 'compiled'}"
  start = time.monotonic()

  alone = [compiled, *arguments(history.keys | {"elastic_min_slice_count": 1})]  # one worker is the only member
  one: ProcessRun = OneWorker(folder / "one", alone, slices=history.slices, server=server)
  if LANES[0] in history.options and history.keys["devices_per_slice"] > PROCESSES:
    # Two devices in each of two processes sum in another order than four devices in one process.
    one = ProcessRun(folder / "one", alone, slices=history.slices, options=LANES, server=server)
  code, _ = train(one)
  if code == 2:
    return f"refused: {one.printed.splitlines()[-1]}", []
  if code != 0:
    return "one process", [f"exit code {code}", one.tail()]

  keys = [compiled, *arguments(history.keys)]
  run = ProcessRun(folder / "run", keys, slices=history.slices, options=history.options, server=server)
  code, hit = train(run, history.faults)
  if code != 0:
    return "processes", [f"exit code {code}", run.tail()]
  broken = []
  # Two signals may hit all members that have the state. Then what follows the last checkpoint is recorded again.
  again = "with the state is lost" in run.printed
  once = lambda values: sorted(set(values)) if again else list(values)
  if once(run.steps()) != list(range(1, STEPS + 1)):
    broken.append(f"the recorded steps are {run.steps()}")
  broken += differences(run, one, STEPS)
  if {step: once(losses) for step, losses in run.evaluations().items()} != one.evaluations():
    broken.append(f"evaluations {run.evaluations()}, of one process {one.evaluations()}")

  same = {key: value for key, value in history.keys.items() if not key.startswith(("elastic_", "exchange_", "shares_"))}
  changes = ["elastic_enabled=false", "elastic_min_slice_count=-1", "cluster=simulated", f"num_slices={history.slices}"]
  single = Run(folder / "single", [*KEYS, compiled, *arguments(same), *changes], server.start)
  code = single.finish(timeout=LIMIT_SECONDS)
  if code != 0:
    return "one controller", [f"exit code {code}", single.printed[-2000:]]
  if (apart := distance(one, single)) > history.tolerance:
    broken.append(f"losses differ by {apart:.1e} from those of one controller")
  seconds = time.monotonic() - start
  return f"{hit} signals, {apart:.1e} from one controller, {seconds:.0f} s", broken


def run_all(folder: Path, first: int, count: int, server: Server) -> int:
  """Plays and checks the runs; returns the exit code."""
  for seed in range(first, first + count):
    try:
      summary, broken = check(folder / str(seed), seed, server)
    except AssertionError as error:
      summary, broken = "not finished", [str(error)]
    print(f"run {seed}: {summary}", flush=True)
    if broken:
      print(*broken, plan(seed), sep="\n  ")
      print(f"repeat with: python -m end_to_end.process_configurations --first {seed} --count 1")
      return 1
    shutil.rmtree(folder / str(seed))
  return 0


if __name__ == "__main__":
  sys.exit(seeded_command(__doc__, "runs", 40, run_all))
