"""Parser of the optimised HLO text of a compiled program: its computations and instructions, and how often each runs.

XLA's own cost analysis counts the body of a loop once. A decoder scans its layers, so that count misses nearly all of
them. Here a body counts as often as its loop runs: the compiler states this number, or it follows from the condition.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128}
_SHAPE = re.compile(r"([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
# `}` alone, or with the name of the thread of the computation. `}},` belongs to an attribute with several lines.
_END = re.compile(r"^\}(?:\s|, |$)")
_CALLED = re.compile(
  r"\b(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation|called_computations)="
)
# The devices that a collective joins.
GROUPS = re.compile(r"\b(?:replica_groups|source_target_pairs)=")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

_REQUIRED_CALLS = {"fusion": ("calls",), "while": ("condition", "body")}

# The device executes the instructions of the computations that these call one by one.
# A `custom-call-start` that calls one is what libtpu 0.0.52 writes where earlier versions write `call-start`.
_RUN_SEPARATELY = frozenset({"while", "conditional", "call", "call-start", "custom-call-start", "async-start"})

# Memory spaces by the number in S(..) of a layout. A layout without S(..) is in the main memory of the device.
DEVICE, HOST = 0, 5


@dataclasses.dataclass(frozen=True)
class Array:
  """One array of the result of an instruction."""

  dtype: str
  dims: tuple[int, ...]
  space: int

  @property
  def bits(self) -> int:
    if self.dtype in _BITS:
      return _BITS[self.dtype]
    digits = re.match(r"[a-z]+(\d+)", self.dtype)
    return int(digits.group(1)) if digits else 0

  @property
  def bytes(self) -> int:
    """Bytes of the array, without the padding of tiles."""
    return math.ceil(math.prod(self.dims) * self.bits / 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of the form `name = result opcode(operands), rest`."""

  name: str
  opcode: str
  result: tuple[Array, ...]  # the leaves of a tuple, in order
  operands: tuple[str, ...]  # names; for a parameter its number, for a constant its value
  rest: str  # everything after the operands, unparsed
  is_root: bool

  def attribute(self, name: str) -> str | None:
    """Returns the value of `name=value` with balanced brackets, or None if it is absent."""
    found = re.search(rf"(?:^|[ ,{{]){name}=", self.rest)
    return None if found is None else _balanced(self.rest, found.end())

  @functools.cached_property
  def index(self) -> int:
    return int(self.attribute("index") or 0)

  @property
  def called(self) -> tuple[str, ...]:
    """Names of the computations that this instruction runs."""
    names: list[str] = []
    if self.opcode.endswith(("-update", "-done")):  # they name the computation that the `-start` runs
      return ()
    for found in _CALLED.finditer(self.rest):
      names += re.findall(r"[\w.\-]+", _balanced(self.rest, found.end()))
    return tuple(names)

  @property
  def source(self) -> str:
    """The name that JAX gave to the operation: a path of transformations and named scopes."""
    found = re.search(r'op_name="([^"]*)"', self.rest)
    return found.group(1) if found else ""

  @property
  def target(self) -> str:
    if self.opcode != "custom-call":
      return ""
    return (self.attribute("custom_call_target") or "").strip('"')


def numbers(text: str | None) -> list[int]:
  """Returns the whole numbers in an attribute, in order; [] if the attribute is absent."""
  return [int(number) for number in re.findall(r"\d+", text or "")]


def matmul_dtype(left: Array, right: Array) -> str:
  """Returns the type of a matmul, which is the wider type of its operands."""
  return max(left, right, key=lambda array: array.bits).dtype


