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
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import yaml

from trainer.config.errors import ConfigError
from trainer.observe import environment
from trainer.report import markup
from trainer.tools.accept.rows import LOSSES, Acceptance, CardRow

FORMAT = 1
REFERENCE = Path(__file__).with_name("reference.yml")
TOLERANCE = {"cpu": 1e-4}  # of a loss relative to the reference's, on another kind of machine
ACCELERATORS = 1e-2  # which multiply float32 with fewer bits
_ADDRESS = re.compile(
  r"\b\d{1,3}(\.\d{1,3}){3}(:\d+)?\b|\b[a-z0-9]+://[^\s,;'\"]+|(?<![\w./])/[\w.+@%-]+(/[\w.+@%-]+)+"
)
_STATES = {True: "holds", False: "does not hold", None: "does not apply"}
Card = dict[str, Any]


def made(found: Acceptance, minutes: float) -> Card:
  """The card of these rows."""
  start = environment.describe()
  own = {
    "cpu": environment.cpu_model() or platform.processor() or platform.machine(),
    "cores": os.cpu_count(),
    "system": platform.system(),
    "machine": platform.machine(),
  }
  card = {
    "format": FORMAT,
    "date": time.strftime("%Y-%m-%d", time.gmtime()),
    "commit": start["git_commit"],
    "launcher": found.launcher.name,
    "slices": found.launcher.slices,
    "keys": found.keys,
    "machine": own | found.machine,
    "versions": start["versions"],
    "minutes": round(minutes, 1),
    "rows": [asdict(row) for row in found.rows],
    "losses": found.losses,
  }
  return _without_names(card, str(found.out)) | {"versions": start["versions"]}  # some look like addresses


def holds(card: Card) -> bool:
  return bool(card["rows"]) and all(row["holds"] is not False for row in card["rows"])


def compared(card: Card, other: Card) -> CardRow:
  """CardRow 7: the losses of a card against those of another one."""
  same = _likeness(card) == _likeness(other)
  limit = TOLERANCE.get(str(card["machine"].get("platform")), ACCELERATORS)
  expected = "equal bits" if same else f"within {limit:g}: other devices, versions or slices"
  name, ours, theirs = f"losses of {LOSSES} steps", card["losses"], other["losses"]
  if card["keys"]:
    return CardRow(7, name, expected, f"the card has other keys: {' '.join(card['keys'])}", holds=None)
  if len(ours) != LOSSES or len(theirs) != LOSSES:
    return CardRow(7, name, expected, f"{len(ours)} and {len(theirs)} losses")
  first = next((step for step, (a, b) in enumerate(zip(ours, theirs), 1) if a != b), 0)
  gap = max(abs(a - b) / abs(b) for a, b in zip(map(_number, ours), map(_number, theirs)))
  seen = f"the losses differ first at step {first}, by at most {gap:.1e}" if first else "equal bits"
  return CardRow(7, name, expected, seen, holds=not first if same else gap <= limit)


def differences(card: Card, other: Card) -> list[str]:
  """What differs between two cards, a line each."""
  one, two = (_flat(each) for each in (card, other))
  return [f"{name}: {one.get(name)} and {two.get(name)}" for name in {**one, **two} if one.get(name) != two.get(name)]


def _flat(card: Card) -> dict[str, Any]:
  found = {name: card[name] for name in ("launcher", "slices", "commit", "keys")} | card["machine"] | card["versions"]
  for row in card["rows"]:
    where = f"row {row['row']}, {row['name']}"
    found[where] = _STATES[row["holds"]]
    found |= {f"{where}: {figure}": value for figure, value in row["figures"].items()}
  return found


def read(file: str) -> Card:
  """A card. Raises ConfigError if the file is none."""
  try:
    card = yaml.safe_load(Path(file).read_text())
  except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
    raise ConfigError(f"{file}: cannot be read: {error}.\nGive the card.yml of an OUT folder.") from error
  needed = ("format", "launcher", "slices", "commit", "keys", "machine", "versions", "rows", "losses")
  missing = [name for name in needed if not isinstance(card, dict) or name not in card]
  if missing or card["format"] != FORMAT:
    raise ConfigError(f"{file}: is no card of format {FORMAT}: it lacks {', '.join(missing) or 'the format'}.")
  names = set(CardRow.__dataclass_fields__)
  if wrong := [row for row in card["rows"] if not isinstance(row, dict) or set(row) != names]:
    raise ConfigError(f"{file}: a row is not as accept writes rows: {wrong[0]}.")
  try:
    [_number(loss) for loss in card["losses"]]
  except (TypeError, ValueError, struct.error) as error:
    raise ConfigError(f"{file}: a loss is no float32 in 8 hex digits: {error}.") from error
  return card


def page(card: Card) -> str:
  """The card as HTML for one sheet."""
  headings = ("row", "what", "expected", "seen", "state")
  rows = [(str(row["row"]), row["name"], row["expected"], row["seen"], _STATES[row["holds"]]) for row in card["rows"]]
  facts = {name: card[name] for name in ("date", "commit", "launcher", "slices", "minutes")}
  facts |= {**card["machine"], "keys": " ".join(card["keys"]), "jax": card["versions"].get("jax")}
  title = f"Acceptance: {'all rows hold' if holds(card) else 'NOT ALL ROWS HOLD'}"
  macros = markup.macros()
  return markup.page(title, f"<h1>{title}</h1>{macros.facts(facts)}{macros.table(headings, rows)}")


def _likeness(card: Card) -> list[Any]:
  """What decides the bits of a run."""
  machine, versions = card["machine"], card["versions"]
  names = ("cpu", "platform", "device_kind", "devices")
  return [
    card["slices"],
    card["launcher"] == "pathways",
    *(machine.get(name) for name in names),
    *(versions.get(name) for name in ("jax", "jaxlib")),
  ]


def _number(loss: str) -> float:
  return float(struct.unpack(">f", bytes.fromhex(loss))[0])


def _without_names(card: Card, out: str) -> Card:
  """The card without what belongs to nobody else: folders, addresses, names of the host and of its user."""
  text = yaml.safe_dump(card, sort_keys=False, width=10**9)
  with contextlib.suppress(OSError, KeyError):  # the user of a container may have no entry
    text = re.sub(rf"(?<![\w-]){re.escape(getpass.getuser())}(?![\w-])", "USER", text)
  names = {out: "OUT", str(Path(out).resolve()): "OUT", sys.executable: "python", socket.gethostname(): "HOST"}
  for name in sorted(names, key=len, reverse=True):
    text = text.replace(name, names[name])
  return cast(Card, yaml.safe_load(_ADDRESS.sub("PLACE", text)))
