"""Names and shapes of TPU slices, names of GPUs. The compiler is not called, because some shapes end its process."""

from __future__ import annotations

import pytest

from stepcost import chips, gpus, topologies


@pytest.mark.parametrize(
  "name, jax_name, chips, hosts",
  [
    ("v5e-1", "v5e:1x1", 1, 1),
    ("v5litepod-16", "v5e:4x4", 16, 4),
    ("v6e-256", "v6e:16x16", 256, 64),
    ("v4-8", "v4:2x2x1", 4, 1),
    ("v4-384", "v4:4x4x12", 192, 48),
    ("v4-4096", "v4:8x16x16", 2048, 512),
    ("v5p-64", "v5p:2x4x4", 32, 8),
    ("v5p-640", "v5p:4x4x20", 320, 80),
    ("v5p-768", "v5p:4x8x12", 384, 96),
    ("v5p-1280", "v5p:4x8x20", 640, 160),
    ("v5p-3968", "v5p:4x4x124", 1984, 496),
    ("v5p-12288", "v5p:16x16x24", 6144, 1536),
    ("v5p-17920", "v5p:16x20x28", 8960, 2240),
    ("tpu7x-2", "tpu7x:1x1x1", 1, 1),
    ("7x-384", "tpu7x:4x4x12", 192, 48),
    ("tpu7x-2304", "tpu7x:8x12x12", 1152, 288),
    ("tpu7x-18432", "tpu7x:16x24x24", 9216, 2304),
    ("v5p-17536", "v5p:4x4x548", 8768, 2192),
    ("tpu7x:4x4x576", "tpu7x:4x4x576", 9216, 2304),
    ("v5e:2x4", "v5e:2x4", 8, 2),
    ("V5p:4x4x8", "v5p:4x4x8", 128, 32),
    ("tpu7x:1x1x1", "tpu7x:1x1x1", 1, 1),
    ("h100-8", "h100:8", 8, 1),
    ("H200-1", "h200:1", 1, 1),
  ],
)
def test_names_of_maxtext_and_jax_are_known(name, jax_name, chips, hosts):
  found = topologies.resolve(name)
  assert (found.jax_name, found.chips, found.hosts) == (jax_name, chips, hosts)


@pytest.mark.parametrize(
  "name, said",
  [
    ("v5e:4x4x4", "3 sides, and slices of v5e have 2"),
    ("v5e:2x2x1", "3 sides, and slices of v5e have 2"),
    ("v5p:4x4", "2 sides, and slices of v5p have 3"),
    ("v5e:32x32", "too large.* v5e:AxB with at most 16 chips along a side and 256 in all"),
    ("v6e:2x32", "too large.* 16 chips along a side"),
    ("v4:2x2x512", "too large.* 256 chips along a side"),
    ("v4:16x16x32", "too large.* and 4096 in all"),
    ("v5e:1x4", "2 x 2 chips.* A and B even"),
    ("v5p:4x3x4", "2 x 2 chips.* A and B even"),
    ("v5e:0x4", "2 x 2 chips.* A and B even"),
    ("v5e:4x", "no such TPU slice"),
    ("v5e-4x4", "no such TPU slice"),
    ("h300-8", "no such GPUs.* .a100-8, h100-8"),
    ("h100-16", "1 to 8 of one host.* More hosts are more slices"),
    ("h100-0", "1 to 8 of one host"),
    ("h100:8", "1 to 8 of one host"),
    ("v9-16", "no such TPU slice"),
    ("v5e-17", "16, 32"),
    ("v5e-0", "16, 32"),
    ("v5p-65", "multiple of 128 up to 17920"),
    ("v5p-0", "multiple of 128 up to 17920"),
    ("v4-16384", "multiple of 128 up to 8192"),
  ],
)
def test_shapes_that_the_compiler_refuses_are_refused(name, said):
  with pytest.raises(topologies.TopologyError, match=said) as refused:
    topologies.resolve(name)
  assert name in str(refused.value)


@pytest.mark.parametrize("name", gpus.CARDS)
def test_every_card_has_the_memory_and_the_rates_of_the_table_of_chips(name):
  card = gpus.CARDS[name]
  chip = chips.find(card.kind)
  assert chip is not None and chip.name == name.upper()
  assert card.memory_bytes == pytest.approx(chip.hbm_bytes, rel=0.08)
  assert card.bandwidth == pytest.approx(chip.hbm_bandwidth, rel=0.05)
  assert f'description_str: "{card.kind}"' in gpus.target_config(card)


def test_jax_takes_the_share_of_a_gpu_that_the_environment_says(monkeypatch):
  for variable in gpus.SHARE_VARIABLES:
    monkeypatch.delenv(variable, raising=False)
  assert gpus.share_of_jax() == 0.75
  for variable in gpus.SHARE_VARIABLES:
    monkeypatch.setenv(variable, ".9")
    assert gpus.share_of_jax() == 0.9
    monkeypatch.delenv(variable)
