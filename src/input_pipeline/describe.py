"""What a run reads, as text: the log's line about the data, and a warning about a vocabulary that is too large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Published vocabularies are padded, and a BPE trained on little text has fewer ids than it may have. Both stay below.
_LARGEST_RATIO = 2


def line(data: Mapping[str, Any]) -> str:
  """One line that names dataset, tokenizer, tokens and epochs. `data` comes from `Loader.describe`."""
  if data["density"] is None:  # without tokens, or without examples
    epochs = "" if data["epochs"] is None else f", {data['epochs']:.3g} epochs of {data['examples']:,} examples"
    return f"Data: {data['dataset']}; the run reads {data['run_tokens']:,} tokens{epochs}"
  tokenizer = "token ids"
  if data["tokenizer"] is not None:
    tokenizer = f"{data['tokenizer']} tokenizer with {data['tokenizer_vocab_size']:,} ids"
  return (
    f"Data: {data['dataset']}, {tokenizer}, {data['tokens']:,} tokens for training in {data['examples']:,} examples "
    f"({data['density']:.1%} of their positions count in the loss); the run reads {data['run_tokens']:,} tokens, "
    f"{data['epochs']:.3g} epochs"
  )


def documents(data: Mapping[str, Any]) -> list[str]:
  """A line with the tokens around each document and, if known, the first tokens; [] if the data are not text."""
  if data["eos_token"] is None:
    return []
  begin, end = (f"{token[0]} ({token[1]})" if token else "no token" for token in (data["bos_token"], data["eos_token"]))
  first = f". The first tokens: {text!r}" if (text := data.get("first_tokens")) is not None else ""
  return [f"Documents begin with {begin} and end with {end}{first}"]


def vocabulary_warning(data: Mapping[str, Any], vocab_size: int) -> str | None:
  """A warning if the model's `vocab_size` is far above the tokenizer's ids, else None.

  Not an error: a rehearsal of a large model with a byte tokenizer is a valid test of speed and recovery.
  """
  ids = data["tokenizer_vocab_size"]
  if ids is None or vocab_size <= _LARGEST_RATIO * ids:
    return None
  others = {"byte": ", or train a tokenizer on the text (tokenizer_type=bpe)"}.get(data["tokenizer"], "")
  return (
    f"vocab_size={vocab_size:,} is far above the {ids:,} ids of the {data['tokenizer']} tokenizer: "
    f"{1 - ids / vocab_size:.1%} of the rows of embedding and head are never used, but cost memory and time. "
    f"Set vocab_size={ids} (with override_model_config=true if model_name is set){others}, or give the model's own "
    "tokenizer (tokenizer_type=bpe tokenizer_path=tokenizer.json)."
  )
