"""One connected client: its handles, and its requests in the order of their arrival."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pathways_standin import arrays, status
from pathways_standin.cpu_slices import Slices
from pathways_standin.executables import Executable
from pathways_standin.host_buffers import HostBuffers
from pathways_standin.proxy_messages import Messages
from pathways_standin.runtime import Runtime
from pathways_standin.status import Status

FIRST_SERVER_HANDLE = 1 << 62  # handles that clients invent are smaller
_COMPILERS, _WAITERS = 8, 32  # threads of a session

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class WhenReady:
  """The answer to a request: once the arrays are ready, what `finish` puts into the response."""

  arrays: Sequence[arrays.Array]
  finish: Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class InBackground:
  """The answer to a request: what `work`, which takes long, puts into the response."""

  work: Callable[[Any], None]


@dataclasses.dataclass(frozen=True)
class Uncounted:
  """The answer to a request that the client sends in batches: it does not count these responses."""


@dataclasses.dataclass(frozen=True)
class Future:
  """The end of something that a client will ask about, once."""

  error: Status | None
  counted: bool


# Fills the response, or says when it can be filled. Arguments: the session, the body of the request, the response.
Handler = Callable[["ClientSession", Any, Any], WhenReady | InBackground | Uncounted | None]


class ClientSession:
  """Handles of one client, and the answers to its requests."""

  def __init__(
    self, number: int, messages: Messages, runtime: Runtime, slices: Slices, handlers: dict[str, Handler]
  ) -> None:
    self.number, self.messages, self.runtime, self.slices = number, messages, runtime, slices
    self.devices = runtime.devices
    self.store = slices.open_store()
    self.buffers = HostBuffers()
    self.executables: dict[int, Executable] = {}
    self.futures: dict[int, Future] = {}
    self.executions: dict[int, Status | list[arrays.Array]] = {}  # status handle -> error, or results
    self.requests: collections.Counter[str] = collections.Counter()
    self.responses: queue.SimpleQueue[Any] = queue.SimpleQueue()  # None: the session has ended
    self._handlers = handlers
    self._handles = itertools.count(FIRST_SERVER_HANDLE)
    self._reply_lock = threading.Lock()
    self._answered = 0  # responses that the client counts
    self._contexts: list[int] = []  # contexts of requests that are answered, which the client may forget
    self._compilers = ThreadPoolExecutor(_COMPILERS, f"standin-{number}-compile")
    self._waiters = ThreadPoolExecutor(_WAITERS, f"standin-{number}-wait")

  def new_handle(self) -> int:
    """A handle that no client invents."""
    return next(self._handles)

  def find_executable(self, handle: int) -> Executable:
    if handle not in self.executables:
      raise Status("NOT_FOUND", f"Unknown loaded executable handle: {handle}")
    return self.executables[handle]

  def add(self, handle: int, array: arrays.Array) -> int:
    """Keeps an array under the handle, or under a new one if the client gave none (0). Returns the handle."""
    handle = handle or self.new_handle()
    self.store.insert(handle, array)
    return handle

  def describe(self) -> dict[str, Any]:
    return {
      "session": self.number,
      "arrays": len(self.store),
      "executables": len(self.executables),
      "host_buffers": len(self.buffers),
      "bytes_received": self.buffers.received,
      "bytes_sent": self.buffers.sent,
      "futures": len(self.futures) + len(self.executions),
      "requests": dict(self.requests),
    }

  # ---- requests and responses

  def process(self, request: Any) -> None:
    """Answers one request, now or later. Later requests see its effects on arrays at once."""
    name = request.WhichOneof("request")
    if name is None:
      self._reply_error(request, Status("UNIMPLEMENTED", "a request of a type that this jaxlib does not know"))
      return
    self.requests[name] += 1
    body = getattr(request, name)
    response = self.messages.proxy("IfrtResponse")()
    getattr(response, name.removesuffix("_request") + "_response").SetInParent()
    try:
      if name not in self._handlers:
        raise Status("UNIMPLEMENTED", f"{name} is not served by the Pathways stand-in")
      answer = self._handlers[name](self, body, response)
    except Exception as error:  # noqa: BLE001 -- whatever it is, the client gets it as the answer
      self._fail(request, name, body, error)
      return
    if isinstance(answer, InBackground):
      self._submit(self._compilers, self._finish, request, response, answer.work)
    elif isinstance(answer, WhenReady):
      self._when_ready(request, response, answer)
    else:
      self._reply(request, response, counted=not isinstance(answer, Uncounted))

  def _fail(self, request: Any, name: str, body: Any, error: Exception) -> None:
    """Answers with the error. Handles that the client has invented for results refer to the error from now on."""
    if not isinstance(error, Status):
      _log.warning("%s failed", name, exc_info=error)
    found = status.from_error(error)
    for handle in _invented_handles(body):
      self.store.insert(handle, found)
    if getattr(body, "result_status_handle", 0) and name == "loaded_executable_execute_request":
      self.executions[body.result_status_handle] = found
    self._reply_error(request, found)

  def _when_ready(self, request: Any, response: Any, answer: WhenReady) -> None:
    """Answers at once if the arrays are ready or lost; after their gates are open and they are computed otherwise."""
    with self.slices.lock:
      error = next((found for array in answer.arrays if (found := array.lost()) is not None), None)
      gate = next((gate for array in answer.arrays for gate in array.closed_gates().values()), None)
      computed = all(array.is_computed() for array in answer.arrays)
      shards = [shard for array in answer.arrays for shard in array.shards]
    error = error or (_failure(shards) if computed else None)
    if error is not None:
      self._reply_error(request, error)
    elif computed and gate is None:
      self._finish(request, response, answer.finish)
    elif gate is not None:
      gate.when_open(lambda: self._submit(self._waiters, self._when_ready, request, response, answer))
    else:
      self._submit(self._waiters, self._wait, request, response, answer, shards)

  def _wait(self, request: Any, response: Any, answer: WhenReady, shards: Sequence[Any]) -> None:
    """Thread: waits for shards, then looks again: the slice may have been lost meanwhile."""
    _failure(shards)
    self._when_ready(request, response, answer)

  def _finish(self, request: Any, response: Any, work: Callable[[Any], None]) -> None:
    try:
      work(response)
    except Exception as error:  # noqa: BLE001 -- it is the answer
      name = request.WhichOneof("request")
      if not isinstance(error, Status):
        _log.info("%s failed: %s", name, error)
      self._reply_error(request, status.from_error(error))
      return
    self._reply(request, response)

  def _submit(self, pool: ThreadPoolExecutor, call: Callable[..., None], request: Any, *arguments: Any) -> None:
    """Calls in a thread. An error of the call is the answer to the request."""

    def work() -> None:
      try:
        call(request, *arguments)
      except Exception as error:  # noqa: BLE001 -- a client that waited for an answer would wait for ever
        _log.warning("%s failed", request.WhichOneof("request"), exc_info=error)
        self._reply_error(request, status.from_error(error))

    with contextlib.suppress(RuntimeError):  # the session has ended
      pool.submit(work)

  def _reply(self, request: Any, response: Any, *, counted: bool = True) -> None:
    body = response.response_metadata
    body.op_id = request.request_metadata.op_id
    with self._reply_lock:
      self._note_context(request)
      if request.HasField("init_request"):
        # The client keeps this response for ever. It forgets contexts in the order of these numbers, from 0, as it
        # frees the responses; so it would forget none.
        body.seq_num = -1
      elif counted:
        body.seq_num = self._answered
        self._answered += 1
        body.destroyed_user_context_ids.extend(self._contexts)
        self._contexts.clear()
      self.responses.put(response)

  def _reply_error(self, request: Any, error: Status) -> None:
    response = self.messages.proxy("IfrtResponse")()
    response.response_metadata.op_id = request.request_metadata.op_id
    response.response_metadata.status.code = status.CODES[error.code]
    response.response_metadata.status.message = error.message
    with self._reply_lock:
      self._note_context(request)
      self.responses.put(response)

  def _note_context(self, request: Any) -> None:
    """The client keeps a traceback for every request until the server says that it does not need it any more."""
    if request.request_metadata.user_context_id:
      self._contexts.append(request.request_metadata.user_context_id)

  def close(self) -> None:
    self.buffers.close()
    self.responses.put(None)
    for pool in (self._compilers, self._waiters):
      pool.shutdown(wait=False, cancel_futures=True)
    self.slices.close_store(self.store)
    self.executables.clear()
    self.executions.clear()


def _failure(shards: Sequence[Any]) -> Status | None:
  """Waits for shards. Returns why the computation of one failed; a donated shard was computed without a failure."""
  for shard in shards:
    try:
      shard.block_until_ready()
    except Exception as error:  # noqa: BLE001 -- whatever it is, it is the answer
      if not shard.is_deleted():
        return status.from_error(error)
  return None


def _invented_handles(body: Any) -> list[int]:
  """The handles that the client has chosen for the arrays that a request makes."""
  makes = {field.name for field in body.DESCRIPTOR.fields} & {"result_handle", "result_handles", "result_array_handle"}
  if body.DESCRIPTOR.name.startswith("Make"):
    makes |= {field.name for field in body.DESCRIPTOR.fields} & {"array_handle", "array_handles"}
  values = [getattr(body, name) for name in makes]
  handles = [handle for value in values for handle in ([value] if isinstance(value, int) else value)]
  return [handle for handle in handles if handle]
