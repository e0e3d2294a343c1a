"""Writes the parameters of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from rich.filesize import decimal

import trainer
from input_pipeline import tokenizer as tokenizer_lib
from input_pipeline.tokenizer import BpeTokenizer, Tokenizer
from trainer.checkpoint import run_folder
from trainer.checkpoint.arrays import fingerprint
from trainer.checkpoint.checkpoint_errors import Rejected
from trainer.config.errors import ConfigError
from trainer.weights import hf_config, names, safetensors, sources, stacking, stored_arrays, tokenizers
from trainer.weights.new_folder import new_folder
from trainer.weights.sources import WeightSource

_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class _Part:
  """A tensor of the export, and where it is: at `index` of a stored array, which may have all layers or experts."""

  theirs: str
  weight: names.Weight
  stored: str
  index: tuple[int, ...]
  dtype: np.dtype

  @property
  def nbytes(self) -> int:
    return math.prod(self.weight.their_shape) * self.dtype.itemsize


def export_run(place: str, directory: str, dtype: str = "", *, report: Callable[[str], object] = print) -> None:
  """Writes the weights of RUN_DIR or RUN_DIR@STEP as a Hugging Face folder, with the run's tokenizer; see `export`."""

  def work(source: WeightSource) -> None:
    tokenizer = None
    try:
      tokenizer = tokenizers.of_source(source)
    except ConfigError as error:  # the weights are whole without it
      report(f"warning: the export has only those files of a tokenizer that the run has: {error}")
    export(source, directory, tokenizer=tokenizer, dtype=dtype, report=report)

  sources.use(place, work)


