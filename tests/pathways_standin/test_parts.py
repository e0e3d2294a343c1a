"""The parts of the server that need no process."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from pathways_standin import dtypes, proxy_messages, status
from pathways_standin.host_buffers import HostBuffers, to_array, to_bytes
from pathways_standin.status import Status


def test_the_numbers_of_types_are_those_of_jaxlib():
  kinds = proxy_messages.load().ifrt("DTypeProto").Kind
  for kind, dtype in dtypes.DTYPES.items():
    name = kinds.Name(kind).removeprefix("KIND_").lower().replace("pred", "i1").replace("c64", "complex<f32>")
    name = name.replace("c128", "complex<f64>").replace("u", "ui", 1) if name[0] in "uc" else name
    name = name.replace("s", "i", 1) if name[0] == "s" else name
    assert dtypes.by_mlir_name()[name.replace("fnuiz", "fnuz")] == dtype, (kind, name)


def test_arrays_that_are_not_served_are_named():
  kinds = proxy_messages.load().ifrt("DTypeProto").Kind
  for kind, name in (("KIND_STRING", "strings"), ("KIND_TOKEN", "tokens"), ("KIND_OPAQUE", "opaque values")):
    with pytest.raises(Status, match=f"UNIMPLEMENTED: arrays of {name}: "):
      dtypes.from_kind(kinds.Value(kind))


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_strided_buffers(permutation):
  value = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
  view = value.transpose(permutation)
  data = to_bytes(view, view.strides)
  assert len(data) == value.nbytes
  np.testing.assert_array_equal(to_array(data, view.dtype, view.shape, view.strides), view)
  np.testing.assert_array_equal(to_array(to_bytes(view, None), view.dtype, view.shape, None), view)


@pytest.mark.parametrize(
  "shape, strides, size", [((2, 2), (8, 4), 15), ((2,), (-4,), 8), ((2, 2), (8,), 16), ((3,), None, 8)]
)
def test_a_buffer_that_does_not_fit_is_refused(shape, strides, size):
  with pytest.raises(Status, match="INVALID_ARGUMENT"):
    to_array(bytes(size), np.dtype(np.int32), shape, strides)


def test_a_request_waits_for_its_buffer_and_a_closed_session_for_none():
  buffers, taken = HostBuffers(), []

  def take():
    try:
      taken.append(buffers.take(1))
      buffers.take(2)
    except Status as error:
      taken.append(error.code)

  thread = threading.Thread(target=take)
  thread.start()
  buffers.store(1, b"data")
  while len(buffers) or not taken:
    time.sleep(0.001)
  buffers.close()
  thread.join(10)
  assert taken == [b"data", "CANCELLED"]


def test_codes_are_those_of_the_protocol():
  code = proxy_messages.load().cls("tensorflow.StatusProto").DESCRIPTOR.fields_by_name["code"].enum_type
  named = {value.name: value.number for value in code.values}
  assert {name: named[name] for name in status.CODES} == status.CODES
  assert status.from_code(99, "odd").code == "UNKNOWN"
