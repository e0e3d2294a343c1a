"""Writes the parameters of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trainer
from trainer.checkpoint import run_id
from trainer.checkpoint.arrays import fingerprint
from trainer.config.errors import ConfigError
from trainer.data import tokenizer as tokenizer_lib
from trainer.data.tokenizer import BpeTokenizer, Tokenizer
from trainer.kernels.attention_xla import dot_product
from trainer.models.decoder import DecoderFunctions
from trainer.models.layers import Kernels
from trainer.parallel import memory
from trainer.weights import hf_config, names, safetensors, sources, tokenizers
from trainer.weights.folders import new_folder
from trainer.weights.importing import Progress
from trainer.weights.sources import Source

MARKER = "trainer_export.json"  # the last file of an export
_SHARD_BYTES = 5_000_000_000
_PROMPT = (1, 5, 2, 9, 3, 7, 4, 8)  # ids of the self-check, taken modulo the vocabulary


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
    return int(np.prod(self.weight.their_shape)) * self.dtype.itemsize


def export_run(
  place: str, directory: str, dtype: str = "", *, report: Callable[[str], object] = print, check: bool = True
) -> None:
  """Writes the weights of RUN_DIR or RUN_DIR@STEP as a Hugging Face folder, with the run's tokenizer; see `export`."""
  source = sources.open_source(place)
  tokenizer = None
  try:
    tokenizer = tokenizers.of_source(source)
  except ConfigError as error:  # the weights are whole without it
    report(f"warning: the export has only those files of a tokenizer that the run has: {error}")
  export(source, directory, tokenizer=tokenizer, dtype=dtype, report=report, check=check)


