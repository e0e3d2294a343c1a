"""One job on GKE: what all renderers receive."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass

from trainer.config import Config
from trainer.launch.manifest import budget
from trainer.launch.manifest.hardware import Slice

# The public images of the Pathways servers: resource manager and workers, proxy.
_SERVER_IMAGE = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/server"
_PROXY_IMAGE = "us-docker.pkg.dev/cloud-tpu-v2-images/pathways/proxy_server"
CACHE_FOLDER = "/cache"  # the mount point of the volume for the compilation cache


@dataclass(frozen=True)
class Job:
  """One job on GKE."""

  options: argparse.Namespace  # of options.parse
  config: Config
  slice: Slice
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
  def least_slices(self) -> int:
    """Slices without which the job waits."""
    return self.num_slices - self.options.elastic_slices

  @property
  def pathways_folder(self) -> str:
    """gs:// folder for the files of Pathways."""
    return self.options.pathways_gcs_location or self.config.run.base_output_directory

  @property
  def pathways_images(self) -> tuple[str, str]:
    """The images of the resource manager and workers, and of the proxy."""
    tag = self.options.pathways_version or "latest"
    return f"{_SERVER_IMAGE}:{tag}", f"{_PROXY_IMAGE}:{tag}"

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
