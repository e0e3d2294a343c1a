"""From the options to a job: everything is resolved, and checked to fit together."""

from __future__ import annotations

import argparse

from trainer.config import Config, load
from trainer.config.errors import require
from trainer.launch import keys
from trainer.launch.manifest import budget, checks, contents, hardware
from trainer.launch.manifest.job import CACHE_FOLDER, Job

DEFAULT_RESTARTS = 10


def resolve(options: argparse.Namespace) -> Job:
  """The job of these options. Raises ConfigError with all independent mistakes."""
  # The last value counts here; the job's own command refuses a key with two values.
  options.config = list({argument.partition("=")[0]: argument for argument in options.config}.values())
  config = load(options.config, check_paths=False)
  piece = hardware.resolve(options.tpu_type)
  piece = hardware.on_hosts_of_ray(piece) if options.target == "rayjob" else piece
  pathways = config.cluster.enable_single_controller
  saving_hosts = 1 if pathways else piece.hosts
  save = budget.save_seconds(config, saving_hosts, options.save_gigabytes_per_second)
  wrapper = budget.XPK_WRAPPER_SECONDS if options.target == "xpk" else 0
  # Not where the period is fixed: services must not make a save impossible that fits it.
  services = 0.0 if pathways and options.target in checks.FIXED_GRACE else budget.service_seconds(config)
  grace = budget.grace_seconds(save, options.step_seconds, wrapper + services)
  num_slices = options.num_slices or config.cluster.num_slices or 1
  if options.target == "rayjob" and not pathways:
    ray_keys = keys.of_ray(max(1, num_slices - options.elastic_slices), num_slices)
    config = load([*options.config, *keys.refuse_other(options.config, "rayjob", ray_keys)], check_paths=False)
  retries, given = config.elastic.elastic_max_retries, options.max_slice_restarts
  ramdisk = 0
  if config.checkpoint.enable_emergency_checkpoint:
    # Behind Pathways the controller writes the copies of all slices.
    ramdisk = budget.ramdisk_mebibytes(config, saving_hosts, num_slices if pathways else 1)
  job = Job(
    options=options,
    config=config,
    slice=piece,
    name=options.workload or config.run.run_name,
    num_slices=num_slices,
    pathways=pathways,
    max_restarts=_max_restarts(options, config),
    max_slice_restarts=retries if given is None else given,
    grace_seconds=grace,
    save_seconds=save,
    ramdisk_mebibytes=ramdisk,
    words=(*options.config, *_added_keys(options, grace)),
  )
  require([*checks.problems(job), *contents.problems(job)])
  return job


def _max_restarts(options: argparse.Namespace, config: Config) -> int:
  """Without checkpoints a restarted run would begin again; and xpk does not restart a job behind Pathways."""
  if options.max_restarts is not None:
    return options.max_restarts
  without = options.target == "xpk" and config.cluster.enable_single_controller
  return DEFAULT_RESTARTS if config.checkpoint.enable_checkpointing and not without else 0


def _added_keys(options: argparse.Namespace, grace: int) -> list[str]:
  """The keys that the manifest adds to the user's: what the program must know about the job around it."""
  added = []
  given = {argument.partition("=")[0] for argument in options.config}
  if grace > budget.DEFAULT_GRACE_SECONDS and "autocheckpoint_grace_seconds" not in given:
    added.append(f"autocheckpoint_grace_seconds={grace}")
  if options.cache_volume:
    added.append(f"jax_cache_dir={CACHE_FOLDER}/jax")
  return added
