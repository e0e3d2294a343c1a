"""How a member begins: it restores the newest state for all, lends its local copies, or receives the state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import jax

from trainer.checkpoint import state_transfer
from trainer.checkpoint.errors import LenderLost
from trainer.checkpoint.lending import Allocate, Answer
from trainer.checkpoint.tiers import Tiers
from trainer.config.schema import Config
from trainer.elastic.elastic_run import ElasticRun
from trainer.program.state import TrainState
from trainer.run.driver import Start
from trainer.run.session import Session
from worlds.exchange import Exchange, PeerLost
from worlds.membership.messages import Message
from worlds.peers import Peers


def join(
  session: Session, elastic: ElasticRun, peers: Peers, abstract: TrainState, tiers: Tiers, restore: Callable[[], Start]
) -> Start:
  """The state that the run starts from, or that members which are ahead send to this one. Call it when this member can
  compute. restore(): the newest good state, or a fresh one; called if this member leads. Raises RunEnded and
  SupervisorLost."""
  membership, led = peers.membership, None
  begin = time.monotonic()
  membership.send("ready", newest=tiers.newest(), holds=False)
  while True:
    message = membership.next()
    assert message is not None
    if message["kind"] == "lead":
      led = None  # its memory is free before another state is restored
      led = _lead(peers, tiers, message, restore)
    elif message["kind"] == "regather":
      membership.send("ready", newest=tiers.newest(), holds=False)
    else:
      peers.handle(message)
    if message["kind"] != "world":
      continue
    if not peers.is_fresh:
      assert led is not None
      return led
    try:
      state, header = _receive(peers, abstract)
    except PeerLost as error:  # the next message says who sends the state now
      peers.report(error, peers.epoch)
      continue
    elastic.join(header["down_events"])
    session.metrics.remember(header["records"])
    seconds = time.monotonic() - begin
    session.events.emit("restore", tier="peer", step=header["step"], seconds=seconds)
    return Start(state, header["step"], "peer", seconds, header["evaluated"], header["meta"])


def _lead(peers: Peers, tiers: Tiers, message: Message, restore: Callable[[], Start]) -> Start | None:
  """Restores the newest state if this member is the leader, with the local copies of all members; None: it is not, or
  another one is lost meanwhile."""
  epoch, leader, addresses = message["epoch"], message["leader"], peers.of_this_lane(message["members"])
  peers.set_primary(leader)
  if leader != peers.member:
    _lend(peers, tiers, epoch, {member: addresses[member] for member in (leader, peers.member)})
    return None
  others = _Others(peers.exchange, epoch, addresses, leader)
  try:
    with tiers.borrowing(others):
      start = restore()
  except LenderLost:
    if others.lost is not None:
      peers.report(others.lost, epoch)
    return None
  peers.membership.send("restored", epoch=epoch, step=start.step)
  return start


def _lend(peers: Peers, tiers: Tiers, epoch: int, addresses: dict[int, str]) -> None:
  """Answers the questions of the leader until the next epoch begins, or the leader is lost."""
  lender = tiers.lender()
  if lender is None:
    return
  (leader,) = addresses.keys() - {peers.member}
  with contextlib.suppress(PeerLost):  # the next message says what follows
    peers.exchange.connect(epoch, addresses)
    while True:
      question, _ = peers.exchange.receive_state(leader, lambda header: [])
      answer, arrays = lender.answer(question)
      peers.exchange.send_state(leader, answer, arrays)


class _Others:
  """The other members as Lenders: this process asks the process of its lane. Connects with the first question."""

  def __init__(self, exchange: Exchange, epoch: int, addresses: dict[int, str], member: int) -> None:
    self.members = sorted(addresses.keys() - {member})
    self.lost: PeerLost | None = None  # why this process raised LenderLost
    self._exchange, self._epoch, self._addresses = exchange, epoch, addresses
    self._connected = False

  def ask(self, member: int, question: dict[str, Any], allocate: Allocate) -> Answer:
    try:
      if not self._connected:
        self._exchange.connect(self._epoch, self._addresses)
        self._connected = True
      self._exchange.send_state(member, question, [])
      return self._exchange.receive_state(member, allocate)
    except PeerLost as error:
      self.lost = error
      raise LenderLost(str(error)) from error


def header(config: Config, session: Session, elastic: ElasticRun, step: int, evaluated: bool) -> dict[str, Any]:
  """What a member that joins after `step` must know besides the state, as JSON. evaluated: whether this state
  has been evaluated."""
  return {
    "step": step,
    "evaluated": evaluated,
    "meta": session.data.meta(config, step),
    "records": session.metrics.remembered(),
    "down_events": elastic.down_events,
  }


def _receive(peers: Peers, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
  """(state, header) from the source of the epoch. Raises PeerLost if the source is lost."""
  peers.exchange.connect(peers.epoch, peers.addresses)
  header, parts = peers.exchange.receive_state(peers.source, lambda header: state_transfer.empty_parts(abstract))
  state = jax.block_until_ready(state_transfer.assemble(abstract, list(parts)))
  peers.connected()
  peers.membership.send("joined", epoch=peers.epoch)
  return state, header
