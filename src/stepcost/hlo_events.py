"""What each instruction of a compiled program does to the clock of a device: compute, start a transfer, or wait.

An instruction without an event (a constant, a parameter, a scalar) takes no time.
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from stepcost import collectives, costs, prices
from stepcost.collectives import Collective
from stepcost.hlo import DEVICE, HOST, Computation, Instruction, Module
from stepcost.prices import Basis, Rates

# Time is counted in whole picoseconds, so that two equal turns of a loop are equal in every digit.
SECOND = 10**12

_COPIES = frozenset({"copy", "slice", "dynamic-slice", "dynamic-update-slice"})
# The result is the first operand, or contains it.
_PASSES = frozenset("bitcast copy opt-barrier optimization-barrier add-dependency domain".split())


class Channel(enum.StrEnum):
  """What transfers move over. Each channel of a device serves one transfer at a time, in the order of their starts."""

  DCN = "DCN"  # between slices
  LINKS = "links"  # between the devices of a slice
  HOST = "host"  # between a device and its host
  MEMORY = "HBM"  # between main memory and on-chip memory, and inside main memory
  CORES = "other cores"  # computation on another core of the device, such as a SparseCore


class Action(enum.Enum):
  """What happens with the result of an instruction. All actions first compute, then start transfers."""

  COMPUTE = enum.auto()  # the result is no transfer
  START = enum.auto()  # the result is the transfer
  PREPARE = enum.auto()  # the result is the transfer; it starts at the UPDATE that gives it its operands
  UPDATE = enum.auto()  # the result is the first operand, a transfer
  SEND = enum.auto()  # a `recv` of the same rendezvous gives the transfer
  RECV = enum.auto()
  WAIT = enum.auto()
  TUPLE = enum.auto()
  ELEMENT = enum.auto()
  PASS = enum.auto()
  LOOP = enum.auto()
  CALL = enum.auto()
  BRANCH = enum.auto()


_STRUCTURE = {
  "tuple": Action.TUPLE,
  "get-tuple-element": Action.ELEMENT,
  "while": Action.LOOP,
  "call": Action.CALL,
  "conditional": Action.BRANCH,
}
_ASYNC = {"start": Action.START, "done": Action.WAIT, "update": Action.UPDATE}


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
  """One instruction that starts a transfer."""

  channel: Channel
  kind: str
  source: str
  bytes: float  # of one call
  needed: int | None  # picoseconds of one call; None: the rate of the channel is unknown


@dataclasses.dataclass(frozen=True, eq=False)
class Event:
  """What one instruction does, in the order of the fields from `ends` on."""

  instruction: Instruction
  action: Action
  ends: tuple[str, ...] = ()  # keys of collectives that fusions execute together; waits for them
  begins: tuple[tuple[str, Site], ...] = ()  # keys of such collectives, with their sites
  picoseconds: int = 0  # of computation
  basis: Basis = Basis.ESTIMATE
  advances: tuple[str, ...] = ()  # keys of such collectives that move on during this computation
  blocks: tuple[Site, ...] = ()  # transfers for which the instruction itself waits
  starts: tuple[Site, ...] = ()
  key: str = ""  # the rendezvous of SEND and RECV

  @property
  def called(self) -> tuple[str, ...]:
    """Names of the computations that a LOOP, CALL or BRANCH runs."""
    return self.instruction.called if self.action in (Action.LOOP, Action.CALL, Action.BRANCH) else ()


@dataclasses.dataclass(frozen=True)
class _Fused:
  """The collectives of a computation that several of its fusions execute together."""

  sites: dict[str, dict[str, Site]]  # name of a fusion -> its collectives by their keys
  fusions: dict[str, list[str]]  # key of a collective -> names of its fusions, in their order

  def of(self, instruction: Instruction) -> tuple[dict[str, Site], tuple[Site, ...]]:
    """Returns the collectives that `instruction` executes with other fusions, by their keys, and its own ones."""
    sites = self.sites.get(instruction.name, {})
    shared = {key: site for key, site in sites.items() if len(self.fusions[key]) > 1}
    return shared, tuple(site for key, site in sites.items() if key not in shared)


class Decoder:
  def __init__(self, module: Module, reader: collectives.Reader, rates: Rates) -> None:
    self._module, self._reader, self._rates = module, reader, rates
    self._bandwidth = {
      Channel.DCN: rates.dcn,
      Channel.LINKS: rates.links,
      Channel.HOST: rates.host,
      Channel.MEMORY: rates.chip.hbm_bandwidth,
    }

  def events(self, computation: Computation) -> list[Event]:
    fused = self._fused(computation)
    decoded = (self._event(computation, instruction, fused) for instruction in computation.instructions)
    return [event for event in decoded if event is not None]

  def _fused(self, computation: Computation) -> _Fused:
    """Finds the collectives that several fusions of `computation` execute together."""
    fused: dict[str, dict[str, Site]] = {}  # name of a fusion -> the collectives that it executes with others
    fusions: dict[str, list[str]] = {}  # collective -> names of its fusions
    starts: collections.Counter[str] = collections.Counter()
    for fusion in computation.instructions:
      if fusion.opcode != "fusion":
        continue
      for owner, part in self._module.parts(computation, fusion):
        channel = collectives.fused_channel(part)
        collective = None if channel is None else self._reader.read(owner, part)
        if channel is None or collective is None:
          continue
        # Several collectives of a computation may have the same channel, one after the other.
        starts[channel] += not collectives.continues(part)
        key = f"{channel}.{starts[channel]}"
        site = self._collective_site(part, collective, computation.origin(fusion))
        fused.setdefault(fusion.name, {})[key] = site
        fusions.setdefault(key, []).append(fusion.name)
    return _Fused(fused, fusions)

  def _event(self, computation: Computation, instruction: Instruction, fused: _Fused) -> Event | None:
    opcode = instruction.opcode
    if opcode in _STRUCTURE:
      return Event(instruction, _STRUCTURE[opcode])
    if collectives.is_megascale(instruction):
      sites = self._collective_sites(computation, instruction)
      return Event(instruction, Action.SEND, starts=sites, key=collectives.rendezvous(instruction))
    if opcode == "send-done":  # the host has the data; the device waits for the transfer at the `recv-done`
      return None
    if opcode == "recv":
      return Event(instruction, Action.RECV, key=collectives.rendezvous(instruction))
    if opcode.endswith(("-start", "-done", "-update")):
      action = _ASYNC[opcode.rsplit("-", 1)[1]]
      sites = self._started(computation, instruction) if action is Action.START else ()
      if action is Action.START and self._lacks_operands(instruction):
        action = Action.PREPARE
      return Event(instruction, action, starts=sites)
    return self._computing(computation, instruction, fused)

  def _computing(self, computation: Computation, instruction: Instruction, fused: _Fused) -> Event | None:
    """Returns the event of an instruction that computes, or of a collective that the device waits for."""
    shared, alone = fused.of(instruction)
    sites = self._collective_sites(computation, instruction) + alone
    if instruction.opcode in collectives.KINDS:
      return Event(instruction, Action.COMPUTE, blocks=sites)
    price = prices.price(self._module, computation, instruction, self._rates)
    if price.host_bytes:
      origin = computation.origin(instruction)
      sites += (self._site(Channel.HOST, instruction.opcode, origin, price.host_bytes, price.host_bytes),)
    action = Action.PASS if instruction.opcode in _PASSES else Action.COMPUTE
    picoseconds = 0 if self._only_moves(instruction) else round(price.seconds * SECOND)
    if action is Action.COMPUTE and not (picoseconds or sites or shared):
      return None
    return Event(
      instruction,
      action,
      ends=tuple(key for key in shared if fused.fusions[key][-1] == instruction.name),
      begins=tuple((key, site) for key, site in shared.items() if fused.fusions[key][0] == instruction.name),
      picoseconds=picoseconds,
      basis=price.basis,
      advances=tuple(shared),
      blocks=sites,
    )

  def _only_moves(self, instruction: Instruction) -> bool:
    """Returns whether a fusion only starts or ends a collective."""
    if instruction.opcode != "fusion":
      return False
    return self._called(instruction)[0].root.target in ("AsyncCollectiveStart", "AsyncCollectiveDone")

  def _started(self, computation: Computation, start: Instruction) -> tuple[Site, ...]:
    base = start.opcode.removesuffix("-start")
    if base in _COPIES:
      moved = costs.bytes_moved(self._module, computation, start)
      channel = Channel.HOST if moved[HOST] else Channel.MEMORY
      size = moved[HOST] or moved[DEVICE]
      return (self._site(channel, base, computation.origin(start), size, size),)
    wrapped = [(inner, part) for inner in self._called(start) for part in inner.instructions]
    inside = [(computation, start), *wrapped]
    sites = sum((self._collective_sites(owner, part) for owner, part in inside), ())
    if sites:
      return sites
    if not wrapped:
      raise ValueError(f"{start.name}: what a {start.opcode} without a computation starts is unknown")
    seconds = sum(prices.price(self._module, owner, part, self._rates).seconds for owner, part in wrapped)
    return (Site(Channel.CORES, base, computation.origin(start), 0.0, round(seconds * SECOND)),)

  def _lacks_operands(self, start: Instruction) -> bool:
    """Returns whether `start` begins a call without the operands. A SparseCore then only loads the program."""
    return not start.operands and any(called.parameters for called in self._called(start))

  def _called(self, instruction: Instruction) -> list[Computation]:
    return [self._module.computations[name] for name in instruction.called]

  def _collective_sites(self, computation: Computation, instruction: Instruction) -> tuple[Site, ...]:
    """Returns the collectives that `instruction` is or contains, but no collective that is spread over fusions."""
    found = []
    for owner, part in self._module.parts(computation, instruction):
      collective = self._reader.read(owner, part)
      if collective is not None and collectives.fused_channel(part) is None:
        found.append(self._collective_site(part, collective, owner.origin(part)))
    return tuple(found)

  def _collective_site(self, instruction: Instruction, collective: Collective, source: str) -> Site:
    if collective.crosses_slices:
      return self._site(Channel.DCN, collective.kind, source, collective.bytes, collective.sent)
    share = collectives.link_share(instruction, collective, self._rates.chip, self._reader.devices_per_slice)
    return self._site(Channel.LINKS, collective.kind, source, collective.bytes, collective.sent / share)

  def _site(self, channel: Channel, kind: str, source: str, size: float, sent: float) -> Site:
    """Returns a site whose transfers take as long as `sent` bytes at the full rate of the channel."""
    bandwidth = self._bandwidth[channel]
    needed = round(sent / bandwidth * SECOND) if bandwidth else (None if sent else 0)
    return Site(channel, kind, source, size, needed)
