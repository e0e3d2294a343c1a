"""Rounds of local steps of members that are threads: what they exchange is what the replicas compute alone."""

from __future__ import annotations

import socket
import time

import jax
import numpy as np
import pytest
from tests.drivers.member_threads import STEPS, Runs
from tests.support.elastic_harness import TINY

from input_pipeline.tally import Tally
from trainer.drivers.local_rounds import LocalRounds, _means, _weighted
from trainer.program.step import METRICS
from worlds.membership.speeds import Speeds

KEYS = [*TINY.split(), "local_steps=4", "outer_learning_rate=0.7", "outer_momentum=0.9"]
MOE = ("num_experts=2", "num_experts_per_tok=1", "base_moe_mlp_dim=16", "routed_bias_update_rate=0.01")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
  return Runs(tmp_path_factory.mktemp("runs"), KEYS)


def test_each_row_is_used_once_and_all_members_have_the_same_state(tmp_path, monkeypatch):
  """Nine steps are two rounds of four steps and one of one step."""
  runs = Runs(tmp_path, [*KEYS, *MOE])
  _, _, _, data = runs.of(2, 1)
  step, found, numbers = LocalRounds.step, {}, []

  def stepping(driver, state, n):
    result = step(driver, state, n)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the devices hold two states"
    first = n - len(driver.tally)
    found.update({first + i: Tally.of_sum(row) for i, row in enumerate(driver.tally)})
    numbers.append((n, driver.of_round))
    assert result[1].shape[0] == n - first and np.isfinite(result[1]).all()
    return result

  monkeypatch.setattr(LocalRounds, "step", stepping)
  states = runs.play(2, 1).states()
  assert len(states) == 2 and (states[0] == states[1]).all()
  assert found == {index: data.train.tally(index, hashes=True) for index in range(STEPS)}
  assert {n for n, _ in numbers} == {4, 8, 9}
  assert all(of_round["replica_distance"] > 0 < of_round["bytes_sent"] for _, of_round in numbers)


def test_two_members_compute_three_replicas_in_turns_with_the_bits_of_three(runs, monkeypatch):
  """Each takes half of the steps of the third replica: after the first round, because the round before tells all
  members that they have the same dealing. The second time, the connection ends when a part of a replica is sent."""
  right = runs.right(3, 1)
  send, sent = LocalRounds._send_replica, []

  def send_replica(driver, replica, turn):
    sent.append((driver._step, turn.steps))
    if len(sent) == 2:
      (link,) = driver._peers.exchange._links[turn.member]
      post = link.post
      monkeypatch.setattr(link, "post", lambda *args: (post(*args), link._sock.shutdown(socket.SHUT_RDWR)))
    send(driver, replica, turn)

  monkeypatch.setattr(LocalRounds, "_send_replica", send_replica)
  for breaks in (False, True):
    played = runs.play(3, 1, members=2)
    assert [(state == right).all() for state in played.states()] == [True, True]
    assert any("A connection between members has ended" in line for line in played.log) == breaks, played.log
  assert sent == [(4, 2)] * 2, "the first round has no turns, and the round of one step has nothing to divide"


def test_a_slow_member_takes_the_last_steps_of_its_replica_with_the_same_bits(runs, monkeypatch):
  right = runs.right(3, 1)
  advanced, share_of, taken, unread, busy = LocalRounds._advanced, LocalRounds._share, [], [], []

  def read(driver, index, share):
    time.sleep(0.2 if (driver._peers.member, index) == (0, 7) else 0.0)
    return share_of(driver, index, share)

  def advance(driver, replica, share, end):
    unread.extend(driver._step + len(replica.rows) not in driver._ahead for _ in replica.rows[:1])
    taken.append((driver._peers.member, share, driver._step + len(replica.rows), end))
    result = advanced(driver, replica, share, end)
    busy.extend(driver._busy for _ in replica.rows[:1] if driver._peers.member == 0)
    return result

  monkeypatch.setattr(LocalRounds, "_share", read)
  monkeypatch.setattr(LocalRounds, "_advanced", advance)
  monkeypatch.setattr(Speeds, "of", lambda _, members: {member: 0.4 if member == 0 else 1.0 for member in members})
  assert [(state == right).all() for state in runs.play(3, 1).states()] == [True] * 3
  of_slow = sorted(one for one in taken if one[0] == 0 or one[1] == 0)
  assert of_slow == [(0, 0, 0, 4), (0, 0, 7, 8), (0, 0, 8, 9), (1, 0, 4, 7)]
  assert unread == [False, False] and busy[0] > 0.2, "data are read before, and slow reads count"


def test_metrics_are_means_over_tokens_and_a_skip_of_one_replica_counts():
  rows = lambda loss, weights, skipped: np.float32([[loss, 1.0, 2.0, 0.1, weights, skipped]])
  one, other = _weighted(rows(3, 10, 0), is_first=True), _weighted(rows(6, 20, 1), is_first=False)
  (row,), skipped = _means(one + other, 2, 4)
  assert dict(zip(METRICS, row.tolist())) == pytest.approx(
    {"loss": 5, "z_loss": 1, "grad_norm": 2, "lr": 0.1, "weights": 30, "skipped": 5}
  )
  assert skipped == 5
  assert _means(one + one, 2, 4)[1] == 0
