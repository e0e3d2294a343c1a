"""How many shares a slice's part of the batch is cut into, where slices are processes.

The number is chosen once and stays for the life of a run, because the order of the sum follows from it. More shares let
fewer slices divide the work more evenly. But each share gathers the weights inside its slice again, and sums its own
gradients: compiled for llama3.1-8b on 32 chips of v5p, a step of 16,384 tokens a device in 2 shares takes 1.2 % longer
than in one, and 6.3 % longer in 4.
"""

from __future__ import annotations

from input_pipeline import places
from trainer.config import config_files
from trainer.config.errors import ConfigError
from trainer.config.schema import Config

MOST = 8  # shares of a slice that are chosen: 7 of 8 slices have 80 % of the speed (8 of 10 shares); 87.5 % is the most
LEAST_TOKENS = 8192  # of a device in a share that is chosen


def resolve(config: Config) -> Config:
  """Returns `config` with the number of shares in the place of shares_per_slice=-1: the number that the run has had so
  far, or a new one. Raises ConfigError if a given number does not cut a slice's part into equal shares."""
  given = config.elastic.shares_per_slice
  possible = _possible(config)
  if given != -1:
    if given not in possible:
      raise ConfigError(f"shares_per_slice={given}: {_work(config)}.\nUse {', '.join(map(str, possible))}, or -1.")
    return config
  recorded = _recorded(config)
  chosen = recorded if recorded in possible else _chosen(config, possible)
  return config.with_values(shares_per_slice=chosen)


def micro_batches(config: Config, rows: int) -> tuple[int, int]:
  """Returns the micro-batches of a share and the rows of each, from the `rows` of a slice's micro-batch."""
  accumulation, shares = config.optimizer.gradient_accumulation_steps, config.elastic.shares_per_slice
  return (accumulation // shares, rows) if accumulation % shares == 0 else (1, rows * accumulation // shares)


def _chosen(config: Config, possible: list[int]) -> int:
  if config.optimizer.has_local_steps:  # a share is a replica: fewer examples for each, and the loss rises
    return 1
  tokens = config.data.per_device_batch_size * config.data.max_target_length
  tokens *= config.optimizer.gradient_accumulation_steps
  return max(shares for shares in possible if shares == 1 or (shares <= MOST and tokens / shares >= LEAST_TOKENS))


def _work(config: Config) -> str:
  """What a slice computes in a step, for a message."""
  rows, accumulation = _rows(config), config.optimizer.gradient_accumulation_steps
  if not rows:
    return f"its rows depend on the devices, so only gradient_accumulation_steps={accumulation} can be divided"
  return (
    f"a slice computes {rows:g} rows for each group of devices that share a row (per_device_batch_size x "
    "gradient_accumulation_steps), in equal micro-batches"
  )


def _rows(config: Config) -> float:
  """Rows of a slice and step for each group of devices that share a row; 0 if the devices decide about their number."""
  parallelism = config.parallelism
  sharing = parallelism.ici_tensor_parallelism * parallelism.ici_context_parallelism
  rows = config.data.per_device_batch_size * config.optimizer.gradient_accumulation_steps * abs(sharing)
  return rows if sharing > 0 and rows == int(rows) else 0


def _possible(config: Config) -> list[int]:
  """Numbers of shares with equal micro-batches, no larger than the micro-batches of the whole: divisors of the
  micro-batches, and those divisors of all rows of a slice that make a share one micro-batch."""
  accumulation, rows = config.optimizer.gradient_accumulation_steps, int(_rows(config))
  finer = [shares for shares in range(accumulation, rows + 1) if rows % shares == 0]
  return sorted({shares for shares in range(1, accumulation + 1) if accumulation % shares == 0} | set(finer))


def _recorded(config: Config) -> int | None:
  """The number of shares of the run so far; None for a new run, or for one whose slices were no processes."""
  path = places.at(config.run_directory) / config_files.CONFIG_FILE
  if not path.exists():
    return None
  given = config_files.read_yaml(path).get("shares_per_slice")
  return int(given[0]) if given and given[0] and given[0].isdecimal() else None
