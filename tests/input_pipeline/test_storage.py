"""What an error of storage means."""

from __future__ import annotations

import pytest

from input_pipeline import storage


@pytest.mark.parametrize(
  ("text", "is_outage"), [("UNAVAILABLE: storage", True), ("DATA_LOSS: checksum", False), ("NOT_FOUND: array", False)]
)
def test_an_outage_of_the_storage_is_not_a_damaged_file(text, is_outage):
  assert storage.is_outage(ValueError(text)) is is_outage
