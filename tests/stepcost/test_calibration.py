"""The measured steps of end_to_end/benchmarks/calibration.yml, and the shares that follow from them."""

from __future__ import annotations

import dataclasses

import pytest
import yaml
from end_to_end.benchmarks import calibration, tpu_models
from tests.support.command import ROOT

from stepcost import chips, hlo, prices, topologies

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


def test_the_shares_follow_from_pairs_of_measured_steps():
  pairs = yaml.safe_load(calibration.DATA.read_text())["pairs"]
  tpus = {version for version, known in prices.CALIBRATIONS.items() if chips.find(version).clock_hz}
  assert set(pairs) == {version for version in tpus if prices.CALIBRATIONS[version].fitted}
  for version, pair in pairs.items():
    known = prices.CALIBRATIONS[version]
    assert calibration.pair_rates(version, pair)[1] == pytest.approx(known.attention, abs=0.005)
    assert known.fitted == len(pair)


@pytest.mark.parametrize(
  "known, text",
  [
    (prices.Calibration(), "unknown"),
    (prices.Calibration(held_out=1, error=0.043), "up to 4% on 1 measured step"),
    (prices.Calibration(0.21, fitted=2), "unknown; attention kernels at 21% of the peak follow from 2 measured steps"),
    (
      prices.Calibration(0.37, fitted=2, held_out=3, error=0.08),
      "up to 8% on 3 measured steps; attention kernels at 37% of the peak follow from 2 measured steps",
    ),
    (
      prices.Calibration(0.41, 0.69, fitted=3, measured_on="H200"),
      "unknown; attention kernels at 41% of the peak and all else at 69% of its peaks follow from 3 measured steps on "
      "H200",
    ),
  ],
)
def test_a_calibration_says_what_it_rests_on(known, text):
  assert str(known) == text


@pytest.mark.parametrize("fused", [False, True])
def test_the_share_is_found_with_which_a_step_agrees(fused):
  """A second of other work, and a second of attention at the peak, of a v6e at 1.75 GHz and 918 TFLOP/s.

  fused: the compiler stores the result of the kernel in a larger array.
  """
  stated = f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":{918 * 10**12}}}}}}}'
  kernel = f'splash_mha_fwd.1 = bf16[2048,128]{{1,0}} custom-call(%q), custom_call_target="tpu_custom_call", {stated}'
  stored = "all = bf16[2048,128]{1,0} fusion(%q), kind=kCustom, calls=%stored"
  text = f"""HloModule m, is_scheduled=true

%nothing () -> s8[8] {{
  ROOT %n = s8[8]{{0:S(1)}} constant({{...}})
}}

%stored (q: bf16[2048,128]) -> bf16[2048,128] {{
  %q = bf16[2048,128]{{1,0:S(1)}} parameter(0)
  ROOT %{kernel}
}}

ENTRY %main (q: bf16[2048,128]) -> bf16[2048,128] {{
  %q = bf16[2048,128]{{1,0:S(1)}} parameter(0)
  %work = s8[8]{{0:S(1)}} fusion(), kind=kLoop, calls=%nothing, backend_config={{"estimated_cycles":"1750000000"}}
  ROOT %{stored if fused else kernel}
}}
"""
  row = dataclasses.replace(ROWS[0], topology="v6e-1", seconds=6.0)
  assert calibration.agreeing_share(row, hlo.parse(text)) == pytest.approx(1 / 5, abs=1e-3)
  assert calibration.agreeing_share(dataclasses.replace(row, seconds=1.5), hlo.parse(text)) is None


def test_a_step_time_that_differs_from_the_page_is_shown():
  page = tpu_models.step_times((ROOT / "docs" / "benchmarks" / "tpu_models.md").read_text())
  step = ("qwen3-0.6b", "v5e-16 x 3")
  assert len(page) >= 6 and page[step] > 0
  line, differs = tpu_models.difference(page, {step: 1.02 * page[step]})
  assert "+2.0%" in line and not differs
  for factor, change in ((1.04, "+4.0% !"), (0.96, "-4.0% !")):
    line, differs = tpu_models.difference(page, {step: factor * page[step]})
    assert change in line and differs
