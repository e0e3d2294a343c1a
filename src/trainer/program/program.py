"""The program of one set of slices: mesh, model, shardings and step, built from the configuration and the devices.

Everything here is abstract: it creates no array and writes no file. Training runs the program; preflight compiles it
for devices that this machine does not have. A configuration that cannot work is refused here, before the run's folder
exists.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Device
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stepcost import chips
from trainer.cluster import View
from trainer.config import compiler_flags, counts, shares
from trainer.config.errors import ConfigError
from trainer.config.schema import Config, ModelSection, RematPolicy
from trainer.elastic import batch_plan
from trainer.elastic.batch_plan import BatchPlan
from trainer.kernels import attention, grouped_matmul, projection
from trainer.kernels.attention import AttentionKernel
from trainer.kernels.cross_entropy import CHUNK_LOGITS_BYTES
from trainer.models import rope
from trainer.models.decoder import DecoderFunctions, Params
from trainer.models.layers import Kernels
from trainer.parallel import mesh as mesh_lib
from trainer.parallel import sharding
from trainer.program import local_steps, optimizers, state, step
from trainer.program.checks import Checks
from trainer.program.local_steps import RoundPrograms
from trainer.program.optimizers import NO_OVERRIDES, Schedule, UserOptimizer
from trainer.program.share_sums import OneProgram, ShareSums, Stages
from trainer.program.state import TrainState
from trainer.program.step import MicroBatches, Sums, TrainStep

TPU_OPTIONS = MappingProxyType(
  {
    # The TPU compiler turns an all-gather of a weight and its matmul into a ring of partial matmuls, however small:
    # with D = 1024 on 16 chips each one contracts 64 values, and the matrix unit has 128 rows. The value is the size in
    # MiB above which the compiler may do this; no weight is that large.
    "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    # It turns gathers of small weights (keys and values of llama3.1-8b on 64 chips) into all-reduces of arrays that are
    # mostly zeros, which take twice as long and hide behind nothing.
    "xla_tpu_prefer_async_allgather_to_allreduce": "true",
  }
)

# SparseCores can move the data of a collective while the matrix units compute. On 7x this is the default. On v5p and
# v6e, the matrix units wait for every collective inside a slice without these options.
_WITH_SPARSECORES = ("v5p", "v6e")
# Matrix units of 256 x 256: see projection.choose. v6e has them, too, but its layouts of llama3.1-8b need no joined
# dims, and the copies that join them cost 5 % of the cycles of a layer.
_WITH_WIDE_UNITS = ("7x",)
_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
SPARSECORE_OPTIONS = MappingProxyType(
  {
    f"{_OFFLOAD}_all_gather": "true",
    f"{_OFFLOAD}_2d_all_gather": "true",
    f"{_OFFLOAD}_3d_all_gather": "true",
    f"{_OFFLOAD}_reduce_scatter": "true",
    f"{_OFFLOAD}_nd_reduce_scatter": "true",
    f"{_OFFLOAD}_all_reduce": "true",
    # How SparseCores run: MaxText sets the same with every offload (benchmarks/xla_flags_library.py).
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_sc_enable_instruction_fusion": "false",
    # For the scheduler: transfers may queue. The multipliers scale its estimates of their latency.
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": "true",
    "xla_tpu_sparse_core_all_gather_latency_multiplier": "1",
    "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": "3",
  }
)

# Chip -> pairs (least D, KiB of on-chip memory for one fusion), in ascending order. From D = 2,560 on, the estimated
# step is 6 to 14 % shorter than with the compiler's default, and compilation takes up to twice as long. Up to D = 2,048
# the step is not shorter.
_ON_CHIP_KIB = MappingProxyType(
  {
    "v5e": ((2560, 64 << 10), (4096, 48 << 10)),
    "v5p": ((2560, 64 << 10),),
    "v6e": ((2560, 64 << 10),),
    "7x": ((2560, 60 << 10),),
  }
)

# For 8-bit matmuls on GPUs. With its own kernels instead of cuBLAS, XLA needs one to several minutes to choose among
# them, and the step is slower.
QUANTIZED_GPU_OPTIONS: Mapping[str, str | bool] = MappingProxyType({"xla_gpu_enable_triton_gemm": False})

# {platform: options of a program that computes the same bits in every process}. On a GPU, XLA times several kernels for
# each matmul by default, so that two processes may choose different ones, and cuDNN adds gradients of attention in no
# fixed order.
SAME_BITS: Mapping[str, Mapping[str, str | bool]] = MappingProxyType({"gpu": {"xla_gpu_deterministic_ops": True}})

# Stages of a share on an accelerator: little of the exchange is left when the last one ends, and a program takes much
# longer to run than to start. A CPU needs its cores for the computation.
_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Program:
  """What an attempt executes on one set of slices."""

  mesh: Mesh
  model: DecoderFunctions
  attention: AttentionKernel
  grouped_matmul: grouped_matmul.Chosen  # of experts
  user_optimizer: UserOptimizer  # schedule and optimizer that the user of the library gives
  optimizer: optax.GradientTransformation
  plan: BatchPlan  # the rows of the global batch that each slice computes
  state: TrainState  # abstract, with shardings
  batch: MicroBatches  # ShapeDtypeStructs [A, rows, T], with shardings
  schedule: Schedule
  train_step: TrainStep
  replica_step: TrainStep  # of a replica with local steps, alone on this mesh
  outer: optax.GradientTransformation | None  # the outer optimizer of local steps; None: all steps are synchronous
  eval_step: Callable[[Any, MicroBatches], tuple[jax.Array, jax.Array]]  # see step.build_eval_step
  share: OneProgram | Stages  # the first half of a step, of this mesh alone
  apply_sums: Callable[[TrainState, Sums, Any], tuple[TrainState, jax.Array]]  # the second half, as TrainStep
  compiler_options: Mapping[str, str | bool]  # of the step

  def lower(self) -> jax.stages.Lowered:
    """Returns the training step, traced. The state is donated and keeps its shardings."""
    out_shardings = state.shardings(self.state), NamedSharding(self.mesh, PartitionSpec())
    jitted = jax.jit(self.train_step, donate_argnums=0, out_shardings=out_shardings)
    with jax.set_mesh(self.mesh):
      return jitted.lower(self.state, self.batch, self.schedule.abstract(self.mesh))

  def compile(self) -> Any:
    """Returns the compiled training step: (state, batch, `schedule.placed(mesh)`) -> (state, metrics)."""
    return self.lower().compile(compiler_options=dict(self.compiler_options))

  def compile_evaluation(self, options: dict[str, str | bool] | None = None) -> Any:
    """Returns `eval_step`, compiled for the parameters and batches of this program."""
    with jax.set_mesh(self.mesh):
      return jax.jit(self.eval_step).lower(self.state.params, self.batch).compile(options)

  def compile_halves(self, *, evaluates: bool, adds: bool, witnesses: bool = False) -> Halves:
    """Returns the halves of a step, compiled, for slices that exchange their sums outside XLA.

    evaluates, adds, witnesses: whether the run evaluates, whether a slice adds the sums of its shares, and whether it
    compares them. A share has the same bits, whichever slice computes it.
    """
    sums = step.abstract_sums(self.state, self.mesh)
    out_shardings = state.shardings(self.state), NamedSharding(self.mesh, PartitionSpec())
    same = self._same_bits
    first = self.compile_share(adds=adds)
    with jax.set_mesh(self.mesh):
      # Donate only the state: on a CPU the sums may share the memory of the exchange's buffer.
      second = jax.jit(self.apply_sums, donate_argnums=0, out_shardings=out_shardings)
      values = self.schedule.abstract(self.mesh)
      # Every slice applies the sums for itself, and all must get the same weights.
      apply = second.lower(self.state, sums, values).compile({**self.compiler_options, **same})
      evaluation = self.compile_evaluation(same) if evaluates else None
    checks = self.compile_checks(first) if witnesses else None
    return Halves(sums, first, apply, evaluation, self._compile_checksum(), checks)

  def compile_round(self, replicas: int, *, evaluates: bool, adds: bool) -> RoundPrograms:
    """Returns what a slice with local steps needs, compiled. replicas: of the run. evaluates, adds: as in
    `compile_halves`. A replica has the same bits, whichever slice computes it."""
    assert self.outer is not None, "no local steps"
    averages = local_steps.Averages.of(self.state, self.model, replicas)
    abstract = self.state, self.batch, self.schedule.abstract(self.mesh)
    options = {**self.compiler_options, **self._same_bits}
    programs = local_steps.compile_round(
      averages, self.outer, self.replica_step, abstract, self.mesh, options, adds=adds
    )
    evaluation = self.compile_evaluation(self._same_bits) if evaluates else None
    return RoundPrograms(**programs, evaluate=evaluation, checksum=self._compile_checksum())

  def _compile_checksum(self) -> Callable[[Params], jax.Array]:
    out = NamedSharding(self.mesh, PartitionSpec())
    with jax.set_mesh(self.mesh):
      return jax.jit(state.checksum, out_shardings=out).lower(self.state.params).compile()

  def compile_share(self, *, adds: bool) -> ShareSums:
    """Returns the first half of a step, compiled: see `compile_halves`."""
    sums, (share,) = step.abstract_sums(self.state, self.mesh), self.batch
    options = {**self._same_bits, **self.compiler_options}
    with jax.set_mesh(self.mesh):
      return self.share.compile(self.state.params, share, sums.grads, options, adds=adds)

  def compile_checks(self, sums: ShareSums) -> Checks:
    """Returns what a witness compares of `sums` and of the state, compiled."""
    with jax.set_mesh(self.mesh):
      return Checks(sums, self.state, NamedSharding(self.mesh, PartitionSpec()))

  @property
  def _same_bits(self) -> dict[str, str | bool]:
    return dict(SAME_BITS.get(self.mesh.devices.flat[0].platform, {}))

  def init(self, key: jax.Array) -> TrainState:
    """Returns a fresh sharded state from `key`: the same numbers on every mesh."""
    with jax.set_mesh(self.mesh):
      return self._init(key)

  def init_from(self, params: Any) -> TrainState:
    """Returns a fresh sharded state with these weights, sharded like `state.params`. It donates them."""
    create = functools.partial(state.with_params, self.optimizer, self.outer)
    with jax.set_mesh(self.mesh):
      return jax.jit(create, out_shardings=state.shardings(self.state), donate_argnums=0)(params)

  @functools.cached_property
  def _init(self) -> Callable[[jax.Array], TrainState]:
    create = functools.partial(state.create, self.model, self.optimizer, self.outer)
    options = None
    if self.mesh.devices.flat[0].platform == "cpu":
      # This runs once, and LLVM needs seconds to optimise random numbers: for small models level 0 is the fastest in
      # total. Its code runs five times as long as level 1's; at about 4 million weights both take the same time.
      small = sum(leaf.size for leaf in jax.tree.leaves(self.state.params)) < 4 << 20
      options = {"xla_backend_optimization_level": 0 if small else 1}
    return jax.jit(create, out_shardings=state.shardings(self.state), compiler_options=options)

  @functools.cached_property
  def evaluate(self) -> Callable[[Any, MicroBatches], tuple[jax.Array, jax.Array]]:
    """`eval_step`, jitted once."""
    return jax.jit(self.eval_step)


@dataclasses.dataclass(frozen=True)
class Halves:
  """The compiled halves of a step of one slice, and what is exchanged between them."""

  abstract: Sums  # ShapeDtypeStructs with shardings
  sums: ShareSums
  apply: Callable[[TrainState, Sums, Any], tuple[TrainState, jax.Array]]  # donates the state
  evaluate: Callable[[Any, MicroBatches], tuple[jax.Array, jax.Array]] | None  # (params, (share,)); None: not needed
  checksum: Callable[[Params], jax.Array]  # `state.checksum`
  checks: Checks | None  # of a witness; None: there is none


def rows_per_micro_batch(config: Config, devices_per_slice: int) -> int:
  """Returns the examples in one slice's micro-batch. Raises ConfigError unless that is a whole number of at least 1."""
  share = config.data.per_device_batch_size
  rows = counts.examples_per_slice(share, devices_per_slice)
  if rows == 0:
    raise ConfigError(
      f"per_device_batch_size={share:g} x {devices_per_slice} devices per slice is {share * devices_per_slice:g} "
      "examples, and a slice's micro-batch must be a whole number of at least 1. Choose "
      f"{counts.valid_batch_sizes(devices_per_slice)}."
    )
  return rows


