"""Flips bits in runs of one controller with three slices, and checks that the witness finds each flip in its reach.

  python -m end_to_end.slice_flips [--count 50 | --seeds 7 9] [--standin]

Seed i determines flip i: what flips (gradients of a slice, its copy of the weights or of the optimizer state), in which
array, slice and step, and whether it is sticky. A flip must be found in the promised step, and the right slice must be
named and lost. The run must complete, and its losses may differ from the undisturbed run's only by the order of sums.
Nothing may be said of a transient wrong gradient in a share that is not compared: it is out of reach.

The slices are simulated; with --standin they are behind the stand-in for Pathways, with the real proxy client.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from end_to_end.pathways_histories import StandIn
from tests.support.elastic_harness import Harness

from trainer.checkpoint.arrays.state_tree import flatten
from trainer.cluster import Cluster
from trainer.config.faults import Fault
from trainer.run.session import Session
from worlds.membership.witness import draw

STEPS, SLICES = 9, 3
KEYS = (
  f"steps={STEPS} checkpoint_period={STEPS} eval_interval=-1 elastic_min_slice_count=1 snapshot_period=1 "
  "num_experts=2 num_experts_per_tok=1 base_moe_mlp_dim=16 use_qk_norm=true"
).split()
Names = Mapping[str, Sequence[str]]  # {kind of fault: the arrays that it may hit}


def plan(seed: int, names: Names) -> tuple[Fault, int, tuple[int, ...]]:
  """(flip `seed`, witness_period, the steps in one of which it must be found). 0 among them: it need not be found."""
  chance = random.Random(seed)
  kind, period = (
    chance.choice(["flip_gradient", "flip_gradient", "flip_weight", "flip_optimizer"]),
    chance.choice([1, 2]),
  )
  step, slice_id, sticky = chance.randint(1, STEPS - 3 * period), chance.randrange(SLICES), chance.random() < 0.5
  if kind != "flip_gradient":
    step += sticky * (-step % period)  # a sticky flip of the same bit undoes itself in every second step
  fault = Fault(kind, step, slice_id, sticky=sticky, array=chance.choice(names[kind]))
  witnesses = [n for n in range(step, STEPS + 1) if n % period == 0]
  if kind != "flip_gradient":  # rounding may hide it in the steps until the witness
    return fault, period, (witnesses[0], *([0] if witnesses[0] != step else []))
  shares = {index: [index] for index in range(SLICES)}
  drawn = [n for n in (witnesses if sticky else witnesses[:1]) if slice_id in draw(0, n // period, shares).members]
  return fault, period, tuple(drawn[:1]) or (0,)


def broken(harness: Harness, seed: int, names: Names, losses: Mapping[int, float]) -> tuple[str, list[str]]:
  """Plays flip `seed`. Returns what kind it is, and the rules that its run breaks. losses: of the undisturbed run."""
  fault, period, found = plan(seed, names)
  kind = fault.kind
  history = harness.run(f"flip-{seed}", [*KEYS, f"witness_period={period}", f"fault_injection={fault}"])
  alarms = history.of_kind("witness")
  expected = [[("removed", [fault.slice], n)] if n else [] for n in found]
  says = [(alarm["outcome"], alarm["members"], int(alarm["round"].split()[-1])) for alarm in alarms]
  rules = {
    "complete": history.outcome.kind == "complete",
    "alarm": says in expected,
    "array": (kind != "flip_gradient" and found[0] != fault.step)
    or all(list(alarm["arrays"].values()) == [1] and fault.array in next(iter(alarm["arrays"])) for alarm in alarms),
    "lost": [event["slice"] for event in history.of_kind("slice_down")] == [[fault.slice]] * len(alarms),
    "no return": not history.of_kind("slice_up"),
    "losses": bool(says == [] and any(found))
    or (
      history.losses.keys() == losses.keys() and np.allclose([*history.losses.values()], [*losses.values()], rtol=1e-5)
    ),
  }
  what = f"{kind}, {'sticky' if fault.sticky else 'transient'}{'' if any(found) else ', out of reach'}"
  return f"{what}: {fault}, witness_period={period}", [name for name, holds in rules.items() if not holds]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--count", type=int, default=50)
  parser.add_argument("--seeds", type=int, nargs="+", help="of the flips, instead of 0 to count - 1")
  parser.add_argument("--standin", action="store_true", help="behind the stand-in for Pathways")
  args = parser.parse_args()
  stand_in = StandIn() if args.standin else None
  if stand_in is None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", SLICES)
  names: dict[str, list[str]] = {}

  def learn(session: Session, cluster: Cluster) -> None:
    state = session.programs.program(cluster.view(cluster.slices)).state
    names["flip_gradient"] = names["flip_weight"] = list(flatten(state.params))
    names["flip_optimizer"] = list(flatten(state.opt_state))

  bad, kinds, seeds = 0, Counter[str](), args.seeds or range(args.count)
  with tempfile.TemporaryDirectory(prefix="slice-flips-") as folder:
    clusters = {"make_cluster": stand_in.make_cluster} if stand_in else {}
    harness = Harness(Path(folder), prepare_steps=False, **clusters)
    losses = harness.run("undisturbed", KEYS, prepare=learn).losses
    for seed in seeds:
      what, rules = broken(harness, seed, names, losses)
      kinds[what.partition(":")[0]] += 1
      bad += bool(rules)
      print(f"flip {seed} ({what}): {f'breaks {rules}' if rules else 'as promised'}", flush=True)
  where = "behind the stand-in" if args.standin else "simulated"
  print(f"{kinds.total()} flips, {where} ({dict(sorted(kinds.items()))}), {bad} of them break a rule.")
  if stand_in:
    stand_in.close()
  return int(bad > 0)


if __name__ == "__main__":
  exit_code = main()
  sys.stdout.flush()
  os._exit(exit_code)  # threads may still wait for a slice
