"""The table of runtime error texts: lookup and advice. tests/elastic/test_events.py checks the texts."""

from __future__ import annotations

import jax
import pytest

from input_pipeline import storage
from trainer.process import runtime_errors
from trainer.process.runtime_errors import Meaning


def runtime_error(text):
  return jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize(
  ("text", "slices"),
  [
    ("DATA_LOSS: simulated loss of slices [1, 3]", {1, 3}),
    ("INTERNAL: Error dispatching computation: DATA_LOSS: The TPU slice 0 has been lost. Worker 10.4.1.7", {0}),
    ("DATA_LOSS: slice 12 (device 25) is down", {12}),
    ("DATA_LOSS: worker 10.4.1.7:8471 disconnected", set()),
    ("INVALID_ARGUMENT: slice 3 is out of bounds", set()),  # not the text of a loss
  ],
)
def test_slices_that_a_text_names_as_lost(text, slices):
  assert runtime_errors.slices_lost(text) == slices


def test_a_wrapped_runtime_error_is_found():
  cause = runtime_error("DATA_LOSS: slice 1")
  try:
    try:
      raise cause
    except jax.errors.JaxRuntimeError as error:
      raise ValueError("the save failed") from error
  except ValueError as error:
    assert runtime_errors.find(error) is cause
  assert runtime_errors.find(ValueError("DATA_LOSS")) is None


@pytest.mark.parametrize(
  ("error", "says"),
  [
    (runtime_error("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17 bytes."), "Lower per_device_batch"),
    (runtime_error("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"), "Lower per_device_batch"),
    (runtime_error("RESOURCE_EXHAUSTED: Quota exceeded for storage requests"), ""),
    (runtime_error("UNAVAILABLE: Connection to IFRT proxy server was terminated: x"), "resumes from the last"),
    (runtime_error("INTERNAL: kernel"), ""),
    (ValueError("RESOURCE_EXHAUSTED: Out of memory"), ""),
  ],
)
def test_advice(error, says):
  advice = runtime_errors.advice(error)
  assert says in advice and bool(advice) == bool(says)


def test_the_specific_part_of_a_nested_error_decides():
  meaning, reason = runtime_errors.explain("INTERNAL: Error dispatching computation: DATA_LOSS: slice 2")
  assert meaning is Meaning.LOSS and reason == "the memory of a slice is lost"
  assert runtime_errors.explain("a new text") == (Meaning.AMBIGUOUS, "an unknown error text")


@pytest.mark.timeout(20)
def test_causes_that_form_a_circle_are_searched_once():
  first, second = ValueError("first"), OSError("second")
  first.__cause__, second.__context__ = second, first
  assert runtime_errors.find(first) is None
  second.__cause__ = loss = jax.errors.JaxRuntimeError("DATA_LOSS: gone")
  assert runtime_errors.find(first) is loss
  loss.__cause__ = first
  assert list(storage.causes(first)) == list(storage.causes(first, explicit=True)) == [first, second, loss]
  assert storage.failure(first) is None
