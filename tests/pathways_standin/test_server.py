"""The server as a process: who may use it, how it starts and ends, and what it answers to clients that are not JAX."""

from __future__ import annotations

import os
import queue
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from tests.support.command import is_running

from pathways_standin import process
from pathways_standin import proxy_messages as messages_lib
from pathways_standin.__main__ import main
from pathways_standin.control import main as control_main
from pathways_standin.standin_server import _HANDLERS

SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"


@pytest.fixture(scope="module")
def messages():
  return messages_lib.load()


@pytest.fixture
def channel(server):
  with grpc.insecure_channel(server.address.removeprefix("grpc://")) as opened:
    yield opened


def get_version(channel, messages, protocol=(16, 25), serdes=(2, 6)):
  request = messages.proxy("GrpcGetVersionRequest")()
  request.min_version.protocol_version, request.max_version.protocol_version = protocol
  request.min_version.ifrt_serdes_version_number, request.max_version.ifrt_serdes_version_number = serdes
  call = channel.unary_unary(
    SERVICE + "GetVersion",
    request_serializer=lambda message: message.SerializeToString(),
    response_deserializer=messages.proxy("GrpcGetVersionResponse").FromString,
  )
  return call(request, timeout=30)


@pytest.fixture
def open_session(channel, messages):
  """open_session(): a session; session(name, **fields): the response to a request."""
  opened = []

  def open_one():
    requests = queue.SimpleQueue()
    opened.append(requests)
    metadata = messages.proxy("GrpcIfrtSessionMetadata")()
    metadata.version.protocol_version = 25
    call = channel.stream_stream(
      SERVICE + "IfrtSession",
      request_serializer=lambda message: message.SerializeToString(),
      response_deserializer=messages.proxy("IfrtResponse").FromString,
    )
    responses = call(
      iter(requests.get, None),
      metadata=[("ifrt-proxy-grpc-ifrt-session-metadata-bin", metadata.SerializeToString())],
      timeout=60,
    )

    def send(name, **fields):
      request = messages.proxy("IfrtRequest")()
      request.request_metadata.op_id = 7
      if name is not None:
        getattr(request, name).SetInParent()
        getattr(request, name).MergeFrom(type(getattr(request, name))(**fields))
      requests.put(request)
      response = next(responses)
      assert response.response_metadata.op_id == 7
      return response

    send.call = responses
    return send

  yield open_one
  for requests in opened:
    requests.put(None)


@pytest.fixture
def ask(open_session):
  return open_session()


def test_a_client_of_another_jaxlib_is_refused_in_one_sentence(channel, messages):
  with pytest.raises(grpc.RpcError) as caught:
    get_version(channel, messages, serdes=(0, 1))
  assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
  assert "(16, 25, 0, 1)" in caught.value.details()
  assert "start it with the client's Python environment." in caught.value.details()
  assert "\n" not in caught.value.details()


def test_every_request_that_is_not_served_is_answered_by_name(ask, messages):
  requests = messages.proxy("IfrtRequest").DESCRIPTOR.oneofs_by_name["request"].fields
  names = {field.name for field in requests} - set(_HANDLERS)
  assert {"bitcast_arrays_request", "loaded_host_callback_poll_request"} <= names
  for name in names:
    status = ask(name).response_metadata.status
    assert (status.code, status.message) == (12, f"{name} is not served by the Pathways stand-in")


def on_one_device(messages, **fields):
  """An ArraySpecProto of float32[2, 3] on device 1, with these fields instead."""
  sharding = messages.ifrt("SingleDeviceShardingProto")(device_id=1).SerializeToString()
  serialized = {"type_name": "xla::ifrt::SingleDeviceSharding", "data": sharding}
  usual = {"dtype": {"kind": 11}, "shape": {"dims": [2, 3]}, "sharding": {"serialized_sharding": serialized}}
  return messages.ifrt("ArraySpecProto")(**(usual | fields))


@pytest.mark.parametrize(
  "fields, text",
  [
    ({"dtype": {"kind": 99}}, "arrays of strings: the Pathways stand-in serves numeric types"),
    ({"layout": b"x"}, "arrays with a custom layout that no compiled program made"),
    (
      {"sharding": {"serialized_sharding": {"type_name": "xla::ifrt::OpaqueSharding2"}}},
      "shardings of the type xla::ifrt::OpaqueSharding2",
    ),
  ],
)
def test_an_array_that_is_not_served_is_answered_by_name(ask, messages, fields, text):
  spec = on_one_device(messages, **fields)
  for name, wanted in (
    ("make_arrays_from_host_buffer_shards_request", {"specs": [{"array_spec": spec}], "array_handles": [31]}),
    ("make_error_arrays_request", {"array_specs": [spec], "array_handles": [31]}),
  ):
    status = ask(name, **wanted).response_metadata.status
    assert (status.code, status.message) == (12, text)
    later = ask("check_value_ready_request", value_handles=[31]).response_metadata.status
    assert (later.code, later.message) == (12, text)


@pytest.mark.parametrize(
  "name, fields, text",
  [
    ("destruct_array_request", {"array_handle": [1, 2]}, "Unknown array handle(s): 1,2"),
    ("loaded_executable_execute_request", {"loaded_executable_handle": 3}, "Unknown loaded executable handle: 3"),
    ("loaded_executable_fetch_execute_result_request", {"result_status_handle": 4}, "Unknown result status handle: 4"),
  ],
)
def test_an_unknown_handle_is_not_found(ask, name, fields, text):
  status = ask(name, **fields).response_metadata.status
  assert (status.code, status.message) == (5, text)


