"""The first and the last lines of a run's log, and the event run_start: what runs, where, with which data and keys."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Mapping

import jax

from input_pipeline import describe
from trainer.checkpoint import disk_space
from trainer.cluster import Cluster, run_command
from trainer.config import counts
from trainer.config.config_files import CONFIG_FILE
from trainer.config.errors import counted
from trainer.config.schema import Config, ModelSection
from trainer.elastic import batch_plan
from trainer.observe import environment, files
from trainer.observe.events import EventLog
from trainer.observe.log import Log
from trainer.program.program import Program
from trainer.run.preparation import Prepared
from trainer.run.run_data import RunData


def announce(prepared: Prepared, log: Log, events: EventLog) -> None:
  """Prints what is about to run, and records it as the first event of the process."""
  config, cluster, full, data = prepared.config, prepared.cluster, prepared.program, prepared.data
  origins = prepared.origins
  device = full.mesh.devices.flat[0]
  model, length = config.model, config.data.max_target_length
  parameters = counts.parameter_count(model)
  source = data.train.describe(config.run.steps)
  mesh = ", ".join(f"{axis}={size}" for axis, size in full.mesh.shape.items() if size > 1) or "one device"
  lines = [
    f"Run {config.run_directory}: {config.run.steps} steps of {data.global_batch_size} x {length} tokens",
    *_shares_line(config, cluster.num_slices),
    f"Model {model.model_name}: {parameters:,} parameters, {counted(model.num_decoder_layers, 'layer')}, "
    f"remat_policy={model.remat_policy}, {model.dtype}",
    f"Devices: {cluster.num_slices} slice{'s' * (cluster.num_slices > 1)} of {cluster.devices_per_slice} "
    f"{device.device_kind} ({cluster.kind}), "
    f"mesh {mesh}, jax {jax.__version__}",
    f"Attention: {full.attention.name} ({full.attention.reason})",
    *_experts(model, full),
    describe.line(source),
    *describe.documents(source),
    *_losses_to_beat(data, model.vocab_size),
    *_on_cpu(config, device, origins),
  ]
  for line in lines:
    log.line(line)
  if warning := describe.vocabulary_warning(source, model.vocab_size):
    log.warning(warning)
  copied, in_storage = cluster.copied(cluster.view(cluster.slices)), cluster.saves_in_storage()
  for shortage in disk_space.warnings(config, full.state, in_storage=in_storage, copied=copied):
    log.warning(shortage)
  _print_config(config, origins, log)
  events.emit(
    "run_start",
    steps=config.run.steps,
    num_slices=cluster.num_slices,
    devices=cluster.num_slices * cluster.devices_per_slice,
    devices_per_slice=cluster.devices_per_slice,
    platform=device.platform,
    device_kind=device.device_kind,
    global_batch_size=data.global_batch_size,
    tokens_per_step=data.tokens_per_step,
    parameters=parameters,
    flops_per_token=counts.flops_per_token(model, length),
    vocab_size=model.vocab_size,
    data=source,
    unigram_entropy=data.train.unigram_entropy(),
    unigram_eval_loss=data.train.unigram_eval_loss(),
    config=config.flat(),
    origins=dict(origins),
    command=run_command(),
    **environment.describe(),
  )


def next_commands(config: Config, cluster: Cluster, data: RunData) -> list[str]:
  """Returns commands for a complete run that work as they are: its report, a text, its losses, and an export."""
  here, python, directory = os.getcwd(), sys.executable or "python", config.run_directory
  if python.startswith(f"{here}/"):
    python = os.path.relpath(python, here)
  commands = [["report", directory]]
  if config.checkpoint.enable_checkpointing:
    if data.train.tokenizer is not None:
      prompt = config.observe.sample_prompt
      commands.append(["generate", directory, prompt if prompt and prompt.isprintable() else "The "])
    if data.evaluations and cluster.kind != "pathways":  # evaluate uses the devices of this process
      commands.append(["evaluate", directory])
    model = config.model
    fits = not model.routed_bias_update_rate and (model.num_experts == 1 or model.use_qk_norm)
    if fits and not files.exists(f"{directory}-hf"):
      commands.append(["export_hf", directory, f"{directory}-hf"])
  return [shlex.join([python, "-m", f"trainer.tools.{tool}", *arguments]) for tool, *arguments in commands]


def _experts(model: ModelSection, full: Program) -> list[str]:
  """Returns a line about the experts; [] for a dense model."""
  if model.num_experts == 1:
    return []
  return [
    f"Experts: {model.num_experts_per_tok} of {model.num_experts} in a token, with "
    f"{counts.active_parameter_count(model):,} active parameters; {full.grouped_matmul.name} "
    f"({full.grouped_matmul.reason})"
  ]


def _on_cpu(config: Config, device: jax.Device, origins: Mapping[str, str]) -> list[str]:
  """Returns a line with the values that train faster on a CPU than the defaults, which are meant for TPUs and GPUs."""
  better = {"dtype": "float32", "remat_policy": "none"}
  left = [f"{key}={value}" for key, value in better.items() if key not in origins and config.flat()[key] != value]
  if device.platform != "cpu" or not left:
    return []
  return [f"A CPU has no fast bfloat16 and rarely needs remat: {' '.join(left)} trains faster here"]


def _losses_to_beat(data: RunData, vocab_size: int) -> list[str]:
  """Returns a line with the losses of trivial models, to compare the training loss with; [] if the data has none."""
  unigram, unigram_eval = data.train.unigram_entropy(), data.train.unigram_eval_loss()
  if unigram is None:
    return []
  line = f"Losses to beat: {math.log(vocab_size):.2f} for a uniform guess (ln V), {unigram:.2f} for a unigram model"
  return [line if unigram_eval is None else f"{line} ({unigram_eval:.2f} in evaluation)"]


def _print_config(config: Config, origins: Mapping[str, str], log: Log) -> None:
  """Prints the keys that differ from their default, and the file that will have all keys (see `Session.ready`)."""
  defaults = Config().flat()
  chosen = {key: value for key, value in config.flat().items() if value != defaults[key]}
  log.line(f"Configuration (differences from the defaults; {config.run_directory}/{CONFIG_FILE} has every key):")
  for key, value in chosen.items():
    switch = f"  # {origins[key]}" if key == "services" and "=" in origins.get(key, "") else ""
    log.line(f"  {key}: {value}{switch}")


def _shares_line(config: Config, slices: int) -> list[str]:
  """Into how many shares a slice's part of the batch is cut, and what a lost slice costs, if slices are processes."""
  shares = config.elastic.shares_per_slice
  if shares == -1 or slices == 1:
    return []
  tokens = config.data.per_device_batch_size * config.data.max_target_length
  tokens *= config.optimizer.gradient_accumulation_steps / shares
  speed = batch_plan.relative_throughput(slices, slices - 1, shares * config.optimizer.local_steps)
  return [
    f"shares_per_slice={shares}: each share has {tokens:,.0f} tokens for each device, and gathers the weights inside "
    f"its slice. With {slices - 1} of {slices} slices the run has {speed:.1%} of its speed"
  ]