@dataclasses.dataclass(frozen=True)
class Computation:
  name: str
  instructions: tuple[Instruction, ...]

  @functools.cached_property
  def by_name(self) -> dict[str, Instruction]:
    return {instruction.name: instruction for instruction in self.instructions}

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """Name of an instruction -> the instructions that read its result."""
    users: dict[str, list[Instruction]] = {}
    for instruction in self.instructions:
      for operand in dict.fromkeys(instruction.operands):
        users.setdefault(operand, []).append(instruction)
    return users

  def origin(self, instruction: Instruction) -> str:
    """Returns the source of `instruction`; if it has none, the source of what made its data, or else its name."""
    found: Instruction | None = instruction
    for _ in range(8):
      if found is None or found.source:
        break
      maker = self.by_name.get(found.operands[0]) if found.operands else None
      if found.opcode == "get-tuple-element" and maker is not None and maker.opcode == "parameter":
        # The body of a loop: the turn before made the data.
        carried = self.root.operands
        maker = self.by_name.get(carried[found.index]) if found.index < len(carried) else None
      found = maker
    return (found.source if found is not None else "") or instruction.name

  @property
  def root(self) -> Instruction:
    return next((i for i in self.instructions if i.is_root), self.instructions[-1])

  @functools.cached_property
  def parameters(self) -> tuple[Instruction, ...]:
    found = [i for i in self.instructions if i.opcode == "parameter"]
    return tuple(sorted(found, key=lambda i: int(i.operands[0])))


@dataclasses.dataclass(frozen=True)
class Module:
  computations: dict[str, Computation]
  entry: str
  devices: int = 1  # replicas x partitions; of a program with transfers between TPU slices, the devices of one slice

  @functools.cached_property
  def runs(self) -> dict[str, float]:
    """How often each computation runs in one execution of the program, with loops multiplied.

    A loop with an unknown number of turns counts once (see `unknown_loops`). Every branch of a conditional counts.
    """
    counts = dict.fromkeys(self.computations, 0.0)
    counts[self.entry] = 1.0
    for name in self._callers_first:
      for instruction in self.computations[name].instructions:
        times = counts[name] * (self.trip_count(self.computations[name], instruction) or 1)
        for called in instruction.called:
          counts[called] += times
    return counts

  def parts(self, computation: Computation, instruction: Instruction) -> Iterator[tuple[Computation, Instruction]]:
    """Yields `instruction` and, for a fusion, the instructions of its body, each with its own computation."""
    yield computation, instruction
    if instruction.opcode not in _RUN_SEPARATELY:
      for name in instruction.called:
        inner = self.computations[name]
        for part in inner.instructions:
          yield from self.parts(inner, part)

  @functools.cached_property
  def fused(self) -> frozenset[str]:
    """Computations that are part of one instruction: bodies of fusions, functions of reductions and sorts."""
    pending = [
      called
      for computation in self.computations.values()
      for instruction in computation.instructions
      if instruction.opcode not in _RUN_SEPARATELY
      for called in instruction.called
    ]
    found: set[str] = set()
    while pending:
      name = pending.pop()
      if name not in found:
        found.add(name)
        pending += [called for i in self.computations[name].instructions for called in i.called]
    return frozenset(found)

  def executed(self) -> Iterator[tuple[Computation, Instruction, float]]:
    """Yields (computation, instruction, number of runs) of all that the device starts separately. A fusion is one."""
    for name, computation in self.computations.items():
      if name not in self.fused and self.runs[name]:
        for instruction in computation.instructions:
          yield computation, instruction, self.runs[name]

  def unknown_loops(self) -> list[str]:
    """Returns the sources of loops whose number of turns is unknown. They count as one turn."""
    loops = ((c, i) for c, i, _ in self.executed() if i.opcode == "while")
    return [loop.source or loop.name for caller, loop in loops if self.trip_count(caller, loop) is None]

  def named(self, loop: Instruction, part: str) -> Computation:
    """Returns the computation that the attribute `part` of a while loop names."""
    return self.computations[(loop.attribute(part) or "").lstrip("%")]

  def trip_count(self, caller: Computation, loop: Instruction) -> int | None:
    """Returns the number of turns of a while loop in `caller`, or None if it is unknown or not a loop."""
    if loop.opcode != "while":
      return None
    stated = _TRIPS.search(loop.rest)
    if stated:
      return int(stated.group(1))
    condition, body = self.named(loop, "condition"), self.named(loop, "body")
    test = condition.root
    if test.opcode != "compare" or test.attribute("direction") != "LT":
      return None
    counter = condition.by_name.get(test.operands[0])
    limit = self._number(condition.by_name.get(test.operands[1]), caller, loop)
    if counter is None or counter.opcode != "get-tuple-element" or limit is None or body.root.opcode != "tuple":
      return None
    # JAX and the compiler usually count from 0 in steps of 1. Other starts and steps are read from the text.
    start = self._number(self._initial(counter.index, caller, loop), caller, loop)
    step = self._step(body, body.by_name.get(body.root.operands[counter.index]))
    return max(0, math.ceil((limit - (start or 0)) / step)) if step else None

  def _initial(self, index: int, caller: Computation, loop: Instruction) -> Instruction | None:
    """Returns element `index` of the state of a loop before the first turn."""
    state = caller.by_name.get(loop.operands[0])
    return caller.by_name.get(state.operands[index]) if state is not None and state.opcode == "tuple" else None

  def _number(self, value: Instruction | None, caller: Computation, loop: Instruction) -> int | None:
    """Returns the integer of a constant `value`, also if `loop` carries the constant in its state."""
    value = _source(value, caller)
    if value is not None and value.opcode == "get-tuple-element":
      value = self._initial(value.index, caller, loop)
    if value is None or value.opcode != "constant":
      return None
    return int(value.operands[0]) if re.fullmatch(r"-?\d+", value.operands[0]) else None

  def _step(self, body: Computation, value: Instruction | None) -> int | None:
    """Returns the increment of the loop counter per turn; `value` is the next value of the counter."""
    value = _source(value, body)
    if value is None:
      return None
    if value.opcode == "fusion":
      return 1
    added = [_source(body.by_name.get(name), body) for name in value.operands]
    constants = [i.operands[0] for i in added if i is not None and i.opcode == "constant"]
    return int(constants[0]) if value.opcode == "add" and constants else None

  @functools.cached_property
  def _callers_first(self) -> list[str]:
    order: list[str] = []
    seen: set[str] = set()
    # Depth first without recursion, because a module can nest deeper than the stack of Python.
    stack = [(self.entry, False)]
    while stack:
      name, done = stack.pop()
      if done:
        order.append(name)
      elif name not in seen:
        seen.add(name)
        stack.append((name, True))
        stack += [(called, False) for i in self.computations[name].instructions for called in i.called]
    return order[::-1]


