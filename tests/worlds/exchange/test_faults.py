"""Lost, damaged and interrupted connections: who is named, and that the next epoch starts clean."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time

import numpy as np
import pytest
from tests.support.exchange_members import Members, Relay, flip, members, random_shares, same_bits, sum_in_order

from worlds.exchange import PeerLost, listener, reduction, thread_pool

SIZE = 200_000
HANDSHAKE = listener.ANSWER_BYTES  # bytes that the caller sends before the first frame


@pytest.fixture(autouse=True, params=["one thread", "several threads"])
def threads(request, monkeypatch):
  """Sums of SIZE values in the caller's thread or in several threads. Returns whether there are several."""
  monkeypatch.setattr(reduction, "ALONE", 0 if request.param == "several threads" else SIZE)
  return request.param == "several threads"


def caught(function):
  """Returns (the PeerLost that `function` raises, seconds until then)."""
  start = time.monotonic()
  with pytest.raises(PeerLost) as error:
    function()
  return error.value, time.monotonic() - start


@pytest.mark.parametrize("at", ["header", "payload"])
def test_a_damaged_byte_is_detected_and_the_next_epoch_gives_the_exact_sum(at):
  shares, dealt = random_shares(2, SIZE), {0: [0], 1: [1]}
  those = Members(2)
  relay = Relay(those.all[0].address, flip(HANDSHAKE + (10 if at == "header" else 1000)))
  try:
    those.connect({(1, 0): relay.address})
    with pytest.raises(PeerLost, match=r"member 1: the (header|checksum)") as error:
      those.reduce(shares, dealt)
    assert error.value.members == (1,)
    those.connect()
    assert all(same_bits(result, sum_in_order(shares)) for result in those.reduce(shares, dealt))
  finally:
    relay.close()
    those.close()


def test_a_connection_that_ends_in_mid_frame_names_the_peer():
  those = Members(2)
  relay = Relay(those.all[0].address, lambda data, offset: data if offset < 100_000 else b"")
  try:
    those.connect({(1, 0): relay.address})
    with pytest.raises(PeerLost) as error:
      those.reduce(random_shares(2, SIZE), {0: [0], 1: [1]})
    assert error.value.members in ((0,), (1,)) and not re.search("header|checksum", str(error.value))
  finally:
    relay.close()
    those.close()


def test_the_survivors_of_a_lost_member_name_it_and_not_each_other():
  shares, dealt = random_shares(3, SIZE), {0: [0], 1: [1], 2: [2]}
  with members(3) as those:
    victim = those.all.pop()
    errors = {}

    def reduce(exchange, member):
      out = np.zeros(SIZE, np.float32)
      errors[member] = caught(lambda: exchange.reduce("step 1", {member: shares[member]}, dealt, out))[0]

    threads = [threading.Thread(target=reduce, args=(exchange, i)) for i, exchange in enumerate(those.all)]
    for thread in threads:
      thread.start()
    time.sleep(0.05)
    victim.close()
    for thread in threads:
      thread.join(10)
    assert {member: error.members for member, error in errors.items()} == {0: (2,), 1: (2,)}
    those.connect()
    results = those.reduce(shares, {0: [0, 2], 1: [1]})
  assert all(same_bits(result, sum_in_order(shares)) for result in results)


@pytest.mark.parametrize("blocked_in", ["reduce", "connect", "receive_state"])
def test_an_interrupt_from_another_thread_ends_a_blocked_call_within_50_ms(blocked_in):
  seconds = []
  with members(2) as those:
    first = those.all[0]
    for epoch in (2, 4, 6):  # the best of three: a busy machine may delay a thread
      calls = {
        "reduce": lambda: first.reduce("s", {0: np.ones(9, np.float32)}, {0: [0], 1: [1]}, np.zeros(9, np.float32)),
        "connect": lambda epoch=epoch: first.connect(epoch + 1, {0: first.address, 1: those.all[1].address}),
        "receive_state": lambda: first.receive_state(1, lambda header: []),
      }
      those.epoch = epoch - 1
      those.connect()
      sent = []

      def interrupt(epoch=epoch, sent=sent):
        sent.append(time.monotonic())
        first.interrupt(epoch + 2)

      timer = threading.Timer(0.1, interrupt)
      timer.start()
      error, _ = caught(calls[blocked_in])
      seconds.append(time.monotonic() - sent[0])
      timer.join()
      assert error.members == ()
      assert caught(calls["receive_state"])[0].members == ()  # the epoch stays over
  assert min(seconds) < 0.05, seconds


def test_interrupts_in_mid_reduction_leave_nothing_for_the_next_epoch():
  shares, dealt = random_shares(3, SIZE), {0: [2], 1: [0], 2: [1]}
  other = {share: -values for share, values in shares.items()}
  moments, interrupted = random.Random(0), 0
  with members(3) as those:
    start = time.monotonic()
    those.reduce(shares, dealt)
    usual = time.monotonic() - start
    for _ in range(15):
      victim = those.all[moments.randrange(3)]
      timer = threading.Timer(moments.uniform(0, usual), victim.interrupt, [those.epoch + 1])
      timer.start()
      try:
        those.reduce(shares, dealt, tag="step")
      except PeerLost:
        interrupted += 1
      timer.join()
      those.connect()
      assert all(same_bits(result, sum_in_order(other)) for result in those.reduce(other, dealt, tag="step"))
  assert interrupted, "no interrupt came in the middle of a reduction"


