"""Where parameters come from: a Hugging Face folder, or a checkpoint of a run."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import numpy as np
from pydantic import ValidationError

from input_pipeline.locks import FolderLock
from input_pipeline.options import DataOptions
from input_pipeline.places import Place
from trainer.checkpoint import run_folder
from trainer.checkpoint.arrays import verified_load
from trainer.checkpoint.checkpoint_errors import CheckpointError, Rejected
from trainer.checkpoint.persistent import Persistent
from trainer.checkpoint.state_backup import RunContext
from trainer.checkpoint.together import on_primary, together
from trainer.config.errors import ConfigError, shorten
from trainer.config.schema import CheckpointSection, ModelSection
from trainer.models.decoder import Params
from trainer.observe import files
from trainer.weights import hf_config, names, safetensors, stacking
from trainer.world import SINGLE_WORLD, World, from_primary
from worlds.lines import warn

X = TypeVar("X")
_TRIES = 10  # checkpoints of a living run that are read until one stays
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
GENERATION = "generation_config.json"
ENDS = ("bos_token_id", "eos_token_id")  # its fields
MARKER = "trainer_export.json"  # the last file of an export
TOKENS = ("bos_token", "eos_token")  # keys of a run, which its exports repeat in this file
TOKENIZER = "tokenizer"  # folder of a run that holds the files of its tokenizer
TOKENIZER_FILES = (  # tokenizer.json is written last: a folder that has it has all
  "tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt tokenizer.model "
  f"chat_template.jinja {GENERATION} tokenizer.json"
).split()
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Old files have them; they are no weights.
_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
# What must agree between a run and its source: the shapes, and the function that the weights were trained for.
_SIZES = (
  "vocab_size emb_dim num_decoder_layers num_query_heads num_kv_heads mlp_dim head_dim use_qk_norm "
  "logits_via_embedding normalization_layer_epsilon rope_max_timescale rope_type"
).split()
_ROPE = "rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_position_embeddings".split()
_EXPERTS = (
  "num_experts num_experts_per_tok moe_mlp_dim norm_topk_prob decoder_sparse_step dense_layers routed_bias_update_rate"
).split()


@dataclass(frozen=True)
class Stored:
  """One of our arrays in a Hugging Face folder. tensors: of `weight.theirs`, all of one type."""

  weight: names.Weight
  tensors: tuple[safetensors.Tensor, ...]

  @property
  def dtype(self) -> np.dtype:
    return self.tensors[0].dtype if self.tensors else np.dtype(np.float32)

  def part(self, index: tuple[slice, ...]) -> np.ndarray:
    """The values at `index`, a slice of each dim, in our layout. Reads no others from a local file."""
    weight = self.weight
    if not self.tensors:
      return np.full(weight.shape, weight.start, self.dtype)[index]
    if not weight.of_experts:
      return _ours(weight, self.tensors[0], index)
    experts = self.tensors[index[0]]
    out: np.ndarray | None = None
    for i, tensor in enumerate(experts):  # in one array, without a list of all
      values = _ours(weight, tensor, index[1:])
      out = np.empty((len(experts), *values.shape), values.dtype) if out is None else out
      out[i] = values
    assert out is not None
    return out


def _ours(weight: names.Weight, tensor: safetensors.Tensor, index: tuple[slice, ...]) -> np.ndarray:
  bits = f"u{tensor.dtype.itemsize}"  # numpy copies values of bfloat16 one by one
  return np.ascontiguousarray(weight.to_ours(tensor.array())[index].view(bits)).view(tensor.dtype)


@dataclass(frozen=True)
class WeightSource:
  """Parameters that can be read. arrays: {name in a state: {"shape", "dtype"}}, with a fingerprint in a checkpoint."""

  where: str
  directory: str
  model: ModelSection
  data: DataOptions | None  # of the run; None: a Hugging Face folder
  arrays: Mapping[str, Mapping[str, Any]]
  read: verified_load.Read
  stored: Mapping[str, Stored]  # of a Hugging Face folder, by our names; else empty
  meta: Mapping[str, Any] = field(default_factory=dict)  # of the checkpoint
  folder: Place = field(default=Place(""))  # of the checkpoint
  held: FolderLock | None = None  # retention of a living run leaves the checkpoint until then
  is_gone: Callable[[], bool] = lambda: False  # whether it has deleted it nevertheless

  @property
  def tokenizer_folder(self) -> str:
    """Where the files of the tokenizer are, if there are any."""
    return self.directory if self.data is None else f"{self.directory}/{TOKENIZER}"

  @property
  def longest(self) -> int:
    return hf_config.longest(self.model, self.data)

  def require_model(self, cfg: ModelSection) -> None:
    """Raises ConfigError with all keys of `cfg` that do not fit these weights."""
    compared = _SIZES + (_ROPE if self.model.rope_type == cfg.rope_type == "llama3" else [])
    compared += _EXPERTS if max(self.model.num_experts, cfg.num_experts) > 1 else []
    differ = [name for name in compared if getattr(cfg, name) != getattr(self.model, name)]
    if differ:
      table = "; ".join(f"{name}={getattr(cfg, name)}, there {getattr(self.model, name)}" for name in differ)
      raise ConfigError(f"{self.where} has another model: {table}. Set model_name, or these keys, to its model.")

  def load(self, abstract: Params, world: World = SINGLE_WORLD) -> Params:
    """The parameters with the shapes, types and shardings of `abstract`. Every process of `world` must call.

    A process reads only the bytes of its shards from local files. Afterwards retention may delete the checkpoint.
    Raises ConfigError, on all processes, if they cannot be read or do not fit.
    """
    try:
      stored = stacking.as_stored(self.arrays, abstract)
      return stacking.convert(verified_load.load(world, self.read, self.arrays, {"params": stored})["params"], abstract)
    except (Rejected, CheckpointError) as error:
      raise ConfigError(f"{self.where}: {error}. Get the files again, or give another folder.") from error
    finally:
      if self.held is not None:
        self.held.release()


def use(place: str, work: Callable[[WeightSource], X]) -> X:
  """Returns what `work` returns for the source at `place`, see `open_source`.

  If the run there has deleted the checkpoint that `work` reads, `work` gets the newest one that is left, unless `place`
  names a step. Raises ConfigError if that happens again and again.
  """
  for _ in range(_TRIES):
    source = open_source(place)
    try:
      return work(source)
    except (ConfigError, Rejected) as error:
      if not source.is_gone():
        raise
      gone = f"{source.where}: retention has deleted this checkpoint while it was read"
      if run_folder.split(place)[1]:
        raise ConfigError(f"{gone}. Name a step that stays, or raise max_num_checkpoints_to_keep.") from error
      warn(f"{gone}. Reading the newest one.")
  raise ConfigError(f"{gone}, as {_TRIES - 1} before it. Raise max_num_checkpoints_to_keep, or read a copy of one.")


def open_source(place: str, world: World = SINGLE_WORLD) -> WeightSource:
  """The parameters in a Hugging Face folder, or in RUN_DIR or RUN_DIR@STEP (default: the newest checkpoint).

  Raises ConfigError, which names what is missing or wrong there. Verifies the files of a checkpoint.
  """
  directory, step = run_folder.split(place)
  folder = run_folder.folder(directory)
  try:
    if not step and (folder / CONFIG).exists():
      return _hugging_face(folder)
    if (folder / "checkpoints").exists():
      return _of_run(directory, int(step) if step else None, world)
  except (Rejected, CheckpointError, OSError) as error:
    raise ConfigError(f"{place}: {error}.") from error
  is_step = folder.parent.name == "checkpoints"
  remedy = f"{folder.parent.parent}@{folder.name}" if is_step else "a Hugging Face folder, RUN_DIR or RUN_DIR@STEP"
  raise ConfigError(f"{place}: has neither {CONFIG} nor checkpoints. Give {remedy}.")


def copy_tokenizer(source: Place, target: Place) -> None:
  """Copies those files of a tokenizer that the folder `source` has to the folder `target`."""
  for name in TOKENIZER_FILES:
    if (source / name).exists():
      files.write_bytes(str(target), name, (source / name).read_bytes())


def _of_run(directory: str, named: int | None, world: World) -> WeightSource:
  persistent = Persistent(f"{directory}/checkpoints", CheckpointSection(), RunContext(world))
  step, meta, held = _held(persistent, directory, named, world)
  keys_of = lambda section: {key: value for key, value in meta["config"].items() if key in section.model_fields}
  model, data = ModelSection(**keys_of(ModelSection)), DataOptions(**keys_of(DataOptions))
  arrays = {name: entry for name, entry in meta["arrays"].items() if name.startswith("params.")}
  read = functools.partial(persistent.read, step)
  folder = persistent.directory / str(step)
  is_gone = functools.partial(persistent.is_gone, step)
  return WeightSource(f"{directory}@{step}", directory, model, data, arrays, read, {}, meta, folder, held, is_gone)


def _held(
  persistent: Persistent, directory: str, named: int | None, world: World
) -> tuple[int, dict[str, Any], FolderLock]:
  """Returns (step, meta, lock) of the checkpoint `named`, or of the newest one that is not deleted meanwhile."""
  while True:
    steps = on_primary(world, persistent.steps)[::-1]
    if not steps or (named is not None and named not in steps):
      raise ConfigError(f"{directory}: has no checkpoint {'' if named is None else named}, but {steps or 'none'}.")
    step = steps[0] if named is None else named
    try:
      held = together(world, functools.partial(persistent.hold, step))
      return step, persistent.verified(step), held
    except Rejected:
      if not from_primary(world, persistent.is_gone(step)):
        raise


def _hugging_face(folder: Place) -> WeightSource:
  where = str(folder)
  keys = hf_config.keys(read_json(folder / CONFIG), f"{where}/{CONFIG}")
  try:
    model = ModelSection(**keys)
  except ValidationError as error:
    wrong = [f"{hf_config.field(str(e['loc'][0]))}={shorten(str(e['input']))} ({e['msg']})" for e in error.errors()]
    raise ConfigError(f"{where}/{CONFIG}: {', '.join(wrong)}. Correct the file.") from error
  found = _tensors(folder)
  if "embed_tokens.weight" in found:  # saved from the part of the model below its head
    found = {name if name == names.HEAD else f"model.{name}": tensor for name, tensor in found.items()}
  if model.logits_via_embedding and names.HEAD in found:  # the same matrix, and either name may be missing
    found.setdefault(names.EMBEDDING, found[names.HEAD])
  stored = {}
  for name, weight in names.weights(model).items():
    tensors = tuple(_take(found, theirs, weight.their_shape, where) for theirs in weight.theirs)
    if other := next((i for i, tensor in enumerate(tensors) if tensor.dtype != tensors[0].dtype), 0):
      raise ConfigError(
        f"{where}: {weight.theirs[other]} is {tensors[other].dtype}, and {weight.theirs[0]} is {tensors[0].dtype}. "
        "Save the experts of a layer in one type."
      )
    stored[name] = Stored(weight, tensors)
  head = found.pop(names.HEAD, None)
  if head is not None and not np.array_equal(_bits(head.array()), _bits(stored["params.embedding"].tensors[0].array())):
    raise ConfigError(f"{where}: {names.HEAD} differs from the embedding, but {CONFIG} says tie_word_embeddings.")
  if extra := [name for name in found if not _BUFFER.fullmatch(name)]:
    raise ConfigError(f"{where}: the model has no place for {len(extra)} tensors: {', '.join(sorted(extra)[:5])}.")
  arrays = {name: {"shape": x.weight.shape, "dtype": str(x.dtype)} for name, x in stored.items()}

  def read(targets: Mapping[str, Any]) -> dict[str, jax.Array]:
    try:
      place = lambda name, to: jax.make_array_from_callback(to.shape, to.sharding, stored[name].part)
      return {name: place(name, target) for name, target in targets.items()}
    except (OSError, ValueError) as error:
      raise Rejected(f"{', '.join(targets)} cannot be read: {error}") from error

  return WeightSource(where, where, model, None, arrays, read, stored)


def _take(found: dict[str, safetensors.Tensor], name: str, shape: tuple[int, ...], where: str) -> safetensors.Tensor:
  """Removes a tensor from `found` and returns it. Raises ConfigError if it is missing or has another shape."""
  tensor = found.pop(name, None)
  if tensor is None:
    tied = f" If its head is the embedding, say so in {CONFIG}: tie_word_embeddings." if name == names.HEAD else ""
    raise ConfigError(f"{where}: {name} is missing. Get the folder again.{tied}")
  if tensor.shape != shape:
    raise ConfigError(f"{where}: {name} has shape {tensor.shape}, and its {CONFIG} says {shape}. Correct it.")
  return tensor


def _bits(array: np.ndarray) -> np.ndarray:
  return array.view(f"u{array.dtype.itemsize}")


def _tensors(folder: Place) -> dict[str, safetensors.Tensor]:
  """All tensors of a folder by name. Raises ConfigError if its index and its files do not say the same."""
  if not (folder / INDEX).exists():
    if not (folder / SINGLE).exists():
      raise ConfigError(f"{folder}: has neither {SINGLE} nor {INDEX}. {_instead(folder)}")
    return safetensors.read(folder / SINGLE)
  places = read_json(folder / INDEX).get("weight_map")
  if not isinstance(places, dict) or any("/" in str(file) for file in places.values()):
    raise ConfigError(f"{folder / INDEX}: has no weight_map of names and files. Get the file again.")
  found: dict[str, safetensors.Tensor] = {}
  for file in sorted(set(places.values())):
    if not (folder / file).exists():
      raise ConfigError(f"{folder}: {file}, which {INDEX} names, is missing. Get the folder again.")
    inside = safetensors.read(folder / file)
    named = {name for name, place in places.items() if place == file}
    if wrong := sorted(named ^ inside.keys()):
      raise ConfigError(f"{folder}: {INDEX} and {file} differ about {', '.join(wrong[:5])}. Get the folder again.")
    found |= inside
  return found


def _instead(folder: Place) -> str:
  """Returns what to do with a folder that lacks its files of weights, by the files that it has."""
  weights = sorted(file.name for file in folder.iterdir() if file.suffix in _WEIGHTS)
  if any(name.startswith("adapter_") for name in weights):
    return "It has an adapter: merge it into its model (merge_and_unload of peft), and save the result."
  if any("-of-" in name and name.endswith(".safetensors") for name in weights):
    return f"It has some of several files: {', '.join(weights[:3])}. Get the folder again."
  found = f"It has {', '.join(weights[:3])}. " if weights else ""
  return f"{found}Save the model as safetensors: AutoModelForCausalLM.from_pretrained(...).save_pretrained(NEW_FOLDER)."


def read_json(path: Place) -> dict[str, Any]:
  """The object in a JSON file. Raises ConfigError."""
  try:
    found = json.loads(path.read_bytes())  # of bytes, json also reads UTF-16 and a byte order mark
  except (OSError, ValueError) as error:
    raise ConfigError(f"{path}: cannot be read: {error}. Get the file again.") from error
  if not isinstance(found, dict):
    raise ConfigError(f"{path}: holds no JSON object. Get the file again.")
  return found
