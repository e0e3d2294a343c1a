"""Measures what a supervisor needs for a committed step, a loss and a return: CPU seconds and bytes, without a network.

    python -m end_to_end.benchmarks.supervisor [--members 64,256,1024,4096]

Decides, encodes, authenticates and hands over each message as the server does; the sockets only count. Each slice has 8
shares, and one member is slow. "reports" are the CPU seconds for reading, checking and decoding the two messages with
which each member reports a step.
"""

from __future__ import annotations

import argparse
import socket
import time

from end_to_end.benchmarks.common import positives

from worlds.membership import messages, wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effects, Send
from worlds.membership.rules import RunRules
from worlds.membership.wire import Channel

SHARES = 8  # of a slice
WARM_UP = 40  # steps after which one member is known to be slow, and has fewer shares
STEPS = 5
KEY = bytes(32)


class CountingSocket(socket.socket):
  """Counts the bytes that are sent, and sends none."""

  sent = 0

  def send(self, data, flags=0):
    self.sent += len(data)
    return len(data)


class Run:
  """A run of `members` members, one process each."""

  def __init__(self, members: int) -> None:
    self.run = Coordinator(RunRules(members, 1, SHARES * members, timeout=1e9), clock=lambda: 0.0)
    self.number = 0  # of the last step
    self.sockets = [CountingSocket() for _ in range(members)]
    self.channels = [Channel(sock, KEY, serves=True) for sock in self.sockets]
    for member in range(members):
      self.joins(member)
    self.tell(self.run.restored(self.run.primary, 0, self.run.epoch, 0))

  def joins(self, member: int) -> None:
    self.tell(self.run.hello(member, 0, 1, f"10.0.{member // 256}.{member % 256}:45678"))
    self.tell(self.run.ready(member, 0, 0))

  def tell(self, effects: Effects) -> None:
    """As `Server` does."""
    bodies: dict[int, wire.Body] = {}
    for effect in effects:
      if isinstance(effect, Send):
        body = bodies.get(id(effect.message)) or bodies.setdefault(id(effect.message), wire.encode(effect.message))
        self.channels[effect.member].send(body)

  def step(self) -> None:
    self.number += 1
    for member in sorted(self.run.active):
      self.run.computed(member, self.run.epoch, 1.23456789 * (1 + (member == 1)))
    for member in sorted(self.run.active):
      self.tell(self.run.done(member, 0, self.run.epoch, f"step {self.number}", 7))

  def measured(self, work) -> tuple[float, int]:
    """(CPU seconds, bytes) of work()."""
    sent, began = sum(sock.sent for sock in self.sockets), time.process_time()
    work()
    return time.process_time() - began, sum(sock.sent for sock in self.sockets) - sent

  def close(self) -> None:
    for channel in self.channels:
      channel.close()


def reports(members: int) -> float:
  """CPU seconds for receiving what `members` members report of one step."""
  ours, theirs = socket.socketpair()
  with ours, theirs:
    member, supervisor = Channel(theirs, KEY, serves=False), Channel(ours, KEY, serves=True)
    spent = 0.0
    for _ in range(members):
      member.send(messages.message("computed", epoch=1, round="step 1", seconds=1.23456789))
      member.send(messages.message("done", epoch=1, round="step 1", checksum=123456789))
      began = time.process_time()
      for _ in range(2):
        messages.check(supervisor.receive() or {}, messages.FROM_MEMBER)
      spent += time.process_time() - began
    return spent


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--members", type=positives, default=[64, 256, 1024, 4096])
  args = parser.parse_args()
  print("members | step | bytes | loss | bytes | step with a return | bytes | reports")
  for members in args.members:
    run = Run(members)
    for _ in range(WARM_UP):
      run.step()
    seconds, sent = run.measured(lambda run=run: [run.step() for _ in range(STEPS)])
    loss = run.measured(lambda run=run: run.tell(run.run.lost(5, "killed")))
    run.step()
    run.joins(5)
    back = run.measured(run.step)
    run.close()
    pairs = (seconds / STEPS, sent // STEPS), loss, back
    columns = (f"{1000 * cpu:.1f} ms | {size:,}" for cpu, size in pairs)
    print(" | ".join([str(members), *columns, f"{1000 * reports(members):.1f} ms"]), flush=True)


if __name__ == "__main__":
  main()
