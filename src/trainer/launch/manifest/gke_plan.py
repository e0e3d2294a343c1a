"""From the options to a plan: everything is resolved. All targets print the same plan."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from trainer.config import Config, load
from trainer.launch.manifest import budget, hardware
from trainer.launch.manifest.hardware import Slice

CACHE_FOLDER = "/cache"  # the mount point of the volume for the compilation cache
# Targets that do not set the grace period of the Pathways head: it is DEFAULT_GRACE_SECONDS.
FIXED_GRACE = ("xpk", "gcluster")
_RESTARTS = 10


@dataclass(frozen=True)
class GkePlan:
  options: argparse.Namespace  # of options.parse
  config: Config
  slice: Slice
  num_slices: int
  save_seconds: float
  grace_seconds: int
  ramdisk_mebibytes: int  # per pod; 0 without emergency tier
  words: tuple[str, ...]  # CONFIG.yml key=value ... of the command in the container

  @property
  def name(self) -> str:
    return self.options.workload or self.config.run.run_name

  @property
  def pathways(self) -> bool:
    return self.config.cluster.enable_single_controller

  @property
  def max_restarts(self) -> int:
    """Restarts of the whole job. Without checkpoints a restarted run would begin again; and xpk does not restart a job
    behind Pathways."""
    if self.options.max_restarts is not None:
      return self.options.max_restarts
    without = self.options.target == "xpk" and self.pathways
    return _RESTARTS if self.config.checkpoint.enable_checkpointing and not without else 0

  @property
  def max_slice_restarts(self) -> int:
    """Restarts of a slice's workers, if slices may be missing."""
    given = self.options.max_slice_restarts
    return self.config.elastic.elastic_max_retries if given is None else given

  @property
  def ramdisk(self) -> str:
    """The kind of volume for the emergency tier. A csi volume stays on its TPU host when the pod is replaced."""
    return self.options.ramdisk or ("emptydir" if self.pathways else "csi")

  @property
  def local_folder(self) -> str:
    return self.config.checkpoint.local_checkpoint_directory

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


def resolve(options: argparse.Namespace) -> GkePlan:
  """The plan of these options. Raises ConfigError for a wrong configuration or TPU."""
  # The last value counts here; the job's own command refuses a key with two values.
  words = list({argument.partition("=")[0]: argument for argument in options.config}.values())
  config = load(words, check_paths=False)
  pathways = config.cluster.enable_single_controller
  piece = hardware.resolve(options.tpu_type)
  num_slices = options.num_slices or config.cluster.num_slices or 1
  # Behind Pathways the controller writes everything, also the local copies of all slices.
  hosts, copies = (1, num_slices) if pathways else (piece.hosts, 1)
  save = budget.save_seconds(config, hosts, options.save_gigabytes_per_second)
  others = budget.XPK_WRAPPER_SECONDS if options.target == "xpk" else 0.0
  # Not where the period is fixed: services must not make a save impossible that fits it.
  others += 0.0 if pathways and options.target in FIXED_GRACE else budget.service_seconds(config)
  grace = budget.grace_seconds(save, options.step_seconds, others)
  local = config.checkpoint.enable_emergency_checkpoint
  # What the program must know about the job around it.
  given = {word.partition("=")[0] for word in words}
  if grace > budget.DEFAULT_GRACE_SECONDS and "autocheckpoint_grace_seconds" not in given:
    words.append(f"autocheckpoint_grace_seconds={grace}")
  if options.cache_volume:
    words.append(f"jax_cache_dir={CACHE_FOLDER}/jax")
  return GkePlan(
    options=options,
    config=config,
    slice=piece,
    num_slices=num_slices,
    save_seconds=save,
    grace_seconds=grace,
    ramdisk_mebibytes=budget.ramdisk_mebibytes(config, hosts, copies) if local else 0,
    words=tuple(words),
  )