def test_an_interrupt_that_comes_before_connect_is_not_forgotten():
  with members(2) as those:
    those.all[0].interrupt(8)
    error, seconds = caught(lambda: those.all[0].connect(7, {0: "unused", 1: "unused"}))
    assert error.members == () and seconds < 0.05
    those.epoch = 7
    those.connect()


def test_connect_names_a_member_that_is_gone_at_once():
  with members(2, connect_seconds=5) as those:
    gone = those.all.pop(0)
    gone.close()
    error, seconds = caught(lambda: those.all[0].connect(2, {0: gone.address, 1: "unused"}))
  assert error.members == (0,) and seconds < 2


def test_connect_names_members_that_do_not_call_within_the_time_limit():
  with members(1, connect_seconds=0.3) as those:
    error, seconds = caught(lambda: those.all[0].connect(2, {0: "unused", 1: "unused", 2: "unused"}))
  assert error.members == (1, 2) and 0.25 < seconds < 2


def test_a_caller_that_is_early_waits_for_the_epoch():
  with members(2, connect_seconds=2) as those:
    early = threading.Thread(target=those.all[1].connect, args=(4, {0: those.all[0].address, 1: "unused"}))
    early.start()
    early.join(0.1)
    those.all[0].connect(4, {0: those.all[0].address, 1: "unused"})
    early.join(10)
    assert not early.is_alive()
    those.epoch = 4
    shares = random_shares(2, 10)
    assert all(same_bits(r, sum_in_order(shares)) for r in those.reduce(shares, {0: [0], 1: [1]}))


def test_reconnects_leave_no_descriptor_and_no_thread():
  shares, dealt = random_shares(3, 1000), {0: [0], 1: [1], 2: [2]}
  with members(3) as those:
    those.reduce(shares, dealt)
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for epoch in range(50):
      if epoch % 5 == 0:  # an epoch that fails in the middle of a call
        with pytest.raises(ZeroDivisionError):
          those.call(lambda exchange, member: exchange.receive_state(0, list) if member else 1 // 0)
      those.connect()
      those.reduce(shares, dealt)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_a_signal_in_the_callers_thread_leaves_no_thread_that_uses_the_arrays(threads):
  """Member 1 sends its values after the signal. They must not arrive in the total of member 0 any more."""

  class Alarm(Exception):
    pass

  def ring(*_):
    raise Alarm

  shares, dealt, out = random_shares(2, SIZE), {0: [0], 1: [1]}, np.full(SIZE, 7, np.float32)
  before = signal.signal(signal.SIGALRM, ring)
  try:
    with members(2) as those:
      signal.setitimer(signal.ITIMER_REAL, 0.1)
      with pytest.raises(Alarm):
        those.all[0].reduce("step 1", {0: shares[0]}, dealt, out)
      late = threading.Thread(target=caught, args=[lambda: those.all[1].reduce("step 1", {1: shares[1]}, dealt, -out)])
      late.start()
      time.sleep(0.1)
      assert (out == 7).all()
      those.all[1].interrupt(2)
      late.join(10)
      those.connect()
      assert all(same_bits(result, sum_in_order(shares)) for result in those.reduce(shares, dealt))
  finally:
    signal.signal(signal.SIGALRM, before)


def test_many_peers_need_few_threads(threads):
  """16 members in one process; one of them hands out its values slowly, so that all others wait for it."""
  count, most = 16, []

  class Slow:
    def __init__(self, values):
      self.size, self._values = values.size, values

    def read(self, start, stop):
      most.append(sum(thread.name.startswith("exchange-") for thread in threading.enumerate()))
      time.sleep(0.01)
      return self._values[start:stop]

  shares = random_shares(count, SIZE)
  with members(count) as those:
    results = those.reduce(shares | {7: Slow(shares[7])}, {member: [member] for member in range(count)})
    those.reduce(shares, {member: [member] for member in range(count)}, tag="step 2")
  assert all(same_bits(result, sum_in_order(shares)) for result in results)
  each = 1 + 2 * thread_pool.ExchangeThreads().pairs * threads  # one listens
  assert max(most) <= count * each <= count * 9
  assert not any(thread.name.startswith("exchange-") for thread in threading.enumerate())


def test_a_peer_that_does_not_read_for_a_while_is_waited_for():
  """The bytes of member 1 to member 0 are held back. Meanwhile they fill the connection."""
  stalled = threading.Event()

  def stall(data, offset):
    if offset > HANDSHAKE and not stalled.is_set():
      time.sleep(0.3)
      stalled.set()
    return data

  shares, dealt = random_shares(3, 2_000_000), {0: [0], 1: [1], 2: [2]}
  those = Members(3)
  relay = Relay(those.all[0].address, stall)
  try:
    those.connect({(1, 0): relay.address})
    assert all(same_bits(result, sum_in_order(shares)) for result in those.reduce(shares, dealt))
    assert stalled.is_set()
  finally:
    relay.close()
    those.close()
