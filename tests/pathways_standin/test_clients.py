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


# One test for many programs: with one for each, every worker of pytest would start a client and run all of them.
def test_programs_give_the_same_bits_as_on_the_cpu(server):
  assert set(CHOSEN) <= standin_conformance.PROGRAMS.keys()
  found = run_client(server, "tests.support.standin_conformance", *CHOSEN, platforms="proxy,cpu")
  assert found == dict.fromkeys(CHOSEN, "")


def test_scenarios_of_faults(server):
  found = run_client(server, "tests.support.standin_faults", server.control_path)
  assert found == dict.fromkeys(standin_faults.SCENARIOS, "")


# The others take longer than without processes: every return of a slice is the start of a process.
OF_PROCESSES = (*standin_faults.PROCESS_SCENARIOS, "a_killed_slice", "no_leak")


@pytest.mark.soak  # tests/elastic/test_pathways_command.py kills and stops processes of slices
def test_scenarios_of_faults_of_processes(tmp_path):
  with open(tmp_path / "log", "w") as log:
    running = start_standin(2, 2, arguments=("--port", "0", "--processes", "--worker-timeout", "8"), log=log)
    try:
      found = run_client(running, "tests.support.standin_faults", running.control_path, *OF_PROCESSES)
      workers = [entry["pid"] for entry in running.control("status")["slices"]]
    finally:
      running.close()
  assert found == dict.fromkeys(OF_PROCESSES, "")
  deadline = time.monotonic() + 30
  while any(map(is_running, workers)) and time.monotonic() < deadline:
    time.sleep(0.05)
  assert len(workers) == 2 and not any(map(is_running, workers))
