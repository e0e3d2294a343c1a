"""Times the exchange of gradients on a slow network: after the backward pass, and while it computes.

    python -m end_to_end.benchmarks.exchange_overlap [--rates 500mbit,1gbit,none] [--repeats 10] [key=value ...]

Two slices of one process and one CPU device are hosts with network namespaces of their own, whose cards send at the
given rate. So this needs Linux, iproute2 and the right to make namespaces. Each slice computes the gradients of one
share in one program, as on a CPU, and in several, as on an accelerator. The two take turns, each without and with the
exchange. A call begins and ends with a barrier. Exposed time is the median with the exchange less the median of one
program without it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
from end_to_end.benchmarks.common import positive
from end_to_end.partition import FAR, NEAR, Network, hosts
from tests.support.command import ROOT, cpu_environment

from worlds.exchange import Exchange

TOKEN = b"a token of benchmarks"
MODEL = (
  "base_num_decoder_layers=8 base_emb_dim=512 base_num_query_heads=4 base_num_kv_heads=2 head_dim=128 "
  "base_mlp_dim=1536 vocab_size=4096 logits_via_embedding=false max_target_length=128 per_device_batch_size=4 "
  "remat_policy=full enable_checkpointing=false"
).split()
STAGES = 4
_INSIDE = "--inside"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rates", default="500mbit,1gbit,none", help="as tc writes them; none: no limit")
  parser.add_argument("--repeats", type=positive, default=10)
  parser.add_argument("keys", nargs="*", metavar="key=value", help="changes of the model")
  parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
  parser.add_argument("--member", help=argparse.SUPPRESS)  # JSON, for the processes that this command starts
  args = parser.parse_args()
  if args.member is not None:
    run_member(keys=args.keys, **json.loads(args.member))
  elif not args.inside:
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", __spec__.name, _INSIDE]
    sys.exit(subprocess.run([*command, *sys.argv[1:]], check=False).returncode)
  else:
    print("| rate | values | compute | several | exchange after | exposed | exchange meanwhile | exposed | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    with hosts() as network:
      for rate in args.rates.split(","):
        print(row(rate, **measure(network, rate, args.repeats, args.keys)), flush=True)


def row(rate: str, size: int, calls: dict[str, list[float]]) -> str:
  """Returns the row of a rate. calls: seconds by program."""
  median = {name: statistics.median(seconds) for name, seconds in calls.items()}
  exposed = [median[name] - median["one"] for name in ("one exchanged", "several exchanged")]
  cells = [
    median["one"],
    median["several"],
    median["one exchanged"],
    exposed[0],
    median["several exchanged"],
    exposed[1],
  ]
  times = " | ".join(f"{1e3 * x:.0f} ms" for x in cells)
  return f"| {rate} | {size / 1e6:.1f} M | {times} | {exposed[1] / exposed[0]:.2f} |"


def measure(network: Network, rate: str, repeats: int, keys: list[str]) -> dict:
  """Returns the number of values, and the seconds of each call of member 0 by program."""
  processes = []
  for member, host in enumerate((FAR, NEAR)):
    subprocess.run([*network.prefix(host), *"tc qdisc replace dev card root pfifo".split()], check=True)
    if rate != "none":
      limit = f"tc qdisc replace dev card root tbf rate {rate} burst 512kb latency 100ms".split()
      subprocess.run([*network.prefix(host), *limit], check=True)
    own = json.dumps({"member": member, "host": host, "repeats": repeats})
    command = [*network.prefix(host), sys.executable, "-m", __spec__.name, "--member", own, *keys]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes.append(subprocess.Popen(command, env=cpu_environment({}), cwd=ROOT, **pipes))
  try:
    peers = {member: json.loads(process.stdout.readline()) for member, process in enumerate(processes)}
    for process in processes:
      process.stdin.write(json.dumps(peers) + "\n")
      process.stdin.flush()
    results = [process.stdout.readline() for process in processes]
    return json.loads(results[0])
  finally:
    for process in processes:
      process.kill()
      process.communicate(timeout=60)


def run_member(member: int, host: str, repeats: int, keys: list[str]) -> None:
  """Runs one member: prints its address, reads the addresses of all, and prints the result of `measure`."""
  exchange = Exchange(member, TOKEN, lambda line: print(line, file=sys.stderr), host=host)
  size, programs = make_programs(exchange, member, keys)
  print(json.dumps(exchange.address), flush=True)
  exchange.connect(1, {int(name): address for name, address in json.loads(sys.stdin.readline()).items()})
  nothing = np.zeros(1, np.float32)

  def barrier(name: str) -> None:
    exchange.reduce(name, {member: nothing}, {0: [0], 1: [1]}, np.empty(1, np.float32))

  calls: dict[str, list[float]] = {name: [] for name in programs}
  for repeat in range(repeats + 1):
    for name, program in programs.items():
      barrier(f"{repeat} {name} begins")
      start = time.perf_counter()
      program(f"{repeat} {name}")
      barrier(f"{repeat} {name} ends")
      if repeat:  # the first calls touch memory for the first time
        calls[name].append(time.perf_counter() - start)
  print(json.dumps({"size": size, "calls": calls}), flush=True)
  sys.stdin.read()  # until the parent kills this process: the other member may still read


def make_programs(exchange: Exchange, member: int, keys: list[str]) -> tuple[int, dict[str, Callable[[str], None]]]:
  """Returns the number of values, and {name: a function that computes the gradients once; its argument is a tag}."""
  import jax

  from input_pipeline.batch import Batch
  from trainer import config
  from trainer.program import program, step
  from worlds.exchange import FlatLayout

  sums = {}
  conf = config.load(["configs/quickstart.yml", *MODEL, *keys])
  for stages in (1, STAGES):
    with mock.patch.object(program, "least_stages", lambda layers, platform, stages=stages: stages):
      prog = program.build(conf, [jax.devices()], 1)
    (abstract,) = prog.batch
    grads = step.abstract_sums(prog.state, prog.mesh).grads
    with jax.set_mesh(prog.mesh):
      sums[stages] = prog.share.compile(prog.state.params, abstract, grads, None, adds=False)
  layout = FlatLayout(grads)
  params = prog.init(jax.random.key(0)).params
  shape = abstract.tokens.shape
  tokens = np.random.default_rng(member).integers(0, conf.model.vocab_size, shape).astype(np.int32)
  positions = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
  batch = Batch(tokens, tokens, np.ones(shape, np.float32), positions, np.ones(shape, np.int32))
  batch = jax.device_put(batch, jax.tree.map(lambda leaf: leaf.sharding, abstract))
  totals = {stages: layout.empty() for stages in sums}

  def compute(stages: int) -> None:
    jax.block_until_ready([part.tree for part in sums[stages](params, batch)[1]])

  def exchanged(stages: int, tag: str) -> None:
    scalars, parts = sums[stages](params, batch)
    jax.block_until_ready(scalars)
    own = {member: layout.to_host(parts)}
    known = layout.ranges(sums[stages].parts)
    exchange.reduce(tag, own, {0: [0], 1: [1]}, totals[stages], known=known)
    assert (totals[1] == totals[stages]).all(), "several programs have other sums than one program"

  programs = {
    "one": lambda tag: compute(1),
    "several": lambda tag: compute(STAGES),
    "one exchanged": lambda tag: exchanged(1, tag),
    "several exchanged": lambda tag: exchanged(STAGES, tag),
  }
  return layout.size, programs


if __name__ == "__main__":
  main()
