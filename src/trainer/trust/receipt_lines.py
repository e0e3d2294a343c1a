"""The lines of receipt.jsonl: their form, their chain, and what must be true of them together (docs/trust.md).

A line is JSON with sorted keys and without spaces; numbers of the computation are the bits of a float32, as hex. `prev`
is the hash of the line before it. Last comes `hash`, the SHA-256 of the object before `hash` was added. A line with
`step` is of a committed step. A line with `after` says which process writes the lines that follow it, and with which
configuration.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from worlds.membership.witness import draw

FILE = "receipt.jsonl"
METRICS = "metrics.jsonl"  # the value of `from`
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)
_HASH = ',"hash":"'  # begins what follows the fields of a line
Line = dict[str, Any]


class _Strict(BaseModel):
  model_config = ConfigDict(extra="forbid", strict=True)


_Count = Annotated[int, Field(ge=0, lt=1 << 48)]
_Few = Annotated[int, Field(ge=1, le=1 << 16)]  # a replay may start so many processes
_Bits = Annotated[str, Field(pattern=r"^(nan|[0-9a-f]{8})$")]
_Print = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
_Member = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")]


class _Config(_Strict):
  """The keys on which the form of the lines depends."""

  model_config = ConfigDict(extra="allow")
  steps: _Count
  learning_rate_schedule_steps: int
  per_device_batch_size: float = Field(gt=0, lt=1e9)
  gradient_accumulation_steps: _Few
  shares_per_slice: int = Field(ge=-1, le=1 << 16)
  data_shuffle_seed: int
  witness_period: _Count
  receipt_state_period: int = Field(ge=1)
  checkpoint_period: _Count
  enable_checkpointing: bool
  local_steps: int = Field(1, ge=1)


class _Data(_Strict):
  model_config = ConfigDict(extra="allow")
  data: str
  global_batch_size: _Count


class _Devices(_Strict):
  cluster: str
  slices: _Few
  devices_per_slice: _Few
  platform: str
  kind: str


class _Start(_Strict):
  after: _Count
  run_id: str
  config: _Config
  data: _Data
  code: dict[str, str | None]
  versions: dict[str, str | None]
  host: str
  process: str
  devices: _Devices
  computes: Literal["rows", "shares"]
  prev: str
  hash: str


class _Witness(_Strict):
  share: _Count
  members: list[_Count]


class _Step(_Strict):
  step: int = Field(ge=1, lt=1 << 48)
  loss: _Bits
  grad_norm: _Bits
  tokens: _Bits
  examples: str = Field(pattern=r"^([0-9a-f]{32})?$")
  computed: dict[_Member, list[Annotated[list[_Count], Field(min_length=2, max_length=2)]]] = {}
  weights: _Bits | None = None
  state: dict[str, _Print] | None = Field(None, min_length=1)
  witness: _Witness | None = None
  origin: Literal["metrics.jsonl"] | None = Field(None, alias="from")
  prev: str
  hash: str


def sealed(fields: Line, prev: str) -> tuple[str, str]:
  """(the line of `fields` after the line with the hash `prev`, its hash)."""
  body = _ENCODER.encode({**fields, "prev": prev})
  digest = hashlib.sha256(body.encode()).hexdigest()
  return f'{body[:-1]}{_HASH}{digest}"}}', digest


def check(lines: Iterable[bytes]) -> tuple[list[Line], list[str]]:
  """(the lines up to the first wrong one, what is wrong with their chain or their form)."""
  good: list[Line] = []
  prev, place = "", -1
  for number, raw in enumerate(lines, 1):
    line, wrong = _line(raw, prev, place)
    if wrong:
      return good, [f"{FILE}, line {number}: {wrong}"]
    good.append(line)
    prev, place = line["hash"], _place(line)
  return good, []


def _line(raw: bytes, prev: str, place: int) -> tuple[Line, str]:
  """(the line, ""), or ({}, why it does not follow the line with the hash `prev` and the step `place`; -1: no line)."""
  try:
    line = json.loads(raw)
    body = raw.rpartition(_HASH.encode())[0]
    if f'{_HASH}{line["hash"]}"}}\n'.encode() != raw[len(body) :] or _sha(body + b"}") != line["hash"]:
      return {}, "it was changed: its hash is another one"
    if line["prev"] != prev:
      return {}, "it does not follow the line before it: lines were removed, added or moved"
    if place == -1 and "after" not in line:
      return {}, "the first line does not say which run this is"
    (_Step if "step" in line else _Start).model_validate(line)
  except ValidationError as error:
    first = error.errors()[0]
    return {}, f"no version of this program writes it: {'.'.join(map(str, first['loc']))}: {first['msg']}"
  except (ValueError, KeyError, TypeError, RecursionError):
    return {}, "it is damaged"
  now = _place(line)
  if place != -1 and now != place + ("step" in line):
    return {}, f"it is of step {now} and follows step {place}"
  return line, ""


def _place(line: Line) -> int:
  return line["step"] if "step" in line else line["after"]


def _sha(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()


def contradictions(lines: Sequence[Line]) -> Iterator[str]:
  """What cannot be true of sound lines together."""
  start, is_late = lines[0], True  # is_late: whether a line may still come from METRICS
  same: tuple[Any, Any] | None = None  # what the lines of a round of local steps have in common
  if start["after"]:
    yield f"steps 1 to {start['after']}: are not in {FILE}. It was deleted, or turned on later"
  for line in lines:
    if "after" in line:
      if line["run_id"] != start["run_id"]:
        yield f"the line after step {line['after']}: it is of another run"
      start, is_late, same = line, True, None
      continue
    is_late = is_late and "from" in line
    if "from" not in line:
      yield from (f"step {line['step']}: {wrong}" for wrong in _wrong(line, start))
      before, same = same, (line.get("weights"), line.get("computed"))
      if before and before != same and (line["step"] - 1) % start["config"].get("local_steps", 1):
        yield f"step {line['step']}: `weights` or `computed` differ from the line before, which is of the same round"
    elif not is_late or line.keys() & {"computed", "weights", "state", "witness"}:
      yield f"step {line['step']}: it cannot come from {METRICS}"


def _wrong(line: Line, start: Line) -> Iterator[str]:
  """What cannot be true of the line of a step that the process of `start` computed."""
  step, config, slices = line["step"], start["config"], start["devices"]["slices"]
  is_shares = start["computes"] == "shares"
  whole = slices * config["shares_per_slice"] if is_shares else start["data"]["global_batch_size"]
  computed = {int(member): ranges for member, ranges in line.get("computed", {}).items()}
  ranges = sorted(one for own in computed.values() for one in own)
  if [0, *(end for _, end in ranges)] != [*(first for first, _ in ranges), whole] or len(computed) > slices:
    yield f"`computed` is not each of {whole} {start['computes']} once"
    return
  if not line["examples"] or ("weights" in line) != is_shares:
    yield f"it {'has no `examples`' if not line['examples'] else 'has `weights`, or lacks them'}"
  period, saves = config["receipt_state_period"], config["checkpoint_period"] if config["enable_checkpointing"] else 0
  in_round = config.get("local_steps", 1)  # only after a round, the slices have a state in common
  due = step // period > (step - in_round) // period or (saves and step % saves == 0)
  if "state" not in line and ((due and step % in_round == 0) or step == config["steps"]):
    yield "it has no `state`, though the run writes one of this step"
  period = config["witness_period"]
  if ("witness" in line) != bool(period and step % period == 0 and (is_shares or len(computed) > 1)):
    yield f"`witness` is {'there' if 'witness' in line else 'missing'}, against witness_period={period}"
  elif "witness" in line:
    yield from _wrong_witness(line, start, computed, is_shares)


def _wrong_witness(line: Line, start: Line, computed: dict[int, Any], is_shares: bool) -> Iterator[str]:
  alive, config = sorted(computed), start["config"]
  if is_shares:
    dealt: dict[int, Sequence[int]] = {
      member: [share for first, end in computed[member] for share in range(first, end)] for member in alive
    }
  else:
    shares = start["devices"]["slices"] * config["gradient_accumulation_steps"]
    dealt = {member: range(index, shares, len(alive)) for index, member in enumerate(alive)}
  drawn = draw(config["data_shuffle_seed"], line["step"] // config["witness_period"], dealt)
  members = line["witness"]["members"]
  is_enough = len(members) >= min(2, len(alive)) and drawn.members[0] in members and set(members) <= set(alive)
  if line["witness"]["share"] != drawn.share or not is_enough or len(set(members)) < len(members):
    yield f"`witness` is not share {drawn.share}, of slice {drawn.members[0]} and another one"
