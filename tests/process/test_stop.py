"""Signals to real processes in each phase, from the first import to the interpreter's shutdown, and one request."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from trainer.process.stop import Stop
from trainer.world import SINGLE_WORLD

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ROOT / "src"
HEADER = """
import atexit, ctypes, os, signal, sys, threading, time, types
from trainer.process.stop import Stop
stop = Stop()
stop.listen()
"""
# A call into C that releases the GIL and that no signal interrupts, such as a compilation or a collective.
CALL = "__import__('hashlib').pbkdf2_hmac('sha256', b'', b'', {})"
STUCK = CALL.format(2**31 - 1)
READY = "print('ready', flush=True)\n"


def start(code: str, *wrapper: str) -> subprocess.Popen:
  environment = os.environ | {"PYTHONPATH": str(SOURCES)}
  command = [*wrapper, sys.executable, "-uc", HEADER + textwrap.dedent(code)]
  process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
  line = process.stdout.readline()
  assert line == "ready\n", line + process.stdout.read()
  return process


@pytest.fixture
def running():
  processes = []
  yield lambda *command: processes.append(start(*command)) or processes[-1]
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()


def answer(process: subprocess.Popen, *numbers: signal.Signals, pause: float = 0.0) -> tuple[int, str]:
  """The exit code of the process after these signals, and what it printed from then on."""
  for i, number in enumerate(numbers):
    time.sleep(pause if i else 0)
    process.send_signal(number)
  code = process.wait(30)
  return code, process.stdout.read()


# ---- starting


REQUESTS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)


@REQUESTS
@pytest.mark.parametrize("work", ["time.sleep(60)", STUCK], ids=["Python", "a call into C"])
def test_while_starting_a_request_ends_the_process_at_once(running, work, number):
  nothing_to_save = f"{number.name} before the first step of this process: nothing to save. Exit code 42.\n"
  assert answer(running(READY + work), number) == (42, nothing_to_save)


@pytest.mark.parametrize("work", ["time.sleep(60)", STUCK], ids=["Python", "a call into C"])
def test_while_starting_sigint_ends_the_process_at_once(running, work):
  assert answer(running(READY + work), signal.SIGINT) == (130, "Interrupted.\n")


# ---- running

LOOP = f"""
stop.running()
{READY}
while not stop.noticed:
  time.sleep(0.01)
print("asked", flush=True)
"""


def test_nohup_keeps_sighup_ignored(running):
  process = running(f"{LOOP}\nprint(stop.request)", "nohup")
  process.send_signal(signal.SIGHUP)
  time.sleep(0.5)
  assert process.poll() is None
  assert answer(process, signal.SIGTERM) == (0, "asked\nSIGTERM\n")


@pytest.mark.parametrize("after", ["time.sleep(1000)", STUCK], ids=["Python", "a call into C"])
def test_a_second_sigterm_ends_at_once_and_repetitions_of_the_first_do_not(running, after):
  process = running(f"{LOOP}\n{after}")
  for _ in range(3):  # as `timeout` does: to the process, then to its group
    process.send_signal(signal.SIGTERM)
    time.sleep(0.01)
  assert process.stdout.readline() == "asked\n"
  time.sleep(1.3)
  assert process.poll() is None
  assert answer(process, signal.SIGTERM) == (143, "second SIGTERM: exiting at once\n")


def test_the_first_sigint_is_a_keyboard_interrupt_and_the_second_ends_at_once(running):
  code = f"""
stop.running()
try:
  {READY.strip()}
  time.sleep(60)
except KeyboardInterrupt:
  print("cleaning up", flush=True)
  {STUCK}
