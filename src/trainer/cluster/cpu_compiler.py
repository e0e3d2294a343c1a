"""What XLA's compiler for CPUs is told beside its defaults. Only the environment carries it: no compile option does."""

from __future__ import annotations

from collections.abc import MutableMapping

# Every kernel's loops are unrolled for nothing: without it a fifth less is to compile, which is most of a start, and
# steps take as long (docs/benchmarks/startup.md).
OPTION = "xla_cpu_disable_loop_unrolling"
_FLAG = "--xla_backend_extra_options="


def prepare_environment(environment: MutableMapping[str, str]) -> None:
  """Adds OPTION to XLA_FLAGS, which is read once, when the first program compiles. Other platforms ignore it.

  A user who gives options of this kind has the word: theirs stand alone.
  """
  flags = environment.get("XLA_FLAGS", "")
  if _FLAG not in flags:
    environment["XLA_FLAGS"] = f"{flags} {_FLAG}{OPTION}".strip()
