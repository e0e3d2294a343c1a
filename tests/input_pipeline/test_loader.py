"""Synthetic batches, and how the loader maps steps and rows to examples of any source."""

from __future__ import annotations

import numpy as np
import pytest

from input_pipeline.batch import Batch, DataError
from input_pipeline.loader import Loader, make_loader
from input_pipeline.options import DataOptions
from input_pipeline.synthetic import SyntheticSource


def section(**keys) -> DataOptions:
  return DataOptions(**{"dataset_type": "synthetic", "max_target_length": 32, **keys})


def loader(split="train", vocab_size=97, global_batch_size=6, **keys) -> Loader:
  return make_loader(section(**keys), vocab_size=vocab_size, global_batch_size=global_batch_size, split=split)


def assert_equal(left: Batch, right: Batch) -> None:
  for name, a, b in zip(Batch._fields, left, right):
    np.testing.assert_array_equal(a, b, err_msg=name)


def test_shapes_types_and_alignment():
  batch = loader().batch(3)
  types = [field.dtype for field in batch]
  assert types == [np.int32, np.int32, np.float32, np.int32, np.int32]
  assert all(field.shape == (6, 32) for field in batch)
  np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
  np.testing.assert_array_equal(batch.positions, np.tile(np.arange(32), (6, 1)))
  assert (batch.weights == 1).all() and (batch.segment_ids == 1).all()


def test_is_a_pure_function_of_seed_and_step():
  forward, backward = loader(), loader()
  steps = [0, 1, 2, 1000, 10**9]
  batches = {step: forward.batch(step) for step in steps}
  for step in reversed(steps):
    assert_equal(batches[step], backward.batch(step))
  assert_equal(batches[1000], forward.batch(1000))


@pytest.mark.parametrize("other", [{"data_shuffle_seed": 1}, {"data_shuffle_seed": -1}, {"split": "eval"}])
def test_seeds_and_splits_differ(other):
  assert not np.array_equal(loader().batch(0).tokens, loader(**other).batch(0).tokens)
  assert loader().fingerprint() != loader(**other).fingerprint()


def test_global_batch_size_cuts_one_order_of_examples():
  small, large = loader(global_batch_size=4), loader(global_batch_size=12)
  parts = [small.batch(step).tokens for step in (3, 4, 5)]
  np.testing.assert_array_equal(large.batch(1).tokens, np.concatenate(parts))


def test_rows_are_the_rows_of_the_full_batch():
  full, rows = loader().batch(5), np.array([4, 0, 4, 5])
  assert_equal(loader().batch(5, rows), Batch(*(field[rows] for field in full)))


@pytest.mark.parametrize("rows", [[6], [-2]])
def test_rows_outside_the_batch_are_refused(rows):
  with pytest.raises(AssertionError):
    loader().batch(0, np.array(rows))


def test_reuse_example_batch():
  reused = loader(reuse_example_batch=1)
  assert_equal(reused.batch(7), loader().batch(0))
  assert_equal(loader(reuse_example_batch=1, split="eval").batch(7), loader(split="eval").batch(7))
  assert reused.fingerprint() != loader().fingerprint()


def test_after_a_change_of_batch_size_the_next_example_follows():
  small, large = loader(global_batch_size=4), loader(global_batch_size=12)
  assert large.fingerprint() == small.fingerprint()  # the batch size is not part of it
  large.resume(3, small.cursor(3), same=True)
  parts = [small.batch(step).tokens for step in range(3, 9)]
  np.testing.assert_array_equal(np.concatenate([large.batch(3).tokens, large.batch(4).tokens]), np.concatenate(parts))
  assert large.cursor(5)["next_example"] == 36


def test_unreadable_example_is_a_data_error_with_the_step():
  class Broken(SyntheticSource):
    def example(self, index):
      raise OSError("disk.bin: input/output error")

  source = Broken(vocab_size=5, length=4, seed=0, stream=0)
  broken = Loader(source, DataOptions(max_target_length=4), 2, "train")
  with pytest.raises(DataError, match=r"step 9: disk\.bin: input/output error") as caught:
    broken.batch(9)
  assert caught.value.step == 9 and isinstance(caught.value.__cause__, OSError)


def test_import_and_synthetic_batches_load_nothing_heavy(python):
  code = """
import sys
from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
cfg = DataOptions(dataset_type="synthetic", max_target_length=16)
make_loader(cfg, vocab_size=9, global_batch_size=2, split="train").batch(0)
print([name for name in ("jax", "tensorflow", "grain", "tokenizers", "array_record") if name in sys.modules])
"""
  assert python(code).communicate(timeout=60)[0].strip() == "[]"
