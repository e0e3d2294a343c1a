"""Requests that compile programs, describe them and run them."""

from __future__ import annotations

from typing import Any

from pathways_standin import dtypes, executables
from pathways_standin.arrays import Array
from pathways_standin.client_session import ClientSession, Future, Handler, InBackground, WhenReady
from pathways_standin.status import Status


def _compile(session: ClientSession, body: Any, response: Any) -> InBackground:
  if body.host_callbacks:
    raise Status("UNIMPLEMENTED", "host callbacks: the function lives in the client's process")

  def work(response: Any) -> None:
    options = session.messages.ifrt("XlaCompileOptionsProto").FromString(body.compile_options.data).compile_options
    made = executables.compile_program(session.messages, session.devices, body.program, options)
    answer = response.compile_response
    answer.name, answer.num_devices = made.name, len(made.devices)
    answer.device_ids.extend(made.devices)
    answer.addressable_device_ids.extend(made.devices)
    fingerprint = made.loaded.fingerprint
    if fingerprint is not None:
      # The client decodes it as UTF-8, and a fingerprint of XLA is bytes.
      answer.fingerprint_value = fingerprint.hex().encode() if isinstance(fingerprint, bytes) else fingerprint.encode()
    answer.loaded_executable_handle, answer.ready_future_handle = session.new_handle(), session.new_handle()
    session.executables[answer.loaded_executable_handle] = made
    session.futures[answer.ready_future_handle] = Future(None, counted=True)

  return InBackground(work)


def _metadata(session: ClientSession, body: Any, response: Any) -> InBackground:
  made = session.find_executable(body.loaded_executable_handle)

  def work(response: Any) -> None:
    answer, loaded = response.loaded_executable_metadata_response, made.loaded
    for field, shardings in (
      (answer.parameter_shardings, loaded.get_parameter_shardings()),
      (answer.output_shardings, loaded.get_output_shardings()),
    ):
      if shardings is not None:
        field.SetInParent()
        for sharding in shardings:
          field.shardings.add().ParseFromString(sharding.SerializeToString())
    for field, layouts in (
      (answer.parameter_layouts_list, loaded.get_parameter_layouts()),
      (answer.output_layouts_list, loaded.get_output_layouts()),
    ):
      field.SetInParent()
      for layout in layouts:
        order = layout._xla_layout().minor_to_major()
        field.layouts.add(minor_to_major=order, tail_padding_alignment_in_elements=1)
    kinds = [output.spec.placement.memory for output in made.outputs]
    answer.output_memory_kinds.memory_kind_lists.add().memory_kinds.extend(kinds)
    answer.donated_input_indices.SetInParent()
    answer.donated_input_indices.donated_input_indices.extend(sorted(made.donated))
    statistics = loaded.get_compiled_memory_stats()
    answer.compiled_memory_stats.SetInParent()
    for field in answer.compiled_memory_stats.DESCRIPTOR.fields:
      if isinstance(value := getattr(statistics, field.name, None), int):
        setattr(answer.compiled_memory_stats, field.name, value)
    answer.size_of_generated_code_in_bytes = max(0, loaded.size_of_generated_code_in_bytes())

  return InBackground(work)


def _cost_analysis(session: ClientSession, body: Any, response: Any) -> None:
  attributes = response.loaded_executable_cost_analysis_response.attributes
  attributes.SetInParent()
  for name, value in session.find_executable(body.loaded_executable_handle).loaded.cost_analysis().items():
    attributes.attributes[name].float_value = value


def _program_text(session: ClientSession, body: Any, response: Any) -> None:
  text = session.find_executable(body.loaded_executable_handle).loaded.get_hlo_text()
  response.loaded_executable_human_readable_program_text_response.human_readable_program_text = text


def _execute(session: ClientSession, body: Any, response: Any) -> None:
  made = session.find_executable(body.loaded_executable_handle)
  arguments = session.store.find_all(body.args_handles)
  if body.device_ids and tuple(body.device_ids) != made.devices:
    raise Status("UNIMPLEMENTED", f"running {made.name}, compiled for devices {made.devices}, on {body.device_ids}")
  kept = frozenset(body.execute_options.non_donatable_input_indices)
  session.slices.begin_dispatch()
  with session.slices.lock:
    for i, array in enumerate(arguments):
      if array.is_deleted():
        raise Status("INVALID_ARGUMENT", f"argument {i} of {made.name} has been deleted or donated")
    lost = session.slices.why_lost(made.devices) or next((e for a in arguments if (e := a.lost()) is not None), None)
    if lost is None:
      shards = session.runtime.run(made, arguments, kept)
    else:
      shards = [[lost] * len(made.devices) for _ in made.outputs]
    results = [Array(output.spec, parts) for output, parts in zip(made.outputs, shards, strict=True)]
    session.slices.dispatch(made.devices, arguments, results)
    for i in made.donated - kept:
      arguments[i].delete()
  answer = response.loaded_executable_execute_response
  if not body.result_array_handle:  # the first execution: the client does not know yet what it gets
    for output, array in zip(made.outputs, results, strict=True):
      described = answer.outputs.add(array_handle=session.add(0, array))
      described.dtype.kind = dtypes.KIND_OF[output.spec.dtype]
      described.shape.dims.extend(output.spec.shape)
      described.sharding.serialized_sharding.type_name = output.sharding_name
      described.sharding.serialized_sharding.data = output.sharding
  for handle, array in zip(body.result_array_handle, results):
    session.add(handle, array)
  if body.execute_options.fill_status:
    answer.status_handle = body.result_status_handle or session.new_handle()
    session.executions[answer.status_handle] = lost or results


def _fetch_execute_result(session: ClientSession, body: Any, response: Any) -> WhenReady:
  found = session.executions.pop(body.result_status_handle, None)
  if found is None:
    raise Status("NOT_FOUND", f"Unknown result status handle: {body.result_status_handle}")
  if isinstance(found, Status):
    raise found
  return WhenReady(found, lambda response: None)


def _destruct(session: ClientSession, body: Any, response: Any) -> None:
  session.find_executable(body.loaded_executable_handle)
  del session.executables[body.loaded_executable_handle]


def _is_deleted(session: ClientSession, body: Any, response: Any) -> None:
  response.loaded_executable_is_deleted_response.is_deleted = False


HANDLERS: dict[str, Handler] = {
  "compile_request": _compile,
  "loaded_executable_metadata_request": _metadata,
  "loaded_executable_cost_analysis_request": _cost_analysis,
  "loaded_executable_human_readable_program_text_request": _program_text,
  "loaded_executable_execute_request": _execute,
  "loaded_executable_fetch_execute_result_request": _fetch_execute_result,
  "loaded_executable_destruct_request": _destruct,
  "loaded_executable_is_deleted_request": _is_deleted,
}
