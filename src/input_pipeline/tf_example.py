"""One feature of a serialized tf.train.Example, without TensorFlow.

The wire format of protocol buffers: a message is a sequence of fields, each with a key (field number << 3 | wire type).
Example { Features features = 1 }; Features { map<string, Feature> feature = 1 }; a map entry has key = 1, value = 2;
Feature { BytesList bytes_list = 1; FloatList float_list = 2; Int64List int64_list = 3 }; a list has repeated value = 1.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def feature(record: bytes, name: str) -> str | np.ndarray:
  """The feature `name`: a text (one UTF-8 string), or integers as int64 [n].

  Raises ValueError if the record is not an Example, or its feature is absent or of another type.
  """
  names = []
  for features in _messages(memoryview(record), 1):
    for entry in _messages(features, 1):
      key = b"".join(bytes(part) for part in _messages(entry, 1)).decode("utf-8")
      names.append(key)
      if key == name:
        return _value(name, next(_messages(entry, 2), memoryview(b"")))
  known = f"It has {', '.join(sorted(names))}" if names else "It has no features: is it a tf.train.Example?"
  raise ValueError(f"no feature {name} (train_data_columns). {known}")


def _value(name: str, message: memoryview) -> str | np.ndarray:
  """The content of a Feature."""
  for number, _, content in _fields(message):
    if not isinstance(content, memoryview):
      break
    if number == 1:
      texts = list(_messages(content, 1))
      if len(texts) != 1:
        raise ValueError(f"feature {name} has {len(texts)} strings, and a document is one string")
      return bytes(texts[0]).decode("utf-8")
    if number == 3:
      return _integers(content)
    raise ValueError(f"feature {name} has numbers with a fraction. Choose a feature with a text or with integers")
  return np.zeros(0, np.int64)  # an empty list is not written


def _integers(message: memoryview) -> np.ndarray:
  """The values of an Int64List: packed (one field of varints), or one field each."""
  parts = [
    _varints(content) if isinstance(content, memoryview) else np.array([content], np.uint64)
    for _, _, content in _fields(message)
  ]
  return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _varints(content: memoryview) -> np.ndarray:
  """The varints of packed bytes, uint64 [n]. A varint has 7 bits per byte, lowest first; its last byte is below 128."""
  octets = np.frombuffer(content, np.uint8)
  ends = np.flatnonzero(octets < 128)
  if not len(octets):
    return np.zeros(0, np.uint64)
  if not len(ends) or ends[-1] != len(octets) - 1:
    raise ValueError("not a tf.train.Example: a number is cut off")
  starts = np.concatenate([[0], ends[:-1] + 1])
  place = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
  return np.add.reduceat((octets & 127).astype(np.uint64) << (7 * place).astype(np.uint64), starts)


def _messages(message: memoryview, wanted: int) -> Iterator[memoryview]:
  """Yields the contents of the fields `wanted`, which have a length (messages, strings)."""
  for number, wire, content in _fields(message):
    if number == wanted:
      if wire != _BYTES or not isinstance(content, memoryview):
        raise ValueError("not a tf.train.Example")
      yield content


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview | int]]:
  """Yields (number, wire type, content) of the fields of a message; of a varint, its value."""
  place = 0
  while place < len(message):
    key, place = _varint(message, place)
    wire = key & 7
    if wire == _VARINT:
      value, place = _varint(message, place)
      yield key >> 3, wire, value
      continue
    if wire == _BYTES:
      size, place = _varint(message, place)
    elif wire in (_FIXED64, _FIXED32):
      size = 8 if wire == _FIXED64 else 4
    else:
      raise ValueError("not a tf.train.Example")
    if place + size > len(message):
      raise ValueError("not a tf.train.Example: it is cut off")
    yield key >> 3, wire, message[place : place + size]
    place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
  """(value of the varint at `place`, place after it)."""
  value = 0
  for shift in range(0, 70, 7):
    if place >= len(message):
      break
    octet = message[place]
    place += 1
    value |= (octet & 127) << shift
    if octet < 128:
      return value & (2**64 - 1), place  # ten octets have 70 bits
  raise ValueError("not a tf.train.Example")
