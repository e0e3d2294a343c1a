"""The simulated schedule, on HLO texts made by hand whose times are known.

All texts run on a device that computes a cycle per nanosecond, sends a byte per nanosecond to the devices of its slice
and a byte per nanosecond to other slices. There are 2 slices of 2 devices.
"""

from __future__ import annotations

import pathlib
import re

import pytest

from stepcost import chips, collectives, costs, hlo, prices, simulation
from stepcost.chips import Chip
from stepcost.hlo_events import Channel
from stepcost.prices import Basis, Rates
from stepcost.simulation import Timeline

CHIP = Chip("test", (), 1e12, 1 << 30, 1e12, 2e9, clock_hz=1e9)
RATES = Rates(CHIP, dcn=1e9)
SLICES = [0, 0, 1, 1]
NANO = 1e-9

# An all-reduce of n bytes in a group of two sends n bytes.
SENT = 'is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="%s",_xla_megascale_target='
SENT += '"{0,1}x{0:1}",_xla_megascale_transfer_type="ALL_REDUCE"}'


def compute(name: str, nanoseconds: int, *operands: str) -> str:
  uses = ", ".join(f"%{operand}" for operand in operands)
  return (
    f"  %{name} = s8[8]{{0:S(1)}} fusion({uses}), kind=kLoop, calls=%nothing, "
    f'backend_config={{"window_config":{{"estimated_cycles":"{nanoseconds}"}}}}\n'
  )


def sent(name: str, operand: str, size: int) -> str:
  """The start of a transfer to another slice, and the receipt of its result."""
  return (
    f"  %{name}.send = (s8[{size}]{{0}}, u32[], token[]) send(%{operand}), {SENT % name}\n"
    f"  %{name}.sent = token[] send-done(%{name}.send), {SENT % name}\n"
    f"  %{name}.recv = (s8[{size}]{{0}}, u32[], token[]) recv(%{name}.send), {SENT % name}\n"
  )


def received(name: str, size: int) -> str:
  return f"  %{name} = (s8[{size}]{{0}}, token[]) recv-done(%{name}.recv), {SENT % name}\n"


def module(entry: str, others: str = "") -> str:
  partitions = 2 if "_xla_megascale_target" in entry + others else 4  # of one slice, or of both
  return (
    f"HloModule m, is_scheduled=true, num_partitions={partitions}\n\n"
    "%nothing () -> s8[8] {\n  ROOT %n = s8[8]{0:S(1)} constant({...})\n}\n\n"
    f"{others}\nENTRY %main (p: s8[4000]) -> s8[4000] {{\n  %p = s8[4000]{{0:S(1)}} parameter(0)\n{entry}"
    "  ROOT %end = s8[4000]{0:S(1)} bitcast(%p)\n}\n"
  )


def loop(body: str, state: str, carried: str, name: str = "body") -> str:
  """A body that carries `state` (its types) and gives `carried` (names) to the next turn."""
  return (
    f"%{name} (s: ({state})) -> ({state}) {{\n  %{name}.s = ({state}) parameter(0)\n{body}"
    f"  ROOT %{name}.t = ({state}) tuple({carried})\n}}\n\n"
    f"%{name}.condition (s: ({state})) -> pred[] {{\n  %{name}.c = ({state}) parameter(0)\n"
    f'  ROOT %{name}.r = pred[] custom-call(%{name}.c), custom_call_target="AllocateBuffer"\n}}\n\n'
  )


def runs(state: str, initial: str, turns: int | None, name: str = "body") -> str:
  """Calls a loop."""
  known = "" if turns is None else f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
  return (
    f"  %{name}.i = ({state}) tuple({initial})\n"
    f"  %{name}.w = ({state}) while(%{name}.i), condition=%{name}.condition, body=%{name}{known}\n"
  )


def simulated(text: str, rates: Rates = RATES) -> Timeline:
  return simulation.simulate(hlo.parse(text), SLICES, rates)


