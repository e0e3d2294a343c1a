"""Plays the schedule of a compiled program on a clock, to find which communication the computation hides.

The compiler fixes the order of the instructions of a device. A transfer begins at its `-start` and moves over a channel
that serves one transfer at a time; its `-done` waits until the transfer is finished. Only this wait is exposed, because
it makes the step longer. A collective without `-start` and `-done` is exposed as a whole.

The body of a loop is played turn by turn, because a transfer that starts in one turn may be finished in the next one.
After two equal turns, all remaining turns are equal, too.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from stepcost import collectives, hlo_events
from stepcost.hlo import Computation, Module
from stepcost.hlo_events import SECOND, Action, Channel, Event, Site
from stepcost.prices import Basis, Rates


@dataclasses.dataclass(frozen=True)
class Transfer:
  """All transfers of one site during the program."""

  site: Site
  calls: int
  needed: float | None  # seconds; None: the rate of the channel is unknown
  exposed: float  # seconds in which the device waits for the channel, and the channel moves this transfer
  computed: float  # seconds of computation between the starts and the ends
  longest: str  # the source of most of the computation between the first start and its end; empty: none


@dataclasses.dataclass(frozen=True)
class Timeline:
  """The times of one execution of a program on one device, in seconds."""

  seconds: float  # the whole execution: computation and exposed transfers
  computation: Mapping[Basis, float]
  exposed: Mapping[Channel, float]
  transfers: tuple[Transfer, ...]
  problems: tuple[str, ...]  # what could not be read or priced, so that the times lack it

  @property
  def computed(self) -> float:
    return sum(self.computation.values())

  def needed(self, channel: Channel) -> float | None:
    """Returns the seconds that the transfers of `channel` take; None if the rate of the channel is unknown."""
    parts = [transfer.needed for transfer in self.transfers if transfer.site.channel is channel]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def simulate(module: Module, slice_of: Sequence[int], rates: Rates) -> Timeline:
  """Returns the times of one execution. `slice_of[i]` is the slice of partition i."""
  decoder = hlo_events.Decoder(module, collectives.Reader(module, slice_of), rates)
  return _Player(module, decoder).timeline()


@dataclasses.dataclass(eq=False)
class _Flight:
  """A transfer that has started and has not been waited for."""

  site: Site
  begin: int  # when the channel begins to move it
  finish: int  # when it is finished; of a collective in fusions: the picoseconds that are left
  computed: int  # computation before the start
  serial: int
  logged: int  # length of the log of computations before the start


@dataclasses.dataclass(eq=False)
class _Handle:
  """The result of a `-start` or of a `recv`."""

  flights: tuple[_Flight, ...] | None  # None: a `recv` whose `send` has not run yet, or a call without its operands
  prepared: tuple[Site, ...] = ()  # the transfers of a call without its operands


# The result of an instruction, as far as it contains handles: a handle, a tuple of results, or None.
_Value = Any


class _Player:
  """The device while the program runs."""

  def __init__(self, module: Module, decoder: hlo_events.Decoder) -> None:
    self._module, self._decoder = module, decoder
    self._events: dict[str, list[Event]] = {}
    self._now = self._computed = self._serial = 0
    self._free = dict.fromkeys(Channel, 0)  # when each channel has served all transfers
    self._open: dict[_Flight, None] = {}
    # Collectives that fusions execute together, by their channels. They move on only while such a fusion computes.
    self._fused: dict[str, _Flight] = {}
    # Sends without a recv, and recvs without a send, by their rendezvous.
    self._sends: dict[str, list[tuple[_Flight, ...]]] = collections.defaultdict(list)
    self._recvs: dict[str, list[_Handle]] = collections.defaultdict(list)
    # Picoseconds by Basis and by Channel (exposed); calls, exposed and computed picoseconds by ("..", Site).
    self._totals: collections.Counter[Any] = collections.Counter()
    self._problems: dict[str, None] = {}
    self._log: list[Event] = []  # all computations, in their order
    self._longest: dict[Site, str] = {}  # of the first transfer of each site

  def timeline(self) -> Timeline:
    self._play(self._module.computations[self._module.entry], [])
    for flight in list(self._open):
      self._wait(flight)
    for channel in list(self._fused):
      self._finish_fused(channel)
    totals = self._totals
    sites = [key[1] for key in totals if isinstance(key, tuple) and key[0] == "calls"]
    return Timeline(
      seconds=self._now / SECOND,
      computation={basis: totals[basis] / SECOND for basis in Basis},
      exposed={channel: totals[channel] / SECOND for channel in Channel},
      transfers=tuple(self._transfer(site) for site in sites),
      problems=tuple(self._problems),
    )

  def _transfer(self, site: Site) -> Transfer:
    calls = self._totals["calls", site]
    needed = None if site.needed is None else calls * site.needed / SECOND
    exposed, computed = (self._totals[name, site] / SECOND for name in ("exposed", "computed"))
    return Transfer(site, calls, needed, exposed, computed, self._longest.get(site, ""))

  def _play(self, computation: Computation, arguments: list[_Value]) -> _Value:
    values: dict[str, _Value] = {}
    for parameter, argument in zip(computation.parameters, arguments):
      if argument is not None:
        values[parameter.name] = argument
    for event in self._events_of(computation):
      self._execute(event)
      for site in event.blocks:
        self._wait(self._start(site))
      value = self._result(computation, event, values)
      if value is not None:
        values[event.instruction.name] = value
    return values.get(computation.root.name)

  def _events_of(self, computation: Computation) -> list[Event]:
    if computation.name not in self._events:
      self._events[computation.name] = self._decoder.events(computation)
    return self._events[computation.name]

  def _result(self, computation: Computation, event: Event, values: dict[str, _Value]) -> _Value:
    """Starts transfers, waits for transfers, or runs other computations. Returns the result of the instruction."""
    instruction, action = event.instruction, event.action
    if action is Action.COMPUTE:
      return None
    operands = [values.get(name) for name in instruction.operands]
    first = operands[0] if operands else None
    if action is Action.TUPLE:
      return tuple(operands) if any(operand is not None for operand in operands) else None
    if action is Action.ELEMENT:
      # An element of the result of a `-start` stands for the transfer.
      return first[instruction.index] if isinstance(first, tuple) else first
    if action is Action.PASS:
      return first
    if action is Action.UPDATE:
      return self._update(first)
    if action in (Action.LOOP, Action.CALL, Action.BRANCH):
      return self._call(computation, event, operands)
    if action is Action.WAIT:
      return self._end(event, first)
    return self._begin(event)

  def _execute(self, event: Event) -> None:
    """Computes, together with the collectives that the instruction is a part of."""
    for channel in event.ends:
      if channel in self._fused:
        self._finish_fused(channel)
    for channel, site in event.begins:
      self._fused[channel] = _Flight(site, 0, site.needed or 0, self._computed, 0, len(self._log))
      self._totals["calls", site] += 1
    self._now += event.picoseconds
    self._computed += event.picoseconds
    self._totals[event.basis] += event.picoseconds
    if event.picoseconds:
      self._log.append(event)
    for channel in event.advances:
      if channel in self._fused:
        self._fused[channel].finish -= event.picoseconds

  def _start(self, site: Site) -> _Flight:
    """Puts a transfer at the end of the queue of its channel."""
    if site.needed is None:
      self._problem(f"{site.channel}: the bandwidth is unknown")
    begin = max(self._now, self._free[site.channel])
    self._free[site.channel] = finish = begin + (site.needed or 0)
    self._serial += 1
    flight = _Flight(site, begin, finish, self._computed, self._serial, len(self._log))
    self._open[flight] = None
    self._totals["calls", site] += 1
    return flight

  def _wait(self, flight: _Flight) -> None:
    """Waits until the transfer is finished. A second wait for the same transfer takes no time."""
    if flight not in self._open:
      return
    if flight.finish > self._now:
      # While the device waits, the channel may move transfers that started before this one.
      for other in self._open:
        if other.site.channel is flight.site.channel:
          moved = min(other.finish, flight.finish) - max(other.begin, self._now)
          self._totals["exposed", other.site] += max(0, moved)
      self._totals[flight.site.channel] += flight.finish - self._now
      self._now = flight.finish
    del self._open[flight]
    self._ended(flight)

  def _finish_fused(self, channel: str) -> None:
    """Waits for a collective that fusions execute together."""
    flight = self._fused.pop(channel)
    exposed = max(0, flight.finish)
    self._now += exposed
    self._totals[flight.site.channel] += exposed
    self._totals["exposed", flight.site] += exposed
    self._ended(flight)

  def _ended(self, flight: _Flight) -> None:
    """Records what was computed between the start and the end of a transfer."""
    self._totals["computed", flight.site] += self._computed - flight.computed
    if flight.site not in self._longest:
      sources: collections.Counter[str] = collections.Counter()
      for event in self._log[flight.logged :]:
        sources[event.instruction.source or event.instruction.name] += event.picoseconds
      self._longest[flight.site] = max(sources, key=lambda source: sources[source], default="")

  def _begin(self, event: Event) -> _Handle | None:
    """Starts the transfers of an instruction and returns the handle to wait for."""
    if event.action is Action.PREPARE:
      return _Handle(None, event.starts)
    flights = tuple(self._start(site) for site in event.starts)
    if event.action is Action.START:
      return _Handle(flights)
    if event.action is Action.SEND:
      waiting = self._recvs[event.key]
      if waiting:
        waiting.pop(0).flights = flights
      else:
        self._sends[event.key].append(flights)
      return None
    assert event.action is Action.RECV, event.action
    sent = self._sends[event.key]
    handle = _Handle(sent.pop(0) if sent else None)
    if handle.flights is None:
      self._recvs[event.key].append(handle)
    return handle

  def _update(self, operand: _Value) -> _Value:
    """Starts the transfers of a call that gets its operands now. Returns the call."""
    handle = _handle(operand)
    if handle is not None and handle.prepared:
      handle.flights, handle.prepared = tuple(self._start(site) for site in handle.prepared), ()
    return operand

  def _end(self, event: Event, operand: _Value) -> None:
    handle = _handle(operand)
    name = event.instruction.name
    if handle is None:
      self._problem(f"{name} ends a transfer whose start is unknown; it counts as finished")
    elif handle.flights is None:
      self._problem(f"{name} waits for a transfer that has not been sent yet; it counts as finished")
    else:
      for flight in handle.flights:
        self._wait(flight)

  def _problem(self, text: str) -> None:
    self._problems[text] = None

  def _call(self, caller: Computation, event: Event, operands: list[_Value]) -> _Value:
    instruction = event.instruction
    called = [self._module.computations[name] for name in event.called]
    if event.action is Action.CALL:
      return self._play(called[0], operands)
    if event.action is Action.BRANCH:
      longest = max(range(len(called)), key=lambda index: self._weight(called[index]))
      return self._play(called[longest], operands[longest + 1 : longest + 2])
    turns = self._module.trip_count(caller, instruction)
    if turns is None:
      self._problem(f"the number of turns is unknown: the loop {instruction.source or instruction.name} counts once")
    return self._loop(self._module.named(instruction, "body"), 1 if turns is None else turns, operands[0])

  def _weight(self, computation: Computation) -> int:
    """Returns the picoseconds of computation in `computation`, with each loop once, to compare branches."""
    events = self._events_of(computation)
    nested = (self._module.computations[name] for event in events for name in event.called)
    return sum(event.picoseconds for event in events) + sum(map(self._weight, nested))

  def _loop(self, body: Computation, turns: int, carried: _Value) -> _Value:
    """Plays a loop turn by turn until a turn equals the turn before it, and multiplies that turn."""
    first_serial = self._serial
    state: Any = None
    for turn in range(turns):
      before, now, computed = self._totals.copy(), self._now, self._computed
      carried = self._play(body, [carried])
      after = self._state(carried, first_serial)
      if after == state:
        self._repeat(turns - turn - 1, before, self._now - now, self._computed - computed, first_serial)
        break
      state = after
    return carried

  def _repeat(self, turns: int, before: collections.Counter[Any], time: int, computed: int, first_serial: int) -> None:
    """Moves the clock and the totals forward by `turns` turns like the last one."""
    for key, total in list(self._totals.items()):
      self._totals[key] += turns * (total - before[key])
    self._now += turns * time
    self._computed += turns * computed
    for channel in self._free:
      self._free[channel] += turns * time
    for flight in self._open:
      if flight.serial > first_serial:
        flight.begin += turns * time
        flight.finish += turns * time
        flight.computed += turns * computed

  def _state(self, carried: _Value, first_serial: int) -> Any:
    """Returns all that the next turn of a loop depends on, relative to now."""
    order = {flight: index for index, flight in enumerate(self._open)}
    seen = lambda flights: None if flights is None else tuple(order.get(flight) for flight in flights)

    def structure(value: _Value) -> Any:
      if isinstance(value, tuple):
        return tuple(structure(part) for part in value)
      return None if value is None else (seen(value.flights),)

    flights = [
      (
        *(max(0, time - self._now) for time in (f.begin, f.finish)),
        self._computed - f.computed if f.serial > first_serial else None,
        f.site,
      )
      for f in self._open
    ]
    free = [max(0, time - self._now) for time in self._free.values()]
    sends = {key: [seen(sent) for sent in queue] for key, queue in self._sends.items() if queue}
    recvs = {key: len(queue) for key, queue in self._recvs.items() if queue}
    fused = {channel: max(0, flight.finish) for channel, flight in self._fused.items()}
    return structure(carried), flights, free, sends, recvs, fused


def _handle(value: _Value) -> _Handle | None:
  if isinstance(value, tuple):
    return next((handle for handle in map(_handle, value) if handle is not None), None)
  assert value is None or isinstance(value, _Handle)
  return value
