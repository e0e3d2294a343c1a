"""How a process that a launcher has started becomes a member of its run."""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
import time

from worlds import lines
from worlds.exchange import Exchange
from worlds.exit_codes import FAILED
from worlds.membership import wire
from worlds.membership.client import Membership, SupervisorLost
from worlds.membership.wire import Channel, WireError
from worlds.peers import Peers, RunEnded
from worlds.place import SUPERVISOR, Place

# A peer may be saving a large checkpoint. If it has died, the supervisor says so, and the wait ends at once.
_CONNECT_SECONDS = 3600.0
_SLOW_SECONDS = 3600.0  # for a supervisor that listens and does not answer
_RETRY_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that this process gets when its parent ends


def join(place: Place) -> Peers:
  """The members of the run, as this process sees them when the supervisor has let it join. Raises RunEnded if the
  supervisor refuses this member, or (exit code 1, so a launcher may restart it) if no supervisor answers."""
  _continue_when_launcher_ends()
  start, patience = time.monotonic(), lines.Patience()
  while True:
    channel, reason, seconds = _connect(place)
    if channel is not None:
      host = place.host or channel.local_host
      exchange = Exchange(
        place.member, place.token, lines.warn, host=host, connect_seconds=_CONNECT_SECONDS, streams=place.streams
      )
      membership = Membership(channel, place, exchange.address, exchange.interrupt, lines.warn)
      peers = Peers(membership, exchange, place.lane, functools.partial(_answers, place))
      try:
        welcome = membership.next()
        assert welcome is not None
        peers.handle(welcome)
        return peers
      except (RunEnded, SupervisorLost) as error:
        membership.close()
        exchange.close()
        if isinstance(error, RunEnded):
          raise
        # Perhaps it was the supervisor of the group before this one, which was about to end.
        reason = "it has closed the connection"
    if time.monotonic() >= start + seconds:
      where = f"{SUPERVISOR}={','.join(place.supervisors)}"
      raise RunEnded(FAILED, f"error: {where}: cannot join the run there: {reason}.\n{place.remedy}")
    patience.waits(functools.partial("Member {} waits for the supervisor: {}".format, place.member, reason))
    time.sleep(_RETRY_SECONDS)


def _continue_when_launcher_ends() -> None:
  """Lets this process find out that its launcher is gone, and end, also if it is stopped then. On Linux."""
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _connect(place: Place) -> tuple[Channel | None, str, float]:
  """Returns (the connection to the supervisor or None, why there is none, for how many seconds to try). A launcher's
  supervisor listens already: it may be stopped or slow, unless the system refuses the connection."""
  reasons, seconds = [], place.wait_seconds
  for address in place.supervisors:
    try:
      return wire.connect(address, place.token), "", place.wait_seconds or _SLOW_SECONDS
    except (OSError, WireError) as error:
      reasons.append(f"{address}: {error}")
      if not isinstance(error, ConnectionRefusedError | WireError):
        seconds = place.wait_seconds or _SLOW_SECONDS
  return None, "; ".join(dict.fromkeys(reasons)), seconds


def _answers(place: Place) -> bool:
  channel, _, _ = _connect(place)
  if channel is not None:
    channel.close()
  return channel is not None
