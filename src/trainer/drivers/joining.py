"""How a member begins: it restores the newest state for all members, or receives the state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

from trainer.checkpoint import state_transfer
from trainer.checkpoint.backups import Backups
from trainer.program.state import TrainState
from trainer.run.driver import Start
from trainer.run.session import Session
from worlds.exchange import PeerLost
from worlds.peers import Peers


def join(session: Session, peers: Peers, abstract: TrainState, backups: Backups, restore: Callable[[], Start]) -> Start:
  """The state that the run starts from, or that members which are ahead send to this one. Call it when this member can
  compute. restore(): the newest good state, or a fresh one; called if this member leads. Raises RunEnded,
  SupervisorLost, and ConfigError if this member has other data."""
  membership, led = peers.membership, None
  begin = time.monotonic()
  membership.send("ready", newest=backups.newest(), holds=False)
  while True:
    message = membership.next()
    assert message is not None
    if message["kind"] == "lead":
      peers.set_primary(message["leader"])
      if message["leader"] == peers.member:
        led = restore()
        membership.send("restored", epoch=message["epoch"], step=led.step)
    elif message["kind"] == "regather":
      membership.send("ready", newest=backups.newest(), holds=False)
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
    session.data.require_equal([header["meta"]["identity"]])
    session.elastic.join(header["down_events"])
    session.metrics.remember(header["records"])
    seconds = time.monotonic() - begin
    session.events.emit("restore", tier="peer", step=header["step"], seconds=seconds)
    return Start(state, header["step"], "peer", seconds, header["evaluated"], header["meta"])


def header(session: Session, step: int, evaluated: bool) -> dict[str, Any]:
  """What a member that joins after `step` must know besides the state, as JSON. evaluated: whether this state
  has been evaluated."""
  return {
    "step": step,
    "evaluated": evaluated,
    "meta": session.data.meta(session.config, step),
    "records": session.metrics.remembered(),
    "down_events": session.elastic.down_events,
  }


def _receive(peers: Peers, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
  """(state, header) from the source of the epoch. Raises PeerLost if the source is lost."""
  peers.exchange.connect(peers.epoch, peers.addresses)
  header, parts = peers.exchange.receive_state(peers.source, lambda header: state_transfer.empty_parts(abstract))
  state = jax.block_until_ready(state_transfer.assemble(abstract, list(parts)))
  peers.connected()
  peers.membership.send("joined", epoch=peers.epoch)
  return state, header
