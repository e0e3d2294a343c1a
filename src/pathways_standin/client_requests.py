"""Requests about the client as a whole: its devices, its defaults, and the ends of what it has started."""

from __future__ import annotations

from typing import Any

from pathways_standin.client_session import ClientSession, Handler, Uncounted
from pathways_standin.devices import MEMORY_KINDS
from pathways_standin.status import Status

PLATFORM = "cpu"  # programs are lowered for this platform
PLATFORM_VERSION = "Pathways stand-in"
# The client puts "proxy/" before it. Orbax looks for "proxy/pathways".
RUNTIME_TYPE = "pathways"


def _init(session: ClientSession, body: Any, response: Any) -> None:
  answer, devices = response.init_response, session.devices
  answer.session_id, answer.process_index = session.number, 0
  answer.platform_name, answer.platform_id, answer.platform_version = PLATFORM, 1, PLATFORM_VERSION
  answer.runtime_type = RUNTIME_TYPE
  for device in range(devices.slices * devices.per_slice):
    slice_id, position = divmod(device, devices.per_slice)
    memories = range(device * len(MEMORY_KINDS), (device + 1) * len(MEMORY_KINDS))
    described = answer.all_devices.add(
      id=device,
      local_device_id=device,
      local_hardware_id=device,
      platform_name=PLATFORM,
      device_kind=devices.kind,
      default_memory_id=memories[0],
      memory_ids=memories,
      debug_string=f"device {device} of slice {slice_id} of the Pathways stand-in",
      to_string=f"StandinDevice(id={device}, slice={slice_id})",
    )
    attributes = described.attributes.attributes
    attributes["slice_index"].int64_value = slice_id
    attributes["core_on_chip"].int64_value = 0
    attributes["coords"].int64_list_value.elements.extend([position, 0, 0])
    for kind_id, (memory, kind) in enumerate(zip(memories, MEMORY_KINDS, strict=True)):
      answer.memories.add(
        id=memory,
        memory_space_kind=kind,
        kind_id=kind_id,
        device_ids=[device],
        debug_string=f"{kind} memory of device {device}",
        to_string=f"{kind}_{device}",
      )
    answer.primary_device_ids.append(device)
    answer.addressable_device_ids.append(device)
  attributes = answer.client_attributes.attributes
  attributes["serialize_with_sdy"].bool_value = True  # as JAX's own CPU client says
  attributes["supports_executable_serialization"].bool_value = False  # the proxy client cannot


def _check_future(session: ClientSession, body: Any, response: Any) -> Uncounted | None:
  future = session.futures.pop(body.future_handle, None)
  if future is None:
    raise Status("NOT_FOUND", f"Unknown future handle: {body.future_handle}")
  if future.error is not None:
    raise future.error
  return None if future.counted else Uncounted()


def _get_default_device_assignment(session: ClientSession, body: Any, response: Any) -> None:
  replicas, partitions = body.num_replicas, body.num_partitions
  available = session.devices.slices * session.devices.per_slice
  if replicas * partitions > available:
    raise Status(
      "INVALID_ARGUMENT", f"{replicas} replicas of {partitions} partitions need more than {available} devices"
    )
  assignment = response.get_default_device_assignment_response.device_assignment
  assignment.replica_count, assignment.computation_count = replicas, partitions
  for partition in range(partitions):
    ids = [replica * partitions + partition for replica in range(replicas)]
    assignment.computation_devices.add().replica_device_ids.extend(ids)


def _get_default_layout(session: ClientSession, body: Any, response: Any) -> None:
  """The row-major layout, as text: this is how a PjRtLayout is serialized."""
  text = "{" + ",".join(map(str, reversed(range(len(body.dims))))) + "}"
  response.get_default_layout_response.serialized_pjrt_layout = text.encode()


HANDLERS: dict[str, Handler] = {
  "init_request": _init,
  "check_future_request": _check_future,
  "get_default_device_assignment_request": _get_default_device_assignment,
  "get_default_layout_request": _get_default_layout,
}
