"""The process of one slice: it holds the data of the slice's devices, and runs their part of every program.

  python -m pathways_standin.worker FILE_DESCRIPTOR DEVICES

The server sends messages, tuples that begin with the name of a method below, over a socket that this process inherits.
Programs of this slice alone run on a client of XLA that lives as long as the process. For programs that span slices,
the workers of each such set of slices form a world: a client of XLA that communicates over gloo. A world ends when a
member is lost: programs may wait forever for the lost peer, so its client is left alone and never used again.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import SingleDeviceSharding
from jaxlib import _jax, lapack, xla_client

from pathways_standin.runtime import join_shards

ALONE = 0  # the world of this slice
_POLL_SECONDS = 0.001
_JOIN_SECONDS = 5  # that a worker waits for the others; one of them may be lost meanwhile

# Messages that are handled when they arrive: the main thread may wait for a world, or for a shard of a stopped slice.
_OUT_OF_ORDER = frozenset({"abandon", "ping", "expect", "arrive"})

Nodes = list[list[jax.Device]]  # of a world: node -> its devices


class Worker:
  """Shards by key, programs and worlds by number."""

  def __init__(self, connection: Connection, devices: int) -> None:
    """devices: of this slice."""
    self._connection = connection
    self._send_lock = threading.Lock()
    self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    self._shards: dict[int, jax.Array | Future[jax.Array]] = {}  # a Future: on its way from another slice
    self._programs: dict[int, tuple[int, Future[tuple[Any, tuple[jax.Device, ...]]]]] = {}  # number -> world, program
    self._pending: list[tuple[int, Sequence[jax.Array], int]] = []  # operation, its results, its world
    self._more = threading.Condition()
    self._clients: list[Any] = []  # what must not be destroyed while an old program may still use it
    self._given_up: list[Any] = []  # clients whose programs may never end
    alone = xla_client.make_cpu_client(num_devices=devices)
    self._clients.append(alone)
    self._worlds: dict[int, Future[Nodes]] = {ALONE: Future()}
    self._worlds[ALONE].set_result([_local_devices(alone)])

  def run(self) -> None:
    """Handles messages until the server has gone."""
    for target in (self._report_ends, self._read):
      threading.Thread(target=target, daemon=True).start()
    while True:
      name, *arguments = self._messages.get()
      getattr(self, name)(*arguments)

  def _read(self) -> None:
    """Thread: receives messages. Ends the process with the server: the other threads may wait in XLA for ever."""
    with contextlib.suppress(EOFError, OSError):
      while True:
        message = self._connection.recv()
        if message[0] in _OUT_OF_ORDER:
          getattr(self, message[0])(*message[1:])
        else:
          self._messages.put(message)
    sys.stderr.flush()
    os._exit(0)

  def _send(self, *message: Any) -> None:
    with self._send_lock:
      self._connection.send(message)

  # ---- messages

  def hello(self, number: int) -> None:
    """Answers when this process is ready."""
    self._send("hello", number, None, "")

  def join(self, world: int, address: str, node: int, nodes: int, heartbeat_seconds: int) -> None:
    """Begins to form a world with other workers, as node `node`. Says so if one of them does not come."""

    def connect() -> Nodes:
      made = self._connect(address, node, nodes, heartbeat_seconds)
      by_process: dict[int, list[jax.Device]] = {}
      for device in sorted(made.devices(), key=lambda device: device.id):
        by_process.setdefault(device.process_index, []).append(device)
      return [by_process[process] for process in sorted(by_process)]

    def report(done: Future[Nodes]) -> None:
      if (error := done.exception()) is not None:
        self._send("broken", world, str(error))

    future = self._worlds[world] = Future[Nodes]()
    future.add_done_callback(report)
    _begin(connect, future)

  def ping(self) -> None:
    """Shows the server that this process is not stopped."""
    self._send("pong", 0)

  def abandon(self, world: int) -> None:
    """A member of the world is lost. The server has given up the programs that run in it."""
    if world in self._worlds:
      if (formed := self._worlds[world]).done() and formed.exception() is None:
        self._given_up.append(formed.result()[0][0].client)
      _finish(self._worlds[world], lambda: _fail(f"DATA_LOSS: a member of the world {world} was lost"))
    with self._more:
      self._pending = [entry for entry in self._pending if entry[2] != world]

  def _connect(self, address: str, node: int, nodes: int, heartbeat_seconds: int) -> Any:
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
      distributed_client=client,
      node_id=node,
      num_nodes=nodes,
      collectives=collectives,
      num_devices=len(self._worlds[ALONE].result()[0]),
    )
    self._clients.append((client, collectives, made))
    return made

  def put(self, key: int, value: np.ndarray, position: int, memory: str) -> None:
    """A shard with a copy of the value on the device with this position in the slice."""
    device = self._worlds[ALONE].result()[0][position]
    self._shards[key] = _place(value, device, memory)

  def expect(self, key: int) -> None:
    """A shard is on its way from another slice. Programs that need it wait for it, and later ones wait for them."""
    self._shards[key] = Future()

  def arrive(self, key: int, value: np.ndarray | None, position: int, memory: str, error: str) -> None:
    """A shard that was expected, or why it will never come."""
    device = self._worlds[ALONE].result()[0][position]
    expected = self._shards.get(key)
    if isinstance(expected, Future):  # else it was freed
      _finish(expected, lambda: _fail(error) if error else _place(value, device, memory))

  def copy(self, key: int, source: int, position: int, memory: str) -> None:
    """A shard that is a copy of another. If that one is missing, so is this one."""
    shard = self._shards.get(source)

    def work() -> jax.Array:
      known = _known(shard)
      (device,) = known.devices()
      return _place(known, _local_devices(device.client)[position], memory)

    if isinstance(shard, Future):  # what comes after this message does not wait
      made = self._shards[key] = Future[jax.Array]()
      shard.add_done_callback(lambda done: _finish(made, work))
    elif shard is not None:
      self._shards[key] = work()

  def get(self, request: int, key: int) -> None:
    """Sends the value of a shard when it is ready."""
    shard = self._shards.get(key)

    def work() -> None:
      try:
        self._send("value", request, np.asarray(_known(shard)), "")
      except Exception as error:  # noqa: BLE001 -- the server gets it
        self._send("value", request, None, str(error))

    threading.Thread(target=work, daemon=True).start()

  def load(self, number: int, program: bytes, options: bytes, world: int, devices: list[tuple[int, int]]) -> None:
    """Begins to load a program that the server has compiled.

    devices: (node, position) of each device, in the order of its assignment.
    """

    def load_program() -> tuple[Any, tuple[jax.Device, ...]]:
      nodes = self._worlds[world].result()
      chosen = tuple(nodes[node][position] for node, position in devices)
      parsed = _jax.CompileOptions.ParseFromString(options)
      ids = np.array([device.id for device in chosen]).reshape(parsed.num_replicas, parsed.num_partitions)
      parsed.device_assignment = xla_client.DeviceAssignment.create(ids)
      return chosen[0].client.deserialize_executable(program, _jax.DeviceList(chosen), parsed), chosen

    self._programs[number] = world, Future()
    _begin(load_program, self._programs[number][1])

  def execute(
    self, operation: int, number: int, arguments: list[list[int]], kept: list[int], results: list[list[int]]
  ) -> None:
    """Runs a program on this slice's devices. arguments, results: keys of the shards on this slice."""
    world = ALONE
    try:
      world, future = self._programs[number]
      loaded, chosen = future.result()
      of_process = [device for device in chosen if device.process_index == device.client.process_index()]
      joined = []
      for i, keys in enumerate(arguments):
        shards = [self._find(key, device) for key, device in zip(keys, of_process, strict=True)]
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
        self._pending.append((operation, [shard for shards in outputs for shard in shards], world))
        self._more.notify()
    except Exception as error:  # noqa: BLE001 -- the server gets it
      self._send("ended", operation, str(error))
      if world != ALONE:  # the other members may wait for this one
        self._send("broken", world, str(error))

  def free(self, keys: list[int]) -> None:
    """Forgets shards."""
    for key in keys:
      self._shards.pop(key, None)

  def forget(self, number: int) -> None:
    """Forgets a program."""
    self._programs.pop(number, None)

  # ---- what they use

  def _find(self, key: int, device: jax.Device) -> jax.Array:
    """A shard, on this device: that of the same position in the world of a program."""
    shard = _known(self._shards.get(key))
    if shard.devices() != {device}:
      while not _is_computed(shard):
        if next(iter(shard.devices())).client in self._given_up:
          _fail("DATA_LOSS: an argument is the result of a program that was given up")
        time.sleep(_POLL_SECONDS)
      # A copy even where XLA could share the memory: either of the two may be donated.
      shard = self._shards[key] = _place(np.asarray(shard), device, shard.sharding.memory_kind)
    return shard

  def _report_ends(self) -> None:
    """Thread: tells the server when operations have ended."""
    while True:
      with self._more:
        self._more.wait_for(lambda: self._pending)
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


