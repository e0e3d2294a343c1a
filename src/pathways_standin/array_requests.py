"""Requests that make, move, read and delete arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pathways_standin import dtypes, host_buffers, placement, status
from pathways_standin.arrays import Array, Shard
from pathways_standin.client_session import ClientSession, Future, Handler, Uncounted, WhenReady
from pathways_standin.devices import DEFAULT_MEMORY
from pathways_standin.placement import Placement, Spec
from pathways_standin.status import Status

# ArrayCopySemantics
_REUSE, _DONATE = 2, 3


def _make_array_from_host_buffer(session: ClientSession, body: Any, response: Any) -> None:
  data = session.buffers.take(body.host_buffer_handle)
  if body.HasField("layout"):
    raise Status("UNIMPLEMENTED", "arrays with a custom layout that no compiled program made")
  where = placement.decode(session.messages, body.sharding)
  shape = tuple(body.shape.dims)
  value = host_buffers.to_array(data, dtypes.from_kind(body.dtype.kind), shape, _strides(body))
  if where.replicated:
    shards = [value] * len(where.devices)
  else:
    shards = [value[part] for part in where.parts(session.devices, shape)]
  array = _put(session, Spec(value.dtype, shape, where), shards)
  response.make_array_from_host_buffer_response.array_handle = session.add(body.array_handle, array)


def _make_arrays_from_host_buffer_shards(session: ClientSession, body: Any, response: Any) -> None:
  handles = [buffer.host_buffer_handle for proto in body.specs for buffer in proto.host_buffers]
  buffers = {handle: session.buffers.take(handle) for handle in handles}
  made = []
  for proto in body.specs:
    spec = placement.decode_spec(session.messages, proto.array_spec)
    values: list[np.ndarray | None] = [None] * len(spec.placement.devices)
    for indices, buffer in zip(proto.addressable_shard_indices, proto.host_buffers, strict=True):
      dtype = dtypes.from_kind(buffer.dtype.kind)
      value = host_buffers.to_array(buffers[buffer.host_buffer_handle], dtype, buffer.shape.dims, _strides(buffer))
      for i in indices.indices:
        values[i] = value
    found = [value for value in values if value is not None]
    if len(found) != len(values):
      raise Status("INVALID_ARGUMENT", f"host buffers for {len(found)} of {len(values)} shards")
    made.append(_put(session, spec, found))
  _answer(session, made, body.array_handles, response.make_arrays_from_host_buffer_shards_response)


def _make_error_arrays(session: ClientSession, body: Any, response: Any) -> None:
  error = status.from_code(body.error.code, body.error.message)
  specs = [placement.decode_spec(session.messages, proto) for proto in body.array_specs]
  made = [Array(spec, [error] * len(spec.placement.devices)) for spec in specs]
  _answer(session, made, body.array_handles, response.make_error_arrays_response)


def _assemble(session: ClientSession, body: Any, response: Any) -> None:
  where = placement.decode(session.messages, body.sharding)
  with session.slices.lock:
    parts = _usable(session, body.single_device_array_handles)
    shards = {device: (part, i) for part in parts for i, device in enumerate(part.devices)}
    if set(shards) != set(where.devices):
      raise Status("INVALID_ARGUMENT", f"arrays on devices {sorted(shards)} for a sharding on {sorted(where.devices)}")
    spec = Spec(parts[0].spec.dtype, tuple(body.shape.dims), dataclasses.replace(where, memory=parts[0].memory))
    array = _derive(session, spec, [shards[device] for device in where.devices])
    _donate(parts, body.copy_semantics)
  response.assemble_array_from_single_device_arrays_response.array_handle = session.add(body.result_handle, array)


def _disassemble(session: ClientSession, body: Any, response: Any) -> None:
  with session.slices.lock:
    (whole,) = _usable(session, [body.array_handle])
    made = [_one_shard(session, whole, i) for i in range(len(whole.devices))]
    _donate([whole], body.copy_semantics)
  _answer(session, made, body.result_handles, response.disassemble_into_single_device_arrays_response)


def _fully_replicated_shard(session: ClientSession, body: Any, response: Any) -> None:
  with session.slices.lock:
    (whole,) = _usable(session, [body.array_handle])
    array = _one_shard(session, whole, 0)
    _donate([whole], body.copy_semantics)
  response.fully_replicated_shard_response.array_handle = session.add(body.result_handle, array)


def _copy_arrays(session: ClientSession, body: Any, response: Any) -> None:
  made = []
  with session.slices.lock:
    sources = _usable(session, body.array_handles)
    for source in sources:
      devices = tuple(body.device_ids) or source.devices
      memory = (body.memory_kind or DEFAULT_MEMORY) if body.HasField("memory_kind") else source.memory
      where = dataclasses.replace(source.spec.placement, devices=devices, memory=memory)
      spec = dataclasses.replace(source.spec, placement=where)
      shards: list[Shard] = []
      for shard, old, new in zip(source.shards, source.devices, devices, strict=True):
        reuse = body.copy_semantics == _REUSE and (old, source.memory) == (new, memory)
        lost = shard if isinstance(shard, Status) else session.slices.why_lost([new])
        shards.append(lost or (shard if reuse else session.runtime.put(shard, new, memory)))
      made.append(session.slices.admit(Array(spec, shards), [source]))
    _donate(sources, body.copy_semantics)
  _answer(session, made, body.result_handles, response.copy_arrays_response)


def _remap_arrays(session: ClientSession, body: Any, response: Any) -> None:
  specs = [placement.decode_spec(session.messages, proto) for proto in body.plan.output_specs]
  with session.slices.lock:
    sources = _usable(session, body.array_handles)
    chosen: list[dict[int, tuple[Array, int]]] = [{} for _ in specs]  # output -> its shard -> array and its shard
    for m in body.plan.mappings:
      for interval in zip(m.from_start, m.from_end, m.from_step, m.to_start, m.to_end, m.to_step, strict=True):
        for i, j in zip(range(*interval[:3]), range(*interval[3:]), strict=True):
          chosen[m.out_array][j] = (sources[m.in_array], i)
    for output in getattr(body.plan, "input_devices_for_output", ()):  # another form of the same, of newer clients
      for group in output.input_devices:
        for device in group.device_list.device_ids:
          source = sources[group.in_array]
          position = specs[output.out_array].placement.devices.index(device)
          chosen[output.out_array][position] = (source, source.devices.index(device))
    made = [_derive(session, spec, [parts[j] for j in range(len(parts))]) for spec, parts in zip(specs, chosen)]
    _donate(sources, body.copy_semantics)
  _answer(session, made, body.result_handles, response.remap_arrays_response)


def _is_array_deleted(session: ClientSession, body: Any, response: Any) -> None:
  with session.slices.lock:
    deleted = session.store.find(body.array_handle).is_deleted()
  response.is_array_deleted_response.deleted = deleted


def _delete_array(session: ClientSession, body: Any, response: Any) -> Uncounted:
  error = None
  with session.slices.lock:
    for handle in body.array_handle:
      try:
        session.store.find(handle).delete()
      except Status as found:
        error = error or found
  response.delete_array_response.deletion_future_handle = handle = session.new_handle()
  session.futures[handle] = Future(error, counted=False)
  return Uncounted()


def _destruct_array(session: ClientSession, body: Any, response: Any) -> Uncounted:
  session.store.erase(body.array_handle)
  return Uncounted()


def _check_value_ready(session: ClientSession, body: Any, response: Any) -> WhenReady:
  with session.slices.lock:
    values = _usable(session, body.value_handles)
    for value in values:
      if (error := value.error()) is not None:
        raise error
  return WhenReady(values, lambda response: None)


def _copy_to_host_buffer(session: ClientSession, body: Any, response: Any) -> WhenReady:
  with session.slices.lock:
    array = session.store.find(body.array_handle)
    if (error := array.error()) is not None:
      raise error
    session.slices.hold_back(array)
    assert not isinstance(array.shards[0], Status)
    if tuple(array.shards[0].shape) != array.spec.shape:
      raise Status("INVALID_ARGUMENT", "CopyToHostBuffer of an array that is partitioned over several devices")
    shard = array.shards[0]
    where = Placement(array.devices[:1], array.memory, "SingleDeviceSharding", replicated=True)
    copied = Array(dataclasses.replace(array.spec, placement=where), [shard])
  strides = _strides(body)

  def finish(response: Any) -> None:
    session.buffers.store(body.host_buffer_handle, host_buffers.to_bytes(np.asarray(shard), strides))

  return WhenReady([array, copied], finish)


def _reshard_arrays(session: ClientSession, body: Any, response: Any) -> None:
  """A reshard goes through the memory of this process."""
  specs = [placement.decode_spec(session.messages, proto) for proto in body.array_specs]
  made = []
  with session.slices.lock:
    sources = _usable(session, body.array_handles)
    for source, spec in zip(sources, specs, strict=True):
      if (error := source.error()) is not None:
        made.append(Array(spec, [error] * len(spec.placement.devices)))
        continue
      made.append(_reshard(session, source, spec))
    _donate(sources, body.copy_semantics)
  _answer(session, made, body.result_handles, response.reshard_arrays_response)


# ---- what they share


def _strides(body: Any) -> list[int] | None:
  return list(body.byte_strides.strides) if body.HasField("byte_strides") else None


def _usable(session: ClientSession, handles: Iterable[int]) -> list[Array]:
  """The arrays. Raises Status for one that is unknown or deleted; lost data are no reason."""
  found = session.store.find_all(handles)
  for array in found:
    if array.is_deleted():
      error = array.error()
      assert error is not None
      raise error
  return found


def _put(session: ClientSession, spec: Spec, values: Sequence[np.ndarray]) -> Array:
  where = spec.placement
  with session.slices.lock:
    shards = [
      session.slices.why_lost([device]) or session.runtime.put(value, device, where.memory)
      for value, device in zip(values, where.devices, strict=True)
    ]
    return session.slices.admit(Array(spec, shards))


def _derive(session: ClientSession, spec: Spec, parts: Sequence[tuple[Array, int]]) -> Array:
  """An array that shares the given shards of other arrays."""
  sources = list({id(source): source for source, _ in parts}.values())
  return session.slices.admit(Array(spec, [source.shards[i] for source, i in parts]), sources)


def _one_shard(session: ClientSession, whole: Array, i: int) -> Array:
  shard = whole.shards[i]
  shape = whole.spec.shape if isinstance(shard, Status) else tuple(shard.shape)
  where = Placement((whole.devices[i],), whole.memory, "SingleDeviceSharding", replicated=True)
  return _derive(session, Spec(whole.spec.dtype, shape, where), [(whole, i)])


def _reshard(session: ClientSession, source: Array, spec: Spec) -> Array:
  """An array with the value of another one that is not lost."""
  before = source.spec.placement.parts(session.devices, spec.shape)
  after = spec.placement.parts(session.devices, spec.shape)
  shards: list[Shard | None] = [session.slices.why_lost([device]) for device in spec.placement.devices]
  whole = np.empty(spec.shape, spec.dtype)
  for part, shard in zip(before, source.shards, strict=True):
    whole[part] = np.asarray(shard)
  for i, device in enumerate(spec.placement.devices):
    if shards[i] is None:
      shards[i] = session.runtime.put(whole[after[i]], device, spec.placement.memory)
  return session.slices.admit(Array(spec, shards), [source])


def _donate(sources: Sequence[Array], semantics: int) -> None:
  if semantics == _DONATE:
    for source in sources:
      source.delete()


def _answer(session: ClientSession, made: Sequence[Array], handles: Sequence[int], response: Any) -> None:
  """Keeps new arrays, under the handles that the client gave if it gave any, and puts the handles into the response."""
  given = list(handles) or [0] * len(made)
  response.array_handles.extend(session.add(handle, array) for handle, array in zip(given, made, strict=True))


HANDLERS: dict[str, Handler] = {
  "make_array_from_host_buffer_request": _make_array_from_host_buffer,
  "make_arrays_from_host_buffer_shards_request": _make_arrays_from_host_buffer_shards,
  "make_error_arrays_request": _make_error_arrays,
  "assemble_array_from_single_device_arrays_request": _assemble,
  "disassemble_into_single_device_arrays_request": _disassemble,
  "fully_replicated_shard_request": _fully_replicated_shard,
  "copy_arrays_request": _copy_arrays,
  "remap_arrays_request": _remap_arrays,
  "reshard_arrays_request": _reshard_arrays,
  "is_array_deleted_request": _is_array_deleted,
  "delete_array_request": _delete_array,
  "destruct_array_request": _destruct_array,
  "check_value_ready_request": _check_value_ready,
  "copy_to_host_buffer_request": _copy_to_host_buffer,
}
