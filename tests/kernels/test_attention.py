"""Every attention implementation that a CPU can run, forward and backward, against float64 from the definition."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, Mesh, PartitionSpec
from tests.kernels.attention_oracle import assert_close, exact, inputs, with_grads
from tests.support.seeds import few

from trainer.config.errors import ConfigError
from trainer.kernels import attention, attention_cpu, attention_gpu, attention_tpu, attention_tpu_steps
from trainer.kernels.attention_xla import dot_product
from trainer.parallel import zigzag

AXES = ("data", "fsdp", "tensor", "context")
FLOAT32 = 1e-5  # relative to the largest value


def mesh_of(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


def tpu(mesh, length, heads, kv_heads=2, head_dim=16, itemsize=4, interpret=True):
  sizes = {"heads_per_key": heads // kv_heads, "head_dim": head_dim, "itemsize": itemsize}
  build = attention_tpu.build(mesh=mesh, seq_len=length, interpret=interpret, **sizes)
  order = attention_tpu.order(mesh, length)
  return lambda *arrays: zigzag.restored(order, build(*(zigzag.spread(order, array) for array in arrays)))


@functools.cache
def compiled(function):
  """Compiled once for all inputs of the same shapes. `function`: the same object for all of them."""
  return jax.jit(with_grads(function))


@functools.cache
def tpu_alone(length, heads, kv_heads, head_dim):
  """The kernel for one device, the same object for all tests of these sizes."""
  return tpu(None, length, heads, kv_heads, head_dim)


def check(function, sizes, dtype=jnp.float32, tolerance=FLOAT32, documents=3):
  arrays = inputs(*sizes, dtype, documents)
  got = compiled(function)(*arrays)
  assert all(x.dtype == dtype for x in got)
  assert_close(got, exact(*arrays), tolerance)


# T: one block, blocks that divide T, blocks that do not, several blocks in a band.
SIZES = [
  (2, 16, 4, 4, 16),
  (2, 37, 3, 1, 8),
  pytest.param((3, 131, 4, 4, 16), marks=pytest.mark.soak),  # a length like the two around it, heads like the first
  pytest.param((1, 256, 4, 1, 32), marks=pytest.mark.soak),
  (1, 777, 4, 2, 16),
  (1, 1, 2, 1, 8),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_cpu_flash_equals_attention_by_definition(sizes):
  check(attention_cpu.flash, sizes)


@pytest.mark.parametrize("sizes", [(2, 37, 3, 1, 8), (1, 64, 4, 2, 16)], ids=str)
def test_dot_product_equals_attention_by_definition(sizes):
  check(dot_product, sizes)


def test_cpu_flash_is_stable_for_scores_that_overflow_exp():
  q, k, v, ids, dout = inputs(*SIZES[1])
  arrays = q * 20, k * 20, v, ids, dout
  assert float(jnp.max(jnp.einsum("btnh,bskh->btnsk", q * 20, k * 20))) * 8**-0.5 > 1000  # exp overflows above 88
  assert_close(compiled(attention_cpu.flash)(*arrays), exact(*arrays), 1e-3)  # scores are 1e-4 off


# Heads of 256 in float32 have blocks of 512 keys, so the gradient of the queries has two parts.
@pytest.mark.parametrize(
  "sizes",
  [
    (2, 256, 4, 2, 64),
    pytest.param((1, 384, 2, 1, 128), marks=pytest.mark.soak),
    pytest.param((2, 1024, 2, 1, 256), marks=pytest.mark.soak),  # the next test has several parts, too
  ],
  ids=str,
)
def test_tpu_flash_equals_attention_by_definition(sizes):
  check(tpu_alone(*sizes[1:]), sizes)


@pytest.mark.slow
@pytest.mark.parametrize("documents", few([3], [1, 3, 40]))
def test_tpu_flash_with_several_blocks_and_chunks_of_queries(documents, monkeypatch):
  """Two blocks of queries and keys, each in a chunk of its own, of four tiles each.

  JAX's simulation of a TPU finds blocks of results that are left and entered again, and reads what nothing wrote as
  not a number.
  """
  monkeypatch.setattr(attention_tpu, "BLOCK", 256)
  monkeypatch.setattr(attention_tpu_steps, "TILE", 128)
  monkeypatch.setattr(attention_tpu, "VMEM", 2 * 256 * 2 * 128 * 4)
  check(tpu(None, 512, 4, 2, 64, interpret=pltpu.InterpretParams()), (1, 512, 4, 2, 64), documents=documents)


@pytest.mark.parametrize("context", few([2], [2, 3, 4]))
def test_tpu_flash_of_a_part_of_the_sequence_in_the_simulation_of_a_tpu(context, monkeypatch):
  """The devices of a context axis of 2 and 4 have zigzag order. With 3 one has fewer blocks than another."""
  monkeypatch.setattr(attention_tpu, "BLOCK", 128)
  length = 384 if context == 3 else 256 * context
  simulated = tpu(mesh_of(1, 1, 1, context), length, 2, 1, 16, interpret=pltpu.InterpretParams())
  check(simulated, (1, length, 2, 1, 16))


@pytest.mark.parametrize("context, length", [(1, 2048), (2, 4096), (4, 8192), (1, 640), (3, 1152)])
@pytest.mark.parametrize("tile", [512, 128])
def test_the_steps_of_all_devices_compute_each_visible_score_once(context, length, tile, monkeypatch):
  """By tiles, and no tile in which no query sees a key."""
  monkeypatch.setattr(attention_tpu_steps, "TILE", tile)
  mesh = None if context == 1 else mesh_of(1, 1, 1, context)
  order = attention_tpu.order(mesh, length)
  places = np.arange(length) if order is None else zigzag.positions(context, length)
  queries = attention_tpu.largest_block(length // context // (1 if order is None else 2), 1024)
  keys = attention_tpu.largest_block(length, 1024)
  starts = places.reshape(context, -1)[:, ::queries].astype(np.int32)
  steps = attention_tpu_steps.make(starts, queries, keys, length // keys, 1)
  visible = {(q, k) for q in range(0, length, queries) for k in range(0, length, keys) if k < q + queries}
  for table in (steps.forward, steps.backward):
    ran = [
      (int(own[attention_tpu_steps.row(step)]), int(attention_tpu_steps.column(step)) * keys)
      for own, device in zip(starts, table, strict=True)
      for step in device
      if step & attention_tpu_steps.RUN
    ]
    assert sorted(ran) == sorted(visible)
  seen = length * (length + 1) // 2
  computed = sum(attention_tpu_steps.computed(own, queries, keys) for own in starts.tolist())
  assert seen <= computed <= seen + length * min(tile, keys) + (queries != keys) * length * max(queries, keys)


def test_tpu_flash_computes_no_block_without_a_common_segment(monkeypatch):
  """Not a number in keys and values of another document would reach the results of a block that is computed."""
  monkeypatch.setattr(attention_tpu, "BLOCK", 128)
  q, k, v, _, dout = inputs(1, 512, 2, 1, 64)
  ids = jnp.repeat(jnp.array([[1, 2]], jnp.int32), 256, axis=1)
  run = jax.jit(with_grads(tpu(None, 512, 2, 1, 64)))
  want = run(q, k, v, ids, dout)
  spoiled = (x.at[:, :256].set(jnp.nan) for x in (q, k, v))
  for got, expected in zip(run(*spoiled, ids, dout), want, strict=True):
    assert np.array_equal(got[:, 256:], expected[:, 256:])
    assert np.isnan(got[:, :256]).any()


def gpu(mesh, length, heads, implementation="xla", dtype=jnp.bfloat16):
  del heads
  return attention_gpu.build(mesh=mesh, head_dim=16, seq_len=length, dtype=dtype, implementation=implementation)


@functools.cache
def gpu_alone():
  """One program for all documents: it chooses the kernel when it runs."""
  with pytest.MonkeyPatch.context() as monkeypatch:
    monkeypatch.setattr(attention_gpu, "DOCUMENT_BYTES", 8 * 16 * 128 * 16 * 3)  # 3 of the 8 query heads of all rows
    arrays = inputs(4, 128, 2, 2, 16)  # float32: plain XLA supports it, cuDNN does not
    return jax.jit(with_grads(gpu(None, 128, 2))).lower(*arrays).compile()


# 1: the kernel without a mask. 3, and 15 with the padding: the kernel for documents, which takes 16. Others: the mask.
@pytest.mark.parametrize("documents", few([1, 15, "unordered"], [1, 3, 15, 16, 40, "unordered"]))
def test_gpu_flash_calls_equal_attention_by_definition(documents):
  unordered = documents == "unordered"
  q, k, v, ids, dout = inputs(4, 128, 2, 2, 16, documents=3 if unordered else documents)
  if documents == 1:
    ids = jnp.ones_like(ids)
  elif unordered:
    ids = jnp.where(ids == 3, 1, ids)
  else:
    every = jnp.arange(1, documents + 1).repeat(2)  # no segment is without tokens
    ids = ids.at[:, : len(every)].set(every).at[:, len(every) : 112].set(documents)
  arrays = q, k, v, ids, dout
  assert_close(gpu_alone()(*arrays), exact(*arrays), FLOAT32)


@pytest.mark.parametrize("hopper", [False, True])
def test_gpu_flash_lowers_to_cudnn(hopper, monkeypatch):
  from jax._src.cudnn import fused_attention_stablehlo

  monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
  monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: hopper)
  monkeypatch.setattr(attention_gpu, "REPAIRED_JAX", (0, 10))
  arrays = inputs(2, 64, 4, 2, 16, jnp.bfloat16)
  run = jax.jit(with_grads(gpu(None, 64, 4, "cudnn")))
  text = run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
  for call in ("Softmax", "SoftmaxBackward", "ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward"):
    assert f"@__cudnn$fmha{call}(" in text
  assert ("PADDING_CAUSAL" in text) == hopper == (r"max_seg_per_batch\22: 16" in text)
  assert "2x4x64x64" not in text and "2x2x2x64x64" not in text  # no scores outside the kernel


def cpu(mesh, length, heads):
  return attention.choose("flash", attention.Shape("cpu", mesh, 16, length, heads, 2, jnp.dtype("float32")))


@pytest.mark.parametrize(
  "build, length, shape",
  [
    pytest.param(cpu, 100, (2, 2, 2, 1), marks=pytest.mark.soak),
    (cpu, 150, (2, 1, 2, 2)),
    pytest.param(cpu, 150, (1, 2, 1, 2), marks=pytest.mark.soak),
    (tpu, 256, (2, 1, 2, 2)),
    pytest.param(tpu, 256, (1, 4, 2, 1), marks=pytest.mark.soak),
    # The simulation of a TPU has zigzag order, too.
    pytest.param(tpu, 512, (2, 1, 1, 2), marks=pytest.mark.soak),
    pytest.param(tpu, 1024, (1, 1, 2, 4), marks=pytest.mark.soak),
    pytest.param(gpu, 64, (1, 2, 1, 2), marks=pytest.mark.soak),
    (gpu, 64, (2, 2, 2, 1)),
  ],
)
def test_sharded_equals_definition_inside_a_region_manual_over_data(build, length, shape):
  mesh, arrays = mesh_of(*shape), inputs(4, length, 4, 2, 16)
  per_slice = jax.shard_map(
    with_grads(build(mesh, length, 4)),
    mesh=mesh,
    axis_names={"data"},
    in_specs=PartitionSpec("data"),
    out_specs=PartitionSpec("data"),
    check_vma=False,
  )
  assert_close(jax.jit(per_slice)(*arrays), exact(*arrays), FLOAT32)


@pytest.mark.parametrize("context", few([True], [False, True]))
def test_sharded_equals_definition_outside_any_region(context):
  mesh, arrays = mesh_of(2, 2, 1, 2), inputs(4, 100, 4, 2, 16)
  run = jax.jit(with_grads(cpu(mesh, 100, 4)))
  if context:
    with jax.set_mesh(mesh):
      got = run(*arrays)
  else:
    got = run(*arrays)
  assert_close(got, exact(*arrays), FLOAT32)


def choose(name, platform="cpu", mesh=None, seq_len=256, num_kv_heads=2, head_dim=64, dtype="bfloat16", **more):
  sizes = {"head_dim": head_dim, "seq_len": seq_len, "num_q_heads": 4, "num_kv_heads": num_kv_heads}
  return attention.choose(name, attention.Shape(platform, mesh, **sizes, dtype=jnp.dtype(dtype), **more))


@pytest.mark.parametrize(
  "name, platform, seq_len, chosen",
  [
    ("dot_product", "tpu", 256, "dot_product"),
    ("flash", "cpu", 16, "flash"),
    ("flash", "tpu", 256, "flash"),
    ("autoselected", "cpu", 128, "flash"),
    ("autoselected", "cpu", 64, "dot_product"),
    ("autoselected", "tpu", 256, "flash"),
    ("autoselected", "tpu", 200, "dot_product"),
    ("flash", "gpu", 256, "flash"),
    ("autoselected", "gpu", 257, "dot_product"),
  ],
)
def test_choose(name, platform, seq_len, chosen):
  assert choose(name, platform, seq_len=seq_len).name == chosen


def test_unsupported_inputs_are_refused_with_a_remedy():
  with pytest.raises(ConfigError, match=r"max_target_length=200 .* multiple of 128.*attention=dot_product"):
    choose("flash", "tpu", seq_len=200)
  with pytest.raises(ConfigError, match=r"129795 blocks of 128 .* can list 80000.*multiple of 2048"):
    choose("flash", "tpu", seq_len=128 * 509)
  with pytest.raises(ConfigError, match="ici_tensor_parallelism"):
    choose("flash", mesh=mesh_of(1, 1, 4, 1), num_kv_heads=2)
  with pytest.raises(ConfigError, match="must be a multiple of the number of key/value heads"):
    choose("flash", num_kv_heads=3)
  with pytest.raises(ConfigError, match="not 'npu'"):
    choose("flash", platform="npu")
  with pytest.raises(ConfigError, match=r"dtype=float32.*Set dtype=bfloat16"):
    gpu(None, 64, 4, dtype=jnp.float32)
  with pytest.raises(ConfigError, match="head_dim=20"):
    attention_gpu.build(mesh=None, head_dim=20, seq_len=64, dtype=jnp.bfloat16)
  assert "finds no GPU of Hopper" in choose("autoselected", "gpu", head_dim=192).reason
  assert "multiple of 128" in choose("autoselected", "tpu", seq_len=200).reason


@pytest.mark.parametrize(
  "precision, dtype, supported",
  [
    ("default", "bfloat16", True),
    ("highest", "float32", True),
    ("highest", "bfloat16", False),
    ("high", "bfloat16", False),
    ("high", "float32", False),
  ],
)
def test_the_tpu_kernel_supports_one_precision_per_dtype(precision, dtype, supported):
  """For other precisions the compiler of the kernel fails: "Bad lhs type", "Unsupported dot precision: HIGH"."""
  found = choose("autoselected", "tpu", precision=precision, dtype=dtype)
  assert found.name == ("flash" if supported else "dot_product")
  assert choose("flash", "cpu", precision=precision, dtype=dtype).name == "flash"
  if not supported:
    assert f"JAX_DEFAULT_MATMUL_PRECISION={precision} with dtype={dtype}" in found.reason
    with pytest.raises(ConfigError, match=r"attention=dot_product"):
      choose("flash", "tpu", precision=precision, dtype=dtype)


@pytest.mark.parametrize("length, limit, block", [(128, 512, 128), (640, 512, 128), (1024, 512, 512), (1152, 512, 384)])
def test_blocks_divide_the_length(length, limit, block):
  assert attention_tpu.largest_block(length, limit) == block
