"""The value of the key compile_xla_flags: options of the compiler, for the training step."""

from __future__ import annotations

import re

from trainer.config.errors import ConfigError, shorten

_FLAG = re.compile(r"(?:--)?(?P<name>xla_\w+)=(?P<value>\S+)")
ON_CHIP_MEMORY_OPTION = "xla_tpu_scoped_vmem_limit_kib"
# With 256, the TPU compiler aborts the process: it reserves 1 MiB of this for collectives.
_LEAST_ON_CHIP_KIB = 4096
_SWITCHES = {"true": True, "false": False}  # the compilers of CPUs and GPUs do not read these words


def parse(text: str) -> dict[str, str | bool]:
  """Returns {name: value} of `--xla_name=value --xla_name=value`.

  Raises ConfigError for any other text, and for less on-chip memory than the TPU compiler needs.
  """
  options: dict[str, str | bool] = {}
  for word in text.split():
    found = _FLAG.fullmatch(word)
    if found is None or found["name"] in options:
      reason = "is given twice" if found else "is not of the form --xla_name=value"
      raise ConfigError(
        f"compile_xla_flags: {shorten(word)} {reason}.\n"
        "Write for example compile_xla_flags='--xla_tpu_scoped_vmem_limit_kib=65536'."
      )
    if found["name"] == ON_CHIP_MEMORY_OPTION and not _enough_on_chip_memory(found["value"]):
      raise ConfigError(
        f"compile_xla_flags: {shorten(word)}: must be a whole number of at least {_LEAST_ON_CHIP_KIB} KiB, because the "
        f"TPU compiler fails with less.\nUse for example --{ON_CHIP_MEMORY_OPTION}=65536."
      )
    options[found["name"]] = _SWITCHES.get(found["value"].lower(), found["value"])
  return options


def _enough_on_chip_memory(value: str) -> bool:
  return re.fullmatch(r"[0-9]{1,18}", value) is not None and int(value) >= _LEAST_ON_CHIP_KIB
