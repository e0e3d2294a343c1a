"""Cuts the network between the hosts of a run without a word to either side, mends it, and checks the run.

  python -m end_to_end.partition

Each host is a network namespace of its own, so this needs Linux, iproute2 and the right to make namespaces (`unshare
--user --map-root-user --net true`). A cut host sends all packets to a network card that does not exist: nobody refuses
a connection, there is only silence.

  1. The host that writes the records is cut off from the supervisor and from the other host.
  2. The hosts are cut off from each other only; the supervisor reaches both.
  3. All is cut for a moment, less than a second.

Steps go on with those that are left, the host that was cut off saves and records nothing, it comes back when the
network does, and the run is equal bit by bit to one of a single process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.agent_runs import AgentRun
from tests.support.command import differences
from tests.support.torchrun_runs import OneWorker

SUPERVISOR, FAR, NEAR = "10.77.0.1", "10.77.0.2", "10.77.0.3"
EVERY = 50  # steps from one evaluation to the next
SECONDS = 240  # longest wait for anything
SILENCE_SECONDS = 1.5 + 3.0  # to notice it, and a moment to compute
APART_SECONDS = 1.5 + 1.0 + 1.4 + 1.0 + 3.0  # to notice it twice, each time to wait for a death, to compute
_INSIDE = "--inside"
_NOBODY = "02:00:00:00:00:ff"  # the address of no network card


class Network:
  """A bridge with the supervisor's address, and hosts at it. To be used in a network namespace of its own."""

  def __init__(self) -> None:
    self._holders: dict[str, subprocess.Popen[bytes]] = {}  # a process in the namespace of each host
    _ip("link set lo up")
    _ip("link add bridge type bridge")
    _ip(f"addr add {SUPERVISOR}/24 dev bridge")
    _ip("link set bridge up")

  def add(self, host: str) -> None:
    """Adds a host with this address."""
    holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
    self._holders[host] = holder
    name, own = f"port{len(self._holders)}", os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{holder.pid}/ns/net") == own:
      time.sleep(0.01)
    _ip(f"link add {name} type veth peer name card netns {holder.pid}")
    _ip(f"link set {name} master bridge up")
    for command in (f"addr add {host}/24 dev card", "link set card up", "link set lo up"):
      _ip(command, self.prefix(host))

  def prefix(self, host: str) -> list[str]:
    """What runs a command on the host."""
    return [] if host == SUPERVISOR else ["nsenter", "--target", str(self._holders[host].pid), "--net"]

  def cut(self, *pairs: tuple[str, str]) -> None:
    """No packet travels between the two hosts of each pair."""
    for one, other in pairs:
      for here, there in ((one, other), (other, one)):
        _ip(f"neigh replace {there} lladdr {_NOBODY} dev {self._card(here)} nud permanent", self.prefix(here))

  def mend(self, *pairs: tuple[str, str]) -> None:
    """Ends a cut."""
    for one, other in pairs:
      for here, there in ((one, other), (other, one)):
        _ip(f"neigh del {there} dev {self._card(here)}", self.prefix(here))

  def _card(self, host: str) -> str:
    return "bridge" if host == SUPERVISOR else "card"

  def close(self) -> None:
    for holder in self._holders.values():
      holder.kill()
      holder.wait()


def _ip(arguments: str, prefix: list[str] | None = None) -> None:
  subprocess.run([*(prefix or []), "ip", *arguments.split()], check=True)


@contextlib.contextmanager
def hosts() -> Iterator[Network]:
  """A network with the two hosts; nothing is left of it at the end of the block."""
  network = Network()
  try:
    for host in (FAR, NEAR):
      network.add(host)
    yield network
  finally:
    network.close()


def check(folder: Path, network: Network) -> None:
  """Runs through the cuts. Raises AssertionError if the run breaks a rule."""
  keys = [f"jax_cache_dir={folder / 'compiled'}", f"eval_interval={EVERY}", "eval_steps=2", "checkpoint_period=1000000"]
  run = AgentRun(folder / "run", [*keys, "steps=1000000"], slices=2, host=SUPERVISOR)
  with run.launched() as supervisor:

    def trains(*members: int) -> None:
      step = run.last_step
      run.wait_for(lambda: run.last_step >= step + 5 and run.active() == sorted(members), supervisor, SECONDS)

    def stood_still(step: int) -> float:
      """The longest time between two recorded steps since `step`."""
      times = [record["wall"] for record in run.records("metrics") if "loss" in record and record["step"] >= step]
      return max(later - earlier for earlier, later in itertools.pairwise(times))

    agents = [run.agent(FAR, prefix=network.prefix(FAR))]
    run.wait_for(lambda: run.count("run_start") == 1, supervisor, SECONDS)  # it has begun, and writes the records
    agents.append(run.agent(NEAR, prefix=network.prefix(NEAR)))
    trains(0, 1)

    step, every = run.last_step, [(FAR, SUPERVISOR), (FAR, NEAR)]
    network.cut(*every)
    trains(1)
    seconds = stood_still(step)
    print(f"1. The host of the primary is cut off: {seconds:.1f} s until the next step of the other one.")
    assert seconds < SILENCE_SECONDS and run.count("primary") == 1, run.tail()
    run.wait_for(lambda: list(run.workers()) == [1], supervisor, SECONDS)
    assert "The run goes on without it" in run.printed and "The supervisor is lost" not in run.printed, run.tail()
    assert run.committed_steps() == [], "the host that was cut off has saved"
    network.mend(*every)
    trains(0, 1)

    step = run.last_step
    network.cut((FAR, NEAR))
    run.wait_for(lambda: "no connection between it and member" in run.printed, supervisor, SECONDS)
    trains(1)
    seconds = stood_still(step)
    print(f"2. The hosts are cut off from each other: {seconds:.1f} s until the next step of one of them.")
    assert seconds < APART_SECONDS, run.tail()
    network.mend((FAR, NEAR))
    trains(0, 1)

    step, began = run.last_step, time.monotonic()
    network.cut(*every)
    network.mend(*every)
    seconds = time.monotonic() - began
    trains(0, 1)
    print(f"3. All is cut for {seconds:.1f} s: {stood_still(step):.1f} s until the next step.")
    assert run.count("slice_down") == 2 or seconds > 1.0, run.tail()

    supervisor.terminate()
    assert run.wait(supervisor, SECONDS) == 42, run.tail()
    assert [agent.wait(30) for agent in agents] == [42, 42]
  last = run.last_step
  assert run.steps() == list(range(1, last + 1)) and run.committed_steps() == [last], run.tail()
  single = OneWorker(folder / "single", [*keys, f"steps={last}"], slices=2)
  with single.launched() as worker:
    assert single.wait(worker, SECONDS) == 0, single.tail()
  assert differences(run, single, last) == []
  assert run.evaluations() == {step: losses for step, losses in single.evaluations().items() if step % EVERY == 0}
  print(f"All {last} steps and the last state are equal bit by bit to those of one process.")


def main() -> int:
  if sys.argv[1:] != [_INSIDE]:
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "end_to_end.partition", _INSIDE]
    return subprocess.run(command, check=False).returncode
  with tempfile.TemporaryDirectory(prefix="partition-") as directory, hosts() as network:
    check(Path(directory), network)
  return 0


if __name__ == "__main__":
  sys.exit(main())
