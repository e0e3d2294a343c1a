"""Slices that agents run for a supervisor on another host: each agent has a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from tests.support.agent_runs import AgentRun, Relay
from tests.support.command import TINY, differences
from tests.support.forked_runs import ENDLESS
from tests.support.torchrun_runs import OneWorker

from trainer.cluster.launched import run_rules
from trainer.config import load
from trainer.launch import agent, local
from trainer.launch.launcher_keys import program
from worlds.membership import wire
from worlds.membership.messages import Message, message
from worlds.membership.wire import Channel
from worlds.place import HOST, MEMBER, SUPERVISOR, TOKEN
from worlds.supervisor import Supervisor, Where

CONFIG = TINY[0]
SLOW = 240  # seconds
FAR = "::1" if os.path.exists("/proc/net/if_inet6") else "127.0.0.3"  # the address of a host
SECRET = b"s" * 32


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_losses_of_workers_agents_connections_and_the_supervisor_change_nothing(compiled, server, tmp_path):
  """Oracle: one worker that computes everything. The last supervisor is told how many steps the run has."""
  keys = [compiled, "eval_interval=50", "eval_steps=2", "checkpoint_period=1000000"]
  run = AgentRun(tmp_path / "run", [*keys, ENDLESS], slices=2, server=server)
  relay = Relay(run.address)
  try:
    with run.launched() as supervisor:
      hosts = [run.agent("127.0.0.2", supervisor=relay.address), run.agent(FAR)]

      def trains(slices: int) -> None:
        """Returns when so many slices have completed steps."""
        step = run.last_step
        run.wait_for(lambda: run.last_step >= step + 5 and len(run.active()) == slices, supervisor, SLOW)

      trains(2)
      places = {env[HOST]: int(env[MEMBER]) for env in run.processes().values() if SUPERVISOR in env}
      assert sorted(places) == ["127.0.0.2", FAR]
      far = places[FAR]

      assert run.kill(far)
      run.wait_for(lambda: run.count("slice_down") == 1, supervisor, SLOW)
      trains(2)
      assert f"Member {far} killed by SIGKILL" in run.printed

      hosts[1].send_signal(signal.SIGKILL)  # its worker leaves in good order
      run.wait_for(lambda: far not in run.workers(), supervisor, SLOW)
      trains(1)
      hosts[1] = run.agent(FAR)
      trains(2)

      assert relay.cut() == 2  # of the agent, and of its worker
      run.wait_for(lambda: "The supervisor has given this process up" in run.printed, supervisor, SLOW)
      trains(2)
      assert run.committed_steps() == []  # the cut member has not saved for a run that goes on

      supervisor.send_signal(signal.SIGKILL)
      supervisor.wait(30)
      run.wait_for_workers(SLOW)
      last = run.last_step
      assert run.committed_steps()[-1] == last
      steps = last + 20
      with_steps = run.launch(f"steps={steps}")  # the agents find it at the same address
      assert with_steps.wait(SLOW) == 0, run.tail()
      assert [host.wait(30) for host in hosts] == [0, 0]
      run.wait_for_processes(30)
  finally:
    relay.close()
  # A primary that is cut off may write its last step after the next primary has (docs/records.md).
  assert sorted({*run.steps()}) == list(range(1, steps + 1)) and len(run.steps()) <= steps + 1, run.tail()
  single = OneWorker(tmp_path / "single", [*keys, f"steps={steps}"], slices=2, server=server)
  with single.launched() as worker:
    assert single.wait(worker, SLOW) == 0, single.tail()
  assert differences(run, single, steps) == []
  assert run.evaluations() == single.evaluations()


@pytest.mark.parametrize(
  ("arguments", "text"),
  [
    (["--supervisor", "nowhere"], "--supervisor nowhere: it must be HOST:PORT"),
    (["--supervisor", "127.0.0.1:1", "--slices", "0"], "--slices: 0 must be a whole number of at least 1"),
    (["--supervisor", "127.0.0.1:1", "--token-file", "/nonexistent"], "--token-file /nonexistent"),
  ],
)
def test_an_agent_with_bad_arguments_ends(arguments, text, capsys, monkeypatch):
  monkeypatch.setenv(TOKEN, "a token of this test only")
  assert agent.main(arguments) == 2
  printed = capsys.readouterr().err
  assert text in printed and printed.count("error: ") == 1


@pytest.mark.parametrize(("token", "code"), [(None, 42), (b"w" * 32, 2)])
def test_an_agent_that_cannot_join_may_be_started_again_unless_its_token_is_wrong(monkeypatch, capsys, token, code):
  """token: of the supervisor; None: nothing listens."""
  monkeypatch.setenv(TOKEN, "a token of this test only")
  with socket.create_server(("127.0.0.1", 0)) as listener:
    address = "{}:{}".format(*listener.getsockname())

    def answer() -> None:
      sock, _ = listener.accept()
      with sock, contextlib.suppress(wire.WireError):
        wire.accept(sock, token)

    if token is None:
      listener.close()
    else:
      threading.Thread(target=answer, daemon=True).start()
    assert agent.main(["--supervisor", address, "--wait-seconds", "0"]) == code
  printed = capsys.readouterr()
  assert printed.err.count("error: ") == 1 and "cannot join within 0 s" in printed.err


@pytest.mark.parametrize(
  ("options", "token", "text"),
  [
    (["--local-slices", "1"], "", "Add --listen HOST:PORT"),
    (["--token-file", "token"], "", "--token-file token: it has an effect only with --listen"),
    (["--listen", "127.0.0.1:0"], "short", "TRAINER_TOKEN has 5 characters"),
    (["--listen", "7777"], "", "--listen 7777: it must be HOST:PORT"),
    (["--listen", "0.0.0.0:0"], "a token of this test only", "Add --advertise HOST"),
  ],
)
def test_a_supervisor_with_bad_options_starts_nothing(options, token, text, capsys, monkeypatch):
  monkeypatch.setenv(TOKEN, token)
  assert local.main(["--slices", "2", *options, CONFIG]) == 2
  printed = capsys.readouterr().err
  assert text in printed and printed.count("error: ") == 1


@pytest.fixture
def supervisor():
  """A supervisor for agents only, of two slices."""
  config = load([CONFIG, "cluster=multiprocess", "num_slices=2", "dataset_type=synthetic"])
  where = Where(socket.create_server(("127.0.0.1", 0)), "127.0.0.1", SECRET)
  supervisor = Supervisor(program(), ["--help"], run_rules(config), local=0, lanes=1, grace=30.0, where=where)
  yield supervisor
  supervisor._server.close()


def joined(supervisor: Supervisor, slices: int) -> tuple[Channel, Message | None]:
  """An agent's connection, and the first answer."""
  channel = wire.connect(supervisor._server.address, SECRET)
  channel.send(message("agent", slices=slices, host="127.0.0.2"))
  return channel, channel.receive()


