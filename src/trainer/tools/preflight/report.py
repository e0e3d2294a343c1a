"""Preflight's findings as lines of text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from trainer.config.errors import counted
from trainer.elastic.batch_plan import PlanCost
from trainer.observe.chips import Chip
from trainer.tools.preflight.analysis import Analysis, DoesNotFit, roofline
from trainer.tools.preflight.collectives import Collective

QUICK = (
  "Compiled quickly, with little optimization, to see that it fits: what runs is optimized, and takes more memory only "
  "where there is room (preflight.degraded=full compiles just that)"
)


@dataclasses.dataclass(frozen=True)
class StateSizes:
  """Bytes of one copy of the training state, and what follows from them."""

  parameters: int
  parameter_bytes: int
  state_bytes: int  # parameters, optimizer, counters: a persistent checkpoint, and a snapshot's replica per slice
  hosts_per_slice: int
  ramdisk_by_rule: int | None  # None, both: no slice holds the whole state
  ramdisk_exact: int | None


def size(count: float) -> str:
  """ "1,037 MB", "12.3 GB": decimal units, three digits or more."""
  if count >= 1e10:
    return f"{count / 1e9:,.1f} GB"
  return f"{count / 1e6:,.0f} MB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"


def milliseconds(seconds: float) -> str:
  return f"{seconds * 1e3:,.1f} ms"


def machine_line(chip: Chip) -> str:
  """What was measured of this machine's CPU."""
  return (
    f"Measured per device of this machine: matmuls {chip.peak_flops / 1e9:,.1f} GFLOP/s, memory "
    f"{chip.hbm_bandwidth / 1e9:,.1f} GB/s, of {size(chip.hbm_bytes)}"
  )


def state_lines(sizes: StateSizes) -> list[str]:
  """Parameters, checkpoints, snapshots, ramdisk."""
  per_host = sizes.state_bytes / sizes.hosts_per_slice
  lines = [
    f"Parameters: {sizes.parameters:,} ({size(sizes.parameter_bytes)})",
    f"Checkpoint: {size(sizes.state_bytes)} of arrays, the whole state once",
  ]
  if sizes.ramdisk_by_rule is None or sizes.ramdisk_exact is None:
    return [*lines, "Snapshot and ramdisk: none, because no slice holds the whole state (dcn_*_parallelism)"]
  return [
    *lines,
    f"Snapshot: {size(sizes.state_bytes)} of host memory per slice and copy, {size(per_host)} per host "
    f"({counted(sizes.hosts_per_slice, 'host')} per slice), two copies while one is being made",
    f"Ramdisk per host: {size(sizes.ramdisk_by_rule)} by the rule (parameters x 12 bytes / hosts x 2 x 1.15)",
    f"Ramdisk per host: {size(sizes.ramdisk_exact)} by exact count, two saves and no margin",
  ]


def degraded_lines(table: Sequence[PlanCost], total: int) -> list[str]:
  """What a step costs while k of N slices live; an empty table says that all must."""
  if total == 1:
    return ["Slices: one; nothing to go on with when it is lost"]
  if not table:
    return [f"Slices: all {total}, as dcn_*_parallelism say; the run cannot go on with fewer"]
  lines = ["Slices alive | micro-batches per step | padding | speed, if only computation counts"]
  for row in reversed(table):
    columns = (
      f"{row.alive} of {total}",
      row.micro_batches,
      f"{row.padding_share:.1%}",
      f"{row.relative_throughput:.1%}",
    )
    lines.append(" | ".join(f"{column:>{width}}" for column, width in zip(columns, (12, 22, 7, 7))))
  return lines


def analysis_lines(analysis: Analysis, chip: Chip | None) -> list[str]:
  """Everything about one compiled step."""
  a = analysis
  mesh = ", ".join(f"{axis}={ways}" for axis, ways in a.mesh.items() if ways > 1) or "one device"
  total = counted(a.num_slices_total, "slice")
  lines = [
    f"The step on {a.slices} of {total} x {a.devices_per_slice} {a.device_kind}: mesh {mesh}",
    f"  Attention: {a.attention}; {a.micro_batches} micro-batches per step; {a.tokens:,} tokens per step",
    f"  {memory_line(a, chip)}",
    *([] if a.optimized else [f"  {QUICK}"]),
    f"  FLOPs per device and step: {a.model_flops:.3e} of the model, {a.costs.flops:.3e} executed"
    + (
      f" (without {a.costs.silent_kernels} runs of kernels whose FLOPs nothing tells)" if a.costs.silent_kernels else ""
    ),
  ]
  if a.optimized:
    lines += [
      f"  Memory traffic per device and step: {size(a.costs.device_bytes)}"
      + (f", and {size(a.costs.host_bytes)} to and from the host" if a.costs.host_bytes else ""),
      f"  The compiler's own counts, loops once: {a.xla_flops:.3e} FLOPs, {a.xla_bytes:.3e} bytes accessed",
    ]
    if a.costs.cycles:
      lines.append(f"  The compiler's estimate: {a.costs.cycles:.3e} cycles, without kernels and communication")
  for loop in a.unknown_loops:
    lines.append(f"  Counted once in all of these, as nothing shows how often it turns: the loop {loop}")
  lines += [f"  {line}" for line in collective_lines(a.collectives)]
  if chip is not None:
    lines += [f"  {line}" for line in roofline_lines(a, chip)]
  lines.append(f"  Seconds: {a.trace_seconds:.1f} to trace, {a.compile_seconds:.1f} to compile")
  return lines


def memory_line(a: Analysis, chip: Chip | None) -> str:
  """HBM per device against what there is."""
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


def refusal_lines(refusal: DoesNotFit) -> list[str]:
  return [f"The step on {counted(refusal.slices, 'slice')} does not fit: {refusal.reason}"]


def collective_lines(collectives: Iterable[Collective]) -> list[str]:
  """Communication by kind, and inside or across slices; loops are multiplied."""
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


def roofline_lines(a: Analysis, chip: Chip) -> list[str]:
  """The least time that a step can take on this chip."""
  r = roofline(a, chip)
  known = lambda seconds: "not known" if seconds is None else milliseconds(seconds)
  mfu = a.model_flops / chip.peak_flops / r.seconds
  return [
    f"Roofline on {chip.name}: compute {milliseconds(r.compute)}, HBM {known(r.memory)}, "
    f"links {milliseconds(r.ici)}, DCN {known(r.dcn)}, host {milliseconds(r.host)}",
    f"  at least {milliseconds(r.seconds)} per step, bound by {r.bound}; at best "
    f"{a.tokens / r.seconds / (a.slices * a.devices_per_slice):,.0f} tokens/s/device, MFU {mfu:.0%}",
  ]
