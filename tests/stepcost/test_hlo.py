"""The parser and the costs of compiled programs, on programs with known costs and on text of the TPU compiler."""

from __future__ import annotations

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepcost import collectives, costs, custom_calls, hlo


def compiled_text(fn, *shapes, mesh=None, specs=None):
  arguments = [
    jax.ShapeDtypeStruct(s, jnp.float32, sharding=None if mesh is None else NamedSharding(mesh, p))
    for s, p in zip(shapes, specs or [None] * len(shapes))
  ]
  return jax.jit(fn).lower(*arguments).compile().as_text()


def scanned(x, ws):
  return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()


def test_a_scans_matmuls_count_as_often_as_they_run():
  """Forward 2BDD FLOPs per layer, backward twice as many."""
  layers, rows, width = 7, 32, 64
  module = hlo.parse(compiled_text(jax.grad(scanned, (0, 1)), (rows, width), (layers, width, width)))
  assert module.unknown_loops() == []
  assert costs.count(module).flops == pytest.approx(3 * layers * 2 * rows * width * width)


def test_matmul_flops_are_counted_by_operand_type():
  """8-bit matmuls run at another rate. A matmul of mixed types counts as its wider operand."""
  text = """ENTRY %main (a: s8[16,32], b: s8[32,8], c: bf16[32,8]) -> s32[16,8] {
  %a = s8[16,32]{1,0} parameter(0)
  %b = s8[32,8]{1,0} parameter(1)
  %c = bf16[32,8]{1,0} parameter(2)
  %mixed = f32[16,8]{1,0} dot(%a, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %integers = s32[16,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
  counted = costs.count(hlo.parse("HloModule m\n\n" + text))
  assert counted.flops_by_type == {("bf16", "default"): 2 * 16 * 32 * 8, ("s8", "default"): 2 * 16 * 32 * 8}
  assert counted.flops == 2 * 2 * 16 * 32 * 8


def test_a_loop_that_ends_by_a_value_is_reported_and_counts_once():
  halve = lambda x: jax.lax.while_loop(lambda c: jnp.sum(c) > 1.0, lambda c: c @ c, x)
  module = hlo.parse(compiled_text(halve, (64, 64)))
  assert len(module.unknown_loops()) == 1
  assert costs.count(module).flops == 2 * 64**3


def test_traffic_of_a_scan_touches_each_layer_once():
  """A loop that reads the weights of one layer per turn reads all weights once, not all of them in every turn."""
  layers, width = 16, 256
  module = hlo.parse(compiled_text(scanned, (8, width), (layers, width, width)))
  weights = 4 * layers * width * width
  assert (
    weights <= costs.count(module).device_bytes < 4 * weights
  )  # the CPU compiler may copy a slice before its matmul


@pytest.fixture
def mesh():
  return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))


def test_collectives_inside_and_across_slices(mesh):
  def per_slice(x, w):
    gathered = jax.lax.all_gather(w, "fsdp", tiled=True)
    return jax.lax.psum(x @ gathered, "data"), jax.lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True)

  rows, width = 8, 64
  both, fsdp = PartitionSpec(("data", "fsdp")), PartitionSpec("fsdp")
  step = jax.shard_map(
    per_slice, mesh=mesh, in_specs=(both, fsdp), out_specs=(fsdp, PartitionSpec("data", "fsdp")), check_vma=False
  )
  text = compiled_text(step, (rows, width), (width, width), mesh=mesh, specs=(both, fsdp))
  found = collectives.find(hlo.parse(text), [0] * 4 + [1] * 4)
  by_kind = {c.kind: c for c in found}
  gather, reduce = by_kind["all-gather"], by_kind["all-reduce"]
  assert (gather.bytes, gather.group, gather.crosses_slices) == (4 * width * width, 4, False)
  assert gather.sent == 3 / 4 * gather.bytes
  assert (reduce.bytes, reduce.group, reduce.crosses_slices) == (4 * 1 * width, 2, True)
  assert reduce.sent == 2 * 1 / 2 * reduce.bytes


def test_collectives_in_a_scan_multiply(mesh):
  summed = lambda x: jax.lax.scan(lambda c, _: (jax.lax.psum(c, "fsdp") * 0.5, None), x, None, length=6)[0]
  step = jax.shard_map(
    summed, mesh=mesh, in_specs=PartitionSpec("fsdp"), out_specs=PartitionSpec("fsdp"), check_vma=False
  )
  text = compiled_text(step, (16, 4), mesh=mesh, specs=(PartitionSpec("fsdp"),))
  assert sum(c.times for c in collectives.find(hlo.parse(text), [0] * 8) if c.kind == "all-reduce") == 6


@pytest.mark.parametrize(
  "written, groups",
  [
    ("{{0,4},{1,5},{2,6},{3,7}}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("mesh['data'=2,'fsdp'=4] {'fsdp'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
  ],
)
def test_notations_of_groups(written, groups):
  text = f"""%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={written}, to_apply=%add
}}
"""
  (instruction,) = (i for i in hlo.parse(text).computations["main"].instructions if i.opcode == "all-reduce")
  assert collectives.groups_of(instruction, 8) == groups


# Text of libtpu: layouts with tiles and memory spaces, an asynchronous collective in several fusions with one channel,
# a loop whose number of turns follows only from its condition, a matmul as a convolution, transfers between slices.
TPU = pathlib.Path(__file__).with_name("tpu.hlo").read_text()


def test_tpu_text():
  module = hlo.parse(TPU)
  assert module.entry == "main"
  assert module.runs["body"] == 28
  assert module.computations["body"].by_name["s.1"].result[2] == hlo.Array("f32", (32, 256), 1)
  found = costs.count(module)
  assert found.flops == 28 * 2 * 32 * 256 * 1024
  assert found.cycles == 28 * 1000
  assert found.host_bytes == 2 * 64 * 1024


@pytest.mark.parametrize("slice_of", [[0] * 4 + [1] * 4 + [2] * 4, [0, 1, 2] * 4])
def test_tpu_text_collectives(slice_of):
  """Groups number the devices of one slice, even if the axis across slices is the innermost."""
  gather, transfer = sorted(collectives.find(hlo.parse(TPU), slice_of), key=lambda c: c.kind)
  assert (gather.kind, gather.times, gather.bytes, gather.group) == ("all-gather", 28, 2 * 256 * 1024, 4)
  assert not gather.crosses_slices
  assert (transfer.kind, transfer.times, transfer.bytes, transfer.group) == ("all-reduce", 1, 4 * 100 * 8 * 128, 3)
  assert transfer.crosses_slices


def test_offloading_moves_only_one_layer_per_turn():
  """Text of libtpu: each of 28 turns stores one layer into a host buffer for all layers, and fetches one layer."""
  found = costs.count(hlo.parse(pathlib.Path(__file__).with_name("offload.hlo").read_text()))
  layer = 2 * 64 * 128
  assert found.host_bytes == 28 * 2 * layer
  assert found.device_bytes == pytest.approx(28 * 2 * layer, rel=0.01)  # plus the indices of the layers


def test_valid_positions_are_those_that_are_found_one_by_one():
  random = np.random.default_rng(0)
  for left, kernel, out, stride, pad, left_dilation, kernel_dilation in random.integers(1, 9, (500, 7)).tolist():
    positions = (i * stride + j * kernel_dilation - pad for i in range(out) for j in range(kernel))
    read = [at for at in positions if 0 <= at <= (left - 1) * left_dilation and at % left_dilation == 0]
    sizes = {"stride": stride, "pad": pad, "left_dilation": left_dilation, "kernel_dilation": kernel_dilation}
    assert costs.valid_positions(left, kernel, out, **sizes) == len(read), (left, kernel, out, sizes)


def test_attention_kernels_of_tpus():
  """Splash kernels are found by name: forward, dk and dv (renamed by the compiler), dq, and all three fused. With only
  one block, no part is skipped. A kernel that states its FLOPs counts as stated, even with multi-line attributes."""
  module = hlo.parse(pathlib.Path(__file__).with_name("splash.hlo").read_text())
  assert [len(c.instructions) for c in module.computations.values()] == [1, 10]
  matmul = 2 * 3 * 4 * 256 * 512 * 128
  found = costs.count(module, "highest")
  assert found.flops_by_type == {("bf16", "highest"): (2 + 4 + 3 + 5) * matmul, ("", "highest"): 7}
  assert found.unpriced_kernel_runs == 1


@pytest.mark.parametrize(
  "stated, share",
  [
    (r"{\"block_q\": 512, \"block_kv\": 512, \"block_q_dkv\": 1024}", 10 / 16),
    (r"{\"block_q\": 256, \"block_kv\": 2048}", 1),
    (r"{\"block_q\": null, \"block_kv\": 512}", 0),  # unknown
    ("{}", 0),
  ],
)
def test_the_cost_of_attention_follows_from_the_blocks_that_the_kernel_states(stated, share):
  target = 'custom_call_target="tpu_custom_call"'
  metadata = f'frontend_attributes={{kernel_metadata={{\n"xprof_metadata":"{stated}"\n}}}}'
  text = f"""ENTRY %main (q: bf16[4,2048,128]) -> bf16[4,2048,128] {{
  %q = bf16[4,2048,128]{{2,1,0}} parameter(0)
  ROOT %splash_mha_fwd.1 = bf16[4,2048,128]{{2,1,0}} custom-call(%q, %q, %q), {target}, {metadata}
}}
"""
  counted = costs.count(hlo.parse("HloModule m\n\n" + text))
  assert counted.flops == share * 2 * 2 * 4 * 2048 * 2048 * 128
  assert counted.unpriced_kernel_runs == (share == 0)


@pytest.mark.parametrize("direction, phase, matmuls", [("forward", "fwd", 2), ("backward", "fused", 5)])
@pytest.mark.parametrize("renamed", [False, True])
def test_a_kernel_of_the_trainer_states_its_flops(direction, phase, matmuls, renamed):
  scores = 2 * 8 * 3 * 1024**2
  stated = f'backend_config={{"custom_call_config":{{"cost_estimate":{{"flops":{matmuls * 2 * scores * 128}}}}}}}'
  target = 'custom_call_target="tpu_custom_call"'
  name = f"flash_attention_{direction}"
  called, source = ("closed_call", f', metadata={{op_name="jit(step)/{name}"}}') if renamed else (name, "")
  text = f"""ENTRY %main (q: bf16[2,8,2048,128], i: s32[3]) -> bf16[2,8,2048,128] {{
  %q = bf16[2,8,2048,128]{{3,2,1,0}} parameter(0)
  %i = s32[3]{{0}} parameter(1)
  ROOT %{called}.1 = bf16[2,8,2048,128]{{3,2,1,0}} custom-call(%i, %q), {target}{source}, {stated}
}}
"""
  module = hlo.parse("HloModule m\n\n" + text)
  (computation,) = module.computations.values()
  found = custom_calls.attention(computation, computation.instructions[-1])
  assert found == custom_calls.Attention("bf16", scores, 128, phase, f"flash_attention {phase}")
  assert costs.count(module).flops_by_type == {("bf16", "default"): matmuls * 2 * scores * 128}


def test_the_precision_of_a_matmul_is_the_higher_precision_of_its_operands():
  text = """ENTRY %main (a: f32[16,32], b: f32[32,8]) -> f32[16,8] {
  %a = f32[16,32]{1,0} parameter(0)
  %b = f32[32,8]{1,0} parameter(1)
  ROOT %d = f32[16,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, operand_precision={default,high}
}
"""
  assert costs.count(hlo.parse("HloModule m\n\n" + text)).flops_by_type == {("f32", "high"): 2 * 16 * 32 * 8}


@pytest.mark.parametrize("after_colon", ["", " "])
def test_gpu_libraries(after_colon):
  """The text is synthetic and follows the sources of XLA and JAX: backend_config has the dimensions of a cuBLAS matmul,
  and for cuDNN attention the shape of the scores and the mask. JAX 0.12 writes spaces after colons."""
  text = pathlib.Path(__file__).with_name("gpu.hlo").read_text()
  found = costs.count(hlo.parse(text.replace('":', f'":{after_colon}')))
  attention = 2 * 2 * 8 * 512 * 1024 * 64
  matmul = 2 * 4 * 64 * 32 * 256
  assert found.flops_by_type == {
    ("bf16", "default"): matmul + 2 * attention / 2 + 5 * attention,
    ("f8e4m3fn", "default"): 2 * 64 * 32 * 256,
  }
  assert found.unpriced_kernel_runs == 1  # the convolution


WHOLE = """HloModule m, is_scheduled=true, num_partitions=4

%double (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %sum = f32[8]{0} add(%a, %a)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %copied = f32[8]{0} copy(%p)
  ROOT %f = f32[8]{0} fusion(%copied), kind=kLoop, calls=%double
}
"""


def test_the_first_line_states_the_number_of_devices():
  assert hlo.parse(WHOLE).devices == 4
  assert hlo.parse(WHOLE.replace("num_partitions=4", "replica_count=2, num_partitions=4")).devices == 8
  assert hlo.parse(WHOLE.replace(", num_partitions=4", "")).devices == 1


@pytest.mark.parametrize(
  "removed, put, message",
  [
    (WHOLE, "hello", "it has no ENTRY computation"),
    (WHOLE[WHOLE.index("  ROOT %f") :], "", "the computation main does not end"),
    (WHOLE[WHOLE.index("%double (") : WHOLE.index("ENTRY")], "", "f calls the computation double, which is not there"),
    ("%double (a: f32[8]) -> f32[8] {\n", "", "an instruction is outside of a computation: %a = f32"),
    ("  %copied = f32[8]{0} copy(%p)\n", "", "f reads copied, which is not in the computation main"),
    ("copy(%p)", "copy(%p", "the instruction copied is cut off"),
    (", calls=%double", "", "the fusion f has no calls="),
    ("fusion(%copied)", "fusion()", "the number of operands of f is not the number of parameters of double"),
  ],
)
def test_a_damaged_text_is_refused(removed, put, message):
  assert removed in WHOLE
  with pytest.raises(ValueError, match=re.escape(message)):
    hlo.parse(WHOLE.replace(removed, put))


TRANSFER = "_xla_megascale_transfer_type"


SLICES_LISTED = '"{0,1,2}x{0:15}"'
DEVICES_LISTED = "{{100000,100001,200000,200001,300000,300001},{100002,200002}}"


def megascale(kind: str, target: str) -> hlo.Module:
  """A program in which a device of one of three slices sends 300 bytes to the host."""
  attributes = f'_xla_host_transfer_rendezvous="r",_xla_megascale_target={target},{TRANSFER}="{kind}"'
  return hlo.parse(f"""HloModule m

ENTRY %main (p: s8[300]) -> s8[300] {{
  %p = s8[300]{{0}} parameter(0)
  %token = token[] after-all()
  %send = (s8[300]{{0}}, u32[], token[]) send(%p, %token), frontend_attributes={{{attributes}}}
  ROOT %r = s8[300]{{0}} bitcast(%p)
}}
""")


@pytest.mark.parametrize("target", [SLICES_LISTED, DEVICES_LISTED])
@pytest.mark.parametrize(
  "kind, found, payload, sent",
  [
    ("ALL_REDUCE", "all-reduce", 300, 400),
    ("ALL_GATHER", "all-gather", 900, 600),  # the operand is the shard of one slice
    ("REDUCE_SCATTER", "reduce-scatter", 300, 200),
    ("ALL_TO_ALL", "all-to-all", 300, 200),
    ("ONE_TO_ONE", "collective-permute", 300, 300),
  ],
)
def test_bytes_between_slices(kind, found, payload, sent, target):
  (collective,) = collectives.find(megascale(kind, target), [0] * 16 + [1] * 16 + [2] * 16)
  assert (collective.kind, collective.bytes, collective.sent) == (found, payload, pytest.approx(sent))
  assert collective.operand_bytes == 300


@pytest.mark.parametrize("target", ['"everyone"', "{}"])
def test_a_transfer_between_slices_with_an_unknown_target_is_refused(target):
  with pytest.raises(ValueError, match=f"send: the target of a transfer between slices is .*{re.escape(target)}"):
    collectives.find(megascale("ALL_REDUCE", target), [0, 1, 2])
