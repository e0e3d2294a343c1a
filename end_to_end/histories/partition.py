"""Cuts of the network between the hosts of a run, without a word to either side: there is only silence.

Each host is a network namespace of its own. A cut host sends all packets to a network card that does not exist. The
seed gives the order of the cuts in CUTS. Steps go on with those that are left, a host that was cut off saves and
records nothing, it comes back when the network does, and the run is equal to one of a single process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from end_to_end.histories import oracle
from end_to_end.histories.__main__ import Play, Played
from end_to_end.network import FAR, INSIDE, NEAR, SUPERVISOR, Network, hosts
from tests.support.agent_runs import AgentRun
from tests.support.torchrun_runs import OneWorker

EVERY = 50  # steps from one evaluation to the next
SECONDS = 240  # longest wait for anything


@dataclasses.dataclass(frozen=True)
class Cut:
  """pairs: of hosts without a link. left: the members that go on, if it lasts. seconds: until their next step, at most:
  to notice the silence (twice, with the wait for a death, if they first connect again in vain), and to compute."""

  name: str
  pairs: Sequence[tuple[str, str]]
  seconds: float
  lasts: bool = True


ALL = ((FAR, SUPERVISOR), (FAR, NEAR))
CUTS = (
  Cut("a host is cut off from everything", ALL, 1.5 + 3.0),
  Cut("the hosts are cut off from each other; the supervisor reaches both", ALL[1:], 1.5 + 1.0 + 1.4 + 1.0 + 3.0),
  Cut("everything is cut for a moment", ALL, 4.5, lasts=False),
)


class Cuts:
  """A run on two hosts of a network."""

  def __init__(self, folder: Path, network: Network) -> None:
    self._network, self._folder = network, folder
    self._keys = [f"jax_cache_dir={folder / 'compiled'}", f"eval_interval={EVERY}", "eval_steps=2"]
    self._keys.append("checkpoint_period=1000000")
    self._run = AgentRun(folder / "run", [*self._keys, "steps=1000000"], slices=2, host=SUPERVISOR)

  def play(self, cuts: Sequence[Cut]) -> None:
    """Runs through the cuts. Raises AssertionError if the run breaks a rule."""
    run = self._run
    with run.launched() as self._supervisor:
      agents = [run.agent(FAR, prefix=self._network.prefix(FAR))]
      self._wait(lambda: run.count("run_start") == 1)  # it has begun, and writes the records
      agents.append(run.agent(NEAR, prefix=self._network.prefix(NEAR)))
      self._trains(2)
      for cut in cuts:
        self._cut(cut)
      assert run.committed_steps() == [], "a host that was cut off has saved"
      self._supervisor.terminate()
      codes = [run.wait(self._supervisor, SECONDS), *(agent.wait(30) for agent in agents)]
    last = run.last_step
    single = OneWorker(self._folder / "single", [*self._keys, f"steps={last}"], slices=2)
    with single.launched() as worker:
      assert single.wait(worker, SECONDS) == 0, single.tail()
    broken = check(run, single, last, codes)
    assert broken == [], "\n".join([*broken, run.tail()])

  def _cut(self, cut: Cut) -> None:
    run, step = self._run, self._run.last_step
    self._network.cut(*cut.pairs)
    began = time.monotonic()
    if cut.lasts:
      self._trains(1)
    self._network.mend(*cut.pairs)
    apart = time.monotonic() - began
    self._trains(2)
    seconds = self._stood_still(step)
    print(f"{cut.name}, for {apart:.1f} s: {seconds:.1f} s until the next step", flush=True)
    assert seconds < cut.seconds, run.tail()
    assert "The supervisor is lost" not in run.printed, run.tail()

  def _trains(self, members: int) -> None:
    """Waits for some steps of so many members."""
    step = self._run.last_step
    self._wait(lambda: self._run.last_step >= step + 5 and len(self._run.active()) == members)

  def _wait(self, condition) -> None:
    self._run.wait_for(condition, self._supervisor, SECONDS)

  def _stood_still(self, step: int) -> float:
    """The longest time between two recorded steps since `step`."""
    times = [record["wall"] for record in self._run.records("metrics") if "loss" in record and record["step"] >= step]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


def check(run: AgentRun, single: OneWorker, last: int, codes: Sequence[int]) -> list[str]:
  """The rules that the run breaks. The single process evaluates its last step, as its run is complete."""
  ours = oracle.read(run.directory, last, printed=run.printed, codes=codes)
  theirs = oracle.read(single.directory, last)
  lines = [line for line in theirs.lines if "eval_loss" not in line or line["step"] % EVERY == 0]
  ours, theirs = dataclasses.replace(ours, files=()), dataclasses.replace(theirs, lines=lines)
  return oracle.broken(ours, theirs, oracle.Promise(last, codes=(42,)))


@contextlib.contextmanager
def opened(folder: Path, kind: str, seeds: range, keys: Sequence[str]) -> Iterator[Play]:
  """Yields what plays a history, in a process that may make namespaces."""

  def play(seed: int) -> Played:
    place = folder / str(seed)
    command = [*INSIDE, sys.executable, "-m", "end_to_end.histories.partition", str(seed), str(place)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    order = ", ".join(cut.name for cut in drawn(seed))
    broken = [] if done.returncode == 0 else [f"exit code {done.returncode}"]
    print(done.stdout if not broken else "", end="", flush=True)
    return Played(order, broken, Counter(cut.name for cut in CUTS), done.stdout)

  yield play


def drawn(seed: int) -> list[Cut]:
  return random.Random(seed).sample(CUTS, len(CUTS))


def main() -> int:
  seed, folder = sys.argv[1:]
  with hosts() as network:
    Cuts(Path(folder), network).play(drawn(int(seed)))
  return 0


if __name__ == "__main__":
  sys.exit(main())
