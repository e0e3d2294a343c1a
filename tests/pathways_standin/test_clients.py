"""Programs of JAX's real proxy client: equal to the CPU, bit for bit, and what they see when slices fail."""

from __future__ import annotations

import time

import pytest
from tests.pathways_standin.conftest import run_client
from tests.support import standin_conformance, standin_faults
from tests.support.command import is_running

from pathways_standin.process import start_standin

# All of them take a minute of CPU time: `python -m end_to_end.standin` runs them.
CHOSEN = (
  "round_trip_bfloat16 round_trip_int4 round_trip_bool round_trip_complex64 round_trip_float8_e4m3fn round_trip_int64 "
  "arithmetic_bfloat16 host_arrays_with_strides arrays_of_keys_move sharded_matmul reshard_with_donation donation "
  "one_argument_twice deletion collectives bfloat16_collectives_on_a_submesh memory_kinds layouts ahead_of_time "
  "exported assembled_arrays ready_and_copied scalars_and_empty_results threads"
).split()


@pytest.fixture(scope="module")
def conformance(server):
  return run_client(server, "tests.support.standin_conformance", *CHOSEN, platforms="proxy,cpu")


@pytest.mark.parametrize("name", CHOSEN)
def test_a_program_gives_the_same_bits_as_on_the_cpu(conformance, name):
  assert name in standin_conformance.PROGRAMS
  assert conformance[name] == ""


@pytest.fixture(scope="module")
def faults(server):
  return run_client(server, "tests.support.standin_faults", server.control_path)


@pytest.mark.parametrize("name", standin_faults.SCENARIOS)
def test_a_scenario_of_faults(faults, name):
  assert faults[name] == ""


# The others take longer than without processes: every return of a slice is the start of a process.
OF_PROCESSES = (*standin_faults.PROCESS_SCENARIOS, "a_killed_slice", "no_leak")


@pytest.fixture(scope="module")
def faults_of_processes(tmp_path_factory):
  with open(tmp_path_factory.mktemp("workers") / "log", "w") as log:
    running = start_standin(2, 2, arguments=("--port", "0", "--processes", "--worker-timeout", "8"), log=log)
    try:
      yield run_client(running, "tests.support.standin_faults", running.control_path, *OF_PROCESSES)
      workers = [entry["pid"] for entry in running.control("status")["slices"]]
    finally:
      running.close()
  deadline = time.monotonic() + 30
  while any(map(is_running, workers)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert len(workers) == 2 and not any(map(is_running, workers))


@pytest.mark.parametrize("name", OF_PROCESSES)
def test_a_scenario_of_faults_of_processes(faults_of_processes, name):
  assert faults_of_processes[name] == ""
