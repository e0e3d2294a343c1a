"""Parts of local copies that processes of other JAX worlds lend to a restore: questions, answers, and who asks them.

A question is JSON; the answer is JSON, and arrays after it:
  {"ask": "list"}                             -> {"copies": Listed.to_json of each, "damage": lines}
  {"ask": "check", "save": [step, digest], "parts": [[array, box], ...]}
                                              -> {"good": the undamaged parts, "meta": of the save, "damage"}
  {"ask": "send", "save", "parts": good ones} -> {}, and the bytes of each part
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from trainer.checkpoint.arrays import boxes
from trainer.checkpoint.arrays.boxes import Box
from trainer.checkpoint.backup import Candidate
from trainer.checkpoint.local_copies import Held, Listed, LocalCopies, Part, parts_of

Answer = tuple[dict[str, Any], Sequence[np.ndarray]]
Allocate = Callable[[dict[str, Any]], Sequence[np.ndarray]]


class Lenders(Protocol):
  """Processes of other worlds. Each process answers with a Lender."""

  @property
  def members(self) -> Sequence[int]:
    """The slices of these processes."""
    ...

  def ask(self, member: int, question: dict[str, Any], allocate: Allocate) -> Answer:
    """The answer of one of them. allocate(answer): the arrays to be filled. Raises LenderLost."""
    ...


class Lender:
  """Answers the questions of one process of another world about the local copies of this host."""

  def __init__(self, copies: LocalCopies) -> None:
    self._copies = copies
    self._save = Candidate(-1)
    self._held: Held = {}  # parts of this save whose checksums are right

  def answer(self, question: Mapping[str, Any]) -> Answer:
    if question["ask"] == "list":
      listed, damage = self._copies.listed()
      return {"copies": [copy.to_json() for copy in listed], "damage": damage}, []
    save, parts = Candidate(*question["save"]), parts_of(question["parts"])
    if question["ask"] == "check":
      self._save = save
      self._held, meta, damage = self._copies.held(save, set(parts))
      return {"good": [(name, box) for name in self._held for box in self._held[name]], "meta": meta,
              "damage": damage}, []  # fmt: skip
    assert question["ask"] == "send" and save == self._save, question["ask"]
    return {}, [self._held[name][box] for name, box in parts]


class Borrowed:
  """The parts that lenders have, and the lender of each part that a restore uses."""

  def __init__(self, lenders: Lenders, damage: Callable[[int, str], None]) -> None:
    """damage(member, line): called for every damaged file of a lender."""
    self._lenders, self._damage = lenders, damage
    self._listed: dict[int, list[Listed]] = {}
    self._lent: dict[str, dict[Box, int]] = {}  # {array: {box: member}} of the restore

  def _ask(self, member: int, question: dict[str, Any]) -> dict[str, Any]:
    answer, _ = self._lenders.ask(member, question, lambda answer: [])
    for line in answer["damage"]:
      self._damage(member, line)
    return answer

  def copies(self) -> list[Listed]:
    """The copies of all lenders. Raises LenderLost, as the other methods do."""
    for member in self._lenders.members:
      answer = self._ask(member, {"ask": "list"})
      self._listed[member] = [Listed.from_json(copy) for copy in answer["copies"]]
    return [copy for copies in self._listed.values() for copy in copies]

  def choose(self, save: Candidate, known: Mapping[str, set[Box]]) -> dict[str, Any]:
    """Chooses a lender with an undamaged copy for each part that is missing in `known`, {array: boxes}.

    Returns the meta of the save; {} if nothing is lent."""
    self._lent, meta = {}, dict[str, Any]()
    for member, copies in self._listed.items():
      wanted: set[Part] = set()
      for copy in copies:
        if copy.candidate == save:
          missing = {name for name, shape in copy.shapes.items() if not boxes.complete(shape, known.get(name, ()))}
          wanted |= {(name, box) for name, box in copy.parts if name in missing and box not in known.get(name, ())}
      wanted = {(name, box) for name, box in wanted if box not in self._lent.get(name, {})}
      if wanted:
        answer = self._ask(member, {"ask": "check", "save": [save.step, save.copy], "parts": sorted(wanted)})
        for name, box in parts_of(answer["good"]):
          self._lent.setdefault(name, {})[box] = member
        meta = meta or answer["meta"]
    return meta

  def leave(self, parts: Collection[Part]) -> None:
    """Does not use these parts: another process of this world borrows them."""
    for name, box in parts:
      self._lent.get(name, {}).pop(box, None)

  @property
  def lent(self) -> list[tuple[int, Part]]:
    """(member, part) of the parts that were chosen."""
    return [(member, (name, box)) for name, found in self._lent.items() for box, member in found.items()]

  def fetch(self, save: Candidate, arrays: Mapping[str, Mapping[str, Any]], names: Iterable[str]) -> Held:
    """The data of the chosen parts of the arrays `names`. arrays: of the meta of the save."""
    wanted: dict[int, list[Part]] = {}
    for name in names:
      for box, member in self._lent.get(name, {}).items():
        wanted.setdefault(member, []).append((name, box))
    fetched: Held = {}
    for member, parts in wanted.items():
      buffers = [np.empty(boxes.shape(box), jnp.dtype(arrays[name]["dtype"])) for name, box in parts]
      question = {"ask": "send", "save": [save.step, save.copy], "parts": parts}
      self._lenders.ask(member, question, lambda answer, buffers=buffers: buffers)  # type: ignore[misc]
      for (name, box), data in zip(parts, buffers, strict=True):
        fetched.setdefault(name, {})[box] = data
    return fetched
