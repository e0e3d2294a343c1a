"""The parts of the server that need no process."""

from __future__ import annotations

import itertools
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from pathways_standin import dtypes, executables, messages, status
from pathways_standin.commands import random_faults
from pathways_standin.gates import Gate, Timer, merge
from pathways_standin.host_buffers import HostBuffers, to_array, to_bytes
from pathways_standin.status import Status


@pytest.mark.parametrize("dtype", sorted(dtypes.KIND_OF, key=str), ids=str)
def test_a_type_has_one_number_and_one_name_in_mlir(dtype):
  assert dtypes.from_kind(dtypes.KIND_OF[dtype]) == dtype
  assert list(dtypes.by_mlir_name().values()).count(dtype) == 1


def test_an_execution_takes_over_only_what_a_result_uses():
  alias = "HloModule m, input_output_alias={ {}: (1, {}, may-alias) }, buffer_donor={ (0, {}) }, num_partitions=2"
  assert executables._donated(alias) == {1}
  assert executables._donated("HloModule m, buffer_donor={ (0, {}) }, num_partitions=2") == frozenset()


def test_names_in_mlir():
  names = dtypes.by_mlir_name()
  assert names["i1"] == np.bool_ and names["ui8"] == np.uint8 and names["complex<f32>"] == np.complex64
  assert names["f8e4m3b11fnuz"] == ml_dtypes.float8_e4m3b11fnuz and names["i4"] == ml_dtypes.int4
  assert names["bf16"] == ml_dtypes.bfloat16 and names["f4e2m1fn"] == ml_dtypes.float4_e2m1fn


def test_the_numbers_of_types_are_those_of_jaxlib():
  kinds = messages.load().ifrt("DTypeProto").Kind
  for kind, dtype in dtypes.DTYPES.items():
    name = kinds.Name(kind).removeprefix("KIND_").lower().replace("pred", "i1").replace("c64", "complex<f32>")
    name = name.replace("c128", "complex<f64>").replace("u", "ui", 1) if name[0] in "uc" else name
    name = name.replace("s", "i", 1) if name[0] == "s" else name
    assert dtypes.by_mlir_name()[name.replace("fnuiz", "fnuz")] == dtype, (kind, name)


def test_arrays_that_are_not_served_are_named():
  kinds = messages.load().ifrt("DTypeProto").Kind
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


def test_gates():
  calls = []
  older, newer = Gate(1), Gate(2)
  assert merge([{0: newer}, {0: older, 1: older}, {}]) == {0: newer, 1: older}
  older.when_open(lambda: calls.append("waited"))
  assert calls == []
  older.open()
  older.when_open(lambda: calls.append("open already"))
  assert calls == ["waited", "open already"] and older.is_open and not newer.is_open


def test_the_timer_calls_in_the_order_of_time():
  timer, calls, done = Timer(), [], threading.Event()
  timer.call_after(0.06, done.set)
  for seconds in (0.04, 0.0, 0.02):
    timer.call_after(seconds, lambda seconds=seconds: calls.append(seconds))
  assert done.wait(20)
  assert calls == [0.0, 0.02, 0.04]


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_random_faults_repeat_and_leave_a_slice_that_works(slices):
  plan = list(itertools.islice(random_faults(5, 20, slices, start=100), 400))
  assert plan == list(itertools.islice(random_faults(5, 20, slices, start=100), 400))
  assert plan != list(itertools.islice(random_faults(6, 20, slices, start=100), 400))
  assert plan[0][0] > 100 and all(a < b for (a, _), (b, _) in itertools.pairwise(plan))
  assert 15 < (plan[-1][0] - 100) / 400 < 25
  ill: set[str] = set()
  for _, command in plan:
    verb, slice_id, *rest = command.split()
    if verb == "kill":
      ill.add(slice_id)
    elif verb == "revive" or (verb == "slow" and rest == ["0"]):
      ill.remove(slice_id)
    elif verb == "slow":
      ill.add(slice_id)
    else:
      assert verb == "hang" and 0 < float(rest[0]) <= 3  # it ends by itself
    assert len(ill) < slices
  if slices > 1:
    assert {command.split()[0] for _, command in plan} == {"kill", "revive", "hang", "slow"}


@pytest.mark.parametrize(
  "error, expected",
  [
    (RuntimeError("DATA_LOSS: gone"), ("DATA_LOSS", "gone")),
    (RuntimeError("SOMETHING: gone"), ("INTERNAL", "Pathways stand-in: RuntimeError: SOMETHING: gone")),
    (Status("ABORTED", "x"), ("ABORTED", "x")),
  ],
)
def test_every_error_has_a_code(error, expected):
  found = status.from_error(error)
  assert (found.code, found.message) == expected


def test_codes_are_those_of_the_protocol():
  code = messages.load().cls("tensorflow.StatusProto").DESCRIPTOR.fields_by_name["code"].enum_type
  named = {value.name: value.number for value in code.values}
  assert {name: named[name] for name in status.CODES} == status.CODES
  assert status.from_code(99, "odd").code == "UNKNOWN"