def check(timeline: Timeline, computed: int, **exposed: int) -> None:
  """Compares nanoseconds of computation, and exposed nanoseconds by channel."""
  found = {channel.name.lower(): round(seconds / NANO, 3) for channel, seconds in timeline.exposed.items() if seconds}
  assert found == {channel: nanoseconds for channel, nanoseconds in exposed.items() if nanoseconds}
  assert timeline.computed == pytest.approx(computed * NANO)
  assert timeline.seconds == pytest.approx((computed + sum(exposed.values())) * NANO)


GROUPS = "channel_id=1, replica_groups={{0,1},{2,3}}, to_apply=%nothing"
ALL_REDUCE = f"  %r = s8[1000]{{0:S(1)}} all-reduce(%a), {GROUPS}\n"
ALL_REDUCE_START = f"  %r = s8[1000]{{0:S(1)}} all-reduce-start(%a), {GROUPS}\n"


def test_a_synchronous_collective_is_exposed():
  text = compute("f", 300) + "  %a = s8[1000]{0:S(1)} bitcast(%p)\n" + ALL_REDUCE + compute("g", 400)
  timeline = simulated(module(text))
  check(timeline, 700, links=1000)
  (transfer,) = timeline.transfers
  assert (transfer.site.kind, transfer.site.bytes, transfer.calls) == ("all-reduce", 1000, 1)
  assert (transfer.needed, transfer.exposed, transfer.computed) == (1e-6, 1e-6, 0)


@pytest.mark.parametrize("between, exposed", [(1500, 0), (1000, 0), (400, 600), (0, 1000)])
def test_computation_between_start_and_done_hides_a_collective(between, exposed):
  text = (
    "  %a = s8[1000]{0:S(1)} bitcast(%p)\n"
    + ALL_REDUCE_START
    + compute("f", between)
    + "  %done = s8[1000]{0:S(1)} all-reduce-done(%r)\n"
    + compute("g", 50)
  )
  timeline = simulated(module(text))
  check(timeline, between + 50, links=exposed)
  assert timeline.transfers[0].computed == pytest.approx(between * NANO)


def offloaded(config: str = "") -> str:
  """A computation of a SparseCore with an all-reduce of 1000 bytes."""
  return (
    "%offloaded (q: s8[1000]) -> s8[1000] {\n  %q = s8[1000]{0:S(1)} parameter(0)\n"
    f"  ROOT %o = s8[1000]{{0:S(1)}} all-reduce(%q), {GROUPS}, backend_config={{{config}}}\n"
    '}, execution_thread="sparsecore"\n\n'
  )


CALL = "  %call = ((s8[1000]), s8[1000], s32[]) call-start({}), to_apply=%offloaded\n"
CALL_DONE = "  %done = s8[1000]{0:S(1)} call-done(%call)\n"


@pytest.mark.parametrize("before, between, exposed", [(0, 1500, 0), (5000, 400, 600), (5000, 0, 1000)])
def test_a_sparsecore_transfers_when_its_call_gets_its_operands(before, between, exposed):
  """The call begins earlier only to load the program of the SparseCore."""
  text = (
    CALL.format("")
    + compute("f", before)
    + "  %a = s8[1000]{0:S(1)} bitcast(%p)\n"
    + "  %update = ((s8[1000]), s8[1000]) call-update(%call, %a)\n"
    + compute("g", between)
    + CALL_DONE.replace("%call", "%update")
  )
  read = module(text, offloaded())
  timeline = simulated(read)
  check(timeline, before + between, links=exposed)
  (transfer,) = timeline.transfers
  assert (transfer.calls, transfer.needed) == (1, 1e-6)
  (found,) = collectives.find(hlo.parse(read), SLICES)
  assert (found.kind, found.times) == ("all-reduce", 1)


def test_a_call_that_begins_with_its_operands_transfers_at_once():
  text = "  %a = s8[1000]{0:S(1)} bitcast(%p)\n" + CALL.format("%a") + compute("f", 400) + CALL_DONE
  check(simulated(module(text, offloaded())), 400, links=600)


def test_a_transfer_between_slices_is_waited_for_by_its_recv_done():
  text = sent("psum", "p", 4000) + compute("f", 1500) + received("psum", 4000) + compute("g", 100)
  timeline = simulated(module(text))
  check(timeline, 1600, dcn=2500)
  assert timeline.needed(Channel.DCN) == pytest.approx(4000 * NANO)
  assert timeline.needed(Channel.LINKS) == 0


