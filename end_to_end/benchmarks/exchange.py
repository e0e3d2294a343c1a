"""Times sums of gradients between processes: the exchange, XLA's gloo all-reduce, and a plain copy of the memory.

    python -m end_to_end.benchmarks.exchange [--members 2,3] [--sizes 5000000,100000000] [--repeats 10]
    python -m end_to_end.benchmarks.exchange --rate 1gbit [--streams 1] [--members 2,3] [--sizes 5000000]
    python -m end_to_end.benchmarks.exchange --rate 100mbit --members 4,8 --sizes 9240000 --compute 0.928,3.71

Each member is a process with one CPU device and one share: an array of float32. The members are joined twice: by the
exchange, and by jax.distributed for gloo. A sum starts after a barrier and ends when the total is a JAX array on the
device of member 0, so the copies from and to the device count. The programs take turns, so that a busy machine slows
all of them. GB/s are the bytes of the float32 array by the median.

With --rate, each member is a host in a network namespace of its own, whose card sends at this rate, and the arrays are
NumPy's. This needs Linux, iproute2 and the right to make namespaces. The share of the rate counts the bytes that a
member must send, without headers: 2 (k - 1) / k times the values. With --compute, each member sleeps so many seconds
before each sum, as it would compute in a round of local steps: utilisation is the share of the time in which it sleeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from end_to_end.benchmarks.common import positive, positives
from end_to_end.network import FAR, NEAR, hosts
from tests.support.command import ROOT, cpu_environment

from worlds.exchange import Exchange, FlatLayout, Part

TOKEN = b"a token of benchmarks"
_INSIDE = "--inside"
LEAVES = 8  # arrays that the values are divided into, as gradients are


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--members", type=positives, default=[2, 3])
  parser.add_argument("--sizes", type=positives, default=[5_000_000, 100_000_000], help="numbers of float32 values")
  parser.add_argument("--repeats", type=positive, default=10)
  parser.add_argument("--rate", help="of the network cards: 1gbit, 50mbit")
  parser.add_argument("--compute", default="0", help="several numbers of seconds before each sum, with --rate: 0.9,3.7")
  parser.add_argument("--streams", type=positive, default=1, help="connections between two members, with --rate")
  parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--member", help=argparse.SUPPRESS)  # JSON, for the processes that this command starts
  args = parser.parse_args()
  if args.member is not None:
    run_member(**json.loads(args.member))
    return
  if args.rate and not args.inside:
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", __spec__.name, _INSIDE]
    sys.exit(subprocess.run([*command, *sys.argv[1:]], check=False).returncode)
  if args.rate:
    measure_paced(args)
    return
  print("| members | values | program | median | least | most | CPU | GB/s |\n|---|---|---|---|---|---|---|---|")
  for count in args.members:
    for size in args.sizes:
      for name, calls in measure(count, size, args.repeats).items():
        print(f"| {count} | {size / 1e6:g} M | {name} | {row(size, calls)} |", flush=True)


def row(size: int, calls: Sequence[tuple[float, float]]) -> str:
  """Returns the columns of one program. calls: (seconds, CPU seconds of member 0) of each call."""
  seconds = [wall for wall, _ in calls]
  median = statistics.median(seconds)
  cpu = statistics.median(cpu for _, cpu in calls)
  times = " | ".join(f"{1e3 * x:.1f} ms" for x in (median, min(seconds), max(seconds), cpu))
  return f"{times} | {4 * size / median / 1e9:.2f}"


def measure_paced(args: argparse.Namespace) -> None:
  """Prints the table of --rate."""
  bits = float(args.rate[:-4]) * {"gbit": 1e9, "mbit": 1e6}[args.rate[-4:]]
  print("| members | values | streams | median | least | most | CPU | rate used | compute | utilisation |")
  print("|---" * 10 + "|")
  with hosts() as network:
    names = [FAR, NEAR, *(f"10.77.0.{number}" for number in range(4, 2 + max(args.members)))]
    for host in names[2:]:
      network.add(host)
    for host in names:
      limit = f"tc qdisc replace dev card root tbf rate {args.rate} burst 512kb latency 100ms".split()
      subprocess.run([*network.prefix(host), *limit], check=True)
    for count, size, compute in itertools.product(args.members, args.sizes, map(float, args.compute.split(","))):
      where = [(host, network.prefix(host)) for host in names[:count]]
      (calls,) = measure(count, size, args.repeats, where, args.streams, compute).values()
      seconds = statistics.median(wall for wall, _ in calls)
      share = 2 * (count - 1) / count * 32 * size / bits / (seconds - compute)
      columns = row(size, calls).rpartition(" | ")[0]
      both = f"{share:.3f} | {compute:g} s | {compute / seconds:.4f}"
      print(f"| {count} | {size / 1e6:g} M | {args.streams} | {columns} | {both} |", flush=True)


def measure(
  count: int,
  size: int,
  repeats: int,
  where: Sequence[tuple[str, list[str]]] = (),
  streams: int = 1,
  compute: float = 0.0,
) -> dict[str, list[tuple[float, float]]]:
  """Returns {program: (seconds, CPU seconds of member 0) of each call} of `count` processes. where: the host of each
  member, and what runs a command there; default: this host."""
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  processes = []
  for member, (host, prefix) in enumerate(where or [("", [])] * count):
    arguments = {"member": member, "count": count, "size": size, "repeats": repeats, "port": port}
    arguments |= {"host": host, "streams": streams, "compute": compute}
    command = [*prefix, sys.executable, "-m", "end_to_end.benchmarks.exchange", "--member", json.dumps(arguments)]
    processes.append(
      subprocess.Popen(
        command, env=cpu_environment({}), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
      )
    )
  try:
    peers = {member: json.loads(_line(process, '"')) for member, process in enumerate(processes)}
    for process in processes:
      process.stdin.write(json.dumps(peers) + "\n")
      process.stdin.flush()
    return json.loads(_line(processes[0], "{"))
  finally:
    for process in reversed(processes):  # jax.distributed ends with member 0, and the others would print errors
      process.kill()
    for process in processes:
      process.communicate(timeout=60)


def _line(process: subprocess.Popen[str], start: str) -> str:
  """Returns the next line that begins with `start`: gloo prints lines of its own."""
  for line in process.stdout:
    if line.startswith(start):
      return line
  sys.exit(f"A member ended with exit code {process.wait()} before it had a result; its error is above.")


def run_member(
  member: int, count: int, size: int, repeats: int, port: int, host: str, streams: int, compute: float
) -> None:
  """Runs one member: prints its address, reads the addresses of all, and prints the result of `measure`. host: its
  address in the network of --rate, or ""."""
  warn = lambda line: print(line, file=sys.stderr)
  exchange = Exchange(member, TOKEN, warn, host=host or "127.0.0.1", streams=streams)
  print(json.dumps(exchange.address), flush=True)
  exchange.connect(1, {int(name): address for name, address in json.loads(sys.stdin.readline()).items()})
  dealt = {other: [other] for other in range(count)}
  nothing = np.zeros(1, np.float32)

  def barrier(name: str) -> None:
    exchange.reduce(name, {member: nothing}, dealt, np.empty(1, np.float32))

  if host:
    share, out = np.full(size, member + 1, np.float32), np.empty(size, np.float32)
    programs = {"exchange, float32": lambda tag: exchange.reduce(tag, {member: share}, dealt, out)}
  else:
    programs = make_programs(exchange, dealt, member, size, port)
  calls: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
  for repeat in range(repeats + 2):
    for name, program in programs.items():
      barrier(f"{repeat} {name}")
      start, cpu = time.perf_counter(), time.process_time()
      time.sleep(compute)
      program(f"{repeat} {name} measured")
      if repeat > 1:  # the first calls compile, and touch memory for the first time
        calls[name].append((time.perf_counter() - start, time.process_time() - cpu))
  barrier("end")
  print(json.dumps(calls), flush=True)
  sys.stdin.read()  # until the parent kills this process: jax.distributed would wait for the others


def make_programs(
  exchange: Exchange, dealt: dict[int, Sequence[int]], member: int, size: int, port: int
) -> dict[str, Callable[[str], None]]:
  """Returns {name: a function that sums or copies the share once; its argument is a tag}."""
  import jax
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  count = len(dealt)
  jax.config.update("jax_num_cpu_devices", 1)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.distributed.initialize(f"127.0.0.1:{port}", count, member)
  device = jax.local_devices()[0]
  mesh = Mesh(np.array(jax.devices()), ("slice",))
  share = np.full(size, member + 1, np.float32)
  tree = jax.device_put(np.array_split(share, LEAVES), device)
  layout = FlatLayout(tree)
  out, copied = layout.empty(), layout.empty()
  by_slice = NamedSharding(mesh, PartitionSpec("slice"))
  whole = jax.make_array_from_single_device_arrays((count, size), by_slice, [jax.device_put(share[None], device)])
  add = jax.shard_map(lambda x: jax.lax.psum(x, "slice"), mesh=mesh, in_specs=by_slice.spec, out_specs=PartitionSpec())
  all_reduce = jax.jit(add)

  def check(totals: Any) -> None:
    for total in jax.tree.leaves(jax.block_until_ready(totals)):
      assert np.asarray(total).reshape(-1)[-1] == count * (count + 1) / 2

  def reduce(tag: str, wire: Any) -> None:
    exchange.reduce(tag, {member: layout.to_host([Part(tree)])}, dealt, out, wire)
    check(layout.to_device(out))

  def send_state(tag: str) -> None:
    if member == 1:
      exchange.send_state(0, {"tag": tag}, [share])
    elif member == 0:
      exchange.receive_state(1, lambda header: [copied])

  return {
    "exchange, float32": lambda tag: reduce(tag, "float32"),
    "exchange, bfloat16": lambda tag: reduce(tag, "bfloat16"),
    "gloo": lambda tag: check(all_reduce(whole).addressable_data(0)),
    "state from one member to another": send_state,
    "copy of the memory": lambda tag: np.copyto(copied, share),
  }


if __name__ == "__main__":
  main()
