"""Real error texts, and the event that each one means."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.cluster.simulated import SimulatedCluster
from trainer.elastic.classification import Kind, SliceHang, classify

LOST_PROXY = [
  "UNAVAILABLE: Connection to IFRT proxy server was terminated: FAILED_PRECONDITION: GrpcClientSession: writes no"
  " longer allowed."
]
LOSS = [
  "DATA_LOSS: simulated loss of slice [2]",
  "INTERNAL: Error dispatching computation: DATA_LOSS: simulated loss of slice [1]",
  "DATA_LOSS: The TPU slice 0 has been lost. Worker 10.4.1.7:8471 disconnected.",
]
PERMANENT = [
  "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
  "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 18.21G of"
  " 15.48G hbm. Exceeded hbm capacity by 2.73G.",
  "INTERNAL: RET_CHECK failure (third_party/xla/service/hlo_verifier.cc:412) Expected instruction to have shape",
  "INTERNAL: Mosaic failed to compile TPU kernel: unsupported shape cast",
  "INTERNAL: Failed to compile Triton kernel",
  "INVALID_ARGUMENT: Executable expected parameter 0 of size 8192 but got buffer with incompatible size 4096",
  "INVALID_ARGUMENT: Invalid buffer passed: buffer has been deleted or donated.",
  "FAILED_PRECONDITION: Buffer Definition Event: the program continuator has halted unexpectedly",
  "UNIMPLEMENTED: Dynamic shapes are not supported",
  "PERMISSION_DENIED: caller does not have storage.objects.create access",
  "INTERNAL: Invalid value (nan) encountered in jit(train_step)",
]
AMBIGUOUS = [
  "UNAVAILABLE: failed to connect to all addresses; last error: UNKNOWN: ipv4:10.4.0.12:29000: Connection refused",
  "UNAVAILABLE: Socket closed",
  "ABORTED: Aborted connect attempt as there is a request for shutdown",
  "CANCELLED: Cancelled by the peer",
  "DEADLINE_EXCEEDED: Deadline of 60s exceeded while waiting for the completion of launch 132",
  "DEADLINE_EXCEEDED: Gloo ReduceScatter timed out: [external/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"
  " waiting 30000ms for recv operation to complete",
  "NOT_FOUND: Buffer 7134 is not present on the worker",
  "INTERNAL: an unexpected error occurred on device ordinal 3",
  "INTERNAL: CustomCall kernel returned an error: flash_attention_bwd",
  "UNKNOWN: Gloo all-reduce failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by"
  " peer [127.0.0.1]:2196",
  "UNKNOWN: [external/gloo/gloo/transport/tcp/pair.cc:538] Read error [10.0.0.2]:4711: Connection reset by peer",
  "something that no version of the runtime has said before",
]


@pytest.fixture
def cluster():
  devices = jax.devices()
  return SimulatedCluster({i: tuple(devices[2 * i : 2 * i + 2]) for i in range(4)})


def runtime_error(text):
  return jax.errors.JaxRuntimeError(text)


@pytest.mark.parametrize("text", LOSS)
def test_lost_memory_is_a_lost_slice_even_when_it_is_back_already(cluster, text):
  view = cluster.view(cluster.alive())
  assert classify(runtime_error(text), cluster, view).kind is Kind.SLICE_DOWN
  cluster.lose(2)
  event = classify(runtime_error(text), cluster, view)
  assert event.is_slice_loss and 2 in event.lost


@pytest.mark.parametrize("text", LOST_PROXY)
def test_a_lost_proxy_is_no_lost_slice(cluster, text):
  view = cluster.view(cluster.alive())
  cluster.lose(1)
  event = classify(runtime_error(text), cluster, view)
  assert event.kind is Kind.DISCONNECTED and not event.is_slice_loss


@pytest.mark.parametrize("text", PERMANENT)
def test_permanent_errors_are_not_retried_on_healthy_slices(cluster, text):
  view = cluster.view(cluster.alive())
  event = classify(runtime_error(text), cluster, view)
  assert event.kind is Kind.DETERMINISTIC and not event.is_slice_loss


@pytest.mark.parametrize("text", PERMANENT)
@pytest.mark.parametrize("outage", ["lose", "hang", "lose and return"])
def test_a_missing_slice_outweighs_a_permanent_error(cluster, text, outage):
  """After a loss the runtime may raise any text, for example about deleted buffers or failed checks."""
  view = cluster.view(cluster.alive())
  (cluster.hang if outage == "hang" else cluster.lose)(1)
  if outage == "lose and return":
    cluster.give_back(1)
  event = classify(runtime_error(text), cluster, view)
  assert event.kind is Kind.SLICE_DOWN and event.lost == {1}
  rest = cluster.view({0, 2, 3})  # a slice outside the view cannot be the cause
  assert classify(runtime_error(text), cluster, rest).kind is Kind.DETERMINISTIC


@pytest.mark.parametrize("text", AMBIGUOUS)
def test_ambiguous_errors_need_a_missing_slice(cluster, text):
  view = cluster.view(cluster.alive())
  event = classify(runtime_error(text), cluster, view)
  assert event.kind is Kind.UNKNOWN and "every slice is alive" in event.reason
  cluster.lose(1)
  assert classify(runtime_error(text), cluster, view).kind is Kind.SLICE_DOWN
  rest = cluster.view(cluster.alive())  # a slice outside the view cannot be the cause
  assert classify(runtime_error(text), cluster, rest).kind is Kind.UNKNOWN


@pytest.mark.parametrize(
  "error", [ValueError("DATA_LOSS"), TypeError("x"), OSError(28, "No space left"), KeyError("a")]
)
def test_errors_of_the_program_are_fatal(cluster, error):
  cluster.lose(0)
  assert classify(error, cluster, cluster.view({0, 1})).kind is Kind.FATAL


def test_a_hang_that_has_ended_meanwhile_still_costs_the_named_slices(cluster):
  """The loop ends the attempt, so all parts must agree on the lost slices of this event."""
  view = cluster.view(cluster.alive())
  event = classify(SliceHang("step 4 ...", [3]), cluster, view)
  assert event.kind is Kind.HANG and event.lost == {3}
  assert cluster.died(view) == {3}


def test_real_errors_of_this_jax(cluster):
  """The errors that the installed version raises, as far as a laptop can cause them."""
  view = cluster.view(cluster.alive())

  def failure(call):
    with pytest.raises(Exception) as caught:
      jax.block_until_ready(call())
    return classify(caught.value, cluster, view).kind

  donated = jnp.ones(4)
  jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(donated))
  shapes = jax.jit(lambda x, y: x @ y)
  compiled = jax.jit(lambda x: x * 2).lower(jnp.ones(3)).compile()

  def raising(x):
    raise RuntimeError("a kernel failed")

  assert failure(lambda: shapes(jnp.ones((2, 3)), jnp.ones((2, 3)))) is Kind.FATAL
  assert failure(lambda: compiled(jnp.ones(4))) is Kind.FATAL
  assert failure(lambda: donated + 1) in (Kind.FATAL, Kind.DETERMINISTIC)
  assert failure(lambda: jnp.zeros(1 << 46, jnp.int8)) in (Kind.DETERMINISTIC, Kind.FATAL)
  callback = jax.jit(lambda x: jax.pure_callback(raising, jax.ShapeDtypeStruct((), np.float32), x))
  assert failure(lambda: callback(jnp.float32(1))) in (Kind.UNKNOWN, Kind.DETERMINISTIC)
