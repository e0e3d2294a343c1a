"""Compiled programs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib import _jax
from jaxlib.mlir import ir

from pathways_standin import dtypes
from pathways_standin.devices import DEFAULT_MEMORY, Devices
from pathways_standin.placement import Placement, Spec
from pathways_standin.proxy_messages import Messages
from pathways_standin.status import Status

# Custom calls that call Python code in the process that compiled them: the client's, not this one.
_CALLBACK = re.compile(r'custom_call\s*@?"?(\w*python\w*callback\w*)"?')


@dataclasses.dataclass(frozen=True)
class Output:
  """Type and placement of one result. A client learns them from the first execution."""

  spec: Spec
  sharding_name: str  # as the protocol spells it
  sharding: bytes  # a serialized message of that name


class Executable:
  """A program for certain devices, compiled for the CPU."""

  def __init__(self, name: str, loaded: Any, devices: tuple[int, ...], outputs: list[Output]) -> None:
    """loaded: a LoadedExecutable of jaxlib."""
    self.name, self.loaded, self.devices, self.outputs = name, loaded, devices, outputs
    self.donated = _donated(loaded.get_hlo_text().partition("\n")[0])


def compile_program(messages: Messages, devices: Devices, program: Any, compile_options: Any) -> Executable:
  """Compiles a program. program: a Serialized. compile_options: a CompileOptionsProto. Raises Status."""
  if not program.type_name.endswith(("::HloProgram", "::XlaProgram")):
    raise Status("UNIMPLEMENTED", f"programs of the type {program.type_name}")
  chosen = _assigned(compile_options)
  with jax_mlir.make_ir_context() as context, ir.Location.unknown(context):
    module = parse(program.data, context)
    text = str(module) if b"callback" in program.data else ""
    if (call := _CALLBACK.search(text)) is not None:
      raise Status("UNIMPLEMENTED", f"host callbacks ({call[1]}): the function lives in the client's process")
    types = _result_types(module)
    attributes = module.operation.attributes
    name = ir.StringAttr(attributes["sym_name"]).value if "sym_name" in attributes else "main"
    loaded = devices.client.compile_and_load(
      module,
      _jax.DeviceList(tuple(devices.all[device] for device in chosen)),
      _jax.CompileOptions.ParseFromString(compile_options.SerializeToString()),
    )
  return Executable(name, loaded, chosen, _outputs(messages, loaded, chosen, types))


def _assigned(compile_options: Any) -> tuple[int, ...]:
  """The devices that the options assign the program to, in the order of replicas and partitions."""
  build = compile_options.executable_build_options
  if not build.HasField("device_assignment"):
    return (0,)
  computations = build.device_assignment.computation_devices
  replicas = zip(*(computation.replica_device_ids for computation in computations), strict=True)
  return tuple(device for replica in replicas for device in replica)


def parse(artifact: bytes, context: Any) -> Any:
  """The module of a StableHLO portable artifact."""
  read = _jax.mlir.deserialize_portable_artifact
  if "context" in (read.__doc__ or ""):
    return read(artifact, context)
  return ir.Module.parse(read(artifact))  # jax 0.10 returns bytes


def _result_types(module: Any) -> list[tuple[np.dtype, tuple[int, ...]]]:
  """Types and shapes of what `main` returns, from the module: the devices may be down at the first execution."""
  names = dtypes.by_mlir_name()
  for operation in module.body.operations:
    if "sym_name" in operation.attributes and ir.StringAttr(operation.attributes["sym_name"]).value == "main":
      results = ir.FunctionType(ir.TypeAttr(operation.attributes["function_type"]).value).results
      break
  else:
    raise Status("INVALID_ARGUMENT", "the program has no function main")
  found = []
  for result_type in results:
    try:
      result = ir.RankedTensorType(result_type)
    except ValueError as error:  # a token
      raise Status("UNIMPLEMENTED", f"results of the type {result_type}") from error
    element = str(result.element_type).lower()
    if element not in names:
      raise Status("UNIMPLEMENTED", f"results of the element type {result.element_type}")
    found.append((names[element], tuple(result.shape)))
  return found


def _outputs(
  messages: Messages, loaded: Any, devices: tuple[int, ...], types: list[tuple[np.dtype, tuple[int, ...]]]
) -> list[Output]:
  kinds = loaded.get_output_memory_kinds()
  memories = list(kinds[0]) if kinds else [DEFAULT_MEMORY] * len(types)
  shardings = loaded.get_output_shardings() if len(devices) > 1 else None
  outputs = []
  for i, ((dtype, shape), memory) in enumerate(zip(types, memories, strict=True)):
    if shardings is None:
      name = "SingleDeviceSharding"
      proto = messages.ifrt("SingleDeviceShardingProto")(device_id=devices[0], memory_kind=memory)
    else:
      name = "HloSharding"
      proto = messages.ifrt("HloShardingProto")(memory_kind=memory)
      proto.devices.device_ids.extend(devices)
      proto.xla_op_sharding.ParseFromString(shardings[i].SerializeToString())
    op_sharding = None if shardings is None else shardings[i].SerializeToString()
    placement = Placement(devices, memory, name, op_sharding, replicated=shardings is None)
    outputs.append(Output(Spec(dtype, shape, placement), f"xla::ifrt::{name}", proto.SerializeToString()))
  return outputs


def _donated(header: str) -> frozenset[int]:
  """The parameters that an execution takes over, from the first line of the HLO text.

  A `buffer_donor` that became no alias of a result stays with the caller.
  """
  found = _braces(header, "input_output_alias")
  return frozenset(int(number) for number in re.findall(r"\(\s*(\d+)\s*,", found))


def _braces(header: str, key: str) -> str:
  """The value of `key={...}` with its braces; empty if the key is missing."""
  start = header.find(f"{key}={{")
  if start < 0:
    return ""
  depth = 0
  for position in range(start + len(key) + 1, len(header)):
    depth += {"{": 1, "}": -1}.get(header[position], 0)
    if depth == 0:
      return header[start : position + 1]
  raise AssertionError(f"unbalanced braces: {header}")
