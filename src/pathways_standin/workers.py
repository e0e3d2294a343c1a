"""Slices as processes: the devices of a server whose slices can be killed like any process.

The server keeps handles and routes data; a worker (worker.py) for each slice holds the data and computes. The server's
own devices only compile programs, for the workers and to describe them to clients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from jaxlib import _jax

from pathways_standin.arguments import WORKER_TIMEOUT
from pathways_standin.arrays import Array, Shard
from pathways_standin.devices import Devices
from pathways_standin.executables import Executable
from pathways_standin.gates import Gate
from pathways_standin.runtime import Place, Rearrange, Runtime
from pathways_standin.status import Status, from_error
from pathways_standin.worker import ALONE

# Without a heartbeat: the server notices a lost worker itself, and XLA would end the other workers.
FOREVER_SECONDS = 1_000_000
_PING_SECONDS = 1.0
_START_SECONDS = 120.0  # of a worker, which imports JAX

_log = logging.getLogger(__name__)

Answer = Callable[[Any, str], None]  # called with a value and an error, "" if there is none


class Operation:
  """A program that runs on some slices, or a copy, that may not have ended."""

  def __init__(self, number: int, slices: frozenset[int], world: int, inputs: Iterable[Operation]) -> None:
    """number: larger than of earlier operations. world: where it runs. inputs: it needs their results."""
    self.number, self.slices, self.world, self._left = number, slices, world, set(slices)
    self.error: Status | None = None
    self.ended = Gate(number)
    self.inputs = tuple(operation for operation in inputs if not operation.ended.is_open)

  def end(self, slice_id: int) -> None:
    """The part of a slice has ended."""
    self._left.discard(slice_id)
    if not self._left:
      self.inputs = ()
      self.ended.open()

  def fail(self, error: Status) -> None:
    """It will never end, or ended with an error."""
    self.error, self.inputs = self.error or error, ()
    self.ended.open()

  def wait(self) -> None:
    """Returns when it has ended. Raises Status if it failed."""
    ended = threading.Event()
    self.ended.when_open(ended.set)
    ended.wait()
    if self.error is not None:
      raise self.error


class HostShard:
  """The value of a shard on its way to this process. It has those methods of a JAX array that the server uses."""

  def __init__(self, shape: tuple[int, ...], operation: Operation) -> None:
    """operation: the copy."""
    self.shape, self.operation = shape, operation
    self.value: np.ndarray | None = None

  def is_deleted(self) -> bool:
    return False

  def is_ready(self) -> bool:
    return self.operation.ended.is_open

  def block_until_ready(self) -> HostShard:
    """Raises Status if the copy failed."""
    self.operation.wait()
    return self

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    self.operation.wait()
    assert self.value is not None
    return self.value


class RemoteShard:
  """A shard in a worker. It has those methods of a JAX array that the server uses."""

  def __init__(self, worker: SliceProcess, shape: tuple[int, ...], operation: Operation | None) -> None:
    """operation: computes it; None: it is there when the worker has handled the message that makes it."""
    self.worker, self.shape, self.operation = worker, shape, operation
    self.key = next(worker.keys)
    self.donated = False

  def __del__(self) -> None:
    if not self.worker.ended:
      self.worker.free(self.key)

  def is_deleted(self) -> bool:
    return self.donated

  def is_ready(self) -> bool:
    return self.operation is None or self.operation.ended.is_open

  def block_until_ready(self) -> RemoteShard:
    """Raises Status if its computation failed."""
    if self.operation is not None:
      self.operation.wait()
    return self


class SliceProcess:
  """The process of a slice, seen from the server. Sending never blocks."""

  def __init__(
    self, slice_id: int, devices: int, lost: Callable[[SliceProcess], None], broken: Callable[[int], None]
  ) -> None:
    """devices: of the slice. lost: called in a thread of its own when the process has ended. broken: called with the
    number of a world that cannot be formed, or whose connections have broken."""
    self.slice_id, self.keys = slice_id, itertools.count(1)
    self.sent: dict[int, int] = {}  # the programs that it has: number -> world
    self.ended = False
    self.gone = threading.Event()  # the process has ended, and everybody knows
    self._lost, self._broken = lost, broken
    self._operations: dict[int, Operation] = {}
    self._requests: dict[int, Answer] = {}
    self._heard, self._silent_seconds = True, 0.0  # since the last ping; and before it
    self._end_reason = "has ended"
    self._numbers = itertools.count(1)
    self._out: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "pathways_standin.worker", str(theirs.fileno()), str(devices)]
    # A process group of its own: Ctrl-C reaches the server only. Gloo writes to the standard output.
    self.process = subprocess.Popen(
      command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
    )
    theirs.close()
    self._connection = Connection(ours.detach())
    for target in (self._send_all, self._receive_all):
      threading.Thread(target=target, name=f"standin-slice-{slice_id}", daemon=True).start()

  def send(self, *message: Any) -> None:
    self._out.put(message)

  def free(self, key: int) -> None:
    """May be called by the garbage collector, in any thread."""
    self._out.put(("free", [key]))

  def ask(self, name: str, *arguments: Any, answer: Answer) -> int:
    """Sends a message with a new number, which it returns. `answer` is called in another thread, or at once."""
    number = next(self._numbers)
    with self._lock:
      ended = self.ended
      if not ended:
        self._requests[number] = answer
    if ended:
      answer(None, self._gone())
    else:
      self.send(name, number, *arguments)
    return number

  def drop_request(self, number: int) -> None:
    """Nobody waits for this answer any more."""
    with self._lock:
      self._requests.pop(number, None)

  def wait_for_start(self) -> None:
    """Returns when the process is ready, or has ended. Kills it if it takes too long."""
    ready = threading.Event()
    self.ask("hello", answer=lambda value, error: ready.set())
    if not ready.wait(_START_SECONDS):
      self.kill(f"did not start in {_START_SECONDS:g} s")
      self.gone.wait()

  def ping(self, timeout: float) -> None:
    """To be called every _PING_SECONDS. Kills a process that has not answered for `timeout` seconds.

    Counts pings, not time, because this process may have been stopped as well.
    """
    self._silent_seconds = 0.0 if self._heard else self._silent_seconds + _PING_SECONDS
    self._heard = False
    if self._silent_seconds >= timeout:
      _log.warning("slice %d is lost: its process %d is silent", self.slice_id, self.process.pid)
      self.kill(f"has not answered for {timeout:g} s and was killed")
    self.send("ping")

  def kill(self, reason: str = "has ended") -> None:
    """Kills the process. reason: what errors will say of it."""
    self._end_reason = reason
    self.process.kill()

  def begin(self, operation: Operation) -> int:
    """The number of an operation for messages to this worker."""
    number = next(self._numbers)
    with self._lock:
      if not self.ended:
        self._operations[number] = operation
        return number
    operation.fail(from_error(RuntimeError(self._gone())))
    return number

  def operations(self) -> list[Operation]:
    """Those that have not ended here."""
    with self._lock:
      return list(self._operations.values())

  def give_up(self, world: int) -> list[Operation]:
    """Ends a world here: its operations, which never end, are forgotten and returned."""
    self.send("abandon", world)
    with self._lock:
      given_up = {number: operation for number, operation in self._operations.items() if operation.world == world}
      for number in given_up:
        del self._operations[number]
    return list(given_up.values())

  @property
  def ending(self) -> str:
    """How the process has ended."""
    return f"its process {self.process.pid} {self._end_reason}"

  def _gone(self) -> str:
    return f"DATA_LOSS: slice {self.slice_id} is down: {self.ending}"

  def _send_all(self) -> None:
    """Thread."""
    with contextlib.suppress(OSError):
      while (message := self._out.get()) is not None:
        self._connection.send(message)

  def _receive_all(self) -> None:
    """Thread: handles what the worker sends, until it ends."""
    with contextlib.suppress(EOFError, OSError):
      while True:
        name, number, *rest = self._connection.recv()
        self._heard = True
        if name == "ended":
          self.end_operation(number, rest[0])
        elif name == "broken":
          self._broken(number)
        else:
          with self._lock:
            answer = self._requests.pop(number, None)
          if answer is not None:
            answer(*rest)
    self.process.wait()
    with self._lock:
      self.ended = True
      operations, self._operations = list(self._operations.values()), {}
      requests, self._requests = list(self._requests.values()), {}
    for answer in requests:
      answer(None, self._gone())
    for operation in operations:
      operation.fail(from_error(RuntimeError(self._gone())))
    self._out.put(None)
    self._lost(self)
    self.gone.set()

  def end_operation(self, number: int, error: str) -> None:
    """The part of an operation that runs here has ended, perhaps with an error."""
    with self._lock:
      operation = self._operations.pop(number, None)
    if operation is None:
      return  # it was given up
    if error:
      operation.fail(_status(error))
    if "Gloo" in error:
      self._broken(operation.world)
    operation.end(self.slice_id)


def _status(error: str) -> Status:
  """The error of an operation. A connection of gloo breaks when a worker is lost, before the server knows the loss."""
  if "Gloo" in error:
    return Status("DATA_LOSS", f"another slice was lost during a program: {error}")
  return from_error(RuntimeError(error))


@dataclasses.dataclass
class _Executable:
  number: int
  binary: bytes  # XLA's serialized executable
  options: bytes
  shard_shapes: list[tuple[int, ...]]  # of each result


class WorkerRuntime(Runtime):
  """Shards are in the workers. All methods are called with the lock of the slices, except where they say otherwise."""

  def __init__(
    self,
    devices: Devices,
    lock: threading.RLock,
    note_loss: Callable[[int, str], None],
    timeout: float = WORKER_TIMEOUT,
  ) -> None:
    """note_loss(slice, reason): called when a worker has ended. timeout: seconds of silence that end a worker."""
    super().__init__(devices)
    self._note_loss, self._lock = note_loss, lock
    self._workers: dict[int, SliceProcess] = {}  # of the slices that are up
    self._worlds: dict[tuple[SliceProcess, ...], int] = {}  # members, by slice -> the number of their world
    self._services: list[Any] = []  # of all worlds: an old client must not miss its service
    self._programs: weakref.WeakKeyDictionary[Executable, _Executable] = weakref.WeakKeyDictionary()
    self._numbers = itertools.count(ALONE + 1)
    self._start(range(devices.slices))
    if len(self._workers) < devices.slices:
      raise RuntimeError("a worker of the Pathways stand-in did not start; its messages say why")
    threading.Thread(target=self._watch, args=(timeout,), name="standin-watch", daemon=True).start()

  # ---- workers and worlds

  def _start(self, slices: Iterable[int]) -> None:
    """Starts workers and waits until they are ready. Called without the lock."""
    started = {s: SliceProcess(s, self.devices.per_slice, self._when_lost, self._when_broken) for s in slices}
    for worker in started.values():
      worker.wait_for_start()
    with self._lock:
      self._workers.update({s: worker for s, worker in started.items() if not worker.ended})

  def _watch(self, timeout: float) -> None:
    """Thread: no wait for a worker is endless, because a worker that has stopped answering is killed."""
    while True:
      time.sleep(_PING_SECONDS)
      for worker in list(self._workers.values()):
        worker.ping(timeout)

  def _world(self, slices: Iterable[int]) -> int:
    """The world of the workers of these slices, which are up. They form it when it is first asked for."""
    members = tuple(self._workers[s] for s in sorted(slices))
    if len(members) == 1:
      return ALONE
    if members not in self._worlds:
      address = f"127.0.0.1:{_free_port()}"
      service = _jax.get_distributed_runtime_service(
        address, len(members), heartbeat_timeout=FOREVER_SECONDS, shutdown_timeout=1, recoverable=True
      )
      self._services.append(service)
      number = self._worlds[members] = next(self._numbers)
      for node, worker in enumerate(members):
        worker.send("join", number, address, node, len(members), FOREVER_SECONDS)
    return self._worlds[members]

  def _when_lost(self, worker: SliceProcess) -> None:
    """Called in a thread of the worker, without the lock."""
    with self._lock:
      if self._workers.get(worker.slice_id) is worker:
        del self._workers[worker.slice_id]
        self._note_loss(worker.slice_id, worker.ending)
      self._leave([members for members in self._worlds if worker in members])

  def _when_broken(self, world: int) -> None:
    """Called in a thread of a worker, without the lock. The next program on these slices forms a new world."""
    with self._lock:
      self._leave([members for members, number in self._worlds.items() if number == world])

  def _leave(self, worlds: Iterable[tuple[SliceProcess, ...]]) -> None:
    """Gives up worlds, the programs that run there, and all programs that need their results."""
    for members in worlds:
      number = self._worlds.pop(members)
      for operation in [operation for worker in members for operation in worker.give_up(number)]:
        operation.fail(Status("DATA_LOSS", "another slice of a program was lost"))
    running = {operation for worker in self._workers.values() for operation in worker.operations()}
    for operation in sorted(running, key=lambda operation: operation.number):
      error = next((needed.error for needed in operation.inputs if needed.error is not None), None)
      if error is not None:
        operation.fail(error)

  def describe(self, slice_id: int) -> dict[str, Any]:
    worker = self._workers.get(slice_id)
    return {"pid": None if worker is None else worker.process.pid}

  def shut_down(self, slice_id: int) -> None:
    """Kills the worker. Called without the lock."""
    worker = self._workers.get(slice_id)
    if worker is not None:
      worker.kill()
      worker.gone.wait()

  def start_up(self, slice_id: int) -> None:
    """Called without the lock."""
    worker = self._workers.get(slice_id)
    if worker is not None and worker.process.poll() is not None:
      worker.gone.wait()  # it was killed a moment ago
    if slice_id not in self._workers:
      self._start([slice_id])

  def close(self) -> None:
    for worker in list(self._workers.values()):
      worker.kill()  # a client of XLA prints a page of errors about a service that ends before it

  def runs(self, slice_id: int) -> bool:
    return slice_id in self._workers

  # ---- shards and programs

  def put(self, value: Any, device: int, memory: str) -> Shard:
    slice_id, position = divmod(device, self.devices.per_slice)
    worker = self._workers[slice_id]
    if isinstance(value, RemoteShard) and value.worker is worker:
      shard = RemoteShard(worker, value.shape, value.operation)
      worker.send("copy", shard.key, value.key, position, memory)
      return shard
    if isinstance(value, RemoteShard):
      return self.rearrange([value], lambda values: values, [(device, value.shape)], memory)[0]
    found = np.asarray(value)
    shard = RemoteShard(worker, found.shape, None)
    worker.send("put", shard.key, found, position, memory)
    return shard

  def rearrange(self, shards: Sequence[Any], change: Rearrange, places: Sequence[Place], memory: str) -> list[Shard]:
    """Returns at once. The values travel through this process when they are there."""
    needed = [shard.operation for shard in shards if shard.operation is not None]
    made: list[Any] = []
    numbers: list[tuple[SliceProcess, int]] = []
    for device, shape in places:
      worker = self._workers[self.devices.slice_of(device)]
      operation = Operation(next(self._numbers), frozenset([worker.slice_id]), ALONE, needed)
      made.append(RemoteShard(worker, shape, operation))
      numbers.append((worker, worker.begin(operation)))
      worker.send("expect", made[-1].key)
    # Not the shards themselves: a client may delete them meanwhile.
    targets = [(shard.key, device % self.devices.per_slice) for shard, (device, _) in zip(made, places, strict=True)]
    sources = [self.to_host(shard) for shard in shards]

    def arrive() -> None:
      error, values = "", list[Any]([None] * len(targets))
      try:
        values = change([np.asarray(source) for source in sources])
      except Exception as found:  # noqa: BLE001 -- whoever waits for the copy gets it
        error = str(from_error(found))
      for value, (worker, number), (key, position) in zip(values, numbers, targets, strict=True):
        worker.send("arrive", key, value, position, memory, error)
        worker.end_operation(number, error)

    _when_all_ended([source.operation for source in sources], arrive)
    return made

  def to_host(self, shard: Any) -> Any:
    source, worker = shard.operation, shard.worker
    copy = Operation(next(self._numbers), frozenset([worker.slice_id]), ALONE, [] if source is None else [source])
    found = HostShard(shard.shape, copy)

    def arrive(value: Any, error: str) -> None:
      found.value = value
      if error:
        copy.fail((source and source.error) or from_error(RuntimeError(error)))
      else:
        copy.end(worker.slice_id)

    number = worker.ask("get", shard.key, answer=arrive)

    def give_up() -> None:
      if source.error is not None:  # the worker may wait for ever for a program that was given up
        worker.drop_request(number)
        copy.fail(source.error)

    if source is not None:
      source.ended.when_open(give_up)
    return found

  def held_back_by(self, shards: Sequence[Any]) -> Gate | None:
    return next((shard.operation.ended for shard in shards if not shard.is_ready()), None)

  def prepare(self, executable: Executable, options: bytes) -> None:
    """Called without the lock."""
    shapes = []
    for output in executable.outputs:
      part = output.spec.placement.parts(self.devices, output.spec.shape)[0]
      shapes.append(tuple(len(range(n)[s]) for s, n in zip(part, output.spec.shape, strict=True)))
    binary = self.devices.client.serialize_executable(executable.loaded)
    made = self._programs[executable] = _Executable(next(self._numbers), binary, options, shapes)
    weakref.finalize(executable, self._forget, made.number)
    slices = frozenset(map(self.devices.slice_of, executable.devices))
    with self._lock:
      if slices <= set(self._workers):
        self._send_program(made, executable.devices)  # now: the first execution should not wait for it

  def _send_program(self, program: _Executable, devices: Sequence[int]) -> int:
    """Sends the program where it is missing. Returns its world."""
    slices = sorted(set(map(self.devices.slice_of, devices)))
    world = self._world(slices)
    for slice_id in slices:
      worker = self._workers[slice_id]
      if worker.sent.get(program.number) != world:
        places = [(slices.index(self.devices.slice_of(d)), d % self.devices.per_slice) for d in devices]
        worker.send("load", program.number, program.binary, program.options, world, places)
        worker.sent[program.number] = world
    return world

  def _forget(self, number: int) -> None:
    for worker in list(self._workers.values()):
      worker.sent.pop(number, None)
      worker.send("forget", number)

  def run(self, executable: Executable, arguments: Sequence[Array], kept: frozenset[int]) -> list[list[Shard]]:
    slices = [self.devices.slice_of(device) for device in executable.devices]
    given: list[list[Any]] = [array.shards for array in arguments]
    needed = {shard.operation for shards in given for shard in shards if shard.operation is not None}
    for operation in needed:
      if operation.error is not None:
        return [[operation.error] * len(slices) for _ in executable.outputs]
    program = self._programs[executable]
    world = self._send_program(program, executable.devices)
    operation = Operation(next(self._numbers), frozenset(slices), world, needed)
    results: list[list[Any]] = [
      [RemoteShard(self._workers[s], shape, operation) for s in slices] for shape in program.shard_shapes
    ]
    for slice_id in sorted(operation.slices):
      worker = self._workers[slice_id]
      of_slice = [i for i, s in enumerate(slices) if s == slice_id]
      keys = [[shards[i].key for i in of_slice] for shards in given]
      made = [[shards[i].key for i in of_slice] for shards in results]
      worker.send("execute", worker.begin(operation), program.number, keys, sorted(kept & executable.donated), made)
    for i in executable.donated - kept:
      for shard in given[i]:
        shard.donated = True
    return results


def _when_all_ended(operations: Sequence[Operation], call: Callable[[], None]) -> None:
  """Calls once, in the thread that ends the last of the operations."""
  left, lock = len(operations), threading.Lock()

  def one_ended() -> None:
    nonlocal left
    with lock:
      left -= 1
      last = left == 0
    if last:
      call()

  for operation in operations:
    operation.ended.when_open(one_ended)


def _free_port() -> int:
  """A port of the loopback address that nobody listens on now."""
  with socket.socket() as sock:
    sock.bind(("127.0.0.1", 0))
    return int(sock.getsockname()[1])
