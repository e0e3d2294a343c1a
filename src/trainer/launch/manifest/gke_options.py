"""The options of the command that are not keys of the configuration: cluster, hardware, image, restarts, volumes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainer.config.option_types import positive, whole

# The extras that docker/Dockerfile installs only with --build-arg EXTRAS="...".
EXTRAS = ("goodput", "ray", "tfds", "wandb", "s3")


def add_to(parser: argparse.ArgumentParser, targets: Sequence[str]) -> None:
  """Adds `target`, `config` (CONFIG.yml and key=value ...) and the options, which may be anywhere."""
  parser.add_argument("target", choices=targets, help=argparse.SUPPRESS)
  parser.add_argument("config", nargs="*", help=argparse.SUPPRESS)

  def add(name: str, text: str, **more: Any) -> None:
    parser.add_argument(name, help=text, metavar=None if "choices" in more else "VALUE", **more)

  add("--image", "container image with this program (docker/Dockerfile)", required=True)
  add("--image-extras", f"comma-separated EXTRAS of the image's build: {', '.join(EXTRAS)}", type=_extras, default=())
  add("--tpu-type", "one slice, by Google Cloud's name, such as v5litepod-16 or v6e-256", required=True)
  add("--num-slices", "slices of the run (default: the key num_slices, or 1)", type=whole(1))
  add("--cluster", "name of the GKE cluster")
  add("--project", "Google Cloud project")
  add("--zone", "zone or region of the cluster")
  add("--workload", "name in Kubernetes (default: the key run_name)")
  add("--elastic-slices", "slices that may be missing at a time (default 0)", type=whole(0), default=0)
  add("--max-slice-restarts", "restarts of a slice's workers (default: elastic_max_retries)", type=whole(0))
  add("--max-restarts", "restarts of the whole job, after exit codes that allow it (default 10, or 0)", type=whole(0))
  add(
    "--save-gigabytes-per-second",
    "rate at which one host writes a checkpoint to base_output_directory, for the grace period (default 1)",
    type=positive(1e9),
    default=1.0,
  )
  add("--step-seconds", "longest training step, for the grace period (default 5)", type=positive(1e9), default=5.0)
  add(
    "--ramdisk",
    "volume for local_checkpoint_directory (default csi; behind Pathways emptydir)",
    choices=("emptydir", "csi"),
  )
  add("--cache-volume", "PersistentVolumeClaim, or gs://BUCKET, that keeps compiled programs for later starts")
  add("--pathways-gcs-location", "gs:// folder for Pathways itself (default: base_output_directory; xpk: its own)")
  add("--pathways-version", "tag of the images of the Pathways servers, which must fit the jaxlib of --image")
  add("--service-account", "Kubernetes service account of the pods")
  add("--queue", "Kueue LocalQueue")


def _extras(text: str) -> tuple[str, ...]:
  found = tuple(text.split(","))
  if unknown := [name for name in found if name not in EXTRAS]:
    raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(EXTRAS)}")
  return found
