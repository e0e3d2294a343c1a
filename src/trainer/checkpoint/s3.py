"""Lets TensorStore, and Orbax with it, use s3:// with the endpoint and region of s3fs, and give up in bounded time."""

from __future__ import annotations

import functools
import os
import urllib.parse
from typing import Any

from input_pipeline import storage

_SCHEME = "s3://"
# About a quarter of a minute, and two minutes if a store is silent (TENSORSTORE_LIMITS): the next save waits for it. By
# default TensorStore repeats a request for a quarter of an hour.
_RETRIES = {"max_retries": 4, "initial_delay": "1s", "max_delay": "8s"}


def is_s3(path: Any) -> bool:
  return str(path).startswith(_SCHEME)


def kvstore(address: str) -> dict[str, Any]:
  """TensorStore's specification of s3://BUCKET/PATH, without a slash at its end.

  TensorStore finds credentials as other programs do, but no endpoint: neither in AWS_ENDPOINT_URL nor in a profile.
  """
  bucket, _, path = address.removeprefix(_SCHEME).partition("/")
  return {"driver": "s3", "bucket": bucket, "path": path, "s3_request_retries": _RETRIES, **_endpoint()}


@functools.cache
def _endpoint() -> dict[str, str]:
  """The place of a store that is not Amazon's, as TensorStore needs it."""
  import fsspec

  system = fsspec.filesystem("s3")
  system.connect()
  found = system.s3.meta
  if (urllib.parse.urlsplit(found.endpoint_url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn")):
    return {}  # TensorStore asks the bucket for its region
  return {"endpoint": found.endpoint_url, "aws_region": found.region_name or "us-east-1"}


def _bounded(specification: dict[str, Any]) -> dict[str, Any]:
  retries = {"gcs_request_retries": _RETRIES}
  return specification | (retries if specification["driver"] == "gcs" else {})  # there is one with gRPC, too


def teach_orbax() -> None:
  """Lets Orbax write and read checkpoints on s3:// as on gs://, and limits how long it waits for a store. Orbax 0.12.8
  knows no addresses of s3://.

  It then commits with a marker, because neither of them renames folders.
  """
  from orbax.checkpoint._src.path import gcs_utils
  from orbax.checkpoint._src.serialization import tensorstore_utils

  if _SCHEME in gcs_utils._GCS_PATH_PREFIX:
    return
  storage.limit_tensorstore()
  of_gs, normal = gcs_utils.get_kvstore_for_gcs, tensorstore_utils._normalize_path
  # Of gs:// and s3:// both. Orbax looks for hierarchical namespaces only on gs://.
  gcs_utils._GCS_PATH_PREFIX = (*gcs_utils._GCS_PATH_PREFIX, _SCHEME)
  gcs_utils.get_kvstore_for_gcs = lambda path: (
    kvstore(path) if is_s3(path) else of_gs(path) | {"gcs_request_retries": _RETRIES}
  )
  tensorstore_utils._use_gcs_driver = lambda path: path.startswith(gcs_utils._GCS_PATH_PREFIX)
  tensorstore_utils._normalize_path = lambda path: (
    _SCHEME + os.path.normpath(path.removeprefix(_SCHEME)) if is_s3(path) else normal(path)
  )
