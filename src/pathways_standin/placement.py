"""Where an array lives: the shardings of the protocol, decoded."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pathways_standin import dtypes
from pathways_standin.devices import DEFAULT_MEMORY, Devices
from pathways_standin.proxy_messages import Messages
from pathways_standin.status import Status

_HLO = "HloSharding"
_WITH_DEVICE_LIST = frozenset({_HLO, "ConcreteEvenSharding", "ConcreteSharding", "OpaqueSharding"})


@dataclasses.dataclass(frozen=True)
class Placement:
  """The devices of an array, in the order of its shards, and the kind of their memory."""

  devices: tuple[int, ...]
  memory: str
  name: str  # of the type of the sharding
  op_sharding: bytes | None = None  # serialized; only of an HloSharding
  replicated: bool = False  # every shard is the whole array

  def parts(self, devices: Devices, shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The part of the array on each device. Raises Status for shardings that do not define it."""
    if self.op_sharding is not None:
      return devices.index_map(self.op_sharding, self.devices, shape)
    if self.replicated:
      return [tuple(slice(0, size) for size in shape)] * len(self.devices)
    raise Status("UNIMPLEMENTED", f"resharding of an array with a sharding of the type {self.name}")


@dataclasses.dataclass(frozen=True)
class Spec:
  """Type, shape and placement of an array."""

  dtype: np.dtype
  shape: tuple[int, ...]
  placement: Placement


def decode(messages: Messages, proto: Any) -> Placement:
  """The Placement of a ShardingProto. Raises Status for an unknown type."""
  serialized = proto.serialized_sharding
  name = serialized.type_name.rpartition("::")[2]
  if name != "SingleDeviceSharding" and name not in _WITH_DEVICE_LIST:
    raise Status("UNIMPLEMENTED", f"shardings of the type {serialized.type_name}")
  body = messages.ifrt(f"{name}Proto").FromString(serialized.data)
  memory = body.memory_kind or DEFAULT_MEMORY
  if name == "SingleDeviceSharding":
    return Placement((body.device_id,), memory, name, replicated=True)
  devices = tuple(body.devices.device_ids)
  if name == _HLO:
    return Placement(devices, memory, name, body.xla_op_sharding.SerializeToString())
  return Placement(devices, memory, name, replicated=bool(getattr(body, "is_fully_replicated", False)))


def decode_spec(messages: Messages, proto: Any) -> Spec:
  """The Spec of an ArraySpecProto. Raises Status for unknown types."""
  if proto.HasField("layout"):
    raise Status("UNIMPLEMENTED", "arrays with a custom layout that no compiled program made")
  shape = tuple(proto.shape.dims)
  return Spec(dtypes.from_kind(proto.dtype.kind), shape, decode(messages, proto.sharding))
