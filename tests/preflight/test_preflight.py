"""The preflight command: for this machine, for TPUs that this machine does not have, and refused inputs."""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import re
import types
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tests.preflight.preflight_command import TINY, command, compile_once
from tests.support import needs

from stepcost import chips
from stepcost.hlo_events import Channel
from stepcost.prices import Basis
from trainer import config
from trainer.config.counts import parameter_count
from trainer.config.schema import RematPolicy
from trainer.preflight import analysis, remat_choice
from trainer.tools.preflight import main

STEP = ["attention=flash", "remat_policy=full"]
TPU = [*STEP, "compile_topology=v5e-4", "compile_topology_num_slices=2"]


@pytest.fixture
def no_compiler(monkeypatch):
  """Findings that a test provides instead of compiling: {slices: finding}."""
  from trainer.preflight import analysis

  found: dict[int, analysis.Finding] = {}
  monkeypatch.setattr(analysis, "analyse", lambda config, slices, total, **_: found[len(slices)])
  return found


@pytest.mark.parametrize("keys, snapshot", [(["dcn_data_parallelism=2"], True), (["dcn_fsdp_parallelism=2"], False)])
def test_keys_that_fix_the_number_of_slices(no_compiler, capsys, keys, snapshot):
  """Nothing is compiled with one slice lost, and the exit code follows from the step on all slices."""
  no_compiler[2] = analysis.Refused(2, "too much", too_large=True)
  assert main([*TINY, "num_slices=2", "attention=dot_product", *keys]) == 1
  text = capsys.readouterr().out
  assert "Slices: dcn_*_parallelism needs all 2; the run cannot continue with fewer" in text
  assert "Slices alive" not in text and "does not fit: too much" in text
  assert ("per slice and copy" in text) == ("Ramdisk per host" in text) == snapshot
  assert ("no slice holds the whole state" in text) != snapshot


def test_keys_of_processes_get_their_table_unless_one_program_computes_all_slices(no_compiler, capsys):
  no_compiler[1] = analysis.Refused(1, "too much", too_large=True)
  keys = [*TINY, "num_slices=4", "attention=dot_product", "gradient_accumulation_steps=4", "shares_per_slice=4"]
  assert main(keys) == 1
  assert "Slices as processes, shares_per_slice=4" in capsys.readouterr().out
  assert main([*keys, "cluster=simulated"]) == 2
  said = capsys.readouterr().err
  assert said.startswith("error: shares_per_slice=4: the slices of a simulated cluster")
  assert "Remove the key (shares_per_slice=-1), or start" in said


def test_a_compiler_error_has_its_own_exit_code(no_compiler, capsys):
  no_compiler[2] = analysis.Refused(2, "too much", too_large=True)
  no_compiler[1] = analysis.Refused(1, "INTERNAL: Mosaic failed to compile TPU kernel")
  assert main([*TINY, "num_slices=2", "attention=dot_product"]) == 3
  said = capsys.readouterr()
  assert "does not fit: too much" in said.out
  assert said.err == "error: the compiler refused the step on 1 slice: INTERNAL: Mosaic failed to compile TPU kernel\n"


def refusing(error, stage="compile"):
  """A program that the compiler refuses."""

  class Refusing:
    compiler_options = types.MappingProxyType({})
    plan = types.SimpleNamespace(rows=np.zeros((1, 1)))

    def lower(self):
      if stage == "lower":
        raise error
      return self

    def compile(self, **_):
      raise error

  return Refusing()


def test_too_little_on_chip_memory_is_not_reported_as_too_little_hbm(monkeypatch):
  text = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\nRan out of memory in memory space vmem while allocating "
  )
  text += "on stack for %splash. Scoped allocation with size 5.21M and limit 4.00M exceeded scoped vmem limit by 1.21M."
  monkeypatch.setattr(analysis.program, "build", lambda *_: refusing(jax.errors.JaxRuntimeError(text)))
  problem = "an operation needs 5.21M of on-chip memory (VMEM), and the limit is 4.00M"
  found = analysis.analyse(config.load(TINY), [[]], 1)
  assert isinstance(found, analysis.Refused)
  assert found.reason == f"{problem}. Set compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=KIB to a higher limit"
  flag = "compile_xla_flags=--xla_tpu_scoped_vmem_limit_kib=4096"
  with pytest.raises(config.ConfigError) as caught:
    analysis.analyse(config.load([*TINY, flag]), [[]], 1)
  assert str(caught.value) == f"{flag}: {problem}.\nRaise xla_tpu_scoped_vmem_limit_kib, or remove it."


def test_flags_that_the_compiler_refuses_are_wrong_input(capsys):
  assert main([*TINY, "compile_xla_flags=--xla_no_such_flag=1"]) == 2
  assert "error: compile_xla_flags=--xla_no_such_flag=1: the compiler of cpu refuses" in capsys.readouterr().err


