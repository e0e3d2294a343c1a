"""What a member computes and holds of a round when the shares that it has grow: the exchange can add it in order."""

from __future__ import annotations

import functools
import queue
import threading
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.drivers.rounds import Contribution, Rounds
from trainer.process.stop import StopRequested
from worlds.exchange import Part
from worlds.exchange.plan import Plan
from worlds.membership.messages import message
from worlds.peers import Peers, RunEnded

SIZE = 3


def array(share: int) -> jax.Array:
  """The gradients of a share. Sums of them in another order have other bits."""
  return jnp.asarray(np.random.default_rng(share).standard_normal(SIZE, np.float32))


def rounds_of(group: int, gather=lambda value: [value]) -> tuple[Rounds, types.SimpleNamespace]:
  abstract = {"w": jax.ShapeDtypeStruct((SIZE,), np.float32, sharding=array(0).sharding)}
  add = lambda shares: [Part({"w": functools.reduce(jnp.add, (parts[0].tree["w"] for parts in shares))})]
  sums = types.SimpleNamespace(parts=[Part(abstract)], add=add)
  peers = types.SimpleNamespace(shares=())
  return Rounds(peers, abstract, sums, "float32", group, lambda member: None, lambda member: None, gather), peers


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4))
def test_shares_that_a_member_gets_later_are_added_to_what_it_has(group, gains):
  rounds, peers = rounds_of(group)
  total, computed, held, shares = 12 // group * group, [], {}, set()

  def compute(share):
    computed.append(share)
    return Contribution((np.float32(share),), [Part({"w": array(share)})])

  for more in gains:
    shares |= {share for share in more if share < total}
    peers.shares = tuple(sorted(shares))
    held = rounds._compute(held, compute)
    others = [share for share in range(total) if share not in shares]
    plan = Plan({0: peers.shares, 1: others}, SIZE, "float32", (), group)
    assert plan.accepts(0, held.keys())
    for first, own in held.items():
      expected = functools.reduce(np.add, [np.asarray(array(share)) for share in range(first, own.stop)])
      assert own.stop == first + 1 or first % group == 0
      np.testing.assert_array_equal(own.grads.read(0, SIZE), expected)
      np.testing.assert_array_equal(own.host_scalars(), [sum(range(first, own.stop))])
  assert sorted(computed) == sorted(shares)  # each share once
  rounds.close()


def test_the_wait_for_data_counts_as_computation():
  """So a slice whose data comes late is called slow, and gets fewer shares to read."""
  rounds, peers = rounds_of(1)
  reported: list[float] = []
  send = lambda kind, **fields: reported.append(fields["seconds"])
  peers.shares, peers.dealt, peers.epoch, peers.interrupted = (0,), {0: (0,)}, 1, False
  peers.connect, peers.commit = lambda *states: None, lambda name, checksum: {}
  peers.membership = types.SimpleNamespace(send=send)
  peers.exchange = types.SimpleNamespace(reduce=lambda *call, **more: None)
  rounds.agree("step 1", lambda: 0, lambda share: Contribution((np.float32(1),)), None, waited=7.0)
  assert 7.0 <= reported[0] < 8.0
  rounds.close()


@pytest.mark.parametrize("kind, raised", [("world", None), ("interrupt", StopRequested), ("end", RunEnded)])
@pytest.mark.parametrize("late", [0, 1])
def test_a_process_that_hears_of_a_change_late_waits_for_its_message(kind, raised, late):
  """Two processes of a slice begin a round; one of them has a message of the supervisor, and the other not yet."""
  values, barrier, found = [None, None], threading.Barrier(2, timeout=20), [None, None]
  fields = {"interrupt": {"leave": True}, "end": {"code": 1, "reason": ""}}.get(kind, WORLD)

  def begin(lane):
    def gather(value):
      barrier.wait()
      values[lane] = value
      barrier.wait()
      return list(values)

    inbox: queue.Queue[Any] = queue.Queue()
    membership = types.SimpleNamespace(member=1, next=lambda timeout=None: read(inbox, timeout))
    exchange = types.SimpleNamespace(begin=lambda *args: None)
    peers = Peers(membership, exchange, lane)
    if lane == late:
      threading.Timer(0.5, inbox.put, [message(kind, epoch=3, **fields)]).start()
    else:
      inbox.put(message(kind, epoch=3, **fields))
    peers.connected()
    rounds = rounds_of(1, gather)[0]
    rounds._peers = peers
    try:
      rounds._connect()
    except (StopRequested, RunEnded) as error:
      found[lane] = type(error)
    else:
      found[lane] = peers.epoch, peers.shares
    rounds.close()

  threads = [threading.Thread(target=begin, args=[lane]) for lane in (0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  assert found == [raised or (3, (0, 1))] * 2


WORLD = {
  "base": 0,
  "gone": [],
  "members": {"1": ["a", "b"]},
  "ranges": {"1": [[0, 2]]},
  "primary": 1,
  "lost": {},
  "attempt": 1,
  "fresh": [],
  "source": 1,
  "slow_steps": {},
}


def read(inbox, timeout):
  try:
    return inbox.get(timeout=20) if timeout is None else inbox.get_nowait()
  except queue.Empty:
    return None
