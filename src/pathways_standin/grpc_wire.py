"""The gRPC service of the IFRT proxy protocol.

A client asks for the version, opens one stream for its session, and moves host buffers on other connections.
"""

from __future__ import annotations

import itertools
import logging
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import jax

from pathways_standin.client_session import ClientSession
from pathways_standin.proxy_messages import Messages
from pathways_standin.status import Status

_SERVICE = "xla.ifrt.proxy.GrpcIfrtService"
_SESSION_METADATA = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_STORE_METADATA = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_CHUNK = 1 << 20  # bytes of a host buffer in one message
_THREADS = 64  # one for each session, and for each host buffer on its way
_PROBE_SECONDS = 60.0
# Without it, the client accepts only servers with ALTS credentials, which exist on Google Cloud.
INSECURE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"

_log = logging.getLogger(__name__)

Versions = tuple[int, int, int, int]  # oldest and newest protocol version, oldest and newest version of serialization


class Service:
  """Serves clients of this jaxlib at one address."""

  def __init__(self, messages: Messages, open_session: Callable[[int], ClientSession]) -> None:
    """open_session: makes the session with the given number."""
    self._messages = messages
    self._open_session = open_session
    self._numbers = itertools.count(1)
    self._sessions: dict[int, ClientSession] = {}
    self._own_versions = probe_versions(messages)
    self._server = _server(messages, self._methods())

  def start(self, address: str) -> str:
    """Begins to serve. Returns the address, with the chosen port if it was 0. Raises RuntimeError if it is taken."""
    try:
      port = self._server.add_insecure_port(address)
    except RuntimeError as error:
      raise RuntimeError(f"{address}: cannot listen there ({error}). Choose another --port or --unix.") from error
    self._server.start()
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

  def sessions(self) -> list[ClientSession]:
    return list(self._sessions.values())

  def drop(self) -> int:
    """Ends the connections of all clients. Returns how many there were."""
    dropped = self.sessions()
    for session in dropped:
      session.responses.put(None)
    return len(dropped)

  def _methods(self) -> dict[str, Any]:
    return {
      "GetVersion": (grpc.unary_unary_rpc_method_handler, self._get_version, "GrpcGetVersionRequest"),
      "IfrtSession": (grpc.stream_stream_rpc_method_handler, self._serve_session, "IfrtRequest"),
      "HostBufferStore": (grpc.stream_unary_rpc_method_handler, self._store, "GrpcHostBufferStoreRequest"),
      "HostBufferLookup": (grpc.unary_stream_rpc_method_handler, self._look_up, "GrpcHostBufferLookupRequest"),
      "HostBufferDelete": (grpc.unary_unary_rpc_method_handler, self._delete, "GrpcHostBufferDeleteRequest"),
    }

  def _get_version(self, request: Any, context: grpc.ServicerContext) -> Any:
    versions = _versions(request)
    if versions != self._own_versions:
      _log.warning("refused a client of another jaxlib: versions %s, here %s", versions, self._own_versions)
      context.abort(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the client's jaxlib speaks versions {versions} of the IFRT proxy protocol, and the Pathways stand-in runs "
        f"jaxlib {jax.lib.__version__} with versions {self._own_versions}: start it with the client's Python "
        "environment.",
      )
    response = self._messages.proxy("GrpcGetVersionResponse")()
    response.version.CopyFrom(request.max_version)
    return response

  def _serve_session(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
    session = self._open_session(next(self._numbers))
    self._sessions[session.number] = session
    _log.info("client %d has connected", session.number)
    reader = threading.Thread(
      target=self._read, args=(session, requests), name=f"standin-{session.number}", daemon=True
    )
    reader.start()
    try:
      while (response := session.responses.get()) is not None:
        yield response
    finally:
      _log.info("client %d has gone", session.number)
      del self._sessions[session.number]
      session.close()
    if context.is_active():
      context.abort(grpc.StatusCode.UNAVAILABLE, "the Pathways stand-in was told to drop the connection")

  def _read(self, session: ClientSession, requests: Iterator[Any]) -> None:
    """Thread: processes requests in their order until the stream ends."""
    try:
      for request in requests:
        session.process(request)
    except grpc.RpcError:
      pass  # the client has gone
    except Exception:  # noqa: BLE001 -- a client that waited for an answer would wait for ever
      _log.exception("session %d failed", session.number)
    session.responses.put(None)

  def _find(self, number: int, context: grpc.ServicerContext) -> ClientSession:
    session = self._sessions.get(number)
    if session is None:
      context.abort(grpc.StatusCode.NOT_FOUND, f"Session id {number} does not exist")
    assert session is not None
    return session

  def _store(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
    metadata = _metadata(context, _STORE_METADATA, self._messages.proxy("GrpcHostBufferStoreMetadata"))
    data = b"".join(request.data for request in requests)
    if len(data) != metadata.buffer_size:
      context.abort(grpc.StatusCode.DATA_LOSS, f"expected {metadata.buffer_size} bytes but got {len(data)}")
    self._find(metadata.session_id, context).buffers.store(metadata.handle, data)
    return self._messages.proxy("GrpcHostBufferStoreResponse")()

  def _look_up(self, request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
    try:
      data = self._find(request.session_id, context).buffers.look_up(request.handle)
    except Status as error:
      context.abort(grpc.StatusCode.NOT_FOUND, error.message)
    for start in range(0, max(len(data), 1), _CHUNK):  # one message even if the buffer is empty
      yield self._messages.proxy("GrpcHostBufferLookupResponse")(data=data[start : start + _CHUNK])

  def _delete(self, request: Any, context: grpc.ServicerContext) -> Any:
    self._find(request.session_id, context).buffers.delete(request.handle)
    return self._messages.proxy("GrpcHostBufferDeleteResponse")()


def probe_versions(messages: Messages) -> Versions:
  """The versions that a client of this jaxlib offers: its own client is asked to connect, and is then refused."""
  found: list[Versions] = []
  asked = threading.Event()

  def get_version(request: Any, context: grpc.ServicerContext) -> Any:
    found.append(_versions(request))
    asked.set()
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "only the version was asked for")

  def ask(address: str) -> None:
    from jax.extend.backend import ifrt_proxy

    options = ifrt_proxy.ClientConnectionOptions()
    options.connection_timeout_in_seconds = 1
    try:
      ifrt_proxy.get_client(f"grpc://{address}", options)
    except RuntimeError:  # always: it was refused
      return

  os.putenv(INSECURE, "true")
  with tempfile.TemporaryDirectory() as folder:
    methods = {"GetVersion": (grpc.unary_unary_rpc_method_handler, get_version, "GrpcGetVersionRequest")}
    server = _server(messages, methods)
    address = f"unix:{pathlib.Path(folder) / 'probe'}"
    server.add_insecure_port(address)
    server.start()
    threading.Thread(target=ask, args=(address,), name="standin-probe", daemon=True).start()
    asked.wait(_PROBE_SECONDS)
    server.stop(grace=1.0)
  if not found:
    raise RuntimeError(f"the IFRT proxy client of jaxlib did not connect within {_PROBE_SECONDS:g} s")
  return found[0]


def _server(messages: Messages, methods: dict[str, Any]) -> grpc.Server:
  handlers = {
    name: make(
      function,
      request_deserializer=messages.proxy(request).FromString,
      response_serializer=lambda message: message.SerializeToString(),
    )
    for name, (make, function, request) in methods.items()
  }
  # No reuse of a port: a second server would get a part of the connections.
  unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
  server = grpc.server(ThreadPoolExecutor(_THREADS, "standin-rpc"), options=unlimited)
  server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
  return server


def _versions(request: Any) -> Versions:
  oldest, newest = request.min_version, request.max_version
  return (
    oldest.protocol_version,
    newest.protocol_version,
    oldest.ifrt_serdes_version_number,
    newest.ifrt_serdes_version_number,
  )


def _metadata(context: grpc.ServicerContext, key: str, cls: Any) -> Any:
  for name, value in context.invocation_metadata():
    if name == key:
      return cls.FromString(value)
  context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"missing metadata {key}")
  raise AssertionError("abort raises")
