"""What a run with several worlds takes from its configuration, and its processes from their environment."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from worlds import addresses
from worlds.membership.run_rules import MOST_SHARES, RunRules, most_members
from worlds.place import TOKEN, Place

_HOW_TO_START = (
  "Start the run with `python -m trainer.launch.local --slices N config.yml key=value`, which starts the supervisor, "
  "or with torchrun."
)
_SHORTEST_SECRET = 16  # characters


def run_rules(config: Config) -> RunRules:
  """The rules of a run of num_slices slices. `shares.resolve` has made the configuration."""
  elastic, slices = config.elastic, config.cluster.num_slices
  minimum = elastic.elastic_min_slice_count if elastic.elastic_enabled else slices
  return RunRules(
    slices,
    slices if minimum == -1 else minimum,
    slices * elastic.shares_per_slice,
    elastic.elastic_timeout_seconds,
    elastic.elastic_min_resize_interval_seconds,
    elastic.elastic_enabled,
    elastic.elastic_max_retries,
    elastic.elastic_slow_factor if elastic.elastic_enabled else 0.0,  # otherwise a loss ends the run
    config.optimizer.local_steps,
  )


def check(rules: RunRules, lanes: int) -> None:
  """Raises ConfigError if the messages about members of so many processes could be too large for a connection."""
  if rules.slices > (most := most_members(lanes)):
    raise ConfigError(
      f"num_slices={rules.slices}: with cluster=multiprocess at most {most} slices of {lanes} processes are possible, "
      "because one message has the addresses of all.\nMake the slices larger, and num_slices smaller."
    )
  if rules.shares > MOST_SHARES:
    raise ConfigError(
      f"num_slices x shares_per_slice = {rules.shares} shares of a step; at most {MOST_SHARES} are possible.\n"
      "Lower shares_per_slice."
    )


def place(environment: Mapping[str, str]) -> Place:
  """The place of a process that a launcher has started. Raises ConfigError if the environment describes none."""
  try:
    return Place.read(environment, _HOW_TO_START)
  except ValueError as error:
    raise ConfigError(f"cluster=multiprocess: {error}") from error


def exchange_host(network: str) -> str:
  """The address of this host on the network `exchange_network`. Raises ConfigError if there is none."""
  if sys.platform != "linux":
    raise ConfigError(f"exchange_network={network}: needs Linux, which lists the addresses of a host.\nRemove it.")
  interfaces = addresses.interfaces()
  if found := addresses.on_network(network, interfaces):
    return found
  known = "; ".join(f"{name} ({', '.join(given) or 'no address'})" for name, given in interfaces.items())
  raise ConfigError(
    f"exchange_network={network}: {socket.gethostname()} has no address there. Its network interfaces: {known}.\n"
    "Give the name of one that has an address, or a subnet such as 10.1.0.0/16."
  )


def shared_token(path: str, environment: Mapping[str, str]) -> bytes:
  """The token of a job on several hosts, 32 bytes, from the text in the file `path`, or if "", in the environment.
  Raises ConfigError if there is no text, or too short a text."""
  try:
    secret = Path(os.path.expanduser(path)).read_text().strip() if path else environment.get(TOKEN, "").strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ConfigError(f"--token-file {path}: {error}.\nGive a text file that all hosts can read.") from error
  if len(secret) < _SHORTEST_SECRET:
    where = f"--token-file {path}" if path else f"the environment variable {TOKEN}"
    raise ConfigError(
      f"{where} has {len(secret)} characters: the token of a run on several hosts needs at least {_SHORTEST_SECRET}.\n"
      f"Make one with `openssl rand -hex 32`, and give it to all hosts with --token-file or {TOKEN}."
    )
  return hashlib.sha256(secret.encode()).digest()