def export(
  source: Source,
  directory: str,
  *,
  tokenizer: Tokenizer | None = None,
  dtype: str = "",
  report: Callable[[str], object] = print,
  check: bool = True,
  shard_bytes: int = _SHARD_BYTES,
) -> None:
  """Writes `directory`, which must not exist, from a run's checkpoint. report: takes a line of progress.

  One stored array at a time is in memory. dtype: float32, float16 or bfloat16; "": every tensor keeps its type. check:
  whether to compare the logits at the end, if the memory holds the model twice.
  Raises ConfigError if the source is damaged or the folder cannot be written; then nothing is left there.
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
    _write_json(folder / sources.CONFIG, hf_config.build(source.model, kind, ends))
    if check:
      report(_self_check(source, folder, bool(dtype)))
    sizes = {file: (folder / file).stat().length for file in files}
    _write_json(folder / MARKER, {"from": source.where, "trainer": trainer.__version__, "bytes": sizes})
  report(f"{directory} is complete.")


def _parts(source: Source, dtype: str) -> list[_Part]:
  """The tensors, those of a stored array one after the other."""
  found = []
  for name, weight in names.weights(source.model).items():
    layer: tuple[int, ...] = ()
    if name not in source.arrays:
      _, _, rest = name.partition("params.layers.")
      number, _, path = rest.partition(".")
      name, layer = f"params.layers.{path}", (int(number or 0),)
    entry = source.arrays.get(name)
    shape = (source.model.num_decoder_layers, *weight.shape) if layer else weight.shape
    if entry is None or tuple(entry["shape"]) != shape:
      raise ConfigError(f"{source.where}: has no array {name} of shape {shape}. Export another checkpoint.")
    kind = np.dtype(jnp.dtype(dtype or entry["dtype"]))
    for i, theirs in enumerate(weight.theirs):
      found.append(_Part(theirs, weight, name, (*layer, i) if weight.of_experts else layer, kind))
  order = {name: i for i, name in enumerate(dict.fromkeys(part.stored for part in found))}
  return sorted(found, key=lambda part: (order[part.stored], part.index))


def _write_shards(
  source: Source, folder: Any, parts: list[_Part], limit: int, report: Callable[[str], object]
) -> dict[str, list[_Part]]:
  """{file: its tensors} of the files that it writes."""
  groups: list[list[_Part]] = [[]]
  for part in parts:
    if groups[-1] and sum(other.nbytes for other in groups[-1]) + part.nbytes > limit:
      groups.append([])
    groups[-1].append(part)
  name = lambda i: f"model-{i:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else sources.SINGLE
  files = {name(i): group for i, group in enumerate(groups, 1)}
  arrays = _arrays(source)
  progress = Progress(sum(part.nbytes for part in parts), report)
  for file, group in files.items():
    with (folder / file).open("wb") as out:
      out.write(safetensors.header({part.theirs: (part.dtype, part.weight.their_shape) for part in group}))
      for part in group:
        ours = arrays(part.stored)[part.index]
        safetensors.write(out, part.weight.to_theirs(ours), part.dtype, part.theirs)
        progress.add(part.nbytes)
      out.flush()
      if "://" not in str(folder):
        os.fsync(out.fileno())
  return files


def _arrays(source: Source) -> Callable[[str], np.ndarray]:
  """Gives a stored array by name; the last one stays in memory. Raises ConfigError if its bits are damaged."""
  cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
  last: dict[str, np.ndarray] = {}

  def get(name: str) -> np.ndarray:
    if name not in last:
      last.clear()
      entry = source.arrays[name]
      target = jax.ShapeDtypeStruct(tuple(entry["shape"]), jnp.dtype(entry["dtype"]), sharding=cpu)
      array = source.read({name: target})[name]
      if fingerprint.differing({name: array}, {name: entry["fingerprint"]}):
        raise ConfigError(f"{source.where}: {name} is damaged. Export another checkpoint.")
      last[name] = np.asarray(array)
    return last[name]

  return get


def _write_tokenizer(source: Source, folder: Any, tokenizer: Tokenizer | None) -> dict[str, Any]:
  """Writes the tokenizer's files and generation_config.json; returns the ids of the tokens around documents."""
  sources.copy_tokenizer(run_id.folder(source.tokenizer_folder), folder)
  ends: dict[str, Any] = dict.fromkeys(sources.ENDS)
  if isinstance(tokenizer, BpeTokenizer):
    ends = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    if not (folder / "tokenizer.json").exists():
      (folder / "tokenizer.json").write_text(tokenizer.json_text)
    if not (folder / "tokenizer_config.json").exists():
      named = {key: value and value[0] for key, value in tokenizer_lib.ends(tokenizer).items()}
      _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
  if (folder / sources.GENERATION).exists():
    ends |= {k: v for k, v in sources.read_json(folder / sources.GENERATION).items() if k in sources.ENDS}
  else:
    _write_json(folder / sources.GENERATION, {name: id for name, id in ends.items() if id is not None})
  return ends


def _self_check(source: Source, folder: Any, changes_types: bool) -> str:
  """A line that tells how far the logits of the export are from those of the source, on a short prompt.

  Raises ConfigError if they are not equal although no type was changed. A model that needs most of the memory is not
  checked.
  """
  model = DecoderFunctions(source.model.model_copy(update={"dtype": "float32"}), Kernels(dot_product))
  abstract = model.abstract()
  if 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract)) > memory.of_host():
    return "No check of the logits: the memory does not hold the model twice."
  device = jax.devices("cpu")[0]
  cpu = jax.sharding.SingleDeviceSharding(device)
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=cpu), abstract)
  tokens = np.array([[token % source.model.vocab_size for token in _PROMPT]], np.int32)
  positions = np.arange(tokens.size, dtype=np.int32)[None]
  with jax.default_device(device):
    run = jax.jit(lambda params: model.merge(params).logits(tokens, positions, np.ones_like(tokens)))
    before = np.asarray(run(source.load(abstract)))
    after = np.asarray(run(sources.open_source(str(folder)).load(abstract)))
  difference = float(np.abs(before - after).max())
  if not np.isfinite(after).all() or (difference and not changes_types):
    raise ConfigError(f"{source.where}: the logits of the export differ by {difference:g}. Report this as a defect.")
  return f"Check: the largest difference of the logits on {tokens.size} tokens is {difference:g}."


def _write_json(path: Any, value: Mapping[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + "\n")
