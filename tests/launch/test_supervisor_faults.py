"""Supervisors that stand still, whose output is lost, or of which a thread fails: no healthy member is lost."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from tests.support.command import ROOT, TINY, cpu_environment
from tests.support.forked_runs import ENDLESS
from tests.support.process_runs import ProcessRun

from trainer.cluster.launched import shared_token
from trainer.launch import launcher_keys
from worlds import interruptions
from worlds import worker_processes as workers_lib
from worlds.host_agent import Agent
from worlds.membership import wire
from worlds.membership.client import Membership
from worlds.membership.messages import message
from worlds.membership.run_rules import RunRules
from worlds.place import COMMAND, TOKEN, Place
from worlds.supervisor import Supervisor, Where
from worlds.worker_processes import MemberProgram, Workers


def advances(run: ProcessRun, supervisor, slices: int = 2) -> None:
  """Returns when so many slices have completed more steps."""
  step = run.last_step
  run.wait_for(lambda: run.last_step >= step + 5 and len(run.active()) == slices, supervisor)


@pytest.mark.slow
def test_a_supervisor_that_is_stopped_at_the_start_and_later_loses_no_member(compiled, server, tmp_path):
  """The first time before the members have connected, which they try for 5 s at a time. Then two minutes in a second:
  they seem to have been silent for longer than any limit."""
  run = ProcessRun(tmp_path, [compiled, ENDLESS], slices=2, server=server)
  with run.launched() as supervisor:
    run.wait_for(lambda: len(run.workers()) == 2, supervisor)
    for before in (lambda: None, lambda: advances(run, supervisor)):
      before()
      supervisor.send_signal(signal.SIGSTOP)
      time.sleep(8)
      supervisor.send_signal(signal.SIGCONT)
      advances(run, supervisor)
    supervisor.send_signal(signal.SIGTERM)
    assert run.wait(supervisor, 60) == 42, run.tail()
  assert run.count("slice_down") == 0 and "Starting member" not in run.printed, run.tail()
  assert run.steps() == list(range(1, run.last_step + 1))


# ---- workers


class Ends:
  """Workers of one member with two lanes, whose program is `code`, and the ends that they report."""

  def __init__(self, code: str, run_command: str = "") -> None:
    self.lines: list[str] = []
    self.codes: list[int] = []
    self.ended = threading.Event()
    place = Place(("127.0.0.1:1",), b"t" * 32, 0, lanes=2)
    code = f"import os, signal, sys, time\nlane = os.environ['TRAINER_LANE']\n{code}"
    program = MemberProgram((sys.executable, "-c"), os.environ, run_command)
    self.workers = Workers(program, [code], place, [0], ended=self._end, log=self.lines.append)

  def _end(self, member: int, code: int) -> None:
    self.codes.append(code)
    self.ended.set()

  @property
  def running(self) -> int:
    return sum(process.poll() is None for process in self.workers._workers[0].processes)


STANDS_STILL = "os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize(
  "code, stays", [(0, STANDS_STILL), (1, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")]
)
def test_a_process_that_outlives_its_member_is_killed_and_the_member_ends(monkeypatch, code, stays):
  monkeypatch.setattr(workers_lib, "_LANE_SECONDS", 1.0)
  ends = Ends(f"sys.exit({code}) if lane == '0' else None\n{stays}")
  ends.workers.start()
  assert ends.ended.wait(20) and ends.codes == [code] and ends.running == 0
  assert len(ends.lines) == 1 + (code != 1)  # its processes; that one was killed
  ends.workers.close(0, 0.0)


def test_a_member_that_cannot_be_started_has_failed_and_may_start_later():
  ends = Ends("sys.exit(7)")
  command = ends.workers._command
  ends.workers._command = ["/nonexistent/python"]
  ends.workers.start()
  assert ends.ended.wait(20) and ends.codes == [1] and "cannot be started" in ends.lines[0]
  ends.ended.clear()
  ends.workers._command = command
  ends.workers.restart(0, 0.1)
  assert ends.ended.wait(20) and ends.codes == [1, 7]
  ends.workers.close(0, 0.0)


def test_the_members_record_the_command_of_their_launcher(monkeypatch):
  """A person runs it again. The command of a member cannot be run."""
  monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "trainer.launch.local", "--slices", "3", "my config.yml"])
  monkeypatch.delenv(COMMAND, raising=False)
  wanted = "python -m trainer.launch.local --slices 3 'my config.yml'"
  ends = Ends(f"sys.exit(7 if os.environ[{COMMAND!r}] == {wanted!r} else 8)", launcher_keys.program().run_command)
  ends.workers.start()
  assert ends.ended.wait(20) and ends.codes == [7]
  ends.workers.close(0, 0.0)


# ---- signals while a launcher starts


@pytest.mark.parametrize("module, number, code", [("local", signal.SIGINT, 130), ("agent", signal.SIGTERM, 42)])
def test_a_signal_while_a_launcher_imports_ends_it_with_its_code(tmp_path, module, number, code):
  (tmp_path / "pydantic.py").write_text(f"import os, time\nos.kill(os.getpid(), {int(number)})\ntime.sleep(60)\n")
  environment = cpu_environment({"PYTHONPATH": f"{tmp_path}:{ROOT / 'src'}:{ROOT}", TOKEN: "a token of this test only"})
  options = {"local": ["--slices", "2", TINY[0]], "agent": ["--supervisor", "127.0.0.1:1"]}[module]
  command = [sys.executable, "-m", f"trainer.launch.{module}", *options]
  ended = subprocess.run(command, env=environment, cwd=ROOT, timeout=60, capture_output=True, text=True)
  assert ended.returncode == code and "Traceback" not in ended.stderr, ended.stderr


def trained(supervisor: Supervisor, where: Where, steps: int) -> Membership:
  """Member 7, which joins the run, and computes so many steps alone."""
  channel = wire.connect(supervisor._address, where.token)
  place = Place((supervisor._address,), where.token, 7)
  member = Membership(channel, place, "127.0.0.1:1", lambda epoch: None, lambda line: None)
  member.send("ready", newest=0, holds=False)
  while (received := member.next(10))["kind"] != "world":
    if received["kind"] == "lead":
      member.send("restored", epoch=received["epoch"], step=0)
  for step in range(1, steps + 1):
    member.send("done", epoch=received["epoch"], round=f"step {step}", checksum=0)
    time.sleep(0.05)
  return member


def between(pause: float, *signals: int) -> None:
  """Sends the signals to this process."""
  for number in signals:
    time.sleep(pause)
    os.kill(os.getpid(), number)


STUBBORN = MemberProgram(("sh", "-c", "trap '' TERM INT; exec sleep 600"), os.environ)


@pytest.mark.parametrize(
  ("signals", "code"),
  [
    ([signal.SIGTERM, signal.SIGTERM], 143),
    ([signal.SIGTERM, signal.SIGINT, signal.SIGINT], 130),  # the last one while it waits for the end of the member
  ],
)
def test_a_second_signal_ends_a_supervisor_and_its_members_at_once(monkeypatch, signals, code):
  """Member 7 never does its step, so the run cannot end in good order; member 0 ignores signals."""
  monkeypatch.setattr(interruptions, "SAME_SIGNAL_SECONDS", 0.1)
  listener = socket.create_server(("127.0.0.1", 0))
  where = Where(listener, "127.0.0.1", b"s" * 32)
  supervisor = Supervisor(STUBBORN, [], RunRules(1, 1, 1), local=1, lanes=1, grace=30.0, where=where)
  (process,) = supervisor._workers._workers.values()

  def train() -> None:
    trained(supervisor, where, 0)
    between(0.3, *signals)

  threading.Thread(target=train, daemon=True).start()
  began = time.monotonic()
  assert supervisor.run() == code
  assert time.monotonic() - began < 4 and process.processes[0].poll() == -signal.SIGKILL


@pytest.mark.parametrize(("second", "code"), [(signal.SIGTERM, 143)])
def test_a_second_signal_ends_an_agent_and_its_members_at_once(monkeypatch, second, code):
  monkeypatch.setattr(interruptions, "SAME_SIGNAL_SECONDS", 0.1)
  with socket.create_server(("127.0.0.1", 0)) as listener:
    address = "{}:{}".format(*listener.getsockname())

    def supervise() -> None:
      channel = wire.accept(listener.accept()[0], b"s" * 32)
      channel.receive()
      channel.send(message("work", argv=[], members=[0], lanes=1, grace=60.0, run_command=""))
      between(0.3, signal.SIGTERM, second)

    threading.Thread(target=supervise, daemon=True).start()
    began = time.monotonic()
    assert Agent(STUBBORN, address, b"s" * 32, slices=1, host="", wait_seconds=5.0).run() == code
    assert time.monotonic() - began < 4


def test_sigterm_to_an_agent_while_it_connects_ends_it():
  token = "a token of this test only"
  with socket.create_server(("127.0.0.1", 0)) as listener:
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    command = [sys.executable, "-m", "trainer.launch.agent", "--supervisor", address]
    with subprocess.Popen(command, env=cpu_environment({TOKEN: token}), cwd=ROOT) as agent:
      try:
        sock, _ = listener.accept()
        agent.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        channel = wire.accept(sock, shared_token("", {TOKEN: token}))
        assert agent.wait(30) == 42
        channel.close()
      finally:
        agent.kill()
