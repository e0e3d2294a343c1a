"""Trains on two hosts with paced links: the same bits at every rate, the bytes of a token, the time of a step.

  python -m end_to_end.benchmarks.local_links [--rates 20mbit,200mbit] [--steps 64]
  python -m end_to_end.benchmarks.local_links --absent
  python -m end_to_end.benchmarks.local_links --slow

--absent: eight slices on this machine take rounds of 32 steps of 0.1 s, and one of them is away after the first round.
The replica of the absent slice is computed by one slice in the next round, and then in turns. --slow: one of the slices
needs 0.2 s for a step. It is named after 16 rounds, and then the others take most steps of its replica.

Otherwise, each host is a network namespace whose card sends at the rate. This needs Linux, iproute2 and the
right to make namespaces. A model of 0.3 million parameters trains on Python's standard library: rounds of 32 local
steps at every rate, then, at the last rate, synchronous steps and rounds with grad_reduce_dtype=bfloat16. Bytes for a
token are counted as the records of the run have them (only with local steps), and by the card of the first host, with
the headers of TCP and the traffic of the supervisor. Exits with 1 if losses or final states differ between rates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from end_to_end.network import FAR, INSIDE, NEAR, SUPERVISOR, Network, hosts
from tests.support.agent_runs import AgentRun
from tests.support.command import differences
from tests.support.forked_runs import SLOW, SLOWED, StandaloneServer
from tests.support.process_runs import ProcessRun

_INSIDE = "--inside"
MODEL = (
  "base_emb_dim=128 base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=2 head_dim=64 base_mlp_dim=256 "
  "vocab_size=260 logits_via_embedding=true remat_policy=none dataset_type=text dataset_path= tokenizer_type=byte "
  "max_target_length=64 per_device_batch_size=4 learning_rate=0.004 sample_prompt= eval_steps=8 "
  "learning_rate_schedule_steps=-1 warmup_steps_fraction=0.1"
).split()
TOKENS = 2 * 4 * 64  # of a step
H = 32


def train(folder: Path, keys: Sequence[str], network: Network, shared: Path) -> tuple[AgentRun, int]:
  """Returns the complete run and what the card of the first host has sent."""
  caches = [f"jax_cache_dir={shared / 'compiled'}", f"dataset_cache_directory={shared / 'tokens'}"]
  run = AgentRun(folder, [*MODEL, *caches, *keys], slices=2, host=SUPERVISOR)
  before = sent(network)
  with run.launched() as supervisor:
    agents = [run.agent(host, prefix=network.prefix(host)) for host in (FAR, NEAR)]
    code = run.wait(supervisor, 600)
    for agent in agents:
      agent.wait(30)
  if code:
    sys.exit(f"The run ended with exit code {code}:\n{run.tail()}")
  return run, sent(network) - before


def sent(network: Network) -> int:
  """The bytes that the card of the first host has sent."""
  command = [*network.prefix(FAR), "ip", "-json", "-stats", "link", "show", "dev", "card"]
  found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
  return int(found[0]["stats64"]["tx"]["bytes"])


def measure(folder: Path, rates: Sequence[str], steps: int) -> int:
  """Prints the table. Returns the number of differences."""
  print("| link | run | evaluation loss | bytes for a token, records | bytes for a token, card | time of a step |")
  print("|---" * 6 + "|", flush=True)
  wrong, first = list[str](), None
  runs = [(rate, f"H = {H}", [f"local_steps={H}"]) for rate in rates]
  runs += [
    (rates[-1], "synchronous", []),
    (rates[-1], f"H = {H}, bfloat16", [*runs[0][2], "grad_reduce_dtype=bfloat16"]),
  ]
  with hosts() as network:
    for number, (rate, kind, keys) in enumerate(runs):
      for host in (FAR, NEAR):
        limit = f"tc qdisc replace dev card root tbf rate {rate} burst 256kb latency 100ms".split()
        subprocess.run([*network.prefix(host), *limit], check=True)
      own = [*keys, f"steps={steps}", f"checkpoint_period={steps}", f"eval_interval={steps}"]
      run, by_card = train(folder / str(number), own, network, folder)
      records = run.records("metrics")
      by_records = max(r["step"] == steps and r.get("bytes_sent", 0) for r in records) / TOKENS / H  # of the last round
      (loss,) = [record["eval_loss"] for record in records if "eval_loss" in record]
      seconds = statistics.median(
        record["seconds"] for record in records if record.get("step", 0) > H and "loss" in record
      )
      columns = f"{loss!r} | {by_records:,.0f} | {by_card / TOKENS / steps:,.0f} | {1e3 * seconds:.0f} ms"
      print(f"| {rate} | {kind} | {columns} |", flush=True)
      first = first or run
      wrong += differences(run, first, steps) if number < len(rates) else []
  print(*wrong, f"{len(wrong)} differences in losses, gradient norms and final states between {rates}", sep="\n")
  return len(wrong)


def uneven(folder: Path, *, is_slow: bool) -> int:
  """Prints the time of each round of slices of which one is away or slow. Returns whether the run failed."""
  rounds, environment = (22, SLOW | {SLOWED: "5:0.2"}) if is_slow else (8, SLOW)
  faults = [] if is_slow else [f"fault_injection=slice_down@{H + 8}:5/inf, slice_up@{6 * H}:5"]
  keys = [f"local_steps={H}", f"steps={rounds * H}", f"checkpoint_period={rounds * H}", *faults]
  with contextlib.closing(StandaloneServer()) as server:
    run = ProcessRun(folder, keys, slices=8, environment=environment, server=server)
    with run.launched() as supervisor:
      code = run.wait(supervisor, 600)
  print("| slices | time of the round | computation of a slice | sent by the first slice |\n|---|---|---|---|")
  for record in run.records("metrics"):
    if by_first := record.get("bytes_sent"):
      computed = [H * seconds for seconds in record["slice_seconds"].values()]
      least, most = f"{min(computed):.2f}", f"{max(computed):.2f} s"
      print(f"| {len(computed)} | {H * record['seconds']:.2f} s | {least} to {most} | {by_first:,} bytes |")
  return code


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--rates", default="20mbit,200mbit")
  parser.add_argument("--steps", type=int, default=64)
  parser.add_argument("--absent", action="store_true")
  parser.add_argument("--slow", action="store_true")
  parser.add_argument(_INSIDE, action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.absent or args.slow:
    with tempfile.TemporaryDirectory(prefix="local-uneven-") as folder:
      sys.exit(uneven(Path(folder), is_slow=args.slow))
  if not args.inside:
    command = [*INSIDE, sys.executable, "-m", __spec__.name, _INSIDE, *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)
  with tempfile.TemporaryDirectory(prefix="local-links-") as folder:
    sys.exit(int(measure(Path(folder), args.rates.split(","), args.steps) > 0))


if __name__ == "__main__":
  main()
