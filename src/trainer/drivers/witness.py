"""The share of a step that several members compute, as one member does: see `worlds.membership.witness`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from trainer.drivers.rounds import Own, Share
from trainer.program.program import Halves
from worlds.exchange import Part
from worlds.membership.witness import Drawn, draw
from worlds.peers import Peers

_SCALARS = ("loss", "z_loss", "weight")


class ComparedShare:
  """The share of one step that is compared. Implements rounds.Compared."""

  def __init__(self, peers: Peers, halves: Halves, seed: int, check: int, compute: Callable[[Share], Own]) -> None:
    """check: number of this comparison in the run. compute: see `Rounds.agree`."""
    self._peers, self._halves, self._seed, self._check, self._compute = peers, halves, seed, check, compute
    self._sums: tuple[Any, list[jax.Array]] | None = None  # of the share, if this member has computed it
    self._since = 0  # see the message `check`

  def compute(self, share: Share) -> Own:
    """The sums of a share of this member. Keeps a digest of them if the share is compared."""
    own = self._compute(share)
    if share == self._drawn().share:
      digests = [digest(part.tree) for digest, part in zip(self._halves.digests, own.parts, strict=True)]
      self._sums = own.scalars, digests
    return own

  def begins_again(self) -> bool:
    """Whether this member must compute all its shares again in this epoch."""
    since = self._told("since", 0)
    again, self._since = since > self._since, max(since, self._since)
    if again:
      self._sums = None
    return again

  def join_in(self) -> None:
    """Computes the share if another member has it, and this one is drawn or asked."""
    asked = self._told("asked", []) or self._drawn().members
    if self._sums is None and self._peers.member in asked:
      self.compute(self._drawn().share)

  def report(self, round_name: str) -> None:
    """Tells the supervisor the sums of the share, if this member has computed it."""
    if self._sums is None:
      return
    scalars, digests = self._sums
    arrays = {name: [int(bits), 0] for name, bits in zip(_SCALARS, np.asarray(scalars, np.float32).view(np.uint32))}
    for part, digest in zip(self._halves.sums.parts, digests, strict=True):
      arrays |= dict(zip(_names(part), of_all_devices(digest).tolist(), strict=True))
    self._peers.membership.send("witness", epoch=self._peers.epoch, round=round_name, sums=arrays)

  def _told(self, name: str, default: Any) -> Any:
    """A field of the message `check` of this epoch."""
    return self._peers.check[name] if self._peers.check.get("epoch") == self._peers.epoch else default

  def _drawn(self) -> Drawn:
    unlike = {int(member): kind for member, kind in self._told("unlike", {}).items()}
    return draw(self._seed, self._check, self._peers.dealt, unlike)


def of_all_devices(replicated: jax.Array) -> np.ndarray:
  """The sum, modulo 2^32, of what the devices of this process hold of a replicated uint32 array. They may differ: a
  device adds its own copy of an array that is replicated within the slice."""
  return np.sum([np.asarray(shard.data) for shard in replicated.addressable_shards], axis=0, dtype=np.uint32)


def _names(part: Part) -> Sequence[str]:
  """The names of the arrays of a part, in the order of their digests."""
  paths, _ = jax.tree_util.tree_flatten_with_path(part.tree)
  rows = f", from layer {part.first}" if part.first else ""
  return [jax.tree_util.keystr(path, simple=True, separator=".") + rows for path, _ in paths]