def test_two_transfers_of_one_channel_queue():
  """The second starts at 100 ns, moves from 1000 to 3000, and is waited for at 100 + 1900 = 2000."""
  text = sent("a", "p", 1000) + compute("f", 100) + sent("b", "p", 2000) + compute("g", 1900)
  check(simulated(module(text + received("b", 2000) + received("a", 1000))), 2000, dcn=1000)


STATE = "s32[], (s8[600]{0}, u32[], token[])"
CARRIED = (
  "  %i = s32[] get-tuple-element(%body.s), index=0\n"
  "  %psum.before = (s8[600]{0}, u32[], token[]) get-tuple-element(%body.s), index=1\n"
  "  %got = (s8[600]{0}, token[]) recv-done(%psum.before), channel_id=1\n"
)


@pytest.mark.parametrize("turns", [1, 2, 3, 28, 1000])
@pytest.mark.parametrize("work, first, each, last", [(700, 600, 0, 600), (500, 600, 100, 600)])
def test_a_transfer_that_ends_in_the_next_turn(turns, work, first, each, last):
  """The layer's gradient travels while the next layer is computed. Nothing hides the first and the last one."""
  body = CARRIED + sent("psum", "i", 600) + compute("f", work)
  text = "  %zero = s32[] constant(0)\n" + sent("first", "p", 600)
  after = (
    "  %last = (s8[600]{0}, u32[], token[]) get-tuple-element(%body.w), index=1\n"
    "  %done = (s8[600]{0}, token[]) recv-done(%last), channel_id=1\n"
  )
  whole = module(text + runs(STATE, "%zero, %first.recv", turns) + after, loop(body, STATE, "%i, %psum.recv"))
  timeline = simulated(whole)
  check(timeline, turns * work, dcn=first + (turns - 1) * each + max(0, last - work))
  assert sum(transfer.calls for transfer in timeline.transfers) == turns + 1
  assert timeline.needed(Channel.DCN) == pytest.approx((turns + 1) * 600 * NANO)


@pytest.mark.parametrize("outer, inner", [(1, 1), (3, 4), (100, 1000)])
def test_nested_loops_multiply(outer, inner):
  one = "s32[]"
  index = lambda name: f"  %{name}.k = s32[] get-tuple-element(%{name}.s), index=0\n"
  within = index("in") + compute("f", 10) + sent("psum", "in.k", 25) + received("psum", 25)
  around = index("out") + runs(one, "%out.k", inner, "in") + compute("g", 7)
  text = "  %zero = s32[] constant(0)\n" + runs(one, "%zero", outer, "out")
  others = loop(within, one, "%in.k", "in") + loop(around, one, "%out.k", "out")
  timeline = simulated(module(text, others))
  check(timeline, outer * (inner * 10 + 7), dcn=outer * inner * 25)
  assert timeline.transfers[0].calls == outer * inner


def test_a_loop_with_an_unknown_number_of_turns_counts_once_and_is_reported():
  body = "  %k = s32[] get-tuple-element(%body.s), index=0\n" + compute("f", 10)
  text = "  %zero = s32[] constant(0)\n" + runs("s32[]", "%zero", None)
  timeline = simulated(module(text, loop(body, "s32[]", "%k")))
  check(timeline, 10)
  assert timeline.problems == ("the number of turns is unknown: the loop body.w counts once",)


def together(name: str, nanoseconds: int, part: int) -> tuple[str, str]:
  """A fusion that computes, and executes a part of the all-gather of channel 7; and its body."""
  body = (
    f"%{name}.body (q: s8[500]) -> s8[1000] {{\n  %{name}.q = s8[500]{{0:S(1)}} parameter(0)\n"
    f"  ROOT %{name}.g = s8[1000]{{0:S(1)}} all-gather(%{name}.q), channel_id=7, replica_groups={{{{0,1}},{{2,3}}}}, "
    f'dimensions={{0}}, backend_config={{"async_collective_fusion_config":{{"flag_start":"{part}"}}}}\n}}\n\n'
  )
  return compute(name, nanoseconds, "p").replace("%nothing", f"%{name}.body"), body


