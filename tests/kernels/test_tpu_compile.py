"""The pattern of a training step, compiled by the TPU compiler without a TPU. Needs the package libtpu."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from tests.support import needs
from tests.support.seeds import few

from stepcost import topologies as stepcost_topologies
from trainer.config.schema import ModelSection
from trainer.kernels import attention, remat

pytestmark = needs.LIBTPU

BFLOAT16 = jnp.dtype("bfloat16")
B, T, D, N, K, H, L = 4, 512, 128, 4, 2, 128, 3


@pytest.fixture
def tpu(monkeypatch):
  """Devices of three slices of 2x2 chips that are described, not attached."""
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # do not ask a metadata server for the machine type
  return topologies.get_topology_desc(
    platform="tpu", topology_name="v5e:2x2", chip_config_name="default", chips_per_host_bounds=(2, 2, 1), num_slices=3
  ).devices


def mesh_of(devices, fsdp, tensor, context):
  ordered = sorted(devices, key=lambda device: (device.slice_index, device.id))
  shape = np.array(ordered).reshape(3, fsdp, tensor, context)
  return Mesh(shape, ("data", "fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 4)


def compile_step(mesh, policy_name):
  """Compiles gradients of scanned, rematerialised attention layers in a region that is manual over `data` only."""
  kernel = attention.choose(
    "flash", attention.Shape("tpu", mesh, head_dim=H, seq_len=T, num_q_heads=N, num_kv_heads=K, dtype=BFLOAT16)
  )
  _, policy = remat.checkpoint_policy(ModelSection(remat_policy=policy_name))
  name = jax.ad_checkpoint.checkpoint_name

  def layer(x, w, ids):
    heads = jnp.einsum("btd,dnh->btnh", x, w.astype(jnp.bfloat16))
    q, k, v = jnp.split(heads, (N, N + K), axis=2)
    q, k, v = name(q, "query_proj"), name(k, "key_proj"), name(v, "value_proj")
    return x + kernel(q, k, v, ids, ids).reshape(x.shape[0], T, N * H)[..., :D]

  def loss(w, x, ids):
    body = jax.checkpoint(layer, policy=policy)
    return jax.lax.scan(lambda x, w: (body(x, w, ids), None), x, w)[0].astype(jnp.float32).sum()

  def per_slice(w, x, ids):
    return jax.lax.psum(jax.grad(loss)(w, x, ids), "data")

  spec = PartitionSpec("data")
  step = jax.shard_map(
    per_slice, mesh=mesh, axis_names={"data"}, in_specs=(PartitionSpec(), spec, spec), out_specs=PartitionSpec(),
    check_vma=False,
  )  # fmt: skip
  rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  abstract = (
    jax.ShapeDtypeStruct((L, D, N + 2 * K, H), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())),
    jax.ShapeDtypeStruct((3 * B, T, D), jnp.bfloat16, sharding=rows),
    jax.ShapeDtypeStruct((3 * B, T), jnp.int32, sharding=rows),
  )
  with jax.set_mesh(mesh):
    return jax.jit(step).lower(*abstract).compile()


def kernels_in(text):
  """Returns the names of the Pallas kernels in a compiled program, one entry per call."""
  return sorted(re.findall(r"%(flash_attention_[a-z]+)[.\d]* = \S.* custom-call", text))


def test_a_step_compiles_and_saves_what_its_policy_names(tpu):
  compiled = compile_step(mesh_of(tpu, 2, 2, 1), "minimal_with_context")
  text = compiled.as_text()
  # One forward kernel: the context is saved, so the backward pass does not recompute it.
  assert kernels_in(text) == ["flash_attention_backward", "flash_attention_forward"]
  assert f"{T},{T}]" not in text  # no scores


def test_a_sharded_sequence_whose_activations_go_to_the_host_compiles(tpu):
  compiled = compile_step(mesh_of(tpu, 1, 2, 2), "qkv_proj_offloaded")
  text = compiled.as_text()
  # The backward pass computes the context once more. The compiler unrolls a part of the loop.
  kernels = collections.Counter(kernels_in(text))
  assert kernels["flash_attention_forward"] == 2 * kernels["flash_attention_backward"] > 0
  assert re.search(rf"bf16\[[\d,]*{T // 2},{H}\][^\n]* custom-call", text)  # a device holds half of the queries
  qkv = L * B * (T // 2) * ((N + 2 * K) // 2) * H * 2
  assert compiled.memory_analysis().host_temp_size_in_bytes >= qkv
  assert "S(5)" in text  # XLA's name for pinned host memory


@pytest.mark.parametrize("kind", few(["v4-8"], ["v4-8", "v5e-4", "v5p-8", "v6e-4", "tpu7x-8"]))
@pytest.mark.parametrize(
  "width, dtype", few([(128, "bfloat16")], [(128, "bfloat16"), (64, "bfloat16"), (256, "bfloat16"), (256, "float32")])
)
def test_kernels_fit_into_vmem_and_have_no_parts_of_the_gradients_of_queries(kind, width, dtype):
  """Eight heads share a key head: the gradients of 8,192 queries are in VMEM in several chunks, whose parts of dk and
  dv are added. The compiler estimates more than ten times as many cycles for a sum over the first dim."""
  device = stepcost_topologies.devices(stepcost_topologies.resolve(kind), 1)[0][0]
  mesh = Mesh(np.array(device).reshape(1, 1, 1, 1), ("data", "fsdp", "tensor", "context"))
  length = 8192
  kernel = attention.choose(
    "flash", attention.Shape("tpu", mesh, width, length, num_q_heads=8, num_kv_heads=1, dtype=jnp.dtype(dtype))
  )
  on_chip = jax.sharding.SingleDeviceSharding(device)
  q, k = (jax.ShapeDtypeStruct((1, length, n, width), dtype, sharding=on_chip) for n in (8, 1))
  ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=on_chip)
  grads = jax.grad(lambda q, k, v, ids: kernel(q, k, v, ids, ids).astype(jnp.float32).sum(), argnums=(0, 1, 2))
  text = jax.jit(grads).lower(q, k, k, ids).compile().as_text()
  assert kernels_in(text) == ["flash_attention_backward", "flash_attention_forward"]
  parts = re.findall(rf"\[(\d+),1,1,{length},{width}\][^\n]* custom-call", text)
  assert parts and int(parts[0]) > 1
  assert not re.search(rf"\[1,1,{length},{width}\][^\n]* reduce\(", text)


def test_kernels_of_many_short_rows_fit_into_scalar_memory(tpu):
  on_chip = jax.sharding.SingleDeviceSharding(tpu[0])
  kernel = attention.choose(
    "flash", attention.Shape("tpu", None, head_dim=H, seq_len=128, num_q_heads=2, num_kv_heads=1, dtype=BFLOAT16)
  )
  q, k = (jax.ShapeDtypeStruct((1024, 128, n, H), jnp.bfloat16, sharding=on_chip) for n in (2, 1))
  ids = jax.ShapeDtypeStruct((1024, 128), jnp.int32, sharding=on_chip)
  grads = jax.grad(lambda q, k, v, ids: kernel(q, k, v, ids, ids).astype(jnp.float32).sum(), argnums=(0, 1, 2))
  assert len(kernels_in(jax.jit(grads).lower(q, k, k, ids).compile().as_text())) == 2