def export(
  source: WeightSource,
  directory: str,
  *,
  tokenizer: Tokenizer | None = None,
  dtype: str = "",
  report: Callable[[str], object] = print,
  shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes `directory`, which must not exist, from a run's checkpoint. report: takes a line of progress.

  The largest stored array and one tensor are in memory. What is read must have the fingerprints of the checkpoint.
  dtype: float32, float16 or bfloat16; "": every tensor keeps its type. Raises ConfigError if the source is damaged or
  the folder cannot be written; then nothing is left there.
  """
  if source.stored:
    raise ConfigError(f"{source.where}: is a Hugging Face folder already. Give RUN_DIR or RUN_DIR@STEP.")
  if rate := source.model.routed_bias_update_rate:
    raise ConfigError(
      f"{source.where}: routed_bias_update_rate={rate:g}, and Qwen3-MoE has no bias of the router: the export would "
      "choose other experts. Train with load_balance_loss_weight and routed_bias_update_rate=0 instead."
    )
  parts = _parts(source, dtype)
  with new_folder(directory) as folder:
    files = _write_shards(source, folder, parts, shard_bytes, report)
    ends = _write_tokenizer(source, folder, tokenizer)
    if files.keys() != {sources.SINGLE}:
      places = {part.theirs: file for file, group in files.items() for part in group}
      total = {"total_size": sum(part.nbytes for part in parts)}
      _write_json(folder / sources.INDEX, {"metadata": total, "weight_map": places})
    kinds = {str(part.dtype) for part in parts if len(part.weight.their_shape) > 1}
    kind = kinds.pop() if len(kinds) == 1 else "float32"
    _write_json(
      folder / sources.CONFIG,
      hf_config.build(source.model.model_copy(update={"max_position_embeddings": source.longest}), kind, ends),
    )
    sizes = {file: (folder / file).stat().size for file in files}
    told = {key: value for key in sources.TOKENS if source.data and (value := getattr(source.data, key))}
    _write_json(folder / sources.MARKER, {"from": source.where, "trainer": trainer.__version__, "bytes": sizes, **told})
  report(f"{directory} is complete.")


def _parts(source: WeightSource, dtype: str) -> list[_Part]:
  """The tensors, in the order of the stored arrays."""
  found = []
  for name, weight in names.weights(source.model).items():
    stored, index = _place(source, name)
    entry = source.arrays.get(stored)
    shape = (source.model.num_decoder_layers, *weight.shape) if index else weight.shape
    if entry is None or tuple(entry["shape"]) != shape:
      raise ConfigError(f"{source.where}: has no array {stored} of shape {shape}. Export another checkpoint.")
    kind = np.dtype(jnp.dtype(dtype or entry["dtype"]))
    for i, theirs in enumerate(weight.theirs):
      found.append(_Part(theirs, weight, stored, (*index, i) if weight.of_experts else index, kind))
  order = {name: i for i, name in enumerate(dict.fromkeys(part.stored for part in found))}
  return sorted(found, key=lambda part: (order[part.stored], part.index))


def _place(source: WeightSource, name: str) -> tuple[str, tuple[int, ...]]:
  """(stored array, index of its first dim) of a weight of separate layers; the index is empty if they are stored so."""
  match = stacking.NAME.match(name)
  return (name, ()) if name in source.arrays or not match else (f"{match[1]}.{match[3]}", (int(match[2]),))


def _write_shards(
  source: WeightSource, folder: Any, parts: list[_Part], limit: int, report: Callable[[str], object]
) -> dict[str, list[_Part]]:
  """{file: its tensors} of the files that it writes."""
  groups: list[list[_Part]] = [[]]
  size = 0
  for part in parts:
    if groups[-1] and size + part.nbytes > limit:
      groups.append([])
      size = 0
    groups[-1].append(part)
    size += part.nbytes
  name = lambda i: f"model-{i:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else sources.SINGLE
  files = {name(i): group for i, group in enumerate(groups, 1)}
  total, done = sum(part.nbytes for part in parts), 0
  stored, array = "", np.empty(0)
  for file, group in files.items():
    with (folder / file).open("wb") as out:
      out.write(safetensors.header({part.theirs: (part.dtype, part.weight.their_shape) for part in group}))
      for part in group:
        if part.stored != stored:  # the parts of an array follow one another
          stored, array = part.stored, _verified_array(source, part.stored)
        theirs = np.empty(part.weight.their_shape, array.dtype)
        part.weight.to_ours(theirs)[...] = array[part.index]
        safetensors.write(out, theirs, part.dtype, part.theirs)
        done += part.nbytes
    report(f"{100 * done // total:3} %: {decimal(done)} of {decimal(total)}")
  return files


def _verified_array(source: WeightSource, name: str) -> np.ndarray:
  """A stored array. Raises ConfigError if it does not have the fingerprint that it was saved with."""
  try:
    array = stored_arrays.read_whole(source.folder, name)
  except Rejected as error:
    raise ConfigError(f"{source.where}: {error}. Export another checkpoint.") from error
  if fingerprint.of_host_array(array) != source.arrays[name]["fingerprint"]:
    raise ConfigError(f"{source.where}: {name} is damaged. Export another checkpoint.")
  return array


def _write_tokenizer(source: WeightSource, folder: Any, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """Writes the tokenizer's files and generation_config.json; returns the ids of the tokens around documents."""
  sources.copy_tokenizer(run_folder.folder(source.tokenizer_folder), folder)
  file = folder / sources.GENERATION
  generation = sources.read_json(file) if file.exists() else {}
  ends = {key: generation.get(key) for key in sources.ENDS}
  if isinstance(tokenizer, BpeTokenizer):
    ends = _write_ends(source, folder, tokenizer, ends)
  if not file.exists() or any(generation.get(key) != id for key, id in ends.items()):
    kept = {key: value for key, value in generation.items() if key not in ends}
    _write_json(file, kept | {key: id for key, id in ends.items() if id is not None})
  return ends


def _write_ends(source: WeightSource, folder: Any, tokenizer: BpeTokenizer, ends: Mapping[str, Any]) -> dict[str, Any]:
  """Writes the names of the tokens around the run's documents to the tokenizer's files, and returns `ends` with them.

  ends: the ids of these tokens in generation_config.json, perhaps of the published model that the run continues. They
  still end a text, and so does the last token of the run's documents. In the other files, the first token of the
  documents, and the keys bos_token and eos_token where they are set, replace the names that are there. The exported
  tokenizer adds the first token to a text, and not the last one.
  """
  named = {key: value and value[0] for key, value in tokenizer_lib.ends(tokenizer).items()}
  given = {key: name for key, name in named.items() if source.data and getattr(source.data, key)}
  if not (folder / "tokenizer_config.json").exists():
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
  given |= {} if tokenizer.bos_id is None else {"bos_token": named["bos_token"]}
  (folder / "tokenizer.json").write_text(tokenizer.json_of_documents())
  _name_tokens(folder, given)
  found = dict(ends)
  if found["bos_token_id"] is None or "bos_token" in given:
    found["bos_token_id"] = tokenizer.bos_id
  stops = tokenizers.named_stop_ids(ends)
  if not stops:
    found["eos_token_id"] = tokenizer.eos_id
  elif tokenizer.eos_id not in stops:
    found["eos_token_id"] = [tokenizer.eos_id, *stops]
  return found


def _name_tokens(folder: Any, names: Mapping[str, str | None]) -> None:
  """Makes the other files of the tokenizer agree with its template: some readers prefer what these say."""
  adds = {"add_bos_token": names.get("bos_token") is not None, "add_eos_token": False}
  for name, wanted in (("tokenizer_config.json", {**names, **adds}), ("special_tokens_map.json", names)):
    if (file := folder / name).exists():
      found = sources.read_json(file)
      # Llama's class adds the token of the beginning unless told otherwise.
      before = {"add_bos_token": True, "add_eos_token": False} | {k: _content(v) for k, v in found.items()}
      if changed := {key: value for key, value in wanted.items() if before.get(key) != value}:
        _write_json(file, found | changed)


def _content(token: Any) -> Any:
  """The text of a token, which these files also write as a mapping."""
  return token["content"] if isinstance(token, dict) and "content" in token else token


def _write_json(path: Any, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n")
