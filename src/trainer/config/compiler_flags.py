"""The value of the key compile_xla_flags: options of the compiler, for the training step."""

from __future__ import annotations

import re

from trainer.config.errors import ConfigError, shorten

_FLAG = re.compile(r"(?:--)?(?P<name>xla_\w+)=(?P<value>\S+)")
_SWITCHES = {"true": True, "false": False}  # the compilers of CPUs and GPUs do not read these words


def parse(text: str) -> dict[str, str | bool]:
  """Returns {name: value} of `--xla_name=value --xla_name=value`. Raises ConfigError for any other text."""
  options: dict[str, str | bool] = {}
  for word in text.split():
    found = _FLAG.fullmatch(word)
    if found is None or found["name"] in options:
      reason = "is given twice" if found else "is not of the form --xla_name=value"
      raise ConfigError(
        f"compile_xla_flags: {shorten(word)} {reason}.\n"
        "Write for example compile_xla_flags='--xla_tpu_scoped_vmem_limit_kib=65536'."
      )
    options[found["name"]] = _SWITCHES.get(found["value"].lower(), found["value"])
  return options
