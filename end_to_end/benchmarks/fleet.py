"""Measures dealing, exchange and coordination of many members on few cores: computing a share is a sleep.

  python -m end_to_end.benchmarks.fleet --members 8 --alive 8,7,4 --shares 1,8 --values 100000 --seconds 0.4
  python -m end_to_end.benchmarks.fleet --members 8 --shares 8 --slow 1.3
  python -m end_to_end.benchmarks.fleet --members 64 --shares 8 --seconds 2 --steps 300 --kill-every 10

Each member is a process that joins a supervisor, sleeps for the shares that it is dealt, exchanges their sums with the
other members, and commits. It has no JAX. The values of a share are known, so every sum is compared with a sum that
NumPy computes in the fixed order, and the state at the end says whether a step was lost or repeated. Columns:

  k / N        N members are started, and k are alive; the others are killed in the second step
  ideal        speed as a share of what the live members could do: the sum of their speeds
  bound        speed as a share of what whole shares allow: N s shares of equal length on k members. "-" with --slow or
               --kill-every
  step, CPU    of a step: seconds, and CPU seconds of all processes
"""

from __future__ import annotations

import argparse
import functools
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from worlds.exchange import PeerLost
from worlds.exchange.plan import pieces
from worlds.join import join
from worlds.membership.rules import RunRules
from worlds.peers import MembershipChanged, Peers
from worlds.place import Place
from worlds.supervisor import Supervisor
from worlds.workers import Program

PHASES = 3  # steps whose values differ
WARM_UP = 5  # steps before the first one that is measured
FOR_EVER = 1e6  # seconds


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
    generator = np.random.default_rng(0)
    return generator.standard_normal(self.values + PHASES * self.members * self.shares, np.float32)

  def sum(self, pool: np.ndarray, phase: int, first: int, stop: int) -> np.ndarray:
    """The sum of the shares [first, stop) in a step of this phase, from left to right."""
    starts = [phase * self.members * self.shares + share for share in range(first, stop)]
    total = pool[starts[0] : starts[0] + self.values]
    for start in starts[1:]:
      total = total + pool[start : start + self.values]
    return total

  def totals(self) -> list[np.ndarray]:
    """The sum of all shares, of each phase, in the order of the exchange."""
    pool, found = self.pool(), []
    for phase in range(PHASES):
      groups = [
        self.sum(pool, phase, slice_ * self.shares, (slice_ + 1) * self.shares) for slice_ in range(self.members)
      ]
      found.append(functools.reduce(np.add, groups))
    return found


class Member:
  """The program of one member. state [2]: completed steps, and a checksum of all their sums."""

  def __init__(self, case: Case, peers: Peers) -> None:
    self._case, self._peers, self._pool = case, peers, case.pool()
    self._sums: dict[tuple[int, int, int], np.ndarray] = {}
    self._state = np.zeros(2, np.int64)
    self._records = open(Path(case.folder) / str(peers.member), "a", buffering=1)  # noqa: SIM115 -- until the exit
    self._record(pid=os.getpid(), member=peers.member)

  def _record(self, **fields: Any) -> None:
    self._records.write(json.dumps({"at": time.monotonic(), **fields}) + "\n")

  def run(self) -> None:
    """Joins, and trains to the last step."""
    peers = self._peers
    peers.completed = lambda: int(self._state[0])
    peers.membership.send("ready", newest=0, holds=False)
    self._record(ready=True)
    while not peers.members:
      message = peers.membership.next()
      if message["kind"] != "lead" or message["leader"] == peers.member:
        peers.handle(message)
    while self._state[0] < self._case.steps:
      self._step(int(self._state[0]) + 1)
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
        time.sleep(len(set(peers.shares) - held) * slow * case.seconds / case.shares)
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
    self._state[:] = step, zlib.crc32(total, int(self._state[1]))
    self._record(step=step, shares=len(peers.shares), computed=computed, sum=zlib.crc32(total), cpu=time.process_time())

  def _values(self, step: int, first: int, stop: int) -> np.ndarray:
    """The sum of a piece, as a device has added it: without time on this CPU, except for the first time."""
    key = step % PHASES, first, stop
    if key not in self._sums:
      self._sums[key] = self._case.sum(self._pool, *key)
    return self._sums[key]

  def _send(self, other: int) -> None:
    self._peers.exchange.send_state(other, {}, [self._state])

  def _receive(self, source: int) -> None:
    self._peers.exchange.receive_state(source, lambda header: [self._state])


def supervise(case: Case) -> NoReturn:
  """Runs the supervisor of one case, and kills members if the case says so."""
  rules = RunRules(slices=case.members, minimum=1, shares=case.members * case.shares, timeout=120.0)
  command = (sys.executable, "-m", "end_to_end.benchmarks.fleet", "--case", json.dumps(asdict(case)))
  run = Supervisor(Program(command, os.environ), [], rules, local=case.members, lanes=1, grace=5.0)
  if case.kill_every:
    threading.Thread(target=kill, args=[case], daemon=True).start()
  sys.exit(run.run())


