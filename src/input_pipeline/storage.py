"""The one boundary to storage: files and folders of this machine, and of object stores (gs://, s3://).

Each library of an object store has errors of its own, and so has each file system. Whatever fails here is a
StorageError. What is there and what is not is no failure, and keeps Python's errors: FileNotFoundError,
FileExistsError, NotADirectoryError and IsADirectoryError. So only "not found" means that something is not there.
"""

from __future__ import annotations

import contextlib
import contextvars
import errno
import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from types import MappingProxyType
from typing import Any, TypeVar

T = TypeVar("T")

TOLD_AFTER_SECONDS = 5.0  # of silence: then a line says what is awaited
ANSWER_SECONDS = 60.0  # that an object store has to answer, with everything that its library repeats
_BYTES_PER_SECOND = 1 << 20  # a slow network: large requests get more time
# Bytes of a request. At 50 ms per request this is above 100 MB/s, and a tokenizer needs less.
BLOCK = 2**23
_AGAIN_SECONDS = 1.0  # in which a call on this machine is repeated: a stale handle of NFS is gone then

_limit = contextvars.ContextVar("storage_limit", default=0.0)  # seconds; 0: ANSWER_SECONDS
_is_silent = contextvars.ContextVar("storage_is_silent", default=False)  # no line says what is awaited
_FACTS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
_PASSING = {
  getattr(errno, name, None)
  for name in "EAGAIN EBUSY EINTR EIO EREMOTEIO ESTALE ETIMEDOUT ECONNABORTED ECONNREFUSED ECONNRESET EPIPE ENOTCONN "
  "EHOSTDOWN EHOSTUNREACH ENETDOWN ENETRESET ENETUNREACH ENOSPC EDQUOT EMFILE ENFILE ENOMEM".split()
}
# Classes of libraries, whose errors and those of their subclasses may pass.
_PASSING_CLASSES = {
  "aiohttp.ClientError", "botocore.ConnectionError", "botocore.HTTPClientError", "gcsfs.ChecksumError",
  "google.TransportError", "httpx.TransportError", "httpx2.TransportError", "requests.ChunkedEncodingError",
  "requests.ConnectionError", "requests.Timeout", "socket.gaierror",
}  # fmt: skip
# Variables of the environment, which TensorStore reads at its first connection.
TENSORSTORE_LIMITS = MappingProxyType(
  {
    "TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS": "20",
    "TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS": "20",
    "TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES": "1",
  }
)
# Of TensorStore, which has only texts.
_PASSING_WORDS = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "Stale file handle")
_REFUSED_WORDS = ("PERMISSION_DENIED", "UNAUTHENTICATED")


class StorageError(OSError):
  """Storage failed. operation: a participle; passes: whether the same call may succeed later."""

  def __init__(self, operation: str, address: str, cause: BaseException) -> None:
    super().__init__(f"{address} cannot be {operation}: {_reason(cause)}")
    self.operation, self.address, self.cause, self.passes = operation, address, cause, may_pass(cause)
    self.errno = getattr(cause, "errno", None)

  def __reduce__(self) -> tuple[Any, ...]:
    """For another process: libraries have causes that cannot be pickled."""
    return StorageError._of, (type(self), str(self), {**vars(self), "cause": None})

  @staticmethod
  def _of(kind: type[StorageError], text: str, fields: dict[str, Any]) -> StorageError:
    error = kind.__new__(kind)
    OSError.__init__(error, text)
    vars(error).update(fields)
    return error

  @property
  def is_full(self) -> bool:
    return self.errno in (errno.ENOSPC, errno.EDQUOT)

  @property
  def remedy(self) -> str:
    """What the user can do, as a sentence."""
    if self.is_full:
      return "Make room there, or choose another place."
    if is_address(self.address):
      what = "the network, and that the store works" if self.passes else "credentials, permissions, region and endpoint"
      return f"Check the address, {what}; then start the same command again."
    return "Check the file system and the permissions; then start the same command again."


def failure(error: BaseException | None) -> StorageError | None:
  """The failure of storage that has caused `error`, if one has."""
  return next((cause for cause in causes(error, explicit=True) if isinstance(cause, StorageError)), None)


def causes(error: BaseException | None, *, explicit: bool = False) -> Iterator[BaseException]:
  """Yields `error`, then its cause (`raise ... from`) or else its context, and so on, each once: threads that raise the
  same error several times may make a circle. explicit: causes only, no contexts."""
  seen: set[int] = set()
  while error is not None and id(error) not in seen:
    yield error
    seen.add(id(error))
    error = error.__cause__ if explicit else error.__cause__ or error.__context__


def is_address(value: str) -> bool:
  """Whether `value` names something in an object store, and not a path of this machine."""
  return "://" in value


def is_outage(error: BaseException) -> bool:
  """Whether storage failed or refused, which says nothing about the file that was to be read."""
  failed = isinstance(error, StorageError | PermissionError) or may_pass(error)
  return failed or any(word in str(error) for word in _REFUSED_WORDS)


def raise_outage(operation: str, address: object, error: BaseException) -> None:
  """Raises StorageError if `error` says nothing about the file at `address`. The caller says what it says else."""
  if isinstance(error, StorageError):
    raise error
  if may_pass(error):
    raise StorageError(operation, str(address), error) from error


def may_pass(error: BaseException) -> bool:
  """Whether what has raised this error may succeed later."""
  if isinstance(error, StorageError):
    return error.passes
  if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None) in _PASSING:
    return True
  answer = getattr(error, "response", None)
  if isinstance(answer, dict):
    told = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
  else:
    told = getattr(answer, "status_code", None)  # of requests and httpx
  status = str(told or getattr(error, "code", None) or getattr(error, "status", None) or "")
  if status.isdigit():
    return status in ("408", "429") or 500 <= int(status) < 600
  names = {f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).__mro__}
  return bool(names & _PASSING_CLASSES) or any(word in str(error) for word in _PASSING_WORDS)


