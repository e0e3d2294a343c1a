"""The process of one slice: it holds the data of the slice's devices, and runs their part of every program.

  python -m trainer.launch.pathways_standin.worker FILE_DESCRIPTOR

The server sends messages, tuples that begin with the name of a method below, over a socket that this process inherits.
A program that spans several slices communicates with the other workers over gloo. When a slice is lost or returns, the
workers form a new world ("join"): clients of an old world may have programs that wait forever for a lost peer, and are
left alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax, lapack, xla_client
from jaxlib.mlir import ir

from trainer.launch.pathways_standin.executables import parse
from trainer.launch.pathways_standin.runtime import join_shards

_POLL_SECONDS = 0.001
_JOIN_SECONDS = 5  # that a worker waits for the others; one of them may be lost meanwhile
_PARENT_SECONDS = 1.0  # between two looks whether the server still exists


class Worker:
  """Shards by key, programs by number."""

  def __init__(self, connection: Connection) -> None:
    self._connection = connection
    self._send_lock = threading.Lock()
    self._shards: dict[int, jax.Array] = {}
    self._sources: dict[int, tuple[bytes, bytes, list[tuple[int, int]]]] = {}
    self._loaded: dict[int, Any] = {}  # programs of this world
    self._pending: list[tuple[int, Sequence[jax.Array], bool]] = []  # operation, its results, whether it has peers
    self._more = threading.Condition()
    self._worlds: list[Any] = []  # what must not be destroyed while an old program may still use it
    self._devices: list[list[jax.Device]] = []  # of this world: node -> its devices
    self._node = 0

  def run(self) -> None:
    """Handles messages until the server has gone."""
    threading.Thread(target=self._report_ends, name="ends", daemon=True).start()
    try:
      while True:
        name, *arguments = self._connection.recv()
        getattr(self, name)(*arguments)
    except (EOFError, OSError):
      return

  def _send(self, *message: Any) -> None:
    with self._send_lock:
      self._connection.send(message)

  # ---- messages

  def hello(self, number: int) -> None:
    """Answers when this process is ready to join a world."""
    self._send("hello", number, None, "")

  def join(self, number: int, address: str, node: int, nodes: int, per_slice: int, heartbeat_seconds: int) -> None:
    """Forms a world with the other workers, as node `node`. Answers with an error if one of them does not come."""
    try:
      made = self._connect(address, node, nodes, per_slice, heartbeat_seconds)
    except RuntimeError as error:  # jaxlib raises some errors of this client without their own type
      self._send("joined", number, None, str(error))
      return
    by_process: dict[int, list[jax.Device]] = {}
    for device in sorted(made.devices(), key=lambda device: device.id):
      by_process.setdefault(device.process_index, []).append(device)
    self._devices, self._node = [by_process[process] for process in sorted(by_process)], node
    self._loaded.clear()
    with self._more:  # the server has given up the programs that had peers in the old world
      self._pending = [entry for entry in self._pending if not entry[2]]
    self._send("joined", number, None, "")

  def _connect(self, address: str, node: int, nodes: int, per_slice: int, heartbeat_seconds: int) -> Any:
    """A client of XLA in a new world."""
    client = _jax.get_distributed_runtime_client(
      address,
      node,
      init_timeout=_JOIN_SECONDS,
      shutdown_timeout=1,
      heartbeat_timeout=heartbeat_seconds,
      missed_heartbeat_callback=lambda *error: None,
      shutdown_on_destruction=False,
    )
    client.connect()
    collectives = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname="127.0.0.1")
    made = xla_client.make_cpu_client(
      distributed_client=client, node_id=node, num_nodes=nodes, collectives=collectives, num_devices=per_slice
    )
    self._worlds.append((client, collectives, made))
    return made

  def put(self, key: int, value: np.ndarray, position: int, memory: str) -> None:
    """A shard with a copy of the value on the device with this position in the slice."""
    self._shards[key] = jax.device_put(value, self._sharding(position, memory), may_alias=False)

  def copy(self, key: int, source: int, position: int, memory: str) -> None:
    """A shard that is a copy of another."""
    self._shards[key] = jax.device_put(self._find(source), self._sharding(position, memory), may_alias=False)

  def get(self, request: int, key: int) -> None:
    """Sends the value of a shard when it is ready."""
    shard = self._shards.get(key)

    def work() -> None:
      try:
        assert shard is not None, f"unknown shard {key}"
        self._send("value", request, np.asarray(shard), "")
      except Exception as error:  # noqa: BLE001 -- the server gets it
        self._send("value", request, None, str(error))

    threading.Thread(target=work, daemon=True).start()

  def compile(self, number: int, program: bytes, options: bytes, devices: list[tuple[int, int]]) -> None:
    """Remembers a program. devices: (node, position) of each device, in the order of its assignment."""
    self._sources[number] = (program, options, devices)

  def execute(
    self, operation: int, number: int, arguments: list[list[int]], kept: list[int], results: list[list[int]]
  ) -> None:
    """Runs a program on this slice's devices. arguments, results: keys of the shards on this slice."""
    try:
      loaded, chosen = self._load(number)
      joined = []
      for i, keys in enumerate(arguments):
        shards = [self._find(key) for key in keys]
        if i in kept:
          shards = [jax.device_put(shard, shard.sharding, may_alias=False) for shard in shards]
        if len(chosen) == 1:
          joined.append(shards[0])
        else:
          memory = shards[0].sharding.memory_kind
          joined.append(join_shards(shards, GSPMDSharding.get_replicated(chosen, memory_kind=memory)))
      outputs = loaded.execute_sharded(joined).disassemble_into_single_device_arrays() if results else []
      for keys, shards in zip(results, outputs, strict=True):
        self._shards.update(zip(keys, shards, strict=True))
      with self._more:
        has_peers = len({node for node, _ in self._sources[number][2]}) > 1
        self._pending.append((operation, [shard for shards in outputs for shard in shards], has_peers))
        self._more.notify()
    except Exception as error:  # noqa: BLE001 -- the server gets it
      self._send("ended", operation, str(error))

  def free(self, keys: list[int]) -> None:
    """Forgets shards."""
    for key in keys:
      self._shards.pop(key, None)

  def forget(self, number: int) -> None:
    """Forgets a program."""
    self._sources.pop(number, None)
    self._loaded.pop(number, None)

  # ---- what they use

  def _sharding(self, position: int, memory: str) -> SingleDeviceSharding:
    return SingleDeviceSharding(self._devices[self._node][position], memory_kind=memory)

  def _find(self, key: int) -> jax.Array:
    """A shard, on a device of this world."""
    if key not in self._shards:
      raise RuntimeError("DATA_LOSS: an argument was lost")
    shard = self._shards[key]
    (device,) = shard.devices()
    position = device.local_hardware_id
    if device is not self._devices[self._node][position]:
      moved = jax.device_put(np.asarray(shard), self._sharding(position, shard.sharding.memory_kind))
      shard = self._shards[key] = moved
    return shard

  def _load(self, number: int) -> tuple[Any, tuple[jax.Device, ...]]:
    """The program, compiled for the devices of this world, and its devices."""
    program, options, devices = self._sources[number]
    chosen = tuple(self._devices[node][position] for node, position in devices)
    if number not in self._loaded:
      parsed = _jax.CompileOptions.ParseFromString(options)
      shape = (parsed.num_replicas, parsed.num_partitions)
      ids = np.array([device.id for device in chosen]).reshape(shape)
      parsed.device_assignment = xla_client.DeviceAssignment.create(ids)
      with jax_mlir.make_ir_context() as context, ir.Location.unknown(context):
        module = parse(program, context)
        loaded = chosen[0].client.compile_and_load(module, _jax.DeviceList(chosen), parsed)
      self._loaded[number] = loaded
    return self._loaded[number], chosen

  def _report_ends(self) -> None:
    """Thread: tells the server when operations have ended. Ends the process if the server was killed."""
    server = os.getppid()
    while True:
      with self._more:
        if not self._more.wait_for(lambda: self._pending, _PARENT_SECONDS) and os.getppid() != server:
          os._exit(1)  # the thread of the messages may wait in XLA for ever
        ended = [entry for entry in self._pending if all(map(_is_computed, entry[1]))]
        self._pending = [entry for entry in self._pending if entry not in ended]
      for operation, results, _ in ended:
        error = ""
        for shard in results:
          try:
            shard.block_until_ready()
          except Exception as found:  # noqa: BLE001 -- the server gets it
            error = error or ("" if shard.is_deleted() else str(found))
        self._send("ended", operation, error)
      if not ended:
        time.sleep(_POLL_SECONDS)


def _is_computed(shard: jax.Array) -> bool:
  """Also for a shard that another thread donates at this moment."""
  try:
    return shard.is_deleted() or shard.is_ready()
  except RuntimeError:
    return shard.is_deleted()


def main(descriptor: int) -> None:
  """Runs until the server has gone."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_x64", True)
  jax.config.update("jax_enable_compilation_cache", False)
  lapack._lapack.initialize()
  Worker(Connection(descriptor)).run()
  sys.stderr.flush()
  os._exit(0)  # threads inside XLA may never end


if __name__ == "__main__":
  main(int(sys.argv[1]))