def kill(case: Case) -> None:
  """Thread: kills one member after the other, chosen at random."""
  choice = random.Random(0)
  while max((record.get("step", 0) for record in records(case)), default=0) < WARM_UP:
    time.sleep(1.0)
  while True:
    time.sleep(case.kill_every)
    member = choice.randrange(case.members)
    own = list(records(case, member))
    with (Path(case.folder) / str(member)).open("a") as file:
      os.kill(next(record["pid"] for record in reversed(own) if "pid" in record), signal.SIGKILL)
      file.write(json.dumps({"at": time.monotonic(), "killed": True}) + "\n")


def records(case: Case, member: int | None = None) -> Iterator[dict[str, Any]]:
  """What the members have written."""
  for path in sorted(Path(case.folder).glob("*" if member is None else str(member))):
    for line in path.read_text().splitlines():
      if line.endswith("}"):  # a killed process leaves half a line
        yield json.loads(line)


def measure(case: Case, verbose: bool) -> str:
  """Runs a case. Returns its row of the table."""
  command = [sys.executable, "-m", "end_to_end.benchmarks.fleet", "--supervise", json.dumps(asdict(case))]
  environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
  with tempfile.TemporaryFile("w+") as log:
    code = subprocess.run(
      command, env=environment, stdout=None if verbose else log, stderr=subprocess.STDOUT
    ).returncode
    if code:
      log.seek(0)
      sys.exit(f"{log.read()}\nThe run ended with exit code {code}; its log is above.")
  lives = [life for member in range(case.members) for life in _lives(case, member)]
  ends = {record["step"]: record["at"] for life in lives for record in life if "step" in record}
  check(case, [record for life in lives for record in life])
  seconds, steps = ends[case.steps] - ends[WARM_UP], case.steps - WARM_UP
  speed = case.members * case.seconds * steps  # slice-seconds of work
  live = sum(_live(case, life, ends) for life in lives)
  whole = -(-case.members * case.shares // case.alive) / case.shares * case.seconds * steps
  bound = "-" if case.kill_every or case.slow > 1 else f"{whole / seconds:.3f}"
  cpu = sum(_cpu(life) for life in lives) / steps
  return (
    f"| {case.alive} / {case.members} | {case.shares} | {case.values / 1e6:g} M | {case.seconds:g} s | {case.slow:g} | "
    f"{speed / live:.3f} | {bound} | {seconds / steps:.3f} s | {cpu:.3f} s |"
  )


def check(case: Case, found: list[dict[str, Any]]) -> None:
  """Every member has computed the right sum of every step, and each step once."""
  totals, chain = case.totals(), 0
  digests = [zlib.crc32(total) for total in totals]
  for step in range(1, case.steps + 1):
    sums = {record["sum"] for record in found if record.get("step") == step}
    assert sums == {digests[step % PHASES]}, f"step {step}: {sums}, not {digests[step % PHASES]}"
    chain = zlib.crc32(totals[step % PHASES], chain)
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


def _live(case: Case, life: list[dict[str, Any]], ends: dict[int, float]) -> float:
  """The seconds in which this process could compute while steps were measured, times its speed."""
  if max((record.get("step", 0) for record in life), default=0) < WARM_UP and not case.kill_every:
    return 0.0  # not among those that stay alive
  begin, end = ends[WARM_UP], ends[case.steps]
  start = next((record["at"] for record in life if "ready" in record), end)
  stop = next((record["at"] for record in life if "killed" in record), end)
  clipped = lambda moment: min(max(moment, begin), end)
  live = clipped(stop) - clipped(start)
  if life[0]["member"] == 1 and case.slow > 1:
    slow = clipped(min(stop, ends[min(case.slow_to, case.steps)])) - clipped(start)
    live -= max(0.0, slow) * (1 - 1 / case.slow)
  return live


def _cpu(life: list[dict[str, Any]]) -> float:
  """The CPU seconds of a process while steps were measured."""
  used = [record["cpu"] for record in life if record.get("step", 0) >= WARM_UP]
  return used[-1] - used[0] if used else 0.0


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--members", type=int, default=8)
  parser.add_argument("--alive", default="", help="several numbers of members that are alive, 8,7,4; default: all")
  parser.add_argument("--shares", default="8", help="several numbers of shares of a slice, 1,8")
  parser.add_argument("--values", default="100000", help="several numbers of float32 values, 100000,1000000")
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
  numbers = lambda text: [int(number) for number in text.split(",")]
  print(
    "| k / N | shares | values | slice | slow | ideal | bound | step | CPU |\n|---|---|---|---|---|---|---|---|---|"
  )
  for values in numbers(args.values):
    for shares in numbers(args.shares):
      for alive in numbers(args.alive or str(args.members)):
        with tempfile.TemporaryDirectory() as folder:
          case = Case(
            args.members,
            alive,
            shares,
            values,
            args.seconds,
            args.steps,
            args.slow,
            args.slow_to,
            args.kill_every,
            folder,
          )
          print(measure(case, args.verbose), flush=True)


if __name__ == "__main__":
  main()
