"""A published guide for elastic training, on simulated slices. test_adversity.py has the other guide's script on a log.

`python -m end_to_end.guides` plays all guides, behind a stand-in for Pathways or, with --simulated, without it.
"""

from __future__ import annotations

import pytest
from end_to_end import guides


@pytest.mark.soak  # test_retry.py has elastic_backup_kind=checkpoint, test_adversity.py a fixed mesh on the real loop
@pytest.mark.timeout(900)
def test_a_restore_on_a_fixed_mesh_rewinds_to_the_last_checkpoint(tmp_path):
  guides.fixed_mesh(tmp_path, guides.SIMULATED)
