"""The measured steps of end_to_end/benchmarks/calibration.yml, and what follows from them."""

from __future__ import annotations

from end_to_end.benchmarks import calibration

from stepcost import chips, prices, topologies

ROWS = calibration.read_rows()


def test_every_row_has_a_source_keys_and_a_chip():
  assert len({row.name for row in ROWS}) == len(ROWS)
  for row in ROWS:
    topologies.resolve(row.topology)
    assert chips.find(row.version), row.topology
    assert row.source and row.seconds > 0
    keys = [key.split("=")[0] for key in row.keys]
    assert len(set(keys)) == len(keys) and all("=" in key for key in row.keys), row.name
    assert len(set(row.flags)) == len(row.flags) and all(flag.startswith("--xla_") for flag in row.flags), row.name


def test_every_tpu_has_the_instructions_of_attention_kernels():
  tpus = {version for version, known in prices.CALIBRATIONS.items() if known.cycles}
  assert tpus == set(prices.ATTENTION_INSTRUCTIONS) == {chip.name for chip in chips.CHIPS if chip.clock_hz}