@pytest.mark.parametrize("work, other, exposed", [(600, 0, 0), (300, 0, 200), (300, 400, 200), (0, 700, 500)])
def test_a_collective_in_fusions_moves_on_while_one_of_them_computes(work, other, exposed):
  """A device sends 500 bytes. Computation of other fusions between the first and the last one does not help."""
  parts = together("first", 0, -1), together("middle", work, 2), together("last", 0, 8)
  (first, middle, last), bodies = zip(*parts)
  text = module(first + middle + compute("f", other) + last, "".join(bodies))
  timeline = simulated(text)
  check(timeline, work + other, links=exposed)
  (transfer,) = timeline.transfers
  assert (transfer.calls, transfer.site.bytes) == (1, 1000)


def test_instructions_without_an_estimate_cost_their_bytes_or_flops():
  text = (
    "  %a = f32[1000,1000]{1,0} bitcast(%p)\n"
    "  %sum = f32[1000,1000]{1,0} add(%a, %a)\n"
    "  %dot = f32[1000,1000]{1,0} dot(%a, %sum), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"
    "  %later = f32[1000,1000]{1,0} operation-of-tomorrow(%a)\n"
    '  %kernel = f32[1000,1000]{1,0} custom-call(%a), custom_call_target="tpu_custom_call"\n'
  )
  timeline = simulated(module(text))
  # 4 MB each: the sum moves 12 MB, the other two 8 MB, and the matmul has 2e9 FLOPs.
  assert timeline.computation[Basis.RATES] == pytest.approx(12e-6 + 2e-3 + 8e-6)
  assert timeline.computation[Basis.UNKNOWN_KERNEL] == pytest.approx(8e-6)
  assert timeline.computation[Basis.ESTIMATE] == timeline.computation[Basis.KERNEL] == 0


def test_kernels_cost_their_flops_at_the_peak():
  text = (pathlib.Path(__file__).with_name("splash.hlo")).read_text()
  timeline = simulation.simulate(hlo.parse(text), [0], RATES)
  matmul = 2 * 3 * 4 * 256 * 512 * 128
  moved = 2 * 3 * 4 * 256 * 128 * 2  # one kernel states 7 FLOPs and one states nothing: two arrays
  assert timeline.computation[Basis.KERNEL] == pytest.approx((14 * matmul + moved) / 1e12)
  assert timeline.computation[Basis.UNKNOWN_KERNEL] == pytest.approx(moved / 1e12)


TOKAMAX = r", \"use_experimental_scheduler\": false"
FIXED = r", \"max_logit_const\": 30.0" + TOKAMAX


def attention(width: int, keys: int, options: str = "") -> hlo.Module:
  """A forward kernel that computes three of four blocks of 1024 x 1024 scores, for `keys` keys at a time."""
  stated = rf"{{\"block_q\": 1024, \"block_kv\": 1024, \"block_kv_compute\": {keys}{options}}}"
  metadata = f'frontend_attributes={{kernel_metadata={{"xprof_metadata":"{stated}"}}}}'
  shape = f"bf16[1,2048,{width}]{{2,1,0:S(1)}}"
  call = f'custom-call(%q, %q), custom_call_target="tpu_custom_call", {metadata}'
  return module(f"  %q = {shape} bitcast(%p)\n  %splash_mha_fwd.1 = {shape} {call}\n")


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
  "chip, keys, options, kernel, size",
  [
    ("v6e", 256, "", "fwd", 512),
    ("v6e", 1024, "", "fwd", 2048),
    ("7x", 512, TOKAMAX + r", \"max_logit_const\": null", "tokamax fwd", 512),
    ("7x", 512, FIXED, "tokamax fwd, fixed maximum", 512),
  ],
)
def test_attention_kernels_of_tpus_take_as_long_as_their_instructions(chip, keys, options, kernel, size, width):
  """The width of the heads does not matter."""
  timeline = simulated(attention(width, keys, options), prices.rates(chips.find(chip)))
  cycles = prices.CYCLES * 3 * prices.ATTENTION_INSTRUCTIONS[chip][kernel][size]
  assert timeline.computation[Basis.ATTENTION] == pytest.approx(cycles / chips.find(chip).clock_hz, rel=1e-6)


