"""Runs preflight on a valid configuration: compiles the steps and prints the findings."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stepcost import chips, gpus, topologies
from stepcost.chips import Chip
from stepcost.formats import size
from trainer import cluster as cluster_lib
from trainer.config import rules, shares
from trainer.config.errors import ConfigError, counted, how_to_install, require
from trainer.config.schema import Config, PreflightOptions, RematPolicy

Slices = Sequence[Sequence[Any]]


def run(config: Config, options: PreflightOptions, started: float) -> int:
  """Prints the findings and returns the exit code.

  0: every compiled step fits. 1: one does not fit. 3: the compiler refused a step for a reason other than memory.
  """
  slices_of, total, where = _devices(config, options)
  # These modules import jax, so import them only now that the environment names the platform.
  from trainer.preflight import analysis, findings
  from trainer.program import program

  print(where)
  slices = slices_of(total)
  program.check_compiler_flags(config, slices)
  chip = _chip(slices)
  whole = _whole(config, total)
  fewer = whole and (total == 1 or config.parallelism.dcn_data_parallelism == -1)
  wanted = [total, total - 1] if total > 1 and fewer else [total]
  compiled_total = total
  if _separate(config):  # each process compiles the program of its own slice, whichever others are alive
    wanted, compiled_total = [1], 1
    config = shares.resolve(config)
  if config.model.remat_policy is RematPolicy.AUTO:
    config = _choose_remat(config, slices_of, compiled_total)
  with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
    # Compile in parallel: the compiler releases the lock of the interpreter.
    futures = [pool.submit(analysis.analyse, config, slices_of(alive), compiled_total) for alive in wanted]
    for line in findings.state_lines(config, slices, whole):
      print(line)
    costs = (
      _process_lines(config, slices_of, total) if _separate(config) else findings.degraded_lines(config, slices, fewer)
    )
    print("\n".join(costs), flush=True)
    codes = [0]
    for future in futures:
      found = future.result()
      living = counted(found.slices, "slice")
      if isinstance(found, analysis.Analysis):
        print("\n".join(findings.analysis_lines(found, chip)), flush=True)
        if config.optimizer.has_local_steps:
          estimate = analysis.timeline(found, chip) if chip else None
          seconds = estimate.seconds if estimate else 0.0
          own = program.build(config, slices_of(1), 1).state
          print("\n".join(findings.local_steps_lines(config, own, total, seconds)), flush=True)
        codes.append(0 if chip is None or found.memory.fits(chip) else 1)
      elif found.too_large:
        print(f"The step on {living} does not fit: {found.reason}", flush=True)
        codes.append(1)
      else:
        print(f"error: the compiler refused the step on {living}: {found.reason}", file=sys.stderr)
        codes.append(3)
  print(f"Seconds in total: {time.monotonic() - started:.1f}")
  return max(codes)


def _chip(slices: Slices) -> Chip | None:
  """The peaks of a device and the memory that arrays can have there; None for a CPU and an unknown device."""
  from trainer.preflight import remat_choice

  found = chips.find(slices[0][0].device_kind)
  if found is None or slices[0][0].platform != "gpu":
    return found
  found = dataclasses.replace(found, hbm_bytes=remat_choice.limit(slices))
  print(f"Of the memory of a GPU, JAX takes {size(found.hbm_bytes)}; {gpus.SHARE_VARIABLES[0]} sets the share")
  return found


def _choose_remat(config: Config, slices_of: Callable[[int], Slices], total: int) -> Config:
  """Returns `config` with the policy that a run would choose. Prints all candidates, and keeps the choice for the run.

  A run in a folder with a config.yml keeps its own policy, which may be another one.
  """
  from trainer.preflight import findings, remat_choice

  needed = [total, total - 1] if remat_choice.needs_fewer(config, total) else [total]
  slice_sets = [slices_of(alive) for alive in needed]
  choice, candidates = remat_choice.choose(config, slice_sets)
  remat_choice.keep(config, slice_sets, choice)
  print("\n".join(findings.remat_lines(choice, candidates)), flush=True)
  return choice.applied(config)


def _separate(config: Config) -> bool:
  """Whether each slice is a process with a program of its own. A file of keys may leave `cluster` to the launcher."""
  kind = config.cluster.cluster
  mistakes = [*rules.single_controller_conflicts(config.elastic, kind), *rules.needs_processes(config.optimizer)]
  if kind in ("simulated", "pathways"):
    require(mistakes)
  return kind == "multiprocess" or bool(mistakes)


def _process_lines(config: Config, slices_of: Callable[[int], Slices], total: int) -> list[str]:
  """What a step, or a round of local steps, costs where each slice is a process."""
  from trainer.preflight import findings
  from trainer.program import program

  values = findings.exchanged_values(config, program.build(config, slices_of(1), 1).state)
  wire_bytes = values * {"float32": 4, "bfloat16": 2}[config.optimizer.grad_reduce_dtype]
  return findings.process_lines(
    total, config.elastic.shares_per_slice, 4 * values, wire_bytes, config.optimizer.local_steps
  )


def _whole(config: Config, total: int) -> bool:
  """Returns whether each of `total` slices holds the whole state. Raises ConfigError if the keys do not fit `total`."""
  from trainer.parallel import mesh

  return set(mesh.axis_sizes(config.parallelism, "dcn", total)[1:]) == {1}


def _devices(config: Config, options: PreflightOptions) -> tuple[Callable[[int], Slices], int, str]:
  """Returns (function from k to the devices of k slices, number of slices, line that describes them)."""
  name, count = options.compile_topology, options.compile_topology_num_slices
  if not name:
    if count != 1:
      raise ConfigError(
        f"compile_topology_num_slices={count}: has no effect without compile_topology.\n"
        "Add compile_topology, such as v5e-16; for simulated slices of this machine use num_slices."
      )
    cluster = cluster_lib.start(
      config.cluster.model_copy(update={"cluster": "simulated"}) if _separate(config) else config.cluster
    )
    all_slices = cluster.view(cluster.slices).devices
    where = f"For the devices of this machine: {counted(cluster.num_slices, 'slice')} of {cluster.devices_per_slice}"
    return lambda alive: all_slices[:alive], cluster.num_slices, where
  given = config.cluster.num_slices or count
  with _refusals():
    topology = topologies.resolve(name)
  untried, tried = topologies.untried_compiler(topology), " and ".join(topologies.TRIED_COMPILERS)
  topologies.prepare_environment()
  # Describe k slices as a topology of k: the compiler needs a program that uses all slices of its topology.
  slices_of = functools.cache(_refusals()(functools.partial(topologies.devices, topology)))
  return (
    slices_of,
    count,
    (
      f"For {counted(count, 'slice')} of {topology.jax_name}: {topology.chips} chips "
      f"({len(slices_of(count)[0])} devices) on {counted(topology.hosts, 'host')} each; "
      f"no {topology.platform.upper()} is needed"
      + (f"\nUsing compile_topology_num_slices={count}, not num_slices={given}" if given != count else "")
      + (f"\nThe times were not tried with libtpu {untried}, only with {tried}" if untried else "")
    ),
  )


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
  """Raises ConfigError for a topology that is refused."""
  try:
    yield
  except topologies.CompilerMissing as error:
    remedy = how_to_install("tpu") if error.platform == "tpu" else how_to_install("gpu")
    others = "or leave out compile_topology to use the devices of this machine."
    raise ConfigError(f"compile_topology={error}\n{remedy}, {others}") from error
  except topologies.TopologyError as error:
    raise ConfigError(f"compile_topology={error}") from error
