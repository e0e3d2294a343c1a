"""Names and shapes of TPU slices, names of GPUs. The compiler is not called, because some shapes end its process."""

from __future__ import annotations

import pytest

from stepcost import chips, gpus, topologies


@pytest.mark.parametrize(
  "name, jax_name, chips, hosts",
  [
    ("v5e-1", "v5e:1x1", 1, 1),
    ("v6e-256", "v6e:16x16", 256, 64),
    ("v4-8", "v4:2x2x1", 4, 1),
    ("v5p-64", "v5p:2x4x4", 32, 8),
    ("tpu7x-2", "tpu7x:1x1x1", 1, 1),
    ("tpu7x-18432", "tpu7x:16x24x24", 9216, 2304),
    ("v5e:2x4", "v5e:2x4", 8, 2),
    ("h100-8", "h100:8", 8, 1),
  ],
)
def test_names_of_maxtext_and_jax_are_known(name, jax_name, chips, hosts):
  found = topologies.resolve(name)
  assert (found.jax_name, found.chips, found.hosts) == (jax_name, chips, hosts)


@pytest.mark.parametrize(
  "name, said",
  [
    ("v5e:4x4x4", "3 sides, and slices of v5e have 2"),
    ("v5e:32x32", "too large.* v5e:AxB with at most 16 chips along a side and 256 in all"),
    ("v4:16x16x32", "too large.* and 4096 in all"),
    ("v5e:1x4", "2 x 2 chips.* A and B even"),
    ("v5e:4x", "no such TPU slice"),
    ("h300-8", "no such GPUs.* .a100-8, h100-8"),
    ("h100-16", "1 to 8 of one host.* More hosts are more slices"),
    ("v5e-17", "16, 32"),
    ("v5p-65", "multiple of 128 up to 17920"),
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
