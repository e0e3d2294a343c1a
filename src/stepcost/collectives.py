"""The communication of a compiled program: the collectives, their bytes, and whether they cross slices."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from stepcost.chips import Chip
from stepcost.hlo import GROUPS, Computation, Instruction, Module

_ONE_RING = re.compile(r'"emitter":"1D|"strategy":"(?:\w*1D\w*|StrategyRing)"|"phase_rings":')
# An axis of the slice along which a SparseCore runs rings. Without one, it runs a ring through all devices of a group.
_RING_AXIS = re.compile(r'"explicit_strategy_ring_dim":"ICI_RING_DIM_([XYZ])')
# A part of a collective that several fusions execute together. The first part waits for no flag.
_PART = re.compile(r'"async_collective_fusion_config":\{"flag_start":"(-?\d+)"')
# The TPU compiler numbers device d of slice s as s * 100000 + d in the groups of a transfer between slices.
_DEVICES_BELOW = 100_000
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction, per device and per execution of the program."""

  kind: str
  bytes: int  # of one call, per device: the larger of input and output
  group: int  # number of devices that communicate with each other
  crosses_slices: bool
  times: float  # number of calls, with loops multiplied
  source: str

  @property
  def operand_bytes(self) -> float:
    """Bytes of the operands in all calls. The operand of a gather is the shard of a device."""
    return self.bytes * self.times / (self.group if self.kind == "all-gather" else 1)

  @property
  def sent(self) -> float:
    """Bytes that a device sends in all calls, with a ring algorithm (pairwise exchange for all-to-all)."""
    share = (self.group - 1) / self.group if self.group > 1 else 0.0
    factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
    return factor * self.bytes * self.times