class Command(NamedTuple):
  """A command for TPUs, and what it has compiled."""

  config: config.Config
  output: str
  findings: dict[tuple[str, int], analysis.Finding]  # {(policy, number of slices): the step}


def run_command(*keys: str) -> Command:
  """Runs preflight with the keys of TINY; `keys` replace keys of the same name. Preflight compiles equal steps once."""
  given = {key.partition("=")[0]: key for key in [*TINY, *keys]}
  output, findings = io.StringIO(), {}
  with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
    by_key = compile_once(patch)
    assert main([*given.values()]) == 0
  for (keys_of_step, slices, _), found in by_key.items():
    findings[json.loads(keys_of_step)["model"]["remat_policy"], slices] = found
  of_step = [key for name, key in given.items() if not name.startswith("compile_topology")]
  return Command(config.load(of_step), output.getvalue(), findings)


@pytest.fixture(scope="module")
def two_slices() -> Command:
  """A step with two micro-batches and tied tables on two slices and, with little optimization, on one of them."""
  keys = "gradient_accumulation_steps=2 logits_via_embedding=true use_qk_norm=false vocab_size=1024 base_emb_dim=256"
  keys += " base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=512"
  return run_command(*TPU, *keys.split())


@needs.libtpu
def test_for_tpus_that_this_machine_does_not_have(two_slices):
  output = two_slices.output
  assert "For 2 slices of v5e:2x2: 4 chips (4 devices) on 1 host each; no TPU is needed" in output
  assert output.count("of 17.2 GB") == 2 and output.count(": fits") == 2
  assert output.count("Roofline on v5e: compute") == 2
  two, one = output.split("The step on 1 of 2 slices")
  assert "across slices (DCN)" in two and "across slices (DCN)" not in one
  assert "Compiled quickly" not in two and "cycles" in two and "HBM unknown" not in two
  assert "Compiled quickly" in one and "cycles" not in one and "HBM unknown" in one
  assert re.search(r"Step time on v5e: (.*? ms): computation .*, exposed DCN (.*? ms)", two), two
  assert "Step time: unknown" in one
  assert "Missing in these times" not in two, "each transfer has a start and an end"


@pytest.fixture(scope="module")
def chosen_policy(tmp_path_factory) -> Command:
  """remat_policy=auto with two candidates."""
  folder = tmp_path_factory.mktemp("chosen_policy")
  # jax 0.12 unrolls a loop over two layers, and then the compiler moves offloaded arrays of the last layer twice.
  keys = [f"base_output_directory={folder}", f"jax_cache_dir={folder}/cache", "base_num_decoder_layers=3"]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(remat_choice, "CANDIDATES", (RematPolicy.FULL, RematPolicy.MINIMAL_OFFLOADED))
    return run_command("attention=flash", "remat_policy=auto", "compile_topology=v5e-4", *keys)


@needs.libtpu
def test_the_policy_with_the_shortest_estimated_step_is_analysed_and_kept(chosen_policy):
  output = chosen_policy.output
  rows = dict(re.findall(r"\n  (\w+) \| ([\d.]+) ms \| [\d.]+ ms \| [\d.]+ MB", output))
  assert list(rows) == ["full", "minimal_offloaded"]
  best = min(rows, key=lambda policy: float(rows[policy]))
  assert f"remat_policy=auto: {best}, the shortest of 2 estimated steps, {rows[best]} ms\n" in output
  assert f"Step time on v5e: {rows[best]} ms" in output
  (entry,) = pathlib.Path(chosen_policy.config.run.jax_cache_dir).iterdir()
  assert json.loads(entry.read_text())[0] == best


@needs.libtpu
def test_slices_exchange_the_gradients_once(two_slices):
  """Each chip sends its float32 shard of every gradient once, for any number of micro-batches, of tied tables too."""
  cfg, found = two_slices.config, two_slices.findings["full", 2]
  assert isinstance(found, analysis.Analysis)
  across = sum(c.bytes * c.times for c in found.exchanged())
  gradients = 4 * parameter_count(cfg.model) / 4
  # Norm scales are replicated on every chip, and small arrays are padded to memory tiles.
  assert gradients <= across < 1.1 * gradients
  assert found.micro_batches == cfg.optimizer.gradient_accumulation_steps == 2
  assert found.costs.unpriced_kernel_runs == 0  # the FLOPs of flash attention are known
  assert found.costs.flops > found.model_flops  # remat computes the layers twice
  check_schedule(found)


