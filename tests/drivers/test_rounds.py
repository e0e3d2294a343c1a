"""What a member computes and holds of a round when the shares that it has grow: the exchange can add it in order."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.drivers.rounds import Contribution, Rounds
from worlds.exchange import Part
from worlds.exchange.plan import Plan

SIZE = 3


def array(share: int) -> jax.Array:
  """The gradients of a share. Sums of them in another order have other bits."""
  return jnp.asarray(np.random.default_rng(share).standard_normal(SIZE, np.float32))


def rounds_of(group: int) -> tuple[Rounds, types.SimpleNamespace]:
  abstract = {"w": jax.ShapeDtypeStruct((SIZE,), np.float32, sharding=array(0).sharding)}
  add = lambda shares: [Part({"w": functools.reduce(jnp.add, (parts[0].tree["w"] for parts in shares))})]
  sums = types.SimpleNamespace(parts=[Part(abstract)], add=add)
  peers = types.SimpleNamespace(shares=())
  return Rounds(peers, abstract, sums, "float32", group, lambda member: None, lambda member: None), peers


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
  peers.connect, peers.commit = lambda *state: None, lambda name, checksum: {}
  peers.membership = types.SimpleNamespace(send=send)
  peers.exchange = types.SimpleNamespace(reduce=lambda *call, **more: None)
  rounds.agree("step 1", lambda: 0, lambda share: Contribution((np.float32(1),)), None, waited=7.0)
  assert 7.0 <= reported[0] < 8.0
  rounds.close()