def sparse_core_program(start: str, update: str, done: str, called: str) -> str:
  """A gather of 100 bytes on a SparseCore, during 60 ns of computation."""
  group = "replica_groups={{0,1},{2,3}}, dimensions={0}"
  gather = (
    f"%called (p: s8[100]) -> s8[200] {{\n  %p = s8[100]{{0}} parameter(0)\n"
    f'  ROOT %gather = s8[200]{{0}} all-gather(%p), {group}\n}}, execution_thread="sparsecore"\n'
  )
  entry = (
    "  %own = s8[100]{0} parameter(1)\n"
    f'  %start = ((), (), s32[9]{{0}}) {start}(), async_execution_thread="sparsecore", {called}\n'
    f"  %update = ((s8[100]{{0}}), s8[200]{{0}}, s32[9]{{0}}) {update}(%start, %own)\n"
    f"{compute('work', 60)}  %whole = s8[200]{{0}} {done}(%update)\n"
  )
  return module(entry, gather)


@pytest.mark.parametrize(
  "opcodes, called",
  [
    (("call-start", "call-update", "call-done"), "to_apply=%called"),  # libtpu 0.0.50.1
    (
      ("custom-call-start", "custom-call-update", "custom-call-done"),  # libtpu 0.0.52
      'custom_call_target="(b/522284627)", called_computations={%called}',
    ),
  ],
)
def test_collectives_of_sparse_cores_count_in_the_forms_of_both_compilers(opcodes, called):
  parsed = hlo.parse(sparse_core_program(*opcodes, called))
  (found,) = collectives.find(parsed, SLICES)
  assert (found.kind, found.bytes, found.times) == ("all-gather", 200, 1)
  timeline = simulation.simulate(parsed, SLICES, RATES)
  assert timeline.exposed[Channel.LINKS] == pytest.approx(40 * NANO)
  assert costs.count(parsed).device_bytes == 100 + 200


@pytest.mark.parametrize(
  "text, said",
  [
    (
      sparse_core_program("new-start", "new-update", "new-done", "new_form={%called}"),
      "the computation called has collectives (all-gather), and no instruction calls it",
    ),
    (
      sparse_core_program("new-start", "new-update", "new-done", "new_form={%called}").replace(
        "all-gather(%p), replica_groups={{0,1},{2,3}}, dimensions={0}",
        "collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
      ),
      "the computation called has collectives (collective-permute), and no instruction calls it",
    ),
    (
      module("  %out = s8[200]{0} ragged-all-gather(%p), replica_groups={{0,1},{2,3}}\n"),
      "out is a collective of an unknown kind, ragged-all-gather",
    ),
    (
      module("  %out = s8[200]{0} new-permute(%p), source_target_pairs={{0,1},{1,0}}\n"),
      "out is a collective of an unknown kind, new-permute",
    ),
    (
      module("  %out = s8[200]{0} bitcast(%p)\n  out@1 := all-gather(%p), replica_groups={{0,1},{2,3}}\n"),
      "out is a collective of an unknown kind, bitcast",
    ),
    (
      module("", "all-gather(s8[100]), replica_groups={{0,1},{2,3}}\n"),
      "a collective is no instruction: all-gather(s8[100])",
    ),
    (
      module("  %s = (s8[200]{0}) new-start(%p), target=1\n  %d = s8[200]{0} new-done(%s)\n"),
      "s: what a new-start without a computation starts is unknown",
    ),
    *(
      (module(f"  %out = f32[4,4]{{1,0}} {call}\n"), f"out is {kind}, whose cost is unknown")
      for call, kind in {
        'custom-call(%p), custom_call_target="lapack_spotrf_ffi"': "a custom call of lapack_spotrf_ffi",
        "custom-call(%p)": "a custom call of an unnamed target",
        "fft(%p), fft_type=FFT, fft_length={4}": "of the kind fft",
        "ragged-dot(%p, %p, %p), lhs_contracting_dims={1}": "of the kind ragged-dot",
      }.items()
    ),
  ],
)
def test_what_has_an_unknown_form_is_refused_by_name(text, said):
  with pytest.raises(ValueError, match=re.escape(said)):
    simulated(text)
