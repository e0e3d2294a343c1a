"""Plays trainer.tools.accept where its launcher needs other commands around it: `python -m end_to_end.accept KIND OUT`.

  agents  three hosts (network namespaces) on links of 1 Gbit/s, each with an agent (Linux, iproute2, `unshare`)
  ray     a Ray cluster on this machine, of three hosts
  slurm   agents on this machine, which a stand-in for srun starts

Further arguments are for accept. Returns the exit code of accept.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from end_to_end.network import FAR, INSIDE, NEAR, SUPERVISOR, hosts
from tests.support.command import ROOT, cpu_environment

_THIRD = "10.77.0.4"
_LINK = "tc qdisc replace dev card root tbf rate 1gbit burst 512kb latency 100ms"
_SRUN = """#!/bin/sh
while case "$1" in -*) true;; *) false;; esac; do shift; done
for node in 1 2 3; do "$@" & agents="$agents $!"; done
trap 'kill $agents' TERM
wait; wait
"""


def main() -> int:
  kind, *arguments = sys.argv[1:]
  if kind == "agents" and os.environ.get("INSIDE") != "1":
    os.execvpe(INSIDE[0], [*INSIDE, sys.executable, *sys.orig_argv[1:]], {**os.environ, "INSIDE": "1"})
  with tempfile.TemporaryDirectory(prefix="accept-") as folder, contextlib.ExitStack() as stack:
    token = {"TRAINER_TOKEN": secrets.token_hex(16)}
    around = {"agents": _agents, "ray": _ray, "slurm": _slurm}[kind]
    options, environment = stack.enter_context(around(Path(folder), token))
    command = [sys.executable, "-m", "trainer.tools.accept", "--launcher", kind, *options, *arguments]
    accept = subprocess.Popen(command, cwd=ROOT, env=cpu_environment({**token, **environment}))
    try:
      return accept.wait()
    finally:
      accept.terminate()  # Ctrl-C: subprocess.run would kill it before it has ended its runs
      accept.wait()


Around = Iterator[tuple[list[str], Mapping[str, str]]]


@contextlib.contextmanager
def _agents(folder: Path, token: Mapping[str, str]) -> Around:
  """An agent on each of three hosts."""
  agents, listen = [], f"{SUPERVISOR}:7777"
  agent = f"while :; do {sys.executable} -m trainer.launch.agent --supervisor {listen}; sleep 1; done"
  with hosts() as network:
    network.add(_THIRD)
    try:
      for host in (FAR, NEAR, _THIRD):
        subprocess.run([*network.prefix(host), *_LINK.split()], check=True)
        with (folder / host).open("wb") as log:
          command = [*network.prefix(host), "sh", "-c", agent]
          environment = cpu_environment(token)
          agents.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, process_group=0))
      kill = f"kill -9 $(sed -n 's/.* is process \\([0-9]*\\)\\.$/\\1/p' {folder}/{FAR} | tail -n 1)"
      yield ["--listen", listen, "--kill", kill], {}
    finally:
      for process in agents:
        os.killpg(process.pid, signal.SIGTERM)  # each agent ends its processes
      for process in agents:
        process.wait(60)


@contextlib.contextmanager
def _ray(folder: Path, token: Mapping[str, str]) -> Around:
  """A Ray cluster."""
  command = [sys.executable, "-m", "tests.support.ray_cluster", "3", "1"]
  pipe = subprocess.PIPE
  cluster = subprocess.Popen(
    command, cwd=ROOT, env=cpu_environment({}), stdin=pipe, stdout=pipe, text=True, start_new_session=True
  )
  try:
    assert cluster.stdin and cluster.stdout
    address = cluster.stdout.readline().strip()
    assert address, "Ray has started no cluster: its messages are above"
    yield ["--kill", "pkill -9 -o -f [r]ay::RayTrainWorker"], {"RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"}
  finally:
    cluster.communicate(timeout=60)


@contextlib.contextmanager
def _slurm(folder: Path, token: Mapping[str, str]) -> Around:
  """A program srun that starts three agents."""
  srun = folder / "srun"
  srun.write_text(_SRUN)
  srun.chmod(0o755)
  with socket.create_server(("127.0.0.1", 0)) as free:
    listen = f"127.0.0.1:{free.getsockname()[1]}"
  kill = "kill -9 $(pgrep -n -f '[t]rainer.*run_name=kill')"
  path = f"{folder}:{os.environ['PATH']}"
  yield ["--listen", listen, "--kill", kill], {"PATH": path, "SLURM_JOB_ID": "1"}


if __name__ == "__main__":
  sys.exit(main())