def test_bytes_that_are_no_request_end_only_their_session(server, channel, messages):
  empty = messages.proxy("GrpcIfrtSessionMetadata")().SerializeToString()
  metadata = [("ifrt-proxy-grpc-ifrt-session-metadata-bin", empty)]
  with pytest.raises(grpc.RpcError):
    list(channel.stream_stream(SERVICE + "IfrtSession")(iter([b"\xff\xff\xff"]), metadata=metadata, timeout=30))
  for method in ("GetVersion", "HostBufferLookup", "HostBufferDelete", "NoSuchMethod"):
    with pytest.raises(grpc.RpcError):
      list(channel.unary_stream(SERVICE + method)(b"\xff", timeout=30))
  with pytest.raises(grpc.RpcError) as caught:
    channel.stream_unary(SERVICE + "HostBufferStore")(iter([b""]), timeout=30)
  assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
  assert server.control("status")["slices"]


def test_a_client_that_has_gone_leaves_nothing(server, ask, messages):
  mine = ask("init_request").init_response.session_id

  def sessions():
    return [client["session"] for client in server.control("status")["clients"]]

  assert mine in sessions()
  ask.call.cancel()
  deadline = time.monotonic() + 30
  while mine in sessions() and time.monotonic() < deadline:
    time.sleep(0.02)
  assert mine not in sessions()


def test_a_handle_whose_array_could_not_be_made_keeps_the_error(ask):
  ask("copy_arrays_request", array_handles=[11], result_handles=[12])
  status = ask("check_value_ready_request", value_handles=[12]).response_metadata.status
  assert (status.code, status.message) == (5, "Unknown array handle: 11")


@pytest.mark.parametrize(
  "words, text",
  [
    (["explode"], "'explode' is no command"),
    (["kill", "2"], "'2' is no slice. The slices are 0 to 1."),
    (["kill", "0", "BAD"], "'BAD' is no error code"),
    (["hang", "0", "-1"], "'-1' is no time"),
    (["at", "soon", "drop"], "DISPATCH must be a whole number"),
  ],
)
def test_a_wrong_command_is_explained(server, words, text):
  with pytest.raises(process.StandinError, match=text):
    server.control(*words)


def test_the_control_command(server, capsys):
  port = server.address.rpartition(":")[2]
  assert control_main(["--port", port, "status"]) == 0
  assert '"dispatches"' in capsys.readouterr().out
  assert control_main(["--port", port, "kill", "9"]) == 2
  assert "'9' is no slice" in capsys.readouterr().err


def test_only_the_owner_can_send_commands(server):
  path = Path(server.control_path)
  assert stat.S_IMODE(path.stat().st_mode) == 0o600
  assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_of_control_sockets_that_others_can_enter_is_refused(tmp_path, monkeypatch):
  monkeypatch.setattr(process.tempfile, "gettempdir", lambda: str(tmp_path))
  folder = Path(process.control_path("127.0.0.1:1")).parent
  folder.chmod(0o755)
  with pytest.raises(process.StandinError, match="only its owner"):
    process.control_path("127.0.0.1:1")


@pytest.mark.parametrize(
  "arguments, text",
  [
    (["--slices", "0"], "--slices 0 must be at least 1"),
    (["--devices-per-slice", "-3"], "--devices-per-slice -3 must be at least 1"),
  ],
)
def test_wrong_arguments_end_with_2(arguments, text, capsys):
  assert main(arguments) == 2
  assert text in capsys.readouterr().err


PARENT = """
import sys, time
from pathways_standin.process import start_standin
server = start_standin(1, 1, log=open({log!r}, "w"), arguments=("--port", "0", "--at", "1000 kill 0"))
print(server.process.pid, server.control_path, flush=True)
time.sleep(600)
"""


def test_the_server_ends_with_a_killed_parent(tmp_path):
  """Also: --at arrives, and the socket of commands is removed."""
  code = PARENT.format(log=str(tmp_path / "log"))
  environment = os.environ | {"PYTHONPATH": "src"}
  with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as parent:
    pid, path = parent.stdout.readline().split()
    assert process.send(path, ["status"])["planned"] == ["at 1000 kill 0"]
    parent.send_signal(signal.SIGKILL)
  deadline = time.monotonic() + 30
  while is_running(int(pid)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert not is_running(int(pid))
  assert not Path(path).exists()


def test_exit_ends_the_server_at_once_and_a_taken_port_is_an_error(server, tmp_path):
  port = server.address.rpartition(":")[2]
  with open(tmp_path / "log", "w+") as log:
    with pytest.raises(process.StandinError, match="exit code 1"):
      process.start_standin(1, 1, log=log, arguments=("--port", port))
    log.seek(0)
    assert f"127.0.0.1:{port}" in log.read()
  unix = tmp_path / "socket"
  with open(tmp_path / "log", "w") as log:
    other = process.start_standin(1, 1, log=log, arguments=("--unix", str(unix)))
  assert other.address == f"grpc://unix:{unix}"
  assert other.control("exit") == {}
  assert other.process.wait(30) == 70
  other.close()
