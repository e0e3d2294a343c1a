"""Sends the state of a run from one member to another: a JSON header, then the bytes of its arrays."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from worlds.exchange.exchange_errors import MismatchedCall
from worlds.exchange.link import Frame, Kind, Link

LONGEST_HEADER = 16 << 20  # bytes
CHUNK = 4 << 20  # bytes; each chunk has a checksum


def send(link: Link, epoch: int, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> None:
  """Sends header and arrays. Raises PeerLost."""
  raw = json.dumps(header).encode()
  assert len(raw) <= LONGEST_HEADER, f"a header of {len(raw)} bytes"
  link.send(Kind.STATE_HEADER, epoch, 0, 0, memoryview(raw))
  for number, array in enumerate(arrays):
    for index, chunk in enumerate(_chunks(np.ascontiguousarray(array))):
      link.send(Kind.STATE_ARRAY, epoch, number, index, chunk)


def receive(
  link: Link, epoch: int, allocate: Callable[[dict[str, Any]], Sequence[np.ndarray]]
) -> tuple[dict[str, Any], Sequence[np.ndarray]]:
  """Returns the header, and the arrays of `allocate(header)` with the received content."""
  raw = bytearray()

  def begin(frame: Frame) -> memoryview:
    _check(link, frame, Kind.STATE_HEADER, epoch, 0, 0)
    if frame.length > LONGEST_HEADER:
      raise MismatchedCall(
        f"Member {link.member} sent a header of {frame.length} bytes; at most {LONGEST_HEADER} are allowed. Send less."
      )
    raw.extend(bytes(frame.length))
    return memoryview(raw)

  link.receive(begin)
  header = json.loads(raw)
  arrays = allocate(header)
  for number, array in enumerate(arrays):
    assert array.flags.c_contiguous and array.flags.writeable, f"array {number} cannot be filled in place"
    for index, chunk in enumerate(_chunks(array)):

      def into(frame: Frame, number: int = number, index: int = index, chunk: memoryview = chunk) -> memoryview:
        _check(link, frame, Kind.STATE_ARRAY, epoch, number, index)
        return chunk

      link.receive(into)
  return header, arrays


def _check(link: Link, frame: Frame, kind: Kind, epoch: int, number: int, index: int) -> None:
  if (frame.kind, frame.call, frame.share, frame.bucket) != (kind, epoch, number, index):
    raise MismatchedCall(
      f"Member {link.member} sent {frame}; {kind.name} {number}, {index} of epoch {epoch} is expected. Send the state "
      "before the first reduction of an epoch, with as many arrays as the receiver has."
    )


def _chunks(array: np.ndarray) -> Iterator[memoryview]:
  raw = memoryview(array.reshape(-1).view(np.uint8))
  for start in range(0, len(raw), CHUNK):
    yield raw[start : start + CHUNK]