class Reader:
  """Reads the collectives of one module."""

  def __init__(self, module: Module, slice_of: Sequence[int]) -> None:
    """`slice_of[i]` is the slice of partition i, the device at position i of the mesh.

    The TPU compiler turns communication across slices into transfers over the host (megascale), each with a `send`. In
    such a program, the remaining collectives stay inside a slice, and their groups number the devices of one slice.

    Raises ValueError if an instruction is called in an unknown form, so that its collectives would not count.
    """
    _require_calls(module)
    if has_transfers_between_slices(module):
      slice_of = [0] * (len(slice_of) // len(set(slice_of)))
    self._slice_of = slice_of
    self.devices_per_slice = len(slice_of) // len(set(slice_of))

  def read(self, computation: Computation, instruction: Instruction, times: float = 1.0) -> Collective | None:
    """Returns the collective that `instruction` starts or executes, or None if it starts none.

    Raises ValueError for a collective of an unknown kind.
    """
    kind = instruction.opcode.removesuffix("-start")
    if kind in KINDS:
      return _collective(computation, instruction, kind, times, self._slice_of)
    if GROUPS.search(instruction.rest) and not instruction.opcode.endswith(("-done", "-update")):
      raise ValueError(f"{instruction.name} is a collective of an unknown kind, {instruction.opcode}")
    return _megascale(instruction, times) if is_megascale(instruction) else None


def _require_calls(module: Module) -> None:
  """Raises ValueError if a computation with collectives is there, and no instruction that runs calls it."""
  for name, computation in module.computations.items():
    if not module.runs[name] and (kinds := {i.opcode for i in computation.instructions if GROUPS.search(i.rest)}):
      raise ValueError(
        f"the computation {name} has collectives ({', '.join(sorted(kinds))}), and no instruction calls it in a form "
        "that is known. Use a version of the compiler that was tried (README.md of stepcost)"
      )


def link_share(instruction: Instruction, collective: Collective, chip: Chip, devices_per_slice: int) -> float:
  """Returns the share of a device's links that move data at a time, by the algorithm that the TPU compiler states.

  A ring through all devices of a slice uses two links. Rings along axes use the links of these axes; without
  wraparounds, data passes these links twice. A ring through a part of a slice counts as a ring along one axis. A
  collective in several fusions states no algorithm, and counts like rings along all axes.
  """
  if not chip.links:
    return 1.0
  of_axes = 1.0 if chip.has_wraparounds(devices_per_slice) else 0.5
  axes = len(set(_RING_AXIS.findall(instruction.rest)))
  if axes:
    return min(1.0, 2 * axes / chip.links) * of_axes
  if _ONE_RING.search(instruction.rest):
    return 2 / chip.links * (of_axes if collective.group < devices_per_slice else 1.0)
  return of_axes


def find(module: Module, slice_of: Sequence[int]) -> list[Collective]:
  """Returns all collectives of `module`. `slice_of[i]` is the slice of partition i.

  A collective that several fusions execute together counts where it starts.
  """
  reader = Reader(module, slice_of)
  found = []
  for computation, instruction, times in module.executed():
    for owner, part in module.parts(computation, instruction):
      collective = reader.read(owner, part, times)
      if collective is not None and not continues(part):
        found.append(collective)
  return found


def fused_channel(instruction: Instruction) -> str | None:
  """Returns the channel of a collective that several fusions execute together, and None for other instructions."""
  return instruction.attribute("channel_id") if _PART.search(instruction.rest) else None


def continues(instruction: Instruction) -> bool:
  """Returns whether `instruction` is a later part of a collective that another fusion has started."""
  part = _PART.search(instruction.rest)
  return part is not None and part.group(1) != "-1"


def _collective(
  computation: Computation, instruction: Instruction, kind: str, times: float, slice_of: Sequence[int]
) -> Collective:
  groups = groups_of(instruction, len(slice_of))
  operands = [computation.by_name[name] for name in instruction.operands if name in computation.by_name]
  sizes = [sum(a.bytes for o in operands for a in o.result), 0]
  if kind != "collective-permute" and not instruction.opcode.endswith("-start"):
    sizes[1] = sum(a.bytes for a in instruction.result)
  elif instruction.opcode == "all-gather-start":
    sizes[1] = sum(a.bytes for a in instruction.result) - sizes[0]
  crosses = any(len({slice_of[i] for i in group if i < len(slice_of)}) > 1 for group in groups)
  return Collective(kind, max(sizes), max(map(len, groups), default=1), crosses, times, instruction.source)


def is_megascale(instruction: Instruction) -> bool:
  """Returns whether `instruction` sends data to another slice (the host moves the data)."""
  return instruction.opcode == "send" and "_xla_megascale_transfer_type" in instruction.rest


def has_transfers_between_slices(module: Module) -> bool:
  """Returns whether `module` is the program of each slice of several TPU slices, and not one program of all devices."""
  return any(is_megascale(i) for computation in module.computations.values() for i in computation.instructions)


def _megascale(send: Instruction, times: float) -> Collective:
  kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', send.rest)
  slices = _target_slices(send)
  name = kind.group(1).lower().replace("_", "-") if kind else "send"
  size = send.result[0].bytes * (slices if name == "all-gather" else 1)
  return Collective("collective-permute" if name == "one-to-one" else name, size, slices, True, times, rendezvous(send))


def _target_slices(send: Instruction) -> int:
  """Returns the number of slices in the target of a transfer.

  The target lists slices and the devices of each, as in `"{1,2,3}x{0:15}"`, or groups of devices, as in
  `{{100000,100001,200000,200001}}`: device 1 of slice 2 is 200001. Raises ValueError for any other target.
  """
  if listed := re.search(r'_xla_megascale_target="\{([\d,]+)\}x', send.rest):
    return len(set(_numbers(listed.group(1))))
  if groups := re.search(r"_xla_megascale_target=\{((?:\{[\d,]+\},?)+)\}", send.rest):
    members = map(_numbers, re.findall(r"\{([\d,]+)\}", groups.group(1)))
    return max(len({device // _DEVICES_BELOW for device in group}) for group in members)
  target = re.search(r"_xla_megascale_target=.{0,60}", send.rest)
  raise ValueError(f"{send.name}: the target of a transfer between slices is {target.group() if target else 'absent'}")


def rendezvous(transfer: Instruction) -> str:
  """Returns the name that a `send` and the `recv` of its result have in common."""
  found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', transfer.rest)
  return found.group(1) if found else transfer.name


def groups_of(instruction: Instruction, devices: int) -> list[list[int]]:
  """Returns the positions of the devices that communicate with each other. Empty groups mean all devices.

  Raises ValueError if the groups use an unknown notation.
  """
  pairs = instruction.attribute("source_target_pairs")
  if pairs is not None:
    return [[int(a), int(b)] for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)]
  written = re.search(r"\breplica_groups=(.*)", instruction.rest)
  if written is None:
    return [list(range(devices))]
  text = written.group(1)
  if listed := re.match(r"\{(?:\{[\d,]*\},?)*\}", text):
    groups = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", listed.group())]
    return groups or [list(range(devices))]
  if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", text):
    return _iota(iota.group(2)).reshape(_numbers(iota.group(1))[0], -1).tolist()
  if mesh := re.match(r"mesh\[([^\]]*)\](?:, ?device_ids=\((\S+)\))? ?\{([^}]*)\}", text):
    return _mesh_groups(*mesh.groups())
  raise ValueError(f"replica groups use an unknown notation: {text[:120]}")


def _numbers(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]


def _iota(text: str) -> np.ndarray:
  """Returns device ids in the notation `[2,4]T(1,0)`: count, reshape, transpose."""
  shape, *order = (_numbers(part) for part in re.findall(r"[\d,]+", text))
  ids = np.arange(np.prod(shape)).reshape(shape)
  return ids.transpose(order[0]) if order else ids


def _mesh_groups(axes: str, devices: str | None, reduced: str) -> list[list[int]]:
  """Returns groups along some axes of a mesh, as in `mesh['a'=2,'b'=4] {'b':(2)2}`.

  A group may use part of an axis: `'b':(2)2` is a factor of size 2 of axis b, after a factor of size 2.
  """
  sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", axes)}
  shape: list[int] = []
  grouped: list[int] = []
  uses = {n: (int(b or 1), int(s or sizes[n])) for n, b, s in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", reduced)}
  for name, size in sizes.items():
    before, used = uses.get(name, (1, 1))
    grouped.append(len(shape) + 1)
    shape += [before, used, size // (before * used)]
  if devices is None:
    ids = np.arange(np.prod(shape))
  else:
    ids = _iota(devices) if devices.startswith("[") else np.array(_numbers(devices))
  ids = np.moveaxis(ids.reshape(shape), grouped, range(-len(grouped), 0))
  return ids.reshape(-1, int(np.prod([shape[i] for i in grouped]))).tolist()
