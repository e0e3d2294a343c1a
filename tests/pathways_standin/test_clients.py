"""Programs of JAX's real proxy client: equal to the CPU, bit for bit, and what they see when slices fail."""

from __future__ import annotations

from tests.pathways_standin import conformance, faults
from tests.pathways_standin.conftest import run_client


# One test for many programs: with one for each, every worker of pytest would start a client and run all of them.
def test_programs_give_the_same_bits_as_on_the_cpu(server):
  found = run_client(server, "tests.pathways_standin.conformance", platforms="proxy,cpu")
  assert found == dict.fromkeys(conformance.PROGRAMS, "")


def test_scenarios_of_faults(server):
  found = run_client(server, "tests.pathways_standin.faults", server.control_path)
  assert found == dict.fromkeys(faults.SCENARIOS, "")
