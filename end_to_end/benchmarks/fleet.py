"""Measures dealing, exchange and coordination of many members on few cores: computing a share is a sleep.

  python -m end_to_end.benchmarks.fleet --members 8 --alive 8,7,4 --shares 1,8 --values 100000 --seconds 0.4
  python -m end_to_end.benchmarks.fleet --members 8 --slow 1.3 --slow-to 60 --steps 120
  python -m end_to_end.benchmarks.fleet --members 64 --seconds 2 --steps 300 --slow 2 --kill-every 10

Each member is a process that joins a supervisor, sleeps for the shares that it is dealt, exchanges their sums with the
other members, and commits. It has no JAX. The values of a share are known, so every sum is compared with a sum that
NumPy computes in the fixed order, and the state at the end says whether a step was lost or repeated. Columns:

  k / N        N members are started, and k are alive; the others are killed in the second step
  steps        that are measured: without the first 5, and without those until the slow member is named
  ideal        speed as a share of what the live members could do: the sum of their speeds
  bound        speed as a share of what whole shares allow. "-" if the speeds change or members are killed meanwhile
  step, CPU    of a step: seconds, and CPU seconds of all members
  faults       members that were killed
  named        after which step member 1 was called slow or as fast as the others, and its shares of a slice then
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from worlds.exchange import PeerLost
from worlds.exchange.plan import pieces
from worlds.join import join
from worlds.membership.run_rules import RunRules
from worlds.peers import MembershipChanged, Peers
from worlds.place import Place
from worlds.supervisor import Supervisor
from worlds.worker_processes import MemberProgram

PHASES = 3  # steps whose values differ
WARM_UP = 5  # steps before the first one that is measured
FOR_EVER = 1e6  # seconds
SAVE_STEPS = 5  # from one copy of a member's state to the next


@dataclass(frozen=True)
class Case:
  """One run. slow: how much longer member 1 takes for a share, until the step `slow_to`."""

  members: int
  alive: int
  shares: int  # of a slice
  values: int
  seconds: float  # that a slice computes
  steps: int
  slow: float
  slow_to: int
  kill_every: float  # seconds; 0: never
  folder: str

  def pool(self) -> np.ndarray:
    """Random values of which every share is a part."""
    return np.random.default_rng(0).standard_normal(self.values + PHASES * self.members * self.shares, np.float32)

  def sum(self, pool: np.ndarray, phase: int, first: int, stop: int) -> np.ndarray:
    """The sum of the shares [first, stop) in a step of this phase, from left to right."""
    starts = [phase * self.members * self.shares + share for share in range(first, stop)]
    total = pool[starts[0] : starts[0] + self.values]
    for start in starts[1:]:
      total = total + pool[start : start + self.values]
    return total

  def totals(self) -> list[np.ndarray]:
    """The sum of all shares, of each phase, in the order of the exchange."""
    pool, firsts = self.pool(), range(0, self.members * self.shares, self.shares)
    groups = [[self.sum(pool, phase, first, first + self.shares) for first in firsts] for phase in range(PHASES)]
    return [functools.reduce(np.add, of_phase) for of_phase in groups]


class Member:
  """The program of one member. state [2]: completed steps, and a checksum of all their sums."""

  def __init__(self, case: Case, peers: Peers) -> None:
    self._case, self._peers, self._pool = case, peers, case.pool()
    self._sums: dict[tuple[int, int, int], np.ndarray] = {}
    self._state = np.zeros(2, np.int64)
    self._last: list[tuple[int, np.ndarray, float]] = []  # (step, sum, when) that are not written down yet
    self._records = open(Path(case.folder) / str(peers.member), "a", buffering=1)  # noqa: SIM115 -- until the exit
    starts_again = next(records(case, peers.member), None) is not None
    self._record(pid=os.getpid(), member=peers.member)
    self._copy = Path(case.folder) / f"copy-{peers.member}"
    if starts_again:
      with contextlib.suppress(FileNotFoundError):
        self._state[:] = json.loads(self._copy.read_text())

  def _record(self, **fields: Any) -> None:
    self._records.write(json.dumps({"at": time.monotonic()} | fields) + "\n")

  def run(self) -> None:
    """Joins, and trains to the last step."""
    peers = self._peers
    peers.train(
      completed=lambda: int(self._state[0]),
      changed=lambda change: None,
      noticed=lambda notice: self._record(notice=notice, after=int(self._state[0])),
    )
    peers.membership.send("ready", newest=int(self._state[0]), holds=False)
    self._record(ready=True)
    while not peers.members:
      message = peers.membership.next()
      if message["kind"] != "lead" or message["leader"] == peers.member:
        peers.handle(message)
    while self._state[0] < self._case.steps:
      self._step(int(self._state[0]) + 1)
    self._write_down()
    self._record(state=self._state.tolist())
    peers.finished(0)

  def _step(self, step: int) -> None:
    case, peers, held, name = self._case, self._peers, set[int](), f"step {step}"
    total, scalars, computed = np.empty(case.values, np.float32), np.ones(8, np.float32), 0.0
    while True:
      try:
        peers.connect(self._send, self._receive)
        if int(self._state[0]) + 1 != step:
          return  # it has received the state of another step
        if step == 2 and peers.member == 0 and len(peers.members) == case.members:
          for other in range(case.alive, case.members):
            peers.membership.send("fault", action="lose", target=other, seconds=FOR_EVER)
        slow = case.slow if peers.member == 1 and step <= case.slow_to else 1.0
        began = time.monotonic()
        self._write_down()
        ends = began + len(set(peers.shares) - held) * slow * case.seconds / case.shares
        time.sleep(max(0.0, ends - time.monotonic()))
        held, computed = held | set(peers.shares), computed + time.monotonic() - began
        own = {piece.first: self._values(step, *piece) for piece in pieces(peers.shares, case.shares)}
        peers.membership.send("computed", epoch=peers.epoch, round=name, seconds=computed)
        peers.exchange.reduce(f"{name} values", own, peers.dealt, total, group=case.shares)
        mine = dict.fromkeys(own, scalars)
        peers.exchange.reduce(name, mine, peers.dealt, np.empty_like(scalars), group=case.shares)
        peers.commit(name, zlib.crc32(self._state))
      except PeerLost as error:
        peers.exchange_failed(error)
      except MembershipChanged:
        pass
      else:
        break
    self._state[0] = step
    self._last.append((step, total, time.monotonic()))

  def _write_down(self) -> None:
    """Records the last step. While the next one is computed: then the CPU of a host is idle."""
    for step, total, at in self._last:
      digest = zlib.crc32(total)
      self._state[1] = zlib.crc32(digest.to_bytes(4), int(self._state[1]))
      self._record(step=step, sum=digest, cpu=time.process_time(), at=at)
      if step % SAVE_STEPS == 0:
        new = self._copy.with_suffix(".new")
        new.write_text(json.dumps(self._state.tolist()))
        new.rename(self._copy)
    self._last.clear()

  def _values(self, step: int, first: int, stop: int) -> np.ndarray:
    """The sum of a piece, as a device has added it: without time on this CPU, except for the first time."""
    key = step % PHASES, first, stop
    if key not in self._sums:
      self._sums[key] = self._case.sum(self._pool, *key)
    return self._sums[key]

  def _send(self, other: int) -> None:
    self._write_down()
    self._peers.exchange.send_state(other, {}, [self._state])

  def _receive(self, source: int) -> None:
    self._write_down()
    self._peers.exchange.receive_state(source, lambda header: [self._state])


def supervise(case: Case) -> NoReturn:
  """Runs the supervisor of one case, and causes its faults."""
  rules = RunRules(slices=case.members, minimum=1, shares=case.members * case.shares, timeout=600.0)
  command = (sys.executable, "-m", "end_to_end.benchmarks.fleet", "--case", json.dumps(asdict(case)))
  run = Supervisor(MemberProgram(command, os.environ), [], rules, local=case.members, lanes=1, grace=5.0)
  threading.Thread(target=cause, args=[case], daemon=True).start()
  sys.exit(run.run())


def cause(case: Case) -> None:
  """Thread: kills a member every `kill_every` seconds, from the first step on that is measured."""
  choice = random.Random(0)
  while begins(case) is None:
    time.sleep(1.0)
  while case.kill_every:
    time.sleep(case.kill_every)
    member = choice.randrange(case.members)
    pid = [record["pid"] for record in records(case, member) if "pid" in record][-1]
    with contextlib.suppress(ProcessLookupError), (Path(case.folder) / str(member)).open("a") as file:
      os.kill(pid, signal.SIGKILL)
      file.write(json.dumps({"at": time.monotonic(), "killed": True}) + "\n")


def begins(case: Case) -> int | None:
  """The step after which steps are measured; None if that is not known yet."""
  if case.slow > 1:  # the next step is the first one with other shares
    return next((after for after, notice in notices(case) if notice["factor"] > 1), None)
  return WARM_UP if any(record.get("step", 0) >= WARM_UP for record in records(case)) else None


def notices(case: Case) -> list[tuple[int, dict[str, Any]]]:
  """(step, notice about the speed of member 1 after this step), each once."""
  found = {r["after"]: r["notice"] for r in records(case) if "notice" in r and r["notice"]["kind"] == "slow"}
  return [(after, notice) for after, notice in sorted(found.items()) if notice["member"] == 1]


def records(case: Case, member: int | None = None) -> Iterator[dict[str, Any]]:
  """What the members have written."""
  for path in sorted(Path(case.folder).glob("[0-9]*" if member is None else str(member))):
    for line in path.read_text().splitlines():
      if line.endswith("}"):  # a killed process leaves half a line
        yield json.loads(line)


def measure(case: Case, verbose: bool) -> str:
  """Runs a case. Returns its row of the table."""
  command = [sys.executable, "-m", "end_to_end.benchmarks.fleet", "--supervise", json.dumps(asdict(case))]
  environment, out = os.environ | {"OPENBLAS_NUM_THREADS": "1"}, None if verbose else subprocess.PIPE
  run = subprocess.run(command, env=environment, stdout=out, stderr=subprocess.STDOUT, text=True)
  if run.returncode:
    sys.exit(f"{run.stdout or ''}\nThe run ended with exit code {run.returncode}; its log is above.")
  lives = [life for member in range(case.members) for life in _lives(case, member)]
  found = [record for life in lives for record in life]
  check(case, found)
  first = begins(case)
  if first is None:
    sys.exit("Member 1 was not called slow. Raise --steps, --seconds or --slow.")
  ends: dict[int, float] = {}
  for record in sorted((record for record in found if "step" in record), key=lambda record: -record["at"]):
    ends[record["step"]] = record["at"]
  seconds, steps = ends[case.steps] - ends[first], case.steps - first
  live = sum(_live(case, life, first, ends) for life in lives)
  constant = case.kill_every == 0 and (case.slow == 1 or case.slow_to >= case.steps)
  columns = [f"{case.alive} / {case.members}", case.shares, f"{case.values / 1e6:g} M", f"{case.seconds:g} s"]
  columns += [f"{case.slow:g}", steps, f"{case.members * case.seconds * steps / live:.3f}"]
  columns += [f"{bound(case) * steps / seconds:.3f}" if constant else "-"]
  columns += [f"{seconds / steps:.3f} s", f"{sum(_cpu(life, first) for life in lives) / steps:.3f} s"]
  columns += [f"{sum('killed' in r and r['at'] > ends[first] for r in found)} kills"]
  columns += ["; ".join(f"{n['factor']:.2f} after {after}: {n['shares']} shares" for after, n in notices(case)) or "-"]
  return f"| {' | '.join(map(str, columns))} |"


def bound(case: Case) -> float:
  """The shortest time of a step that whole shares allow: until then, the members can compute all shares."""
  speeds = [1 / case.slow if member == 1 else 1.0 for member in range(case.alive)]
  ends = sorted(count / speed for speed in set(speeds) for count in range(1, case.members * case.shares + 1))
  can = lambda end: sum(int(end * speed + 1e-9) for speed in speeds) >= case.members * case.shares
  return next(end for end in ends if can(end)) / case.shares * case.seconds


def check(case: Case, found: list[dict[str, Any]]) -> None:
  """Every member has computed the right sum of every step, and the state at the end has each step once."""
  totals, chain = case.totals(), 0
  digests = [zlib.crc32(total) for total in totals]
  for step in range(1, case.steps + 1):
    sums = {record["sum"] for record in found if record.get("step") == step}
    assert sums == {digests[step % PHASES]}, f"step {step}: {sums}, not {digests[step % PHASES]}"
    chain = zlib.crc32(digests[step % PHASES].to_bytes(4), chain)
  states = [record["state"] for record in found if "state" in record]
  assert states and all(state == [case.steps, chain] for state in states), f"{states}, not {[case.steps, chain]}"


def _lives(case: Case, member: int) -> list[list[dict[str, Any]]]:
  """The records of each process of a member."""
  lives: list[list[dict[str, Any]]] = []
  for record in records(case, member):
    if "pid" in record:
      lives.append([])
    lives[-1].append(record)
  return lives


def _live(case: Case, life: list[dict[str, Any]], first: int, ends: dict[int, float]) -> float:
  """The seconds in which this process could compute while steps were measured, times its speed."""
  if max((record.get("step", 0) for record in life), default=0) < first and life[-1]["at"] < ends[first]:
    return 0.0
  begin, end = ends[first], ends[case.steps]
  start = next((record["at"] for record in life if "ready" in record), end)
  stop = next((record["at"] for record in life if "killed" in record), end)
  clipped = lambda moment: min(max(moment, begin), end)
  slow = clipped(min(stop, ends[min(case.slow_to, case.steps)])) - clipped(start) if life[0]["member"] == 1 else 0.0
  return clipped(stop) - clipped(start) - max(0.0, slow) * (1 - 1 / case.slow)


def _cpu(life: list[dict[str, Any]], first: int) -> float:
  """The CPU seconds of a process while steps were measured."""
  used = [record["cpu"] for record in life if record.get("step", 0) >= first]
  return used[-1] - used[0] if used else 0.0


def numbers(text: str) -> list[int]:
  """The numbers of "1,2,3"."""
  return [int(number) for number in text.split(",")]  # not `common.positives`, which imports much for each member


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--members", type=int, default=8)
  parser.add_argument("--alive", type=numbers, help="several numbers of members that are alive, 8,7,4; default: all")
  parser.add_argument("--shares", type=numbers, default=[8], help="several numbers of shares of a slice, 1,8")
  parser.add_argument("--values", type=numbers, default=[100000], help="several numbers of float32 values")
  parser.add_argument("--seconds", type=float, default=0.4, help="that a slice computes")
  parser.add_argument("--steps", type=int, default=40)
  parser.add_argument("--slow", type=float, default=1.0, help="how much longer member 1 computes")
  parser.add_argument("--slow-to", type=int, default=10**9, help="the last step in which it does")
  parser.add_argument("--kill-every", type=float, default=0.0, help="seconds from one kill to the next; 0: none")
  parser.add_argument("--verbose", action="store_true", help="show what the supervisor and the members print")
  parser.add_argument("--supervise", help=argparse.SUPPRESS)  # a Case, for the processes that this command starts
  parser.add_argument("--case", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.supervise:
    supervise(Case(**json.loads(args.supervise)))
  if args.case:
    case = Case(**json.loads(args.case))
    Member(case, join(Place.read(os.environ))).run()
    return
  print("| k / N | shares | values | slice | slow | steps | ideal | bound | step | CPU | faults | named |")
  print("|---" * 12 + "|")
  for values, shares, alive in itertools.product(args.values, args.shares, args.alive or [args.members]):
    with tempfile.TemporaryDirectory() as folder:
      chosen = vars(args) | {"values": values, "shares": shares, "alive": alive, "folder": folder}
      print(measure(Case(**{field.name: chosen[field.name] for field in fields(Case)}), args.verbose), flush=True)


if __name__ == "__main__":
  main()
