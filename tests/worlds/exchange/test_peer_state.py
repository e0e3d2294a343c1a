"""The state of a run from one member to another."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tests.support.exchange_members import Members, Relay, flip, members, random_shares, same_bits, sum_in_order

from worlds.exchange import MismatchedCall, PeerLost, listener, peer_state
from worlds.exchange.link import checksum

ARRAYS = [
  np.random.default_rng(0).standard_normal((300, 70)).astype(np.float32),
  np.asarray(jnp.arange(7, dtype=jnp.bfloat16)),
  np.array(12, np.int32),
  np.zeros((0, 3), np.float32),
  np.array([True, False]),
  np.asfortranarray(np.arange(12, dtype=np.int64).reshape(3, 4)),
]
HEADER = {"step": 12, "meta": {"name": "run", "seeds": [1, 2]}}


def transfer(those, allocate=lambda header: [np.empty(x.shape, x.dtype) for x in ARRAYS], header=HEADER):
  """Member 1 sends, member 0 receives."""

  def act(exchange, member):
    return exchange.send_state(0, header, ARRAYS) if member else exchange.receive_state(1, allocate)

  return those.call(act)[0]


@pytest.mark.parametrize("chunk", [1 << 22, 64])
def test_a_state_arrives_with_every_bit(chunk, monkeypatch):
  monkeypatch.setattr(peer_state, "CHUNK", chunk)
  shares = random_shares(2, 100)
  with members(2) as those:
    header, arrays = transfer(those)
    results = those.reduce(shares, {0: [0], 1: [1]})  # the same connections go on with reductions
  assert header == HEADER
  assert all(same_bits(a, b) and a.shape == b.shape for a, b in zip(arrays, ARRAYS, strict=True))
  assert all(same_bits(result, sum_in_order(shares)) for result in results)


@pytest.mark.parametrize("change", ["one more", "one less", "larger"])
def test_other_arrays_than_those_of_the_sender_are_refused(change):
  def allocate(header):
    arrays = [np.empty(x.shape, x.dtype) for x in ARRAYS]
    if change == "larger":
      arrays[0] = np.empty((300, 71), np.float32)
    return arrays[:-1] if change == "one less" else [*arrays, np.empty(3)] if change == "one more" else arrays

  with members(2) as those:
    if change == "one less":  # the rest shows in the next call
      transfer(those, allocate)
      with pytest.raises(MismatchedCall):
        those.reduce(random_shares(2, 10), {0: [0], 1: [1]})
    elif change == "one more":

      def act(exchange, member):
        if not member:
          return exchange.receive_state(1, allocate)
        exchange.send_state(0, HEADER, ARRAYS)
        return exchange.reduce("s", {1: np.ones(9, np.float32)}, {0: [0], 1: [1]}, np.zeros(9, np.float32))

      with pytest.raises(MismatchedCall, match="STATE_ARRAY 6, 0 of epoch 1 is expected"):
        those.call(act)
    else:
      with pytest.raises(MismatchedCall, match="84000 bytes of STATE_ARRAY 0, 0; 85200 bytes are expected"):
        transfer(those, allocate)


def test_a_header_that_is_too_long_allocates_nothing(monkeypatch):
  with members(2) as those:
    monkeypatch.setattr(peer_state, "LONGEST_HEADER", 100)
    with pytest.raises(AssertionError, match="a header of"):
      transfer(those, header={"x": "y" * 200})
  with members(2) as those:

    def act(exchange, member):
      if member:
        return exchange._links[0][0].send(3, 1, 0, 0, memoryview(b"x" * 200), 0)
      return exchange.receive_state(1, list)

    with pytest.raises(MismatchedCall, match="a header of 200 bytes; at most 100"):
      those.call(act)


def test_a_damaged_byte_of_a_state_is_detected():
  those = Members(2)
  relay = Relay(those.all[0].address, flip(listener.ANSWER_BYTES + 5000))
  try:
    those.connect({(1, 0): relay.address})
    with pytest.raises(PeerLost, match="member 1: the checksum of STATE_ARRAY 0, 0 is wrong"):
      transfer(those)
    those.connect()
    assert transfer(those)[0] == HEADER
  finally:
    relay.close()
    those.close()


@pytest.mark.parametrize("size", [0, 1, 3, 1000, 4072, 4096, 4099, 70_001])
def test_every_flipped_bit_changes_the_checksum(size):
  payload = np.random.default_rng(0).integers(0, 256, size, np.uint8)
  whole = checksum(memoryview(payload))
  for at in {0, 1, size // 2, size - 2, size - 1} & set(range(size)):
    payload[at] ^= 64
    assert checksum(memoryview(payload)) != whole
    payload[at] ^= 64