def test_agents_get_members_that_nobody_else_has(supervisor):
  first, work = joined(supervisor, 2)
  assert work is not None and work["kind"] == "work" and work["members"] == [0, 1] and work["argv"] == ["--help"]
  second, work = joined(supervisor, 1)
  assert work is not None and work["members"] == [2]
  first.close()
  deadline = time.monotonic() + 10
  while len(supervisor._agents()) > 1:
    assert time.monotonic() < deadline
    time.sleep(0.01)
  third, work = joined(supervisor, 2)
  assert work is not None and work["members"] == [0, 1]
  for channel in (second, third):
    channel.close()


@pytest.mark.parametrize(
  "lie",
  [
    message("ended", member=2, code=0),
    message("agent", slices=1, host=""),
    message("hello", member=0, lane=0, lanes=1, address=""),
  ],
)
def test_an_agent_that_breaks_the_protocol_is_dropped(supervisor, lie):
  channel, work = joined(supervisor, 2)
  assert work is not None
  channel.send(lie)
  assert channel.receive() is None
  channel.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_waits_ends_at_a_signal(tmp_path, number):
  run = AgentRun(tmp_path, [])
  waiting = run.agent("127.0.0.2")
  try:
    run.wait_for(lambda: "Waiting for the supervisor" in run.printed, waiting)
    os.kill(waiting.pid, number)
    assert waiting.wait(30) == 42
  finally:
    waiting.send_signal(signal.SIGKILL)
    waiting.wait(30)
