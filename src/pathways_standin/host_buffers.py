"""Bytes on their way between the client's memory and arrays."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from pathways_standin.status import Status


class HostBuffers:
  """The buffers of one session. They travel on a connection of their own, so a request may arrive before its buffer."""

  def __init__(self) -> None:
    self.received, self.sent = 0, 0  # bytes that arrays were made of, and bytes of arrays that the client has read
    self._data: dict[int, bytes] = {}
    self._arrived = threading.Condition()
    self._closed = False

  def __len__(self) -> int:
    return len(self._data)

  def store(self, handle: int, data: bytes) -> None:
    """Keeps a buffer until it is taken or deleted."""
    with self._arrived:
      if not self._closed:
        self._data[handle] = data
        self._arrived.notify_all()

  def take(self, handle: int) -> bytes:
    """Waits for a buffer and removes it. Raises Status if the session ends first."""
    with self._arrived:
      self._arrived.wait_for(lambda: handle in self._data or self._closed)
      if self._closed:
        raise Status("CANCELLED", "the session has ended")
      data = self._data.pop(handle)
      self.received += len(data)
      return data

  def look_up(self, handle: int) -> bytes:
    """A buffer that is here. Raises Status if it is not."""
    with self._arrived:
      if handle not in self._data:
        raise Status("NOT_FOUND", f"Unknown host buffer handle: {handle}")
      self.sent += len(self._data[handle])
      return self._data[handle]

  def delete(self, handle: int) -> None:
    with self._arrived:
      self._data.pop(handle, None)

  def close(self) -> None:
    """Removes all buffers. Whoever waits for one gets an error."""
    with self._arrived:
      self._closed = True
      self._data.clear()
      self._arrived.notify_all()


def to_array(data: bytes, dtype: np.dtype, shape: Sequence[int], strides: Sequence[int] | None) -> np.ndarray:
  """The array in a buffer. strides: in bytes, none of them negative; None: row-major."""
  shape = tuple(shape)
  if 0 in shape:
    return np.zeros(shape, dtype)
  size = _size(dtype, shape, strides)
  if len(data) != size:
    raise Status("INVALID_ARGUMENT", f"a host buffer of {len(data)} bytes for an array that needs {size}")
  if strides is None:
    return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
  return np.ndarray(shape, dtype, data, strides=tuple(strides))


def to_bytes(value: np.ndarray, strides: Sequence[int] | None) -> bytes:
  """The smallest buffer that holds the array with these strides (in bytes); None: row-major."""
  if strides is None or value.size == 0:
    return np.ascontiguousarray(value).tobytes()
  buffer = bytearray(_size(value.dtype, value.shape, strides))
  np.ndarray(value.shape, value.dtype, buffer, strides=tuple(strides))[...] = value
  return bytes(buffer)


def _size(dtype: np.dtype, shape: Sequence[int], strides: Sequence[int] | None) -> int:
  """Bytes from the first element to the end of the last. Raises Status for strides that the protocol does not allow."""
  if strides is None:
    return dtype.itemsize * int(np.prod(shape, dtype=np.int64))
  if len(strides) != len(shape) or any(stride < 0 for stride in strides):
    raise Status("INVALID_ARGUMENT", f"byte strides {list(strides)} for an array with the shape {list(shape)}")
  return dtype.itemsize + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
