"""The grammar of the key fault_injection: faults to rehearse.

  slice_down@STEP:SLICE[:MOMENT][/SECONDS]   the slice dies; it returns after SECONDS (inf: never) or at its slice_up.
                                             Without either, it returns one second after the run waits for it
  slice_up@STEP:SLICE[:MOMENT]               a dead slice returns with empty memory, or a hanging slice continues
  hang@STEP:SLICE[:MOMENT][/SECONDS]         the slice stops answering, without an error; after SECONDS it continues
  ckpt_kill@STEP                             the process kills itself (SIGKILL) while that checkpoint is being written
  FLIP@STEP:SLICE[:sticky][=ARRAY][#BIT]     one bit is wrong on a device of the slice, in an array whose name includes
                                             ARRAY; array and bit are drawn if they are not given. FLIP is one of
      flip_gradient                          in the sums of each share that it computes in STEP (one controller: in
                                             its sums for the witness). They are right when it computes them again;
                                             with sticky, they are wrong from STEP on
      flip_weight, flip_optimizer            in its weights or its optimizer state, before STEP is computed; with
                                             sticky, before each later step too
  random:seed=S,rate=R                       each step has a fault with probability R; the seed spares one slice

MOMENT is one of
  step       before STEP is computed (the default)
  prepared   as step, after the run has waited for the compilations in the background
  snapshot   while a snapshot of STEP is made
  save       while a checkpoint of STEP is written
  eval       when the evaluation of STEP begins
  restore    when a new process has restored a state (or made a fresh one), to continue with STEP
  recovery   when a recovery has restored a state, to continue with STEP
A fault happens at the first such moment of step STEP or later. The faults of one slice happen in the order of their
steps: a slice_up waits until an earlier slice_down of its slice has happened.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, cast, get_args

from trainer.config.errors import ConfigError

Moment = Literal["step", "prepared", "snapshot", "save", "eval", "restore", "recovery"]
Kind = Literal["slice_down", "slice_up", "hang", "ckpt_kill", "flip_gradient", "flip_weight", "flip_optimizer"]

_EXAMPLE = "Write for example fault_injection='slice_down@12:1, slice_up@30:1, hang@40:2, ckpt_kill@50'."
_FAULT = re.compile(
  r"(?P<kind>slice_down|slice_up|hang|ckpt_kill)@(?P<step>[0-9]{1,10})(:(?P<slice>[0-9]{1,10}))?"
  r"(:(?P<moment>[a-z]+))?(/(?P<seconds>[0-9]+(\.[0-9]+)?|inf))?"
)
_FLIP = re.compile(
  r"(?P<kind>flip_gradient|flip_weight|flip_optimizer)@(?P<step>[0-9]{1,10}):(?P<slice>[0-9]{1,10})"
  r"(?P<sticky>:sticky)?(=(?P<array>[A-Za-z0-9_.]+))?(#(?P<bit>[0-9]|[12][0-9]|3[01]))?"
)
_RANDOM = re.compile(r"random:seed=(?P<seed>[0-9]{1,18}),rate=(?P<rate>[0-9]*\.?[0-9]+)")


@dataclass(frozen=True)
class Fault:
  """One fault. str() gives its text in the grammar."""

  kind: Kind
  step: int
  slice: int | None = None
  moment: Moment = "step"
  seconds: float | None = None
  sticky: bool = False
  array: str = ""
  bit: int = -1  # -1: drawn

  @property
  def is_flip(self) -> bool:
    """Whether it only changes numbers, so that nothing is lost on command."""
    return self.kind.startswith("flip_")

  def __str__(self) -> str:
    if self.is_flip:
      where = (":sticky" * self.sticky) + (f"={self.array}" if self.array else "") + (f"#{self.bit}" * (self.bit >= 0))
      return f"{self.kind}@{self.step}:{self.slice}{where}"
    moment = "" if self.kind == "ckpt_kill" or self.moment == "step" else f":{self.moment}"
    seconds = "" if self.seconds is None else f"/{self.seconds:g}"
    return f"{self.kind}@{self.step}" + ("" if self.slice is None else f":{self.slice}") + moment + seconds


@dataclass(frozen=True)
class RandomFaults:
  """Faults drawn from a seed: each step has one with probability `rate`."""

  seed: int
  rate: float


def parse(text: str) -> tuple[Fault | RandomFaults, ...]:
  """The faults that `text` names, in its order. Raises ConfigError if it does not follow the grammar."""
  parts = re.split(r",\s*(?=[a-z_]+[@:])", text.strip())
  return tuple(_parse_one(part.strip()) for part in parts if part.strip())


def _parse_one(text: str) -> Fault | RandomFaults:
  given = f"fault_injection={text}:"
  if match := _RANDOM.fullmatch(text):
    faults = RandomFaults(int(match["seed"]), float(match["rate"]))
    if not 0 < faults.rate <= 1:
      raise ConfigError(f"{given} the rate is a probability.\nUse a rate above 0 and at most 1.")
    return faults
  if match := _FLIP.fullmatch(text):
    kind, sticky, bit = cast(Kind, match["kind"]), bool(match["sticky"]), int(match["bit"] or -1)
    return Fault(kind, int(match["step"]), int(match["slice"]), sticky=sticky, array=match["array"] or "", bit=bit)
  match = _FAULT.fullmatch(text)
  if match is None:
    raise ConfigError(
      f"{given} is neither KIND@STEP[:SLICE][:MOMENT][/SECONDS] with KIND slice_down, slice_up, hang or ckpt_kill, nor "
      "KIND@STEP:SLICE[:sticky][=ARRAY][#BIT] with KIND flip_gradient, flip_weight or flip_optimizer, nor "
      f"random:seed=S,rate=R.\n{_EXAMPLE}"
    )
  kind = cast(Kind, match["kind"])
  moment = match["moment"] or ("save" if kind == "ckpt_kill" else "step")
  if moment not in get_args(Moment):
    raise ConfigError(f"{given} there is no moment {moment}.\nUse one of {', '.join(get_args(Moment))}.")
  if kind == "ckpt_kill" and (match["slice"] or match["moment"] or match["seconds"]):
    raise ConfigError(f"{given} ckpt_kill kills the whole process and has only a step.\nWrite ckpt_kill@STEP.")
  if kind != "ckpt_kill" and match["slice"] is None:
    raise ConfigError(f"{given} the slice is missing.\nWrite {kind}@STEP:SLICE.")
  if kind == "slice_up" and match["seconds"]:
    raise ConfigError(f"{given} only slice_down and hang have /SECONDS.\nRemove it.")
  if kind == "hang" and moment in ("restore", "recovery"):
    raise ConfigError(f"{given} a slice cannot hang in a {moment}.\nUse step, eval, snapshot or save.")
  seconds = float(match["seconds"]) if match["seconds"] else None
  slice_id = int(match["slice"]) if match["slice"] else None
  return Fault(kind, int(match["step"]), slice_id, cast(Moment, moment), seconds)
