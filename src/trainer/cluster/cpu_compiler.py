"""An option of XLA's compiler for CPUs. It can be set only through the environment, not as a compile option."""

from __future__ import annotations

from collections.abc import MutableMapping

# By default XLA unrolls the loops of every kernel. Without unrolling it compiles a fifth less code, and compiling takes
# most of a start. Steps take the same time.
OPTION = "xla_cpu_disable_loop_unrolling"
_FLAG = "--xla_backend_extra_options="


def prepare_environment(environment: MutableMapping[str, str]) -> None:
  """Adds OPTION to XLA_FLAGS, which is read once, when the first program compiles. Other platforms ignore it. If the
  user already sets this flag, or names a file of flags, XLA_FLAGS stays unchanged."""
  flags = environment.get("XLA_FLAGS", "").strip()
  if _FLAG not in flags and flags[:1] in ("", "-"):
    environment["XLA_FLAGS"] = f"{flags} {_FLAG}{OPTION}".strip()
