"""The Pathways stand-in: every conformance program, every scenario of faults, and no leak over many dispatches.

  python -m end_to_end.standin conformance        each program equal to the CPU, bit for bit
  python -m end_to_end.standin faults             what clients see when slices fail
  python -m end_to_end.standin leak --dispatches 100000

The exit code is 1 if something is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from tests.support.command import standin_environment

from pathways_standin.process import start_standin

_HELD = ("arrays", "executables", "host_buffers", "futures")
_MOST_GROWTH = 200  # bytes of resident memory for each dispatch, between the two halves; allocators never settle quite


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("what", choices=["conformance", "faults", "leak", "leak-client"])
  parser.add_argument("--dispatches", type=int, default=100_000)
  options = parser.parse_args()
  if options.what == "leak-client":
    return _dispatch(options.dispatches)
  server = start_standin(2, 2, "TPU v5 lite")
  try:
    if options.what == "leak":
      return _measure(server, options.dispatches)
    module, platforms, arguments = {
      "conformance": ("tests.pathways_standin.conformance", "proxy,cpu", []),
      "faults": ("tests.pathways_standin.faults", "proxy", [server.control_path]),
    }[options.what]
    report = json.loads(_client(server, module, arguments, platforms).communicate()[0].splitlines()[-1])
  finally:
    server.close()
  wrong = {name: text for name, text in report.items() if text}
  for name, text in wrong.items():
    print(f"{name}: {text}")
  print(f"{len(report) - len(wrong)} of {len(report)} as expected")
  return 1 if wrong else 0


def _client(server, module: str, arguments: list[str], platforms: str = "proxy") -> subprocess.Popen[str]:
  command, environment = [sys.executable, "-m", module, *arguments], standin_environment(server.address, platforms)
  return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _dispatch(count: int) -> int:
  """The client: a donated state through `count` steps on all devices; ten times it waits until it may go on."""
  import jax
  import jax.numpy as jnp
  import numpy as np
  import pathwaysutils
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  pathwaysutils.initialize()
  sharding = NamedSharding(Mesh(np.array(jax.devices()), ("a",)), PartitionSpec("a"))
  batch = np.ones(8, np.float32)
  step = jax.jit(lambda x, y: (x + y, jnp.vdot(x, y)), donate_argnums=0)
  state = jax.device_put(np.zeros(8, np.float32), sharding)
  for number in range(1, count + 1):
    state, loss = step(state, jax.device_put(batch, sharding))
    if number % 100 == 0:
      float(loss)
    if number % (count // 10) == 0:
      jax.block_until_ready((state, loss))
      print(number, flush=True)
      sys.stdin.readline()
  np.testing.assert_array_equal(np.asarray(state), np.full(8, count, np.float32))
  return 0


def _measure(server, count: int) -> int:
  client = _client(server, "end_to_end.standin", ["leak-client", "--dispatches", str(count)])
  rows, began = [], time.monotonic()
  print("dispatches  seconds  server and client in MiB  handles")
  for line in client.stdout:
    time.sleep(1.0)  # the client sends the last deletions
    status = server.control("status")
    (session,) = status["clients"]
    processes = [server.process.pid, client.pid]
    rows.append((list(map(_mebibytes, processes)), [session[key] for key in _HELD]))
    memory = "  ".join(f"{mebibytes:7.1f}" for mebibytes in rows[-1][0])
    print(f"{int(line):10d}  {time.monotonic() - began:7.1f}  {memory}  {rows[-1][1]}", flush=True)
    client.stdin.write("\n")
    client.stdin.flush()
  halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
  peaks = [[max(row[0][i] for row in half) for i in range(len(processes))] for half in halves]
  growth = [(after - before) * 2**20 / (count / 2) for before, after in zip(*peaks, strict=True)]
  print("bytes for each dispatch, between the peaks of both halves: " + ", ".join(f"{value:.0f}" for value in growth))
  fine = client.wait() == 0 and rows[0][1] == rows[-1][1] and max(growth) <= _MOST_GROWTH
  print("no leak" if fine else "LEAK, or a wrong result")
  return 0 if fine else 1


def _mebibytes(pid: int) -> float:
  """Resident memory of a process."""
  return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1]) / 1024


if __name__ == "__main__":
  sys.exit(main())
