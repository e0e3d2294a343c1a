"""What the error texts of the runtime (XLA, PjRt, IFRT, gloo) mean. No other module matches these texts."""

from __future__ import annotations

import re
from enum import StrEnum

import jax

from input_pipeline import storage


class Meaning(StrEnum):
  LOSS = "loss"  # proves that a slice was lost
  DISCONNECTED = "disconnected"  # the connection to the Pathways proxy is lost, and every array with it
  PERMANENT = "permanent"  # the same program on healthy slices fails again
  AMBIGUOUS = "ambiguous"  # a lost slice or another cause


# The first match wins. Errors nest ("INTERNAL: Error dispatching computation: DATA_LOSS: ..."), so specific texts come
# before general ones.
_TABLE: tuple[tuple[str, Meaning, str], ...] = (
  (r"IFRT proxy server was terminated", Meaning.DISCONNECTED, "the connection to the Pathways proxy is lost"),
  (r"DATA_LOSS", Meaning.LOSS, "the memory of a slice is lost"),
  (r"RESOURCE_EXHAUSTED|[Oo]ut of memory|Exceeded .* capacity", Meaning.PERMANENT, "out of memory"),
  (r"Mosaic|Triton|failed to compile|[Cc]ompilation fail|Compile", Meaning.PERMANENT, "the program does not compile"),
  (r"RET_CHECK|Check failed", Meaning.PERMANENT, "an internal check of the compiler or runtime failed"),
  (r"\bnan\b|NaN|non-finite", Meaning.PERMANENT, "a number is not finite"),
  (r"INVALID_ARGUMENT|FAILED_PRECONDITION", Meaning.PERMANENT, "wrong shapes, types or donated buffers"),
  (r"UNIMPLEMENTED|OUT_OF_RANGE|ALREADY_EXISTS", Meaning.PERMANENT, "the program asks for an unsupported operation"),
  (r"PERMISSION_DENIED|UNAUTHENTICATED", Meaning.PERMANENT, "credentials are missing"),
  (r"[Gg]loo|Connection (closed|reset|refused)|Socket closed", Meaning.AMBIGUOUS, "the network or a peer failed"),
  (r"UNAVAILABLE|ABORTED|CANCELLED", Meaning.AMBIGUOUS, "a worker is not reachable or restarts"),
  (r"DEADLINE_EXCEEDED|[Tt]imed out|[Tt]imeout", Meaning.AMBIGUOUS, "a slice is lost or slow"),
  (r"NOT_FOUND", Meaning.AMBIGUOUS, "a buffer of a lost slice, or a file, is missing"),
  (r"INTERNAL|UNKNOWN", Meaning.AMBIGUOUS, "a slice is lost, or a kernel failed"),
)

_ADVICE_OUT_OF_MEMORY = (
  "The devices have too little memory for this run. Lower per_device_batch_size (and raise "
  "gradient_accumulation_steps to keep the global batch), set remat_policy=full, or use more devices. "
  "python -m trainer.tools.preflight with the same arguments shows what fits."
)
_ADVICE_DISCONNECTED = (
  "The connection to the Pathways proxy is lost; this process cannot use its devices any more. Look at the proxy's own "
  "log for the reason, then start the same command again: it resumes from the last checkpoint."
)


def explain(text: str) -> tuple[Meaning, str]:
  """The meaning of an error text, and the reason in words."""
  for pattern, meaning, reason in _TABLE:
    if re.search(pattern, text):
      return meaning, reason
  return Meaning.AMBIGUOUS, "an unknown error text"


def find(error: BaseException | None) -> jax.errors.JaxRuntimeError | None:
  """`error` or the first of its causes that is a runtime error, or None. Checkpoint threads wrap what they catch."""
  return next((cause for cause in storage.causes(error) if isinstance(cause, jax.errors.JaxRuntimeError)), None)


def is_disconnected(error: BaseException) -> bool:
  return explain(str(error))[0] is Meaning.DISCONNECTED


def is_out_of_memory(error: BaseException) -> bool:
  """Whether a device ran out of memory. A quota of a storage service is RESOURCE_EXHAUSTED too, without "memory"."""
  text = str(error)
  return "RESOURCE_EXHAUSTED" in text and "memory" in text.lower()


def slices_lost(text: str) -> frozenset[int]:
  """Ids of the slices that a text names as lost ("DATA_LOSS: slice 2 is down"); empty if it names none."""
  if explain(text)[0] is not Meaning.LOSS:
    return frozenset()
  lists = re.findall(r"\bslices? \[?(\d+(?:, \d+)*)", text)
  return frozenset(int(number) for numbers in lists for number in numbers.split(", "))


def advice(error: BaseException) -> str:
  """What the user can do about a runtime error, in one paragraph; "" if there is nothing special to say."""
  found = find(error)
  if found is None:
    return ""
  if is_disconnected(found):
    return _ADVICE_DISCONNECTED
  return _ADVICE_OUT_OF_MEMORY if is_out_of_memory(found) else ""