def parse(text: str) -> Module:
  """Returns the module from `text`, the result of `compiled.as_text()`.

  Raises ValueError if the text is not a whole module: an instruction is cut off, a computation is empty or does not
  end, an operand or a called computation is not there, a collective is no instruction, or no computation is the ENTRY.
  """
  computations: dict[str, Computation] = {}
  entry, name = "", ""  # name: of the computation that the line belongs to; empty between computations
  body: list[Instruction] = []
  for line in _logical_lines(text):
    header = _COMPUTATION.match(line)
    if _END.match(line):
      if not body:
        raise ValueError(f"the computation {name} is empty" if name else "a computation ends that does not begin")
      computations[name] = Computation(name, tuple(body))
      name, body = "", []
    elif header:
      if name:
        raise ValueError(f"the computation {name} does not end")
      name = header.group(2)
      entry = name if header.group(1) else entry
    elif _INSTRUCTION.match(line):
      if not name:
        raise ValueError(f"an instruction is outside of a computation: {line.strip()[:60]}")
      body.append(_instruction(line))
    elif GROUPS.search(line):
      raise ValueError(f"a collective is no instruction: {line.strip()[:60]}")
  if name:
    raise ValueError(f"the computation {name} does not end")
  if not entry:
    raise ValueError("it has no ENTRY computation")
  for computation in computations.values():
    for instruction in computation.instructions:
      _check_references(computation, instruction, computations)
  return Module(computations, entry, _devices(text))


