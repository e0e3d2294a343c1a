from __future__ import annotations

import pytest


@pytest.fixture(scope="package")
def harness(tmp_path_factory, shared):
  """A harness whose runs share compiled steps. All runs must have the number of steps of histories.elastic.KEYS.

  Only the steps that a run needs are compiled. test_retry.py and test_pathways_command.py show their preparation.
  """
  from tests.support.elastic_harness import Harness

  return Harness(tmp_path_factory.mktemp("runs"), cache=shared / "harness", prepare_steps=False)


@pytest.fixture(scope="package")
def undisturbed_run(harness):
  from end_to_end.histories import elastic

  return elastic.run(harness, "undisturbed", "", fixed_mesh=True)
