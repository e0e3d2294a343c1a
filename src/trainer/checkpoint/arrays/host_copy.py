"""Copies of a state in the memory of a process that drives its devices through a proxy.

Every byte travels through this process, and a slice may stop answering at any time. So a save first reads all that it
needs, with a time limit, before it touches a file. After that it needs no slice any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from trainer.checkpoint.arrays.fingerprint import Started

# fetch(work, what): calls work(), which waits for slices, and returns its result. Raises the error of a slice that is
# lost or does not answer. `what` names the work in messages.
Fetch = Callable[[Callable[[], Any], str], Any]


def read(arrays: Mapping[str, jax.Array], started: Started) -> Started:
  """Reads the first replica of all arrays into the memory of this process, where JAX keeps it with their shards.

  Returns the fingerprints, read too. Waits for the slices.
  """
  first = [shard.data for x in arrays.values() for shard in x.addressable_shards if shard.replica_id == 0]
  for data in [*first, started.values]:
    if isinstance(data, jax.Array):
      data.copy_to_host_async()  # all of them are under way before the first one is waited for
  for data in first:
    np.asarray(data)
  return Started(started.names, np.asarray(started.values))