def global_batch_size(config: Config, num_slices: int, devices_per_slice: int) -> int:
  """Returns the examples per optimizer step. It depends on the full topology, never on which slices are alive."""
  accumulation = config.optimizer.gradient_accumulation_steps
  return rows_per_micro_batch(config, devices_per_slice) * num_slices * accumulation


def of_view(config: Config, view: View, user_optimizer: UserOptimizer = NO_OVERRIDES) -> Program:
  """Returns the program for the slices of `view`. Raises ConfigError if sizes do not fit the devices."""
  return build(config, view.devices, view.num_slices_total, user_optimizer)


def build(
  config: Config,
  slices: Sequence[Sequence[Device]],
  num_slices_total: int,
  user_optimizer: UserOptimizer = NO_OVERRIDES,
) -> Program:
  """Returns the program for the living `slices` of `num_slices_total`.

  Raises ConfigError if sizes do not fit the devices.
  """
  cfg = config.model
  length = config.data.max_target_length
  rows = rows_per_micro_batch(config, len(slices[0]))
  mesh = mesh_lib.make(config.parallelism, slices)
  context = mesh.shape[mesh_lib.CONTEXT]
  if length % context:
    raise ConfigError(
      f"max_target_length={length} does not divide by the {context} ways of the mesh axis 'context'. Choose a multiple."
    )
  plan = _batch_plan(config, mesh, rows, len(slices), num_slices_total)
  platform = slices[0][0].platform
  kernel = _attention(cfg, platform, mesh, length)
  tokens = len(slices) * rows * length // (mesh.shape[mesh_lib.DATA] * mesh.shape[mesh_lib.FSDP] * context)
  grouped = grouped_matmul.choose(platform)
  model = DecoderFunctions(cfg, _kernels(config, mesh, platform, tokens, kernel, grouped))
  optimizer, schedule = user_optimizer.replace(
    optimizers.build(config.optimizer, model.logical_axes(), cfg.weight_dtype),
    optimizers.schedule(config.optimizer, config.run.steps),
    lambda: jax.eval_shape(model.init, jax.random.key(0)),
    model.logical_axes(),
  )
  outer = local_steps.outer_optimizer(config.optimizer)
  return Program(
    mesh=mesh,
    model=model,
    attention=kernel,
    grouped_matmul=grouped,
    user_optimizer=user_optimizer,
    optimizer=optimizer,
    plan=plan,
    schedule=schedule,
    state=state.abstract(model, optimizer, mesh, outer),
    batch=tuple(step.abstract_batch(mesh, len(group), group[0].size, length) for group in plan.groups),
    train_step=step.build_train_step(model, config.optimizer, optimizer, schedule, mesh),
    replica_step=step.build_replica_step(model, config.optimizer, optimizer, schedule),
    outer=outer,
    eval_step=step.build_eval_step(model, config.optimizer, mesh),
    share=_share(config, model, platform),
    apply_sums=functools.partial(step.apply_gradients, config.optimizer, optimizer, schedule),
    compiler_options=compiler_options(slices[0][0], cfg, compiler_flags.parse(config.run.compile_xla_flags)),
  )


