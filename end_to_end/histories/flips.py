"""Bits that flip, and whether the witness finds each flip within its reach: with one controller, and with processes.

The seed determines what flips (gradients of a slice, its copy of the weights or of the optimizer state), in which
array, slice and step, and whether it is sticky. A flip must be found in the promised step, before its commit; the right
slice must be named and lost, and stays away; and the run must complete. With processes (every second history), the
lines of metrics and the final state then have the bits of the undisturbed run; with one controller, sums may be added
in another order. A transient wrong gradient in a share that is not compared is out of reach, and nothing may be said of
it."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
from end_to_end.histories import oracle
from end_to_end.histories.__main__ import Play, Played
from tests.support.elastic_harness import Harness
from tests.support.forked_runs import Server, StandaloneServer
from tests.support.process_runs import ProcessRun

from trainer.checkpoint.arrays.state_tree import flatten
from trainer.cluster import Cluster
from trainer.config.faults import Fault
from trainer.run.session import Session
from worlds.membership.dealing import deal
from worlds.membership.witness import draw

STEPS, SLICES = 9, 3
KEYS = (
  f"steps={STEPS} checkpoint_period={STEPS} eval_interval=-1 elastic_min_slice_count=1 num_experts=2 "
  "num_experts_per_tok=1 base_moe_mlp_dim=16 use_qk_norm=true"
).split()
KINDS = ("flip_gradient", "flip_gradient", "flip_weight", "flip_optimizer")
Names = Mapping[str, Sequence[str]]  # {kind of fault: the arrays that it may hit}


@dataclasses.dataclass(frozen=True)
class Flip:
  """One run. found: the steps in one of which the flip must be found; 0 among them: it need not be found."""

  fault: Fault
  period: int
  found: tuple[int, ...]

  def __str__(self) -> str:
    return f"fault_injection={self.fault} witness_period={self.period}"

  @property
  def what(self) -> str:
    kind = "sticky" if self.fault.sticky else "transient"
    return f"{kind} {self.fault.kind}{'' if any(self.found) else ', out of reach'}"


def plan(seed: int, names: Names, *, processes: bool) -> Flip:
  """Returns flip `seed`."""
  chance = random.Random(seed)
  kind, period = chance.choice(KINDS), chance.choice([1, 2])
  # In the first step, processes get the state of the first one, with what flips in it.
  step, slice_id, sticky = chance.randint(2, STEPS - 3 * period), chance.randrange(SLICES), chance.random() < 0.5
  if kind != "flip_gradient":
    step += sticky * (-step % period)  # a sticky flip of the same bit undoes itself in every second step
  fault = Fault(kind, step, slice_id, sticky=sticky, array=chance.choice(names[kind]))
  return Flip(fault, period, promised(fault, period, processes=processes))


def promised(fault: Fault, period: int, *, processes: bool) -> tuple[int, ...]:
  """The steps in one of which the fault must be found. Processes compare weights in each step, others at a witness."""
  step, witnesses = fault.step, [n for n in range(fault.step, STEPS + 1) if n % period == 0]
  if fault.kind == "flip_weight" and processes:
    return (step,)
  if fault.kind != "flip_gradient":  # rounding may hide it in the steps until the witness
    return (*range(step + 1, witnesses[0]), witnesses[0], *([0] if witnesses[0] != step else []))
  shares = deal(SLICES, range(SLICES), 1) if processes else {index: [index] for index in range(SLICES)}
  compared = witnesses if fault.sticky else [n for n in witnesses if n == step] if processes else witnesses[:1]
  drawn = [n for n in compared if fault.slice in draw(0, n // period, shares).members]
  return tuple(drawn[:1]) or (0,)


def check(left: oracle.Left, undisturbed: oracle.Left, flip: Flip, tolerance: float) -> list[str]:
  """The rules that the run breaks."""
  fault, alarms = flip.fault, left.of_kind("witness")
  says = [(alarm["outcome"], alarm["members"], int(alarm["round"].split()[-1])) for alarm in alarms]
  expected = [[("removed", [fault.slice], n)] if n else [] for n in flip.found]
  lost = [event["slice"] for event in left.of_kind("slice_down")]
  if tolerance or fault.kind == "flip_gradient":
    broken = [] if says in expected else [f"the witness says {says}, not one of {expected}"]
    broken += [] if lost == [[fault.slice]] * len(says) else [f"lost: {lost}"]
  else:  # members compare their weights and states in each step: the supervisor ends the one that differs
    broken = (
      [] if not says and lost in [[[fault.slice]], *[[]] * (0 in flip.found)] else [f"lost: {lost}, alarms {says}"]
    )
  broken += ["the slice returned"] if says and left.of_kind("slice_up") else []
  for alarm in alarms if fault.kind == "flip_gradient" or flip.found[0] == fault.step else ():
    if list(alarm["arrays"].values()) != [1] or fault.array not in next(iter(alarm["arrays"])):
      broken.append(f"the alarm names {alarm['arrays']}")
  is_clean = any(flip.found) and lost and (fault.kind != "flip_gradient" or flip.found == (fault.step,))
  return broken + (oracle.broken(left, undisturbed, oracle.Promise(STEPS, tolerance, lost=1)) if is_clean else [])


class Controller:
  """Flips where one controller drives simulated slices."""

  def __init__(self, folder: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", SLICES)
    self._harness = Harness(folder, prepare_steps=False)
    self.names: dict[str, list[str]] = {}
    self._rows: dict[int, dict[int, str]] = {}  # of the undisturbed run: step -> row -> hash of its tokens
    self._undisturbed = self._run("undisturbed", [], learn=True)

  def play(self, name: str, flip: Flip) -> tuple[list[str], str]:
    left = self._run(name, str(flip).split())
    return check(left, self._undisturbed, flip, tolerance=1e-5), ""

  def _run(self, name: str, keys: Sequence[str], *, learn: bool = False) -> oracle.Left:
    def prepare(session: Session, cluster: Cluster) -> None:
      if learn:
        state = session.programs.program(cluster.view(cluster.slices)).state
        self.names["flip_gradient"] = self.names["flip_weight"] = list(flatten(state.params))
        self.names["flip_optimizer"] = list(flatten(state.opt_state))

    look = lambda directory: oracle.read(directory, STEPS)
    history = self._harness.run(name, [*KEYS, "snapshot_period=1", *keys], prepare=prepare, look=look)
    self._rows = self._rows or history.used  # a witness reads a part of the rows again
    rows = {
      step: self._rows[step] if used.items() <= self._rows[step].items() else used
      for step, used in history.used.items()
    }
    receipt = [{"step": step, "examples": found} for step, found in sorted(rows.items())]
    return dataclasses.replace(history.seen, receipt=receipt, codes=[history.outcome.kind != "complete"])


class Members:
  """Flips in slices that are processes."""

  def __init__(self, folder: Path, server: Server) -> None:
    self._folder, self._server = folder, server
    self._undisturbed = self._run("undisturbed", [])[0]

  def play(self, name: str, flip: Flip) -> tuple[list[str], str]:
    left, tail = self._run(name, str(flip).split())
    return check(left, self._undisturbed, flip, tolerance=0.0), tail

  def _run(self, name: str, keys: Sequence[str]) -> tuple[oracle.Left, str]:
    own = [*KEYS, *keys, f"jax_cache_dir={self._folder / 'compiled'}"]
    run = ProcessRun(self._folder / name, own, slices=SLICES, server=self._server)
    with run.launched() as supervisor:
      code = run.wait(supervisor, 200)
    return oracle.read(run.directory, STEPS, printed=run.printed, codes=[code]), run.tail()


@contextlib.contextmanager
def opened(folder: Path, kind: str, seeds: range, keys: Sequence[str], server: Server | None = None) -> Iterator[Play]:
  """Yields what plays a flip. server: forks the processes; None: one of its own."""
  with contextlib.ExitStack() as stack:
    if server is None:
      server = StandaloneServer()  # before JAX starts its threads here
      stack.callback(server.close)
    controller, members = Controller(folder / "controller"), Members(folder / "members", server)

    def play(seed: int) -> Played:
      flip = plan(seed, controller.names, processes=seed % 2 == 1)
      broken, tail = (members if seed % 2 else controller).play(f"flip-{seed}", flip)
      where = "processes" if seed % 2 else "one controller"
      return Played(f"{flip}, {where}; found: {flip.found}", broken, Counter([f"{flip.what}, {where}"]), tail)

    yield play
