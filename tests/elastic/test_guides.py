"""The published guides for elastic training on simulated slices. `python -m end_to_end.guides` needs longer: it repeats
them behind a stand-in for Pathways."""

from __future__ import annotations

import pytest
from end_to_end import guides


@pytest.mark.timeout(900)
def test_a_restore_on_a_fixed_mesh_rewinds_to_the_last_checkpoint(tmp_path):
  guides.fixed_mesh(tmp_path, guides.SIMULATED)


@pytest.mark.timeout(900)
def test_three_slices_two_and_three_again(tmp_path):
  guides.fewer_slices(tmp_path, guides.SIMULATED)
