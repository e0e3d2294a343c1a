"""The messages of the IFRT proxy protocol, as the installed jaxlib defines them.

jaxlib contains the serialized FileDescriptorProto of every message that it knows, because the C++ protobuf runtime
needs them. The message classes are made from these descriptors, so they always belong to the version that is installed.
"""

from __future__ import annotations

import importlib.util
import mmap
import pathlib
import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_LIBRARY = "libjax_common.so"
_ROOTS = (
  "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
  "xla/python/ifrt/sharding_serdes.proto",
  "xla/python/pjrt_ifrt/xla_sharding.proto",
  "xla/python/pjrt_ifrt/xla_compiler.proto",
)
# Field 1, the name, is the first field of a serialized FileDescriptorProto: a tag, one byte of length, the text.
_NAME = re.compile(rb"\x0a(.)((?:google|xla|tsl|tensorflow)/[\w./-]+?\.proto)", re.DOTALL)
_STRINGS = frozenset({1, 2, 3, 4, 5, 6, 7, 8, 9, 12})  # length-delimited fields of FileDescriptorProto
_NUMBERS = frozenset({10, 11, 14})  # fields of FileDescriptorProto that are varints


class Messages:
  def __init__(self, files: dict[str, descriptor_pb2.FileDescriptorProto]) -> None:
    """files: file name -> descriptor, with all dependencies."""
    self._pool = descriptor_pool.DescriptorPool()
    self._added: set[str] = set()
    for name in files:
      self._add(files, name)
    self._classes: dict[str, Any] = {}

  def _add(self, files: dict[str, descriptor_pb2.FileDescriptorProto], name: str) -> None:
    if name not in self._added:
      self._added.add(name)
      for dependency in files[name].dependency:
        self._add(files, dependency)
      self._pool.AddSerializedFile(files[name].SerializeToString())

  def cls(self, name: str) -> Any:
    """The class of a message with its full name, for example "xla.OpSharding"."""
    if name not in self._classes:
      self._classes[name] = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(name))
    return self._classes[name]

  def proxy(self, name: str) -> Any:
    """The class of a message of the proxy protocol, for example "IfrtRequest"."""
    return self.cls(f"xla.ifrt.proxy.{name}")

  def ifrt(self, name: str) -> Any:
    """The class of a message of IFRT, for example "HloShardingProto"."""
    return self.cls(f"xla.ifrt.{name}")


def load() -> Messages:
  """The messages of the installed jaxlib. Raises RuntimeError if this jaxlib does not contain them."""
  found = _extract(library())
  wanted: dict[str, descriptor_pb2.FileDescriptorProto] = {}
  missing = list(_ROOTS)
  while missing:
    name = missing.pop()
    if name not in found:
      raise RuntimeError(f"{library()} has no descriptor of {name}. Install a jaxlib that the trainer supports.")
    if name not in wanted:
      wanted[name] = found[name]
      missing += found[name].dependency
  return Messages(wanted)


def library() -> pathlib.Path:
  """The shared library of jaxlib that contains the descriptors."""
  spec = importlib.util.find_spec("jaxlib")
  assert spec is not None and spec.submodule_search_locations, "jaxlib is not installed"
  return pathlib.Path(spec.submodule_search_locations[0]) / _LIBRARY


def _extract(path: pathlib.Path) -> dict[str, descriptor_pb2.FileDescriptorProto]:
  found: dict[str, descriptor_pb2.FileDescriptorProto] = {}
  with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
    for match in _NAME.finditer(data):
      if match[1][0] != len(match[2]):
        continue
      try:
        descriptor = descriptor_pb2.FileDescriptorProto.FromString(data[match.start() : _end(data, match.start())])
      except DecodeError:
        continue
      # The same bytes may also begin something else: the longest is the descriptor.
      if descriptor.name not in found or descriptor.ByteSize() > found[descriptor.name].ByteSize():
        found[descriptor.name] = descriptor
  return found


def _end(data: mmap.mmap, start: int) -> int:
  """The end of the FileDescriptorProto that begins at `start`: the first byte that cannot continue it.

  Fields are serialized in the order of their numbers.
  """
  position, last = start, 0
  while True:
    tag, after = _varint(data, position)
    field, wire = tag >> 3, tag & 7
    if field < last or (field == last == 1):
      return position
    if wire == 0 and field in _NUMBERS:
      _, after = _varint(data, after)
    elif wire == 2 and field in _STRINGS:
      size, after = _varint(data, after)
      after += size
    else:
      return position
    if after > len(data):
      return position
    position, last = after, field


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
  """A number of at most 10 bytes, and the position after it; (0, position) without one."""
  result = 0
  for count in range(min(10, len(data) - position)):
    byte = data[position + count]
    result |= (byte & 0x7F) << (7 * count)
    if not byte & 0x80:
      return result, position + count + 1
  return 0, position
