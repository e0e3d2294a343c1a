"""card.yml and card.html: what accept has seen, without names of hosts, people, addresses and folders."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.config.errors import ConfigError
from trainer.observe import environment
from trainer.report import markup
from trainer.tools.accept.rows import LOSSES, Acceptance, CardRow

REFERENCE = Path(__file__).with_name("reference.yml")
TOLERANCE = {"cpu": 1e-4}  # of a loss relative to the reference's, on another kind of machine
ACCELERATORS = 1e-2  # which multiply float32 with fewer bits
_ADDRESS = re.compile(
  r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b|\b[a-z0-9]+://[^\s,;'\"]+|(?<![\w./])/[\w.+@%-]+(/[\w.+@%-]+)+"
)
_TOOLS = "python -m trainer.tools."  # how the command of each row begins
_ONE_SHEET = (
  "@media print { @page { margin: 9mm } body { padding: 0; max-width: none } h1 { font-size: 15px }"
  " .lead, .good, .bad, .sub, table, th { font-size: 8px; margin: 1px 0 } td, th { padding: 1px 7px 1px 0 } }"
)


class Card(BaseModel):
  """The file card.yml. losses: the bits of float32 numbers."""

  model_config = ConfigDict(extra="forbid")

  format: Literal[1] = 1
  date: str
  commit: str | None
  launcher: str
  slices: int
  keys: list[str]
  command: str = ""
  machine: dict[str, str | int | None]
  versions: dict[str, str]
  minutes: float
  rows: list[CardRow]
  losses: list[Annotated[str, Field(pattern="^[0-9a-f]{8}$")]]

  @property
  def holds(self) -> bool:
    return bool(self.rows) and all(row.holds is not False for row in self.rows)

  def text(self) -> str:
    return yaml.safe_dump(self.model_dump(), sort_keys=False, width=120)


def made(found: Acceptance, minutes: float) -> Card:
  """The card of these rows."""
  launcher, start = found.launcher, {**environment.describe(), **found.start}
  machine = {
    "cpu": environment.cpu_model() or platform.processor() or platform.machine(),
    "cores": os.cpu_count(),
    "system": platform.system(),
    "machine": platform.machine(),
  }
  machine |= {name: start.get(name) for name in ("platform", "device_kind", "devices", "devices_per_slice")}
  card = {
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
    "commit": start["git_commit"],
    "launcher": launcher.name,
    "slices": launcher.slices,
    "keys": found.keys,
    "command": " ".join(found.jobs["undisturbed"].command()),
    "machine": machine,
    "minutes": round(minutes, 1),
    "rows": [vars(row) for row in found.rows],
    "losses": found.losses,
  }
  hosts = [line["host"] for job in found.jobs.values() for line in job.read("events.jsonl") if line.get("host")]
  private = {sys.executable: "python", str(found.out): "OUT", str(found.out.resolve()): "OUT"}
  private |= dict.fromkeys([socket.gethostname(), *hosts], "HOST") | dict.fromkeys(launcher.private, "...")
  with contextlib.suppress(OSError, KeyError):  # the user of a container may have no entry
    private[getpass.getuser()] = "USER"
  return Card(**_hidden(card, private), versions=start["versions"])  # some versions look like addresses


def _hidden(value: Any, private: Mapping[str, str]) -> Any:
  """The value without what belongs to nobody else: folders, addresses, names of hosts and of the user."""
  if isinstance(value, dict):
    return {name: _hidden(one, private) for name, one in value.items()}
  if isinstance(value, list):
    return [_hidden(one, private) for one in value]
  if not isinstance(value, str):
    return value
  for name in sorted(filter(None, private), key=len, reverse=True):
    value = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", private[name], value)
  return _ADDRESS.sub("PLACE", value)


def read(file: str) -> Card:
  """A card. Raises ConfigError if the file is none."""
  try:
    return Card.model_validate(yaml.safe_load(Path(file).read_text()))
  except ValidationError as error:
    reason = "; ".join(f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}" for wrong in error.errors()[:3])
  except (OSError, ValueError, yaml.YAMLError) as error:
    reason = str(error)
  raise ConfigError(f"{file}: is no card: {reason}.\nGive the card.yml of an OUT folder.")


def compared(card: Card, other: Card, command: str = "") -> CardRow:
  """Row 7: the losses of a card against those of another one."""
  same, platform_name = _likeness(card) == _likeness(other), str(card.machine.get("platform"))
  limit = 0.0 if same else TOLERANCE.get(platform_name, ACCELERATORS)
  expected = f"within {limit:g}: other devices, versions or slices" if limit else "equal bits"
  holds: bool | None = False
  if card.keys:
    seen, holds = f"the card has other keys: {' '.join(card.keys)}", None
  elif len(card.losses) != LOSSES or len(other.losses) != LOSSES:
    seen = f"{len(card.losses)} and {len(other.losses)} losses"
  elif card.losses == other.losses:
    seen, holds = "equal bits", True
  else:
    pairs = list(zip(card.losses, other.losses, strict=True))
    first = next(step for step, (ours, theirs) in enumerate(pairs, 1) if ours != theirs)
    numbers = [struct.unpack(">2f", bytes.fromhex(ours + theirs)) for ours, theirs in pairs]
    gaps = [abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in numbers]
    seen, holds = f"the losses differ first at step {first}, by at most {max(gaps):.1e}", all(g <= limit for g in gaps)
  return CardRow(7, f"losses of {LOSSES} steps", expected, seen, command, holds)


def _likeness(card: Card) -> list[Any]:
  """What decides the bits of a run."""
  machine = [card.machine.get(name) for name in ("cpu", "platform", "device_kind", "devices")]
  return [card.slices, card.launcher == "pathways", machine, card.versions.get("jax"), card.versions.get("jaxlib")]


def differences(card: Card, other: Card) -> list[str]:
  """What differs between two cards, a line each."""
  one, two = (_flat(each) for each in (card, other))
  return [f"{name}: {one.get(name)} and {two.get(name)}" for name in {**one, **two} if one.get(name) != two.get(name)]


def _flat(card: Card) -> dict[str, Any]:
  found = {**card.model_dump(include={"launcher", "slices", "commit", "keys"}), **card.machine, **card.versions}
  for row in card.rows:
    where = f"row {row.row}, {row.name}"
    found |= {where: row.state, **{f"{where}: {name}": value for name, value in row.figures.items()}}
  return found


def page(card: Card) -> str:
  """The card as HTML for one sheet."""
  headings = ("row", "what", "expected", "seen", "state", f"again: {_TOOLS}")
  rows = [
    (str(row.row), row.name, row.expected, row.seen, row.state, row.command.removeprefix(_TOOLS))
    for row in sorted(card.rows, key=lambda row: row.row)
  ]
  facts = {**card.machine, "jax": card.versions.get("jax"), "commit": card.commit, "runs": card.command}
  state = ("all rows hold that apply", "good") if card.holds else ("NOT ALL ROWS HOLD", "bad")
  where = [card.date, f"launcher {card.launcher}", f"{card.slices} slices", f"{card.minutes:g} minutes", *card.keys]
  macros = markup.macros()
  head = macros.summary("Acceptance", *state, where, [f"{name}: {value}" for name, value in facts.items()])
  return markup.page("Acceptance", f"<style>{_ONE_SHEET}</style>{head}{macros.table(headings, rows)}")
