"""A few trials of `python -m end_to_end.corrupt_entries`: damaged older checkpoints and odd entries."""

from __future__ import annotations

import pytest
from end_to_end import corrupt_entries
from tests.support.seeds import few


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
  folder = tmp_path_factory.mktemp("prepared") / "run"
  corrupt_entries.prepare(folder)
  return folder


@pytest.mark.parametrize("seed", few(range(100, 102), range(100, 106)))
def test_the_newest_good_state_is_restored_and_saving_goes_on(prepared, tmp_path, seed):
  corrupt_entries.trial(prepared, tmp_path / "trial", seed)