"""
  process = running(code)
  process.send_signal(signal.SIGINT)
  assert process.stdout.readline() == "cleaning up\n"
  process.send_signal(signal.SIGINT)  # a repetition does not interrupt the cleanup
  time.sleep(1.3)
  assert process.poll() is None
  assert answer(process, signal.SIGINT) == (130, "second SIGINT: exiting at once\n")


# ---- ending

ENDING = f"stop.running(); stop.ending(7)\n{READY}"


def test_while_ending_the_exit_code_stays(running):
  assert answer(running(f"{ENDING}time.sleep(0.5)\nsys.exit(7)"), signal.SIGTERM) == (7, "")
  code, text = answer(running(f"{ENDING}{STUCK}"), signal.SIGTERM, signal.SIGTERM, pause=1.3)
  assert (code, text) == (7, "SIGTERM while ending: exiting at once with code 7\n")
  code, text = answer(running(f"{ENDING}{STUCK}"), signal.SIGINT)
  assert (code, text) == (7, "SIGINT while ending: exiting at once with code 7\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_the_interpreters_shutdown_is_not_interrupted(running, number):
  code = f"""
  class Late:  # deleted when the interpreter has put back the system's defaults
    def __init__(self, kill): self.kill = kill
    def __del__(self): self.kill()
  kill = lambda kill=os.kill, pid=os.getpid(): kill(pid, {int(number)})
  atexit.register(kill)
  sys.kept = Late(kill)
  print("ready", flush=True)
  stop.ignore()
  sys.exit(7)
  """
  assert running(code).wait(30) == 7


# ---- a request, and what the loop does


def test_a_request_is_announced_once_and_stays():
  stop, lines, events = Stop(), [], []
  emit = lambda kind, **fields: events.append((kind, fields))
  stop.join_run(SINGLE_WORLD.stop_agreed, saves=True, log=lines.append, emit=emit)
  assert not stop.requested(1) and not stop.noticed
  stop.request = "SIGUSR1"
  assert stop.noticed
  assert stop.requested(2) and stop.requested(3)
  assert lines == ["SIGUSR1 received: finishing the step, saving a checkpoint and exiting."]
  assert events == [("preemption", {"step": 2, "signal": "SIGUSR1"})]


def test_the_loop_of_a_run_that_does_not_save_gets_no_request():
  stop = Stop()
  stop.join_run(SINGLE_WORLD.stop_agreed, saves=False)
  stop.request = "SIGTERM"
  assert not stop.requested(1)


def test_worlds_that_agree_end_a_process_which_received_no_signal():
  stop, lines, asked = Stop(), [], []
  stop.join_run(lambda *of_one: bool(asked), saves=True, log=lines.append, asked=lambda: bool(asked))
  stop.request = "SIGTERM"
  assert not stop.requested(1), "one world must not decide alone"
  stop.request = ""
  assert not stop.noticed
  asked.append(True)
  assert stop.noticed and stop.requested(2)
  assert lines == ["SIGTERM received: finishing the step, saving a checkpoint and exiting."]


# ---- handlers of other code


def test_a_handler_in_c_that_replaces_ours_is_replaced_and_called(running):
  code = """
  seen = []
  @ctypes.CFUNCTYPE(None, ctypes.c_int)
  def native(number):
    seen.append(number)
  libc = ctypes.CDLL(None)
  libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  libc.signal(signal.SIGTERM, ctypes.cast(native, ctypes.c_void_p))
  stop.join_run(lambda requested, asked: requested, saves=True, several={size} > 1)
  stop.running()
  print("ready", flush=True)
  while not stop.noticed:
    time.sleep(0.01)
  time.sleep(0.1)
  print(seen)
  """
  assert answer(running(code.replace("{size}", "2")), signal.SIGTERM) == (0, "[15]\n")
  assert answer(running(code.replace("{size}", "1")), signal.SIGTERM) == (0, "[]\n")


# ---- the command

COMMAND = """
import atexit, os, runpy, sys
name, number = sys.argv.pop(1), int(sys.argv.pop(1))
def kill():
  os.kill(os.getpid(), number)
class Finder:
  def find_spec(self, imported, path=None, target=None):
    if imported == name:
      kill()
sys.meta_path.insert(0, Finder())
if name == "atexit":
  atexit.register(kill)
runpy.run_module("trainer", run_name="__main__", alter_sys=True)
"""


# The import of flax comes last, after two seconds of imports.
IMPORTS = [("trainer.config", signal.SIGHUP, 42), ("jaxlib._jax", signal.SIGINT, 130), ("flax", signal.SIGTERM, 42)]


@pytest.mark.parametrize(("moment", "number", "code"), IMPORTS)
def test_a_signal_during_an_import_of_the_command(tmp_path, moment, number, code):
  arguments = "configs/base.yml", f"base_output_directory={tmp_path}", "dataset_type=synthetic", "steps=1"
  assert ended(moment, number, *arguments) == code
  assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_the_exit_of_the_command(number):
  assert ended("atexit", number, "--help") == 0


def ended(moment: str, number: int, *arguments: str) -> int:
  """The exit code of a command that gets the signal at the moment; asserts that it prints no traceback."""
  environment = os.environ | {"PYTHONPATH": str(SOURCES), "JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-c", COMMAND, moment, str(int(number)), *arguments]
  result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
  assert "Traceback" not in result.stderr
  return result.returncode


# ---- SIGUSR2


def test_sigusr2_prints_every_stack_even_during_a_call_into_c_and_the_process_goes_on(running):
  work = f"def stuck():\n  {READY}  {CALL.format(2**21)}\ndef other(): time.sleep(600)\n"
  work += "threading.Thread(target=other, daemon=True).start()\n"
  process = running(work + "stuck()\nprint('done', flush=True)")
  process.send_signal(signal.SIGUSR2)
  assert process.wait(60) == 0
  out = process.stdout.read()
  stacks, _, rest = out.partition("done")
  assert "in stuck" in stacks and "in other" in stacks and rest == "\n"


def test_a_signal_at_the_exit_of_a_launcher_does_not_change_its_exit_code():
  """Its members have ended, and the exit code is known."""
  code = """
import os, signal
from worlds import interruptions
def main():
  with interruptions.handled(lambda number, frame: None, lambda: None):
    pass
  os.kill(os.getpid(), signal.SIGTERM)
  os.kill(os.getpid(), signal.SIGINT)
  return 3
interruptions.run_launcher(main)
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
  assert (done.returncode, done.stderr) == (3, "")
