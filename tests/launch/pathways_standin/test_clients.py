"""Programs of JAX's real proxy client: equal to the CPU, bit for bit, and what they see when slices fail."""

from __future__ import annotations

import pytest
from tests.launch.pathways_standin.conftest import run_client
from tests.support import standin_conformance, standin_faults

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
