"""The number of shares of a slice: how it is chosen, that a run keeps it, and which numbers are refused."""

from __future__ import annotations

import pytest

from trainer.config import ConfigError, load
from trainer.config.shares import micro_batches, resolve


def chosen(tmp_path, *keys: str):
  base = ["configs/base.yml", f"base_output_directory={tmp_path}", "run_name=run", "dataset_type=synthetic"]
  return resolve(load([*base, *keys]))


@pytest.mark.parametrize(
  "rows, accumulation, length, shares",
  [
    (1, 1, 4096, 1),  # one row cannot be cut
    (4, 1, 4096, 2),  # 8,192 tokens a share
    (4, 1, 2048, 1),
    (8, 1, 8192, 8),
    (16, 1, 8192, 8),  # at most 8
    (1, 6, 8192, 6),
    (3, 2, 8192, 6),  # 2 micro-batches of 3 rows: 1, 2, 3 or 6 shares
    (3, 4, 8192, 6),  # 4 micro-batches of 3 rows: a share is a micro-batch of 2 rows
    (1, 12, 16384, 6),  # 8 does not divide 12
    (0.5, 4, 16384, 4),
  ],
)
def test_the_most_shares_with_enough_tokens_are_chosen(tmp_path, rows, accumulation, length, shares):
  config = chosen(
    tmp_path,
    f"per_device_batch_size={rows}",
    f"gradient_accumulation_steps={accumulation}",
    f"max_target_length={length}",
  )
  assert config.elastic.shares_per_slice == shares
  count, size = micro_batches(config, int(rows * 16))
  assert count * size * shares == rows * 16 * accumulation and size <= rows * 16


@pytest.mark.parametrize(
  "saved, shares",
  [("shares_per_slice: 2", 2), ("shares_per_slice: -1", 8), ("shares_per_slice: 3", 8)],  # 3: the batch has changed
)
def test_a_run_keeps_its_number(tmp_path, saved, shares):
  (tmp_path / "run").mkdir()
  (tmp_path / "run" / "config.yml").write_text(saved + "\n")
  config = chosen(tmp_path, "per_device_batch_size=8", "max_target_length=8192")
  assert config.elastic.shares_per_slice == shares


def test_a_number_that_does_not_cut_the_rows_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r"shares_per_slice=5: a slice computes 8 rows .*\.\nUse 1, 2, 4, 8, or -1\."):
    chosen(tmp_path, "per_device_batch_size=8", "shares_per_slice=5")
  with pytest.raises(ConfigError, match=r"shares_per_slice=0"):
    chosen(tmp_path, "per_device_batch_size=8", "shares_per_slice=0")
  devices_decide = "gradient_accumulation_steps=2", "ici_fsdp_parallelism=1", "ici_tensor_parallelism=-1"
  with pytest.raises(ConfigError, match=r"shares_per_slice=3: its rows .*accumulation_steps=2.*\.\nUse 1, 2, or -1"):
    chosen(tmp_path, *devices_decide, "shares_per_slice=3")
