"""Exit codes of tools that import JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainer import cluster
from trainer.config.errors import ConfigError


def exit_code(work: Callable[[], int | None], *expected: type[Exception]) -> int:
  """Returns what `work` returns, None as 0; or 2, with the message on stderr, if the environment or the input is wrong.

  work: checks its input, then calls cluster.check_environment, then imports jax. expected: further errors of `work`
  that mean wrong input.
  """
  wrong: tuple[type[Exception], ...] = (ConfigError, *expected)
  try:
    try:
      return work() or 0
    except (RuntimeError, AssertionError):
      cluster.check_devices()  # if there are none, that is the reason
      raise
  except wrong as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
