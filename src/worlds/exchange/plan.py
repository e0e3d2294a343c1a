"""Who sums which values of which shares, and in which order: equal on all members, computed by each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np

from worlds.exchange.link import Kind

PART = 1 << 18  # most elements of a part: 1 MiB of float32
_LEAST = 8  # a part has at least PART / _LEAST elements: then the bytes of a frame cost more than the frame

Wire = Literal["float32", "bfloat16"]


class Piece(NamedTuple):
  """The sum of the shares [first, stop) of one group, which travels as one array. It is the next to be added to the
  sum of its group, so only a prefix of the group can have more than one share."""

  first: int
  stop: int


def pieces(shares: Sequence[int], group: int) -> list[Piece]:
  """The pieces that a member with these shares sends, ascending. `group` shares from a multiple of `group` on are a
  group. The member's shares from the first one of a group on are one piece; every other share is a piece of its own."""
  found: list[Piece] = []
  for share in sorted(shares):
    if share % group and found and found[-1].stop == share and found[-1].first % group == 0:
      found[-1] = Piece(found[-1].first, share + 1)
    else:
      found.append(Piece(share, share + 1))
  return found


class Plan:
  """The plan of one sum. dealt, size, wire, known, group: see `Exchange.reduce`.

  A bucket has one part per member. A bucket with few values has fewer parts, of the first members.

  pieces: {member: its pieces}. ordered: all pieces in the order of the sum. types: {first share: the dtype in which its
  piece travels}; an incomplete group is not rounded, so that the sum of a group has the same bits whoever computes it.
  order: all buckets; a bucket comes when the last of its values is known. position: {bucket: its index in `order`}.
  """

  def __init__(
    self,
    dealt: Mapping[int, Sequence[int]],
    size: int,
    wire: Wire,
    known: Sequence[tuple[int, int]] = (),
    group: int = 1,
  ) -> None:
    self.members = sorted(dealt)
    self.size, self.group = size, group
    self.dtype = np.dtype(ml_dtypes.bfloat16 if wire == "bfloat16" else np.float32)
    shares = {share for of_member in dealt.values() for share in of_member}
    assert len(shares) == sum(map(len, dealt.values())) > 0, f"{dealt}: each share belongs to one member"
    groups = {share // group for share in shares}
    assert len(shares) == len(groups) * group, f"{dealt}: incomplete groups of {group} shares"
    self.pieces = {member: pieces(dealt[member], group) for member in self.members}
    self.ordered = sorted(piece for of_member in self.pieces.values() for piece in of_member)
    self.types = {
      piece.first: self.dtype if piece.stop - piece.first == group else np.dtype(np.float32) for piece in self.ordered
    }
    self._index = {member: index for index, member in enumerate(self.members)}
    self._bounds: dict[int, list[int]] = {}  # bucket -> where its parts begin, and its end
    self._bucket = len(self.members) * PART
    last = [0] * -(-size // self._bucket)  # of each bucket: the index of the range that is known last
    for index, (start, stop) in enumerate(known):
      for bucket in range(start // self._bucket, -(-stop // self._bucket)):
        last[bucket] = index
    self.order = sorted(range(len(last)), key=lambda bucket: last[bucket])
    self.position = {bucket: position for position, bucket in enumerate(self.order)}
    text = json.dumps([list(self.pieces.items()), group, size, str(self.dtype), [list(part) for part in known]])
    self._hash = hashlib.blake2b(text.encode(), digest_size=8)
    self._frames: dict[tuple[int, int], tuple[tuple[Kind, int, int], ...]] = {}

  def identify(self, epoch: int, tag: str) -> int:
    """Returns a number that differs between calls of different epochs, tags or plans."""
    call = self._hash.copy()
    call.update(json.dumps([epoch, tag]).encode())
    return int.from_bytes(call.digest(), "little")

  def accepts(self, member: int, given: Collection[int]) -> bool:
    """Whether `given` are all shares of this member, except for those that a piece's first share includes already."""
    shares: list[int] = []
    for first, stop in self.pieces[member]:
      held = sum(share in given for share in range(first, stop))
      shares += [first, *range(stop - held + 1, stop)]
    return sorted(given) == shares

  def bucket(self, bucket: int) -> tuple[int, int]:
    return bucket * self._bucket, min(self.size, (bucket + 1) * self._bucket)

  def part(self, bucket: int, member: int) -> tuple[int, int]:
    """Returns [start, stop) of the part of a bucket that `member` sums; it may be empty."""
    if bucket not in self._bounds:
      start, stop = self.bucket(bucket)
      count = max(1, min(len(self.members), (stop - start) // max(1, PART // _LEAST)))
      bounds = [start + (stop - start) * index // count for index in range(count + 1)]
      self._bounds[bucket] = bounds + [stop] * (len(self.members) - count)
    bounds, index = self._bounds[bucket], self._index[member]
    return bounds[index], bounds[index + 1]

  def frames(self, sender: int, receiver: int) -> tuple[tuple[Kind, int, int], ...]:
    """(kind, first share, bucket) of every frame from one member to another."""
    if (sender, receiver) not in self._frames:
      self._frames[sender, receiver] = tuple(self._find_frames(sender, receiver))
    return self._frames[sender, receiver]

  def _find_frames(self, sender: int, receiver: int) -> Iterator[tuple[Kind, int, int]]:
    for bucket in self.order:
      start, stop = self.part(bucket, receiver)
      if start < stop:
        yield from ((Kind.PIECE, piece.first, bucket) for piece in self.pieces[sender])
      start, stop = self.part(bucket, sender)
      if start < stop:
        yield Kind.TOTAL, 0, bucket
