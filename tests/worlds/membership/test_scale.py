"""What the supervisor sends for a step and for a loss grows with the number of members, and not with its square."""

from __future__ import annotations

import ipaddress
import random
import socket
import zlib

import pytest

from worlds.membership import wire
from worlds.membership.coordinator import Coordinator
from worlds.membership.effects import Effects, Send
from worlds.membership.run_rules import RunRules


def training(members: int, lanes: int = 1) -> tuple[Coordinator, Effects]:
  """A run that trains, whose processes have random IPv6 addresses, and what its first epoch sends."""
  numbers = random.Random(0)
  address = lambda: f"[{ipaddress.IPv6Address(numbers.getrandbits(128))}]:{numbers.randrange(1024, 65536)}"
  run = Coordinator(RunRules(members, 1, 8 * members, timeout=1e9), clock=lambda: 0.0)
  for member in range(members):
    for lane in range(lanes):
      run.hello(member, lane, lanes, address())
  for member in range(members):
    for lane in range(lanes):
      run.ready(member, lane, 0)
  return run, [effect for lane in range(lanes) for effect in run.restored(run.primary, lane, run.epoch, 0)]


def step(run: Coordinator, number: int) -> Effects:
  effects: Effects = []
  for member in sorted(run.active):
    run.computed(member, run.epoch, 1.234567891)
  for member in sorted(run.active):
    effects += run.done(member, 0, run.epoch, f"step {number}", 7)
  return effects


def sent(effects: Effects) -> int:
  return sum(len(wire.encode(effect.message)) for effect in effects if isinstance(effect, Send))


@pytest.fixture(scope="module")
def sizes() -> dict[int, tuple[int, int, int]]:
  """{members: bytes of a step, of a loss, and of the step after which the lost member joins again}."""
  found = {}
  for members in (64, 4096):
    run, _ = training(members)
    one, loss = sent(step(run, 1)), sent(run.lost(5, "killed"))
    run.hello(5, 0, 1, "10.0.0.5:1024")
    run.ready(5, 0, 1)
    found[members] = one, loss, sent(step(run, 2))
  return found


def test_what_is_sent_grows_with_the_members(sizes):
  for few, many in zip(sizes[64], sizes[4096], strict=True):
    assert many < 1.2 * 64 * few, sizes
  assert sizes[4096][0] < 200 * 4096, "bytes of a step for each member"
  assert sizes[4096][1] < 500 * 4096, "bytes of a loss for each member"


@pytest.mark.parametrize(
  "body",
  [zlib.compress(bytes(1 << 24)), zlib.compress(b'{"kind": "end"}' + bytes(5000))[:-5], b"x\x9cnonsense"],
  ids=["too large", "cut off", "nonsense"],
)
def test_a_compressed_message_that_no_supervisor_would_send_ends_the_connection(body):
  ours, theirs = socket.socketpair()
  with ours, theirs:
    wire.Channel(ours, b"key", serves=True).send(body)
    with pytest.raises(wire.WireError, match="not JSON"):
      wire.Channel(theirs, b"key", serves=False).receive()
