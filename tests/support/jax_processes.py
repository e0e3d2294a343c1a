"""Several real processes joined by jax.distributed, each of which runs functions of checkpoint_scenarios.py."""

from __future__ import annotations

import inspect
import io
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.support.forked_runs import Server

from worlds.addresses import free_port

ROOT = Path(__file__).parents[2]
DEVICES = 2  # of each process
MODULE = "tests.support.jax_processes"


class Processes:
  """Running processes. `finish` waits for all, kills the rest after a failure, and shows output of failed processes."""

  def __init__(
    self, server: Server, scenario: str, path: Path, processes: int, arguments: tuple[str, ...] = ()
  ) -> None:
    """server: forks the processes. scenario: a function, or several with commas, each with a folder of its name."""
    port = str(free_port())
    self.logs = [path / f"{scenario}.{processes}.{i}.log" for i in range(processes)]
    for log in self.logs:
      log.touch()
    self.processes = [
      server.run(MODULE, [scenario, str(i), str(processes), port, str(path), *arguments], {}, log)
      for i, log in enumerate(self.logs)
    ]

  def wait_for_text(self, index: int, text: str, timeout: float = 400) -> None:
    """Returns when process `index` has printed `text`, after `timeout` seconds, or when a process has ended."""
    deadline = time.monotonic() + timeout
    while text not in self.logs[index].read_text() and time.monotonic() < deadline:
      if any(process.poll() is not None for process in self.processes):
        return
      time.sleep(0.05)

  def finish(self, timeout: float = 240) -> list[str]:
    """The output of every process. Raises AssertionError if a process did not exit with 0."""
    try:
      codes = [process.wait(timeout) for process in self.processes]
    except subprocess.TimeoutExpired:
      codes = [process.poll() for process in self.processes]
    finally:
      self.kill()
    texts = [log.read_text(errors="replace") for log in self.logs]
    failed = [f"process {i} exited with {code}:\n{texts[i][-4000:]}" for i, code in enumerate(codes) if code != 0]
    assert not failed, "\n".join(failed)
    return texts

  def kill(self) -> None:
    for process in self.processes:
      if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def main() -> None:
  from trainer.process.stop import Stop

  assert isinstance(sys.stdout, io.TextIOWrapper)
  sys.stdout.reconfigure(line_buffering=True)  # tests wait for lines
  scenario, index, count, port, path, *arguments = sys.argv[1:]
  stop = Stop()
  stop.listen()  # before jax.distributed, as the command does
  import jax

  jax.config.update("jax_num_cpu_devices", DEVICES)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index), heartbeat_timeout_seconds=20)
  from tests.support import checkpoint_scenarios

  try:
    for name in scenario.split(","):
      function = getattr(checkpoint_scenarios, name)
      options = {"stop": stop} if "stop" in inspect.signature(function).parameters else {}
      folder = Path(path) if name == scenario else Path(path) / name
      folder.mkdir(exist_ok=True)
      function(folder, *arguments, **options)
  except BaseException:  # noqa: BLE001 -- printed, and the process ends
    traceback.print_exc()
    os._exit(1)  # otherwise the other processes would wait for it at the exit barrier


if __name__ == "__main__":
  main()