def check_schedule(found: analysis.Analysis) -> None:
  """Asserts that the simulation executes every computation and every transfer as often as the counts do."""
  chip = chips.find("v5e")
  assert chip is not None and chip.clock_hz is not None
  times, bounds = analysis.timeline(found, chip), analysis.roofline(found, chip)
  assert times is not None and times.problems == ()
  assert times.computation[Basis.ESTIMATE] == pytest.approx(found.costs.cycles / chip.clock_hz)
  assert times.computation[Basis.ATTENTION] > 0 == times.computation[Basis.UNKNOWN_KERNEL]
  assert times.needed(Channel.DCN) == pytest.approx(bounds.dcn)
  # Two rings without wraparounds, or one ring: both use half of the links of a slice of four.
  assert times.needed(Channel.LINKS) == pytest.approx(2 * bounds.ici)
  for channel in Channel:
    assert 0 <= times.exposed[channel] <= times.needed(channel)
  assert times.seconds == pytest.approx(times.computed + sum(times.exposed.values()))
  assert sum(transfer.exposed for transfer in times.transfers) == pytest.approx(sum(times.exposed.values()))


@needs.libtpu
@pytest.mark.parametrize("policy, forward", [("full", 2), ("minimal_with_context", 1)])
def test_attention_counts_once_per_run_of_its_kernels(policy, forward):
  """Two matmuls forward, two more if the policy does not save the result, and five backward; all in one block."""
  import jax
  import jax.numpy as jnp

  from stepcost import costs, hlo, topologies
  from trainer.config.schema import ModelSection
  from trainer.kernels import attention_tpu, remat

  layers, batch, length, heads, width = 3, 2, 256, 2, 128
  kernel = attention_tpu.build(mesh=None, seq_len=length, heads_per_key=1, head_dim=width, itemsize=2)
  _, kept = remat.checkpoint_policy(ModelSection(remat_policy=policy))

  def layer(x, scale):
    queries = jax.ad_checkpoint.checkpoint_name(x * scale, "query_proj")
    return x + kernel(queries, x, x, jnp.ones((batch, length), int), jnp.ones((batch, length), int))

  def loss(scales, x):
    body = jax.checkpoint(layer, policy=kept)
    return jax.lax.scan(lambda x, scale: (body(x, scale), None), x, scales)[0].astype(jnp.float32).sum()

  device = topologies.devices(topologies.resolve("v5e-4"), 1)[0][0]
  shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
  gradient = jax.jit(jax.grad(loss, (0, 1))).lower(shape(layers), shape(batch, length, heads, width)).compile()
  found = costs.count(hlo.parse(gradient.as_text()))
  matmul = 2 * batch * heads * length * length * width
  assert found.flops_by_type == {("bf16", "default"): layers * (2 * forward + 5) * matmul}
  assert found.unpriced_kernel_runs == 0


@needs.libtpu
def test_offloaded_activations_go_to_the_host_and_back_once(chosen_policy):
  """Queries, keys, values, the output projection and the two inner arrays of the MLP, per token in bf16. The output of
  the MLP is not offloaded, because the backward pass does not read it."""
  found, model = chosen_policy.findings["minimal_offloaded", 1], chosen_policy.config.model
  assert isinstance(found, analysis.Analysis)
  width = (model.num_query_heads + 2 * model.num_kv_heads) * model.head_dim + model.emb_dim + 2 * model.mlp_dim
  moved = 2 * model.num_decoder_layers * 2 * width * chosen_policy.config.data.max_target_length
  assert found.costs.host_bytes == pytest.approx(moved, rel=0.01)


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch, capsys):
  monkeypatch.setattr("stepcost.topologies.importlib.util.find_spec", lambda name: None)
  assert main([*TINY, *TPU]) == 2
  assert "setup.sh --tpu" in capsys.readouterr().err


@needs.cuda
def test_for_gpus_that_this_machine_does_not_have():
  found = command("compile_topology=h100-2", "compile_topology_num_slices=2", "attention=flash", "dtype=bfloat16")
  assert found.returncode == 0, found.stderr
  assert "For 2 slices of h100:2" in found.stdout and "JAX takes 64.4 GB" in found.stdout
  assert re.search(r"The step on 1 of 2 slices x 2 NVIDIA H100 80GB HBM3: mesh fsdp=2", found.stdout)
  assert len(re.findall("Step time on H100: [^;]*; [\\d,]+ tokens/s/device", found.stdout)) == 2
  assert "Missing in these times" not in found.stdout


@needs.libtpu
def test_a_step_that_does_not_fit_is_reported_with_the_numbers_of_the_compiler():
  from stepcost import topologies

  large = "max_target_length=512 per_device_batch_size=8192 attention=dot_product remat_policy=none".split()
  cfg = config.load([*TINY[:-2], *large])
  found = analysis.analyse(cfg, topologies.devices(topologies.resolve("v5e-1"), 1), 1)
  assert isinstance(found, analysis.Refused) and found.too_large
  assert re.fullmatch(r"total memory required for .* exceeds available HBM \(15.75G\)", found.reason)