def _check_references(computation: Computation, instruction: Instruction, known: Mapping[str, Computation]) -> None:
  """Raises ValueError unless the operands of `instruction` and the computations that it calls are there."""
  for attribute in _REQUIRED_CALLS.get(instruction.opcode, ()):
    if not instruction.attribute(attribute):
      raise ValueError(f"the {instruction.opcode} {instruction.name} has no {attribute}=")
  for called in instruction.called:
    if called not in known:
      raise ValueError(f"{instruction.name} calls the computation {called}, which is not there")
    if instruction.opcode == "fusion" and len(known[called].parameters) != len(instruction.operands):
      raise ValueError(f"the number of operands of {instruction.name} is not the number of parameters of {called}")
  if instruction.opcode not in ("parameter", "constant"):
    for operand in instruction.operands:
      if operand not in computation.by_name:
        raise ValueError(f"{instruction.name} reads {operand}, which is not in the computation {computation.name}")


def _devices(text: str) -> int:
  """Returns replicas x partitions. The first line of the text states a number other than 1."""
  first = text.partition("\n")[0]
  return math.prod(int(count) for count in re.findall(r"\b(?:replica_count|num_partitions)=(\d+)", first))


def _logical_lines(text: str) -> Iterator[str]:
  """Yields lines, with continuation lines joined: the attributes of a Pallas kernel contain line breaks."""
  pending = ""
  for line in text.splitlines():
    if pending and line and not (_INSTRUCTION.match(line) or _END.match(line)):
      pending += line
      continue
    if pending:
      yield pending
    pending = line if _INSTRUCTION.match(line) else ""
    if not pending:
      yield line
  if pending:
    yield pending


def _instruction(line: str) -> Instruction:
  head = _INSTRUCTION.match(line)
  assert head is not None
  start = head.end()
  end = start + len(_balanced(line, start)) if line.startswith("(", start) else line.find(" ", start)
  opening = line.find("(", end)
  if not start < end <= opening:
    raise ValueError(f"the instruction {head.group(2)} is cut off")
  operands = _balanced(line, opening)
  if not operands.endswith(")"):
    raise ValueError(f"the instruction {head.group(2)} is cut off")
  opcode = line[end:opening].strip()
  return Instruction(
    name=head.group(2),
    opcode=opcode,
    result=arrays(line[start:end]),
    operands=(operands[1:-1],) if opcode == "constant" else _operands(operands[1:-1]),
    rest=line[opening + len(operands) :],
    is_root=head.group(1) is not None,
  )


def _source(value: Instruction | None, computation: Computation) -> Instruction | None:
  """Returns the instruction of `computation` that `value` is a copy of, or `value` itself."""
  while value is not None and value.opcode in ("copy", "bitcast"):
    value = computation.by_name.get(value.operands[0])
  return value


def arrays(text: str) -> tuple[Array, ...]:
  """Returns the arrays of a shape such as `(f32[2,3]{1,0:T(8,128)S(1)}, u32[])`."""
  found = []
  for dtype, dims, layout in _SHAPE.findall(text):
    space = re.search(r"S\((\d+)\)", layout)
    found.append(Array(dtype, tuple(int(d) for d in dims.split(",") if d), int(space.group(1)) if space else DEVICE))
  return tuple(found)


def _operands(text: str) -> tuple[str, ...]:
  """Returns the names of the operands. The only operand of a parameter is its number."""
  names = re.findall(r"%([\w.\-]+)", text)
  return tuple(names) if names or not text.strip() else tuple(re.findall(r"[\w.\-]+", text))


def _balanced(text: str, start: int) -> str:
  """Returns the value that begins at `start`: a bracketed group, or a word. Empty at the end of `text`."""
  closing = {"(": ")", "{": "}", "[": "]"}
  if text[start : start + 1] not in closing:
    word = re.match(r'"[^"]*"|[^\s,(){}]+', text[start:])
    return word.group(0) if word else ""
  depth = 0
  for position in range(start, len(text)):
    depth += (text[position] in closing) - (text[position] in closing.values())
    if depth == 0:
      return text[start : position + 1]
  return text[start:]
