"""The options of the command that are not keys of the configuration: cluster, hardware, image, restarts, volumes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer.config import ConfigError
from trainer.config.option_types import positive, whole

# The extras that docker/Dockerfile installs only with --build-arg EXTRAS="...".
EXTRAS = ("goodput", "ray", "tfds", "wandb", "s3")


class _Parser(argparse.ArgumentParser):
  def error(self, message: str) -> NoReturn:
    raise ConfigError(f"{message}.\n--help describes every option.")


def parse(arguments: Sequence[str], targets: Sequence[str]) -> argparse.Namespace:
  """target, config (CONFIG.yml and key=value ...) and the options, which may be anywhere; None: was not given.

  Raises ConfigError for an unknown or wrong option.
  """
  found, rest = _parser(targets).parse_known_args(list(arguments))
  unknown = [word for word in rest if word.startswith("-")]
  if unknown:
    raise ConfigError(f"{unknown[0]}: there is no such option.\n--help describes every option. Keys are key=value.")
  found.config += rest
  return found


def describe() -> str:
  """The options, one paragraph each."""
  return _parser(("TARGET",)).format_help().partition("options:")[2].strip("\n")


def _parser(targets: Sequence[str]) -> argparse.ArgumentParser:
  parser = _Parser(allow_abbrev=False, add_help=False)
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
  return parser


def _extras(text: str) -> tuple[str, ...]:
  found = tuple(text.split(","))
  if unknown := [name for name in found if name not in EXTRAS]:
    raise argparse.ArgumentTypeError(f"{unknown[0]!r} must be one of {', '.join(EXTRAS)}")
  return found
