"""Programs of JAX's real proxy client: equal to the CPU, bit for bit, and what they see when slices fail."""

from __future__ import annotations

from tests.pathways_standin import conformance, faults
from tests.pathways_standin.conftest import run_client

# All of them take a minute of CPU time: `python -m end_to_end.standin` runs them.
CHOSEN = (
  "round_trip_bfloat16 round_trip_int4 round_trip_bool round_trip_complex64 round_trip_float8_e4m3fn round_trip_int64 "
  "arithmetic_bfloat16 host_arrays_with_strides arrays_of_keys_move sharded_matmul reshard_with_donation donation "
  "one_argument_twice deletion collectives bfloat16_collectives_on_a_submesh memory_kinds layouts ahead_of_time "
  "exported assembled_arrays ready_and_copied scalars_and_empty_results threads"
).split()


# One test for many programs: with one for each, every worker of pytest would start a client and run all of them.
def test_programs_give_the_same_bits_as_on_the_cpu(server):
  assert set(CHOSEN) <= conformance.PROGRAMS.keys()
  found = run_client(server, "tests.pathways_standin.conformance", *CHOSEN, platforms="proxy,cpu")
  assert found == dict.fromkeys(CHOSEN, "")


def test_scenarios_of_faults(server):
  found = run_client(server, "tests.pathways_standin.faults", server.control_path)
  assert found == dict.fromkeys(faults.SCENARIOS, "")