def _begin(work: Callable[[], Any], future: Future[Any]) -> None:
  """Starts a thread that does the work and finishes the future."""
  threading.Thread(target=_finish, args=(future, work), daemon=True).start()


def _finish(future: Future[Any], work: Callable[[], Any]) -> None:
  """Finishes the future with what the work returns or raises, unless it is finished already."""
  with contextlib.suppress(InvalidStateError):
    try:
      future.set_result(work())
    except InvalidStateError:
      raise
    except Exception as error:  # noqa: BLE001 -- whoever asks the future gets it
      future.set_exception(error)


def _fail(error: str) -> Any:
  raise RuntimeError(error)


def _known(shard: jax.Array | Future[jax.Array] | None) -> jax.Array:
  """The shard, when it has arrived. Raises RuntimeError if it is lost."""
  if shard is None:
    raise RuntimeError("DATA_LOSS: an argument was lost")
  return shard.result() if isinstance(shard, Future) else shard


def _place(value: Any, device: jax.Device, memory: str) -> jax.Array:
  return jax.device_put(value, SingleDeviceSharding(device, memory_kind=memory), may_alias=False)


def _local_devices(client: Any) -> list[jax.Device]:
  """The devices of this process, by position."""
  return sorted(client.local_devices(), key=lambda device: device.local_hardware_id)


def _is_computed(shard: jax.Array) -> bool:
  """Also for a shard that another thread donates at this moment."""
  try:
    return shard.is_deleted() or shard.is_ready()
  except RuntimeError:
    return shard.is_deleted()


def main(descriptor: int, devices: int) -> None:
  """Runs until the server has gone."""
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_enable_x64", True)
  jax.config.update("jax_enable_compilation_cache", False)
  lapack._lapack.initialize()
  Worker(Connection(descriptor), devices).run()


if __name__ == "__main__":
  main(*map(int, sys.argv[1:]))