def _reason(error: BaseException) -> str:
  if isinstance(error, OSError) and error.strerror:
    return error.strerror
  text = " ".join(str(error).split())[:400]
  if isinstance(error, TimeoutError) and not text:
    return f"no answer in {seconds():g} s"
  return text if type(error) is OSError and text else f"{type(error).__name__}: {text or 'no message'}"


def seconds() -> float:
  """How long an object store may take for an answer."""
  return _limit.get() or ANSWER_SECONDS


@contextlib.contextmanager
def limited(most: float, *, is_silent: bool = False) -> Iterator[None]:
  """Inside the block, an object store has at most so many seconds for an answer: something else can do without it.
  is_silent: nobody waits for the answer, so no line says that it is awaited."""
  limit, silent = _limit.set(min(most, seconds())), _is_silent.set(is_silent or _is_silent.get())
  try:
    yield
  finally:
    _limit.reset(limit)
    _is_silent.reset(silent)


@contextlib.contextmanager
def access(operation: str, address: object) -> Iterator[None]:
  """Makes a StorageError of whatever the block raises, unless it says what is there. The block calls libraries of
  storage only."""
  try:
    yield
  except _FACTS as error:
    if (cause := error.__cause__) is None or not may_pass(cause):
      raise
    raise StorageError(operation, str(address), cause) from None  # fsspec's https:// finds nothing without a network
  except StorageError:
    raise
  except Exception as error:  # noqa: BLE001 -- each library has its own
    raise StorageError(operation, str(address), error) from None


@contextlib.contextmanager
def _told(operation: str, address: str) -> Iterator[None]:
  """After TOLD_AFTER_SECONDS in the block, a line says what is awaited."""
  if not is_address(address) or _is_silent.get():
    yield
    return
  text = f"Waiting for {address}, which is being {operation}..."
  waiting = functools.partial(print, text, file=sys.stderr, flush=True)
  timer = threading.Timer(TOLD_AFTER_SECONDS, waiting)
  timer.daemon = True
  timer.start()
  try:
    yield
  finally:
    timer.cancel()


def perform(operation: str, address: str, work: Callable[[], T]) -> T:
  """work(), as in `access`. What may succeed later is repeated, for as long as `seconds` in an object store: each try
  has the time that is left."""
  most = seconds() if is_address(address) else _AGAIN_SECONDS
  end, first = time.monotonic() + most, None
  with _told(operation, address):
    for tried in itertools.count():
      try:
        with access(operation, address), limited(max(end - time.monotonic(), 0.01)):
          return work()
      except StorageError as error:
        pause = min(0.1 * 2**tried, 4.0)
        if not error.passes or error.is_full or time.monotonic() + pause > end:
          # A try that only ran out of time says less than the first.
          raise first if first and isinstance(error.cause, TimeoutError) else error from None
        first = first or error
        time.sleep(pause)
      except FileNotFoundError:
        if tried == 0 or operation != "deleted":
          raise
        return None  # type: ignore[return-value]  # the call before has deleted it, and its answer was lost
  raise AssertionError


def limit_tensorstore() -> None:
  """Lets TensorStore give up connections over which nothing comes. Call it before the first one."""
  for name, value in TENSORSTORE_LIMITS.items():
    os.environ.setdefault(name, value)


def system(address: str) -> tuple[Any, str]:
  """(file system of fsspec, path in it). fsspec keeps one file system of each kind for a process. Raises ImportError or
  ValueError if no package reads such an address."""
  import fsspec
  from fsspec import config, core

  # File systems that remember no listings, because other processes write too. Orbax gets the same objects.
  for name, own in {"gs": {"requests_timeout": 30}, "gcs": {"requests_timeout": 30}, "s3": {}}.items():
    config.conf[name] = {"use_listings_cache": False, **own, **config.conf.get(name, {})}
  for name in ("gcsfs", "s3fs", "fsspec"):  # they print tracebacks of what they raise
    logging.getLogger(name).setLevel(logging.CRITICAL)
  kind = fsspec.get_filesystem_class(address.partition("://")[0].rpartition("::")[2])
  connect = functools.partial(core.url_to_fs, address)
  # fsspec keeps a file system that is not asynchronous for each thread.
  found, path = _in_time(connect) if kind.async_impl else connect()
  return found, path


def _in_time(work: Callable[[], T]) -> T:
  """work(), which may look for credentials in the network. Raises TimeoutError."""
  result: futures.Future[T] = futures.Future()

  def run() -> None:
    try:
      result.set_result(work())
    except BaseException as error:  # noqa: BLE001 -- raised by `result`
      result.set_exception(error)

  threading.Thread(target=run, name="storage-connect", daemon=True).start()
  return result.result(seconds())


def in_time(found: Any, size: int) -> dict[str, float]:
  """The option of a method of fsspec that limits its time. size: bytes that travel."""
  return {"timeout": seconds() + size / _BYTES_PER_SECOND} if found.async_impl else {}


def ask(operation: str, address: str, method: str, *arguments: Any, size: int = 0, **options: Any) -> Any:
  """What a method of fsspec answers about `address`. arguments: after the path. size: bytes that travel."""

  def work() -> Any:
    found, path = system(address)
    return getattr(found, method)(path, *arguments, **options, **in_time(found, size))

  return perform(operation, address, work)
