"""The job that a configuration and the options describe, resolved and checked. All renderers receive it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from trainer.config import Config, load
from trainer.config.errors import require
from trainer.launch.manifest import budget, checks, hardware
from trainer.launch.manifest.options import Options

DEFAULT_RESTARTS = 10
CACHE_FOLDER = "/cache"  # the mount point of the volume for the compilation cache


@dataclass(frozen=True)
class Job:
  """One job on GKE."""

  options: Options
  config: Config
  slice: hardware.Slice
  name: str
  num_slices: int
  pathways: bool
  max_restarts: int
  max_slice_restarts: int
  grace_seconds: int
  save_seconds: float
  ramdisk_mebibytes: int  # per pod; 0 without emergency tier
  words: tuple[str, ...]  # CONFIG.yml key=value ... of the command in the container

  @property
  def command(self) -> str:
    """What a shell in the container executes. With exec the program itself receives SIGTERM."""
    return "exec python -m trainer " + shlex.join(self.words)

  @property
  def pathways_folder(self) -> str:
    """gs:// folder for the files of Pathways."""
    return self.options.pathways_gcs_location or self.config.run.base_output_directory

  @property
  def summary(self) -> list[str]:
    """The assumptions behind the numbers, as lines."""
    size = budget.checkpoint_bytes(self.config) / 1e9
    lines = [
      f"Grace period {self.grace_seconds} s. A checkpoint of {size:.2f} GB takes {self.save_seconds:.1f} s at "
      f"{self.options.save_gigabytes_per_second:g} GB/s per host, after a step of {self.options.step_seconds:g} s."
    ]
    if self.ramdisk_mebibytes:
      lines.append(f"Ramdisk of {self.ramdisk_mebibytes} MiB per host for {self.local_folder}.")
      if self.ramdisk == "emptydir":
        lines.append("An emptyDir is lost with its pod: it serves recoveries of a running process, not restarts.")
    cache = self.config.run.jax_cache_dir
    if cache and "://" not in cache and not self.options.cache_volume:
      lines.append("A restarted pod compiles again. Give --cache-volume or jax_cache_dir=gs://... to keep programs.")
    return lines

  @property
  def ramdisk(self) -> str:
    """The kind of volume for the emergency tier. A csi volume stays on its TPU host when the pod is replaced."""
    return self.options.ramdisk or ("emptydir" if self.pathways else "csi")

  @property
  def local_folder(self) -> str:
    """The mount point of the ramdisk."""
    return self.config.checkpoint.local_checkpoint_directory


def resolve(options: Options) -> Job:
  """The job of these options. Raises ConfigError with all independent mistakes."""
  config = load(options.config, check_paths=False)
  piece = hardware.resolve(options.tpu_type)
  pathways = config.cluster.enable_single_controller
  saving_hosts = 1 if pathways else piece.hosts
  save = budget.save_seconds(config, saving_hosts, options.save_gigabytes_per_second)
  wrapper = budget.XPK_WRAPPER_SECONDS if options.target == "xpk" else 0
  grace = budget.grace_seconds(save, options.step_seconds, wrapper)
  num_slices = options.num_slices or config.cluster.num_slices or 1
  max_slice_restarts = options.max_slice_restarts
  if max_slice_restarts is None:
    max_slice_restarts = config.elastic.elastic_max_retries
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
    max_slice_restarts=max_slice_restarts,
    grace_seconds=grace,
    save_seconds=save,
    ramdisk_mebibytes=ramdisk,
    words=(*options.config, *_added_keys(options, grace)),
  )
  require(checks.problems(job))
  return job


def _max_restarts(options: Options, config: Config) -> int:
  """Without checkpoints a restarted run would begin again; and xpk does not restart a job behind Pathways."""
  if options.max_restarts is not None:
    return options.max_restarts
  without = options.target == "xpk" and config.cluster.enable_single_controller
  return DEFAULT_RESTARTS if config.checkpoint.enable_checkpointing and not without else 0


def _added_keys(options: Options, grace: int) -> list[str]:
  """The keys that the manifest adds to the user's: what the program must know about the job around it."""
  added = []
  given = {argument.partition("=")[0] for argument in options.config}
  if grace > budget.DEFAULT_GRACE_SECONDS and "autocheckpoint_grace_seconds" not in given:
    added.append(f"autocheckpoint_grace_seconds={grace}")
  if options.cache_volume:
    added.append(f"jax_cache_dir={CACHE_FOLDER}/jax")
  return added
