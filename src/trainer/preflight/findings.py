"""The findings of preflight as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Device

from stepcost import prices
from stepcost.chips import Chip
from stepcost.collectives import Collective
from stepcost.formats import milliseconds, size, transfer_lines
from trainer.checkpoint import ramdisk_size
from trainer.checkpoint.arrays import state_tree
from trainer.config import counts
from trainer.config.errors import counted
from trainer.config.schema import Config
from trainer.elastic import batch_plan
from trainer.preflight.analysis import Analysis, roofline, timeline
from trainer.preflight.remat_choice import Choice, PolicyResult
from trainer.program import program
from trainer.program.state import TrainState

EXPOSED_SHOWN = 5  # transfers
_LINKS = (1, 10, 100)  # Gbit/s, between two slices

QUICK = (
  "Compiled quickly, with little optimization, to check that it fits. The program that runs is fully optimized, and "
  "uses more memory only if there is room"
)


def state_lines(config: Config, slices: Sequence[Sequence[Device]], whole: bool) -> list[str]:
  state = program.build(config, slices, len(slices)).state
  parameters, state_bytes = counts.parameter_count(config.model), state_tree.state_bytes(state)
  lines = [
    f"Parameters: {parameters:,} ({size(state_tree.state_bytes(state.params))})",
    f"Checkpoint: {size(state_bytes)} of arrays, one copy of the whole state",
  ]
  if not whole:
    return [*lines, "Snapshot and ramdisk: none, because no slice holds the whole state (dcn_fsdp_parallelism)"]
  host_of = lambda device: device.process_index
  hosts = len({host_of(device) for device in slices[0]})
  by_rule = ramdisk_size.ramdisk_by_rule(parameters, hosts)
  exact = max(ramdisk_size.ramdisk_exact(state, slices[0], host_of).values())
  sums = 2 * 4 * exchanged_values(config, state)  # of its own shares, and the total, in float32
  return [
    *lines,
    f"Snapshot: {size(state_bytes)} of host memory per slice and copy, {size(state_bytes / hosts)} per host "
    f"({counted(hosts, 'host')} per slice), two copies while a new one is being written",
    f"Slices as processes: no snapshots; {size(sums / hosts)} of host memory per host for sums, and "
    f"{size(state_bytes / hosts)} during a save"
    + (" and in a round of local steps" if config.optimizer.has_local_steps else ""),
    f"Ramdisk per host: {size(by_rule)} by the rule (parameters x 12 bytes / hosts x 2 x 1.15)",
    f"Ramdisk per host: {size(exact)} by exact count, for two saves without a margin",
  ]


def degraded_lines(config: Config, slices: Sequence[Sequence[Device]], fewer: bool) -> list[str]:
  """Returns what a step costs with k of N slices alive. fewer: whether the run continues without some slices."""
  total = len(slices)
  if total == 1:
    return ["Slices: one; the run cannot continue if it is lost"]
  if not fewer:
    return [f"Slices: dcn_*_parallelism needs all {total}; the run cannot continue with fewer"]
  lines = ["Slices alive | micro-batches per step | padding | speed, if only computation counts"]
  for alive in range(total, 0, -1):
    plan = program.batch_plan_of(config, slices[:alive], total)
    columns = (f"{alive} of {total}", plan.rounds, f"{plan.padding_share:.1%}", f"{plan.relative_throughput:.1%}")
    lines.append(" | ".join(f"{column:>{width}}" for column, width in zip(columns, (12, 22, 7, 7))))
  return lines


def process_lines(total: int, shares: int, gradient_bytes: int, wire_bytes: int, local_steps: int = 1) -> list[str]:
  """Returns what a step costs with k of N slices alive where each slice is a process (cluster=multiprocess).

  shares: of a slice of the full run. gradient_bytes: of one copy of the gradients in float32. wire_bytes: of one copy
  on its way between slices. Memory and traffic are per slice, all hosts together. local_steps: of a round, which slices
  compute in turns; the traffic is without the replicas that they hand over.
  """
  lines = [f"Slices as processes, shares_per_slice={shares}: alive | shares | speed | most sums held | most sent"]
  for alive in range(total, 0, -1):
    most = -(-total * shares // alive)  # shares of the slice that has the most
    groups, others = divmod(most, shares)  # shares of a group travel together
    sent = others * gradient_bytes + (groups + 1) * wire_bytes  # the sums of its shares, and the totals of what it sums
    columns = (
      f"{alive} of {total}",
      most,
      f"{batch_plan.relative_throughput(total, alive, shares * local_steps):.1%}",
      size((groups + others) * gradient_bytes),
      size(sent * (alive - 1) / alive),
    )
    lines.append(" | ".join(f"{column:>{width}}" for column, width in zip(columns, (48, 6, 6, 14, 18))))
  return lines


def exchanged_values(config: Config, state: TrainState) -> int:
  """Returns how many values the slices sum at once: gradients, or with local steps all that a round averages."""
  return _floating((state.params, state.opt_state) if config.optimizer.has_local_steps else state.params)


def _floating(tree: Any) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating))


def local_steps_lines(config: Config, state: TrainState, total: int, step_seconds: float) -> list[str]:
  """Returns what a round of local steps sends, and the share of the time that the exchange takes at several speeds of a
  link.

  state: of a slice, abstract. total: slices. step_seconds: of a step without the exchange; 0: not known, and the table
  is for a step of 1 s.
  """
  width = {"float32": 4, "bfloat16": 2}[config.optimizer.grad_reduce_dtype]
  sent = lambda values: 2 * (total - 1) / total * width * values
  gradients, averaged = sent(_floating(state.params)), sent(exchanged_values(config, state))
  counts_of_steps = sorted({1, 10, 36, 100, config.optimizer.local_steps})
  step = f"steps of {milliseconds(step_seconds)}" if step_seconds else "steps of 1 s (no estimate for these devices)"
  lines = [
    f"Local steps: a slice sends {size(averaged)} in a round of {config.optimizer.local_steps} steps, and "
    f"{size(gradients)} in a synchronous step",
    f"Share of the exchange for {step}, without overlap: link | "
    f"{' | '.join(f'H={count}' for count in counts_of_steps)}",
  ]
  for gigabits in _LINKS:
    seconds = {count: (gradients if count == 1 else averaged) * 8e-9 / gigabits for count in counts_of_steps}
    shares = (seconds[count] / (seconds[count] + count * (step_seconds or 1.0)) for count in counts_of_steps)
    lines.append(f"  {gigabits:>3} Gbit/s | {' | '.join(f'{share:.1%}' for share in shares)}")
  return lines


def remat_lines(choice: Choice, candidates: Sequence[PolicyResult]) -> list[str]:
  """Returns the choice of remat_policy=auto, and the table of the candidates that were compiled for it."""
  lines = [str(choice), "  remat_policy | step time | exposed communication | HBM"]
  for c in candidates:
    times = f"{milliseconds(c.seconds)} | {milliseconds(c.exposed)}" if c.seconds else "no estimate | no estimate"
    result = f"cannot run: {c.problem}" if c.problem else f"{times} | {size(c.total_bytes)}"
    lines.append(f"  {c.policy} | {result}")
  return lines


def analysis_lines(analysis: Analysis, chip: Chip | None) -> list[str]:
  a = analysis
  mesh = ", ".join(f"{axis}={ways}" for axis, ways in a.mesh.items() if ways > 1) or "one device"
  total = counted(a.num_slices_total, "slice")
  runs = a.costs.unpriced_kernel_runs
  unpriced = f" (without {runs} runs of kernels with unknown FLOPs)" if runs else ""
  lines = [
    f"The step on {a.slices} of {total} x {a.devices_per_slice} {a.device_kind}: mesh {mesh}",
    f"  Attention: {a.attention}; {a.micro_batches} micro-batches per step; {a.tokens:,} tokens per step",
    f"  {memory_line(a, chip)}",
    *([] if a.optimized else [f"  {QUICK}"]),
    f"  FLOPs per device and step: {a.model_flops:.3e} of the model, {a.costs.flops:.3e} executed{unpriced}",
  ]
  if a.optimized:
    lines += [
      f"  Memory traffic per device and step: {size(a.costs.device_bytes)}"
      + (f", and {size(a.costs.host_bytes)} to and from the host" if a.costs.host_bytes else "")
    ]
    if a.costs.cycles:
      lines.append(f"  The compiler's estimate: {a.costs.cycles:.3e} cycles, without kernels and communication")
  for loop in a.unknown_loops:
    lines.append(f"  Counted as one turn, because the number of turns is unknown: the loop {loop}")
  lines += [f"  {line}" for line in collective_lines(a.collectives)]
  if chip is not None:
    lines += [f"  {line}" for line in (*step_time_lines(a, chip), *roofline_lines(a, chip))]
  lines.append(f"  Seconds: {a.trace_seconds:.1f} to trace, {a.compile_seconds:.1f} to compile")
  return lines


def memory_line(a: Analysis, chip: Chip | None) -> str:
  m = a.memory
  parts = (
    f"HBM per device: arguments {size(m.arguments)} ({size(m.aliased)} reused for results) + temporaries "
    f"{size(m.temporaries)} + outputs {size(m.outputs)} + code and buffers {size(m.code)} = {size(m.total)}"
  )
  host = f"; pinned host memory {size(m.host)}, {size(m.host * a.devices_per_host)} per host" if m.host else ""
  if chip is None:
    return parts + host
  verdict = "fits" if m.fits(chip) else "does not fit"
  return f"{parts} of {size(chip.hbm_bytes)} ({m.total / chip.hbm_bytes:.0%}): {verdict}{host}"


def collective_lines(collectives: Iterable[Collective]) -> list[str]:
  groups: dict[tuple[bool, str, int], list[Collective]] = {}
  for c in collectives:
    groups.setdefault((c.crosses_slices, c.kind, c.group), []).append(c)
  if not groups:
    return ["Communication: none"]
  lines = ["Communication per device and step: kind | where | group | calls | payload | sent"]
  for (crosses, kind, group), members in sorted(groups.items()):
    calls = sum(c.times for c in members)
    payload = sum(c.bytes * c.times for c in members)
    sent = sum(c.sent for c in members)
    where = "across slices (DCN)" if crosses else "inside a slice"
    lines.append(f"  {kind} | {where} | {group} | {calls:,.0f} | {size(payload)} | {size(sent)}")
  return lines


def step_time_lines(a: Analysis, chip: Chip) -> list[str]:
  """Returns the estimated time of a step, what is computed and what is exposed in it, and what the estimate lacks."""
  t = timeline(a, chip)
  if t is None:
    return ["Step time: unknown, because this program is not optimized"]
  exposed = ", ".join(f"{channel} {milliseconds(seconds)}" for channel, seconds in t.exposed.items() if seconds)
  basis = ", ".join(f"{milliseconds(seconds)} {basis}" for basis, seconds in t.computation.items() if seconds)
  return [
    f"Step time on {chip.name}: {milliseconds(t.seconds)}: computation {milliseconds(t.computed)}, exposed "
    f"{exposed or 'nothing'}; {throughput(a, chip, t.seconds)}",
    f"  Computation: {basis}",
    f"  Error: {prices.calibration(chip)}",
    *(["  The most exposed transfers:"] if exposed else []),
    *(f"    {line}" for line in transfer_lines(t, EXPOSED_SHOWN)),
    *(f"  Missing in these times: {problem}" for problem in t.problems),
  ]


def throughput(a: Analysis, chip: Chip, seconds: float) -> str:
  tokens = a.tokens / seconds / (a.slices * a.devices_per_slice)
  return f"{tokens:,.0f} tokens/s/device, MFU {a.model_flops / chip.peak_flops / seconds:.0%}"


def roofline_lines(a: Analysis, chip: Chip) -> list[str]:
  r = roofline(a, chip)
  known = lambda seconds: "unknown" if seconds is None else milliseconds(seconds)
  return [
    f"Roofline on {chip.name}: compute {milliseconds(r.compute)}, HBM {known(r.memory)}, "
    f"links {milliseconds(r.ici)}, DCN {known(r.dcn)}, host {milliseconds(r.host)}",
    f"  at least {milliseconds(r.seconds)} per step, limited by {r.bound}; at most {throughput(a, chip, r.seconds)}",
  ]
