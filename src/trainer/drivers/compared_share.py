"""The share of a step that several members compute, as one member does: see `worlds.membership.witness`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from trainer.drivers.rounds import Contribution, Share
from trainer.program.checks import Checks, Digests
from worlds.membership.witness import Drawn, draw
from worlds.peers import Peers


class ComparedShare:
  """The share of one step that is compared. Implements rounds.Compared."""

  def __init__(
    self, peers: Peers, checks: Checks, seed: int, check: int, compute: Callable[[Share], Contribution]
  ) -> None:
    """check: number of this comparison in the run. compute: see `Rounds.agree`."""
    self._peers, self._checks, self._seed, self._check, self._compute = peers, checks, seed, check, compute
    self._digests: Digests | None = None  # of the share, if this member has computed it
    self._since = 0  # see the message `check`
    self._members: Collection[int] = ()  # that compute the share in this epoch

  def compute(self, share: Share) -> Contribution:
    own = self._compute(share)
    if share == self._drawn().share:
      self._digests = self._checks.of_share(own.scalars[: len(Checks.SCALARS)], own.parts)
    return own

  def must_recompute(self) -> bool:
    since = self._check_field("since", 0)
    again, self._since = since > self._since, max(since, self._since)
    if again:
      self._digests = None
    return again

  def compute_if_drawn(self) -> None:
    owner, *second = self._drawn().members
    self._members = {owner, *(self._check_field("asked", []) or second)}
    if self._digests is None and self._peers.member in self._members:
      self.compute(self._drawn().share)

  def report(self, round_name: str) -> None:
    if self._digests is not None:
      sums = self._checks.read_share(self._digests)
      self._peers.membership.send("witness", epoch=self._peers.epoch, round=round_name, sums=sums)

  def record(self) -> dict[str, Any]:
    """Which share was compared, and by whom, for the receipt."""
    return {"share": self._drawn().share, "members": sorted(self._members)}

  def _check_field(self, name: str, default: Any) -> Any:
    """A field of the message `check` of this epoch."""
    return self._peers.check[name] if self._peers.check.get("epoch") == self._peers.epoch else default

  def _drawn(self) -> Drawn:
    return draw(self._seed, self._check, self._peers.dealt)