def batch_plan_of(config: Config, slices: Sequence[Sequence[Device]], num_slices_total: int) -> BatchPlan:
  """Returns how the living `slices` of `num_slices_total` share a step. Raises ConfigError if sizes do not fit."""
  rows = rows_per_micro_batch(config, len(slices[0]))
  return _batch_plan(config, mesh_lib.make(config.parallelism, slices), rows, len(slices), num_slices_total)


def _batch_plan(config: Config, mesh: Mesh, rows: int, alive: int, total: int) -> BatchPlan:
  step.require_whole_rows(mesh, alive * rows)
  micro_batches = config.optimizer.gradient_accumulation_steps
  if config.elastic.shares_per_slice > 0:  # this program computes one share of a slice's part of the batch
    micro_batches, rows = shares.micro_batches(config, rows)
  ways = mesh.shape[mesh_lib.DATA] * mesh.shape[mesh_lib.FSDP]
  # Where fsdp spans slices, all of them are needed, and the units of a slice do not matter.
  return batch_plan.plan(total, alive, micro_batches, rows, ways // math.gcd(ways, alive))


def _attention(cfg: ModelSection, platform: str, mesh: Mesh, length: int) -> AttentionKernel:
  shape = attention.Shape(
    platform=platform,
    mesh=mesh,
    head_dim=cfg.head_dim,
    seq_len=length,
    num_q_heads=cfg.num_query_heads,
    num_kv_heads=cfg.num_kv_heads,
    dtype=jnp.dtype(cfg.dtype),
    precision=matmul_precision(),
  )
  return attention.choose(cfg.attention, shape)


def _kernels(
  config: Config, mesh: Mesh, platform: str, tokens: int, kernel: AttentionKernel, grouped: grouped_matmul.Chosen
) -> Kernels:
  """Returns the implementations for a platform. tokens: of a shard of the batch."""
  cfg = config.model
  # Without a remat policy, the backward pass would keep the gathered weights of all layers.
  gathers_again = cfg.remat_policy is RematPolicy.NONE
  first_stage = sharding.first_stage(mesh, cfg.emb_dim)
  wide_units = _chip_name(mesh.devices.flat[0]) in _WITH_WIDE_UNITS
  return Kernels(
    kernel,
    grouped_matmul=grouped.function,
    expert_parallelism=config.parallelism.ici_expert_parallelism,
    project=projection.choose(platform, cfg.quantization, gathers_again, first_stage, wide_units),
    rotate_half=rope.choose_rotate_half(platform),
    chunk_logits_bytes=CHUNK_LOGITS_BYTES[platform],
    head_neighbours=sharding.head_neighbours(mesh, tokens, cfg.vocab_size),
    zigzag=kernel.zigzag,
  )


def compiler_options(device: Device, cfg: ModelSection, given: Mapping[str, str | bool]) -> dict[str, str | bool]:
  """Returns the compiler options of a model's step for devices like `device`.

  given: options of the user. They replace the trainer's own options of the same name.
  """
  options: dict[str, str | bool] = dict(TPU_OPTIONS) if device.platform == "tpu" else {}
  if device.platform == "gpu" and cfg.quantization:
    options |= QUANTIZED_GPU_OPTIONS
  name = _chip_name(device)
  if name in _WITH_SPARSECORES:
    options |= SPARSECORE_OPTIONS
  for least, kib in _ON_CHIP_KIB.get(name, ()):
    if cfg.emb_dim >= least:
      options[compiler_flags.ON_CHIP_MEMORY_OPTION] = str(kib)
  return {**options, **given}


def _chip_name(device: Device) -> str:
  """Returns the name of the device's chip in `chips.CHIPS`, or "" if it is not there."""
  chip = chips.find(device.device_kind)
  return "" if chip is None else chip.name


def check_compiler_flags(config: Config, slices: Sequence[Sequence[Device]]) -> None:
  """Raises ConfigError if the compiler of these devices refuses compile_xla_flags: it compiles one addition."""
  flags = compiler_flags.parse(config.run.compile_xla_flags)
  if not flags:
    return
  mesh = Mesh(np.array([device for devices in slices for device in devices]), ("all",))
  number = jax.ShapeDtypeStruct((), np.float32, sharding=NamedSharding(mesh, PartitionSpec()))
  try:
    jax.jit(lambda x: x + 1).lower(number).compile(compiler_options=flags)
  except JaxRuntimeError as error:
    # RESOURCE_EXHAUSTED: with this limit of on-chip memory, not even the addition fits.
    if "INVALID_ARGUMENT" not in str(error) and "RESOURCE_EXHAUSTED" not in str(error):
      raise
    reason = str(error).splitlines()[0].removeprefix("INVALID_ARGUMENT: ").rstrip(" :")
    kind = slices[0][0].device_kind
    raise ConfigError(
      f"compile_xla_flags={config.run.compile_xla_flags}: the compiler of {kind} refuses: {reason}\n"
      "Remove the option, or give it a value that this compiler accepts."
    ) from error


def _share(config: Config, model: DecoderFunctions, platform: str) -> OneProgram | Stages:
  """Returns how a slice that is a JAX world of its own computes the sums of a share."""
  layers = config.model.num_decoder_layers
  stages = least_stages(layers, platform) if config.model.scan_layers else 1
  if stages == 1:
    return OneProgram(functools.partial(step.loss_and_grads, model, config.optimizer))
  return Stages.of(model, config.optimizer, layers, stages)


def least_stages(layers: int, platform: str) -> int:
  """Returns into how many programs, at least, the backward pass through scanned layers is divided."""
  return 1 if platform == "cpu" else min(_STAGES, layers)


def matmul_precision() -> str:
  """Returns JAX's matmul precision, which JAX_DEFAULT_MATMUL_PRECISION sets: default, high, highest or an algorithm."""
  given = str(jax.config.jax_default_matmul_precision or "default")
  try:
    return jax.lax.Precision(given).name.lower()
  except ValueError:  # such as BF16_BF16_F32
    return given
