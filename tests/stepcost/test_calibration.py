"""The measured steps of end_to_end/benchmarks/calibration.yml, and what follows from them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from end_to_end.benchmarks import attention_kernels, calibration, tpu_models
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


def test_every_tpu_has_the_instructions_of_attention_kernels():
  tpus = {version for version, known in prices.CALIBRATIONS.items() if known.cycles}
  assert tpus == set(prices.ATTENTION_INSTRUCTIONS) == {chip.name for chip in chips.CHIPS if chip.clock_hz}


def test_the_instructions_of_a_kernel_are_counted_between_branches():
  """Blocks of 40 instructions with a mask and 30 without, and 10 others. Or all blocks are alike."""
  other = ["(%p0) sbr.rel"] + ["nop"] * 3
  text = lambda *parts: "\n".join(f"  0x{i:x}   : > {{ {line} }}" for i, line in enumerate(itertools.chain(*parts)))
  body = lambda size: ["(%p1) sbr.rel"] + ["vmatmul"] * (size - 1)
  counted = attention_kernels.bodies(text(other, body(40), body(30), other, ["nop", "shalt"]))
  assert counted == (40, 30, 10)
  assert attention_kernels.bodies(text(other, body(40), other)) == (40, 40, 8)
  # Of 4 x 4 blocks of T = 8192, 4 are on the diagonal and 6 below it. The rest is computed once for each row of blocks.
  around = 10 * attention_kernels.AROUND + 6 * attention_kernels.SKIPPED
  cycles = attention_kernels.instructions_of((40, 30, 500), 2048, 2048) * 10 * 2048 * 2048 / 2**20
  assert cycles == pytest.approx(4 * 40 + 6 * 30 + around + 4 * 270)


@pytest.mark.parametrize("diagonal", [30, 50])
def test_the_instructions_of_the_trainers_kernels_are_counted_in_the_order_of_the_program(diagonal):
  """A block without a mask has 40 instructions, the tiles on the diagonal may have more or fewer, and the tile above it
  does not count."""
  other, last = ["(%p0) sbr.rel"] + ["nop"] * 3, ["nop", "shalt"]
  body = lambda size: ["(%p1) sbr.rel"] + ["vmatmul"] * (size - 1)
  lines = [*other, *body(40), *body(diagonal), *body(12), *other, *last]
  text = "\n".join(f"  0x{i:x}   : > {{ {line} }}" for i, line in enumerate(lines))
  assert attention_kernels.ordered_bodies(text) == (diagonal, 40, 10)
  # Of T = 8192, four blocks of 2048 are on the diagonal, with 10 of 16 tiles, and 6 below it.
  found = attention_kernels.trainers_instructions((diagonal, 40, 10), 2048, 512, 5)
  scores = 6 * 2048**2 + 4 * 10 * 512**2
  assert found * scores / 2**20 == pytest.approx(4 * (diagonal + 10) + 6 * (40 + 5))


@pytest.mark.parametrize(
  "known, text",
  [
    (prices.Calibration(), "unknown"),
    (prices.Calibration(held_out=1, error=0.043), "up to 4% on 1 measured step"),
    (
      prices.Calibration(cycles=1.15, fitted=1),
      "unknown; 1.15 cycles for each instruction of attention kernels follow from one more",
    ),
    (
      prices.Calibration(cycles=1.15, fitted=1, measured_on="7x", held_out=3, error=0.08),
      "up to 8% on 3 measured steps; 1.15 cycles for each instruction of attention kernels follow from one more on 7x",
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
def test_the_cycles_are_found_with_which_a_step_agrees(fused):
  """A second of other work, and attention with as many instructions as a v6e starts in a second.

  fused: the compiler stores the result of the kernel in a larger array.
  """
  scores = 1.75e9 / prices.ATTENTION_INSTRUCTIONS["v6e"]["fwd"][512] * 2**20
  stated = f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":{scores * 2 * 2 * 128:.0f}}}}}}}'
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
  assert calibration.agreeing_cycles(row, hlo.parse(text)) == pytest.approx(5, abs=1e-3)
  assert calibration.agreeing_cycles(dataclasses.replace(row, seconds=0.9), hlo.parse(text)) is None


def test_a_step_time_that_differs_from_the_page_is_shown():
  page = tpu_models.step_times((ROOT / "docs" / "benchmarks" / "tpu.md").read_text())
  step = ("qwen3-0.6b", "v5e-16 x 3")
  assert len(page) >= 6 and page[step] > 0
  line, differs = tpu_models.difference(page, {step: 1.02 * page[step]})
  assert "+2.0%" in line and not differs
  for factor, change in ((1.04, "+4.0% !"), (0.96, "-4.0% !")):
    line, differs = tpu_models.difference(page, {step: factor * page[step]})
    assert change in line and differs
