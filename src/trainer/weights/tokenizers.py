"""The tokenizer in a run's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from input_pipeline import chat_template
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_bpe
from trainer.checkpoint import run_folder
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.run.plugins import Plugin
from trainer.weights import sources
from trainer.weights.sources import WeightSource

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


class KeepTokenizer(Plugin):
  """Keeps the tokenizer in the run's folder, where generate, evaluate and exports find it."""

  def ready(self) -> None:
    keep(self.config.run_directory, self.data.train.tokenizer, self.config.run.load_parameters_path)


def keep(run_directory: str, tokenizer: Tokenizer | None, source: str = "") -> None:
  """Writes the files of `tokenizer` into the run's folder, once. source: "", or load_parameters_path.

  The other files of the source's tokenizer, such as its chat template, are kept if the run uses the same tokenizer.
  """
  target = f"{run_directory}/{sources.TOKENIZER}"
  if not isinstance(tokenizer, BpeTokenizer) or (run_folder.folder(target) / _TOKENIZER).exists():
    return
  kept: dict[str, str | bytes] = {}
  if source:
    folder = run_folder.folder(run_folder.split(source)[0])
    theirs = folder if (folder / sources.CONFIG).exists() else folder / sources.TOKENIZER
    if _same_tokenizer(theirs / _TOKENIZER, tokenizer):
      kept = {name: (theirs / name).read_bytes() for name in sources.TOKENIZER_FILES if (theirs / name).exists()}
  if isinstance(tokenizer, ChatTokenizer):
    kept |= _of_chats(tokenizer, kept)
  kept[_TOKENIZER] = tokenizer.json_text
  for name in sources.TOKENIZER_FILES:
    if name in kept:
      files.write_bytes(target, name, content if isinstance(content := kept[name], bytes) else content.encode())


def _same_tokenizer(file: Any, tokenizer: BpeTokenizer) -> bool:
  """Whether a file has the JSON of `tokenizer`. Bytes, because reading as text changes the ends of lines."""
  return file.exists() and file.read_bytes().decode("utf-8-sig", "replace") == tokenizer.json_text


def _of_chats(tokenizer: ChatTokenizer, kept: Mapping[str, str | bytes]) -> dict[str, str]:
  """The files that let a model talk: the template, the tokens that it names, and the token that ends a turn.

  kept: files of the model that the run continues.
  """
  read = lambda name: json.loads(kept.get(name, "{}"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.template.names | read(_CONFIG)
  config.pop("chat_template", None)
  generation, end = read(sources.GENERATION), tokenizer.turn_end()
  stops = [id for id in (end, *named_stop_ids(generation)) if id is not None]
  files = {_TEMPLATE: tokenizer.template.text, _CONFIG: json.dumps(config, indent=2)}
  if stops:
    files[sources.GENERATION] = json.dumps(generation | {"eos_token_id": list(dict.fromkeys(stops))}, indent=2)
  return files


def of_source(source: WeightSource) -> Tokenizer:
  """The tokenizer of a run or a Hugging Face folder. Raises ConfigError if it cannot be found."""
  file, cfg = run_folder.folder(source.tokenizer_folder) / "tokenizer.json", source.data or _of_export(source)
  if file.exists() or cfg.tokenizer_path:
    return load_bpe(str(file) if file.exists() else cfg.tokenizer_path, cfg.bos_token, cfg.eos_token)
  if source.data is not None and cfg.tokenizer_type == "byte":
    return ByteTokenizer()
  raise ConfigError(f"{source.where}: {file} is missing. Copy the tokenizer of the model there.")


def of_chats(folder: str, tokenizer: Tokenizer) -> ChatTokenizer:
  """The tokenizer with the chat template in its folder. Raises ConfigError if there is none."""
  if not isinstance(tokenizer, BpeTokenizer):
    raise ConfigError(
      f"{folder}: the tokenizer of the model is {tokenizer.name}, which has no chat template. Give a PROMPT."
    )
  template = chat_template.search(f"{folder}/{_TOKENIZER}", "", tokenizer)
  if template is None:
    raise ConfigError(f"{folder}: the model has no {_TEMPLATE}. Train it on conversations, or copy the file there.")
  return ChatTokenizer(tokenizer, template, "assistant", DataOptions().max_target_length)


def _of_export(source: WeightSource) -> DataOptions:
  """The tokens around documents that the run of an export had; the defaults for other folders."""
  marker = run_folder.folder(source.directory) / sources.MARKER
  told = sources.read_json(marker) if marker.exists() else {}
  return DataOptions(**{key: told.get(key, "") for key in sources.TOKENS})


def stop_ids(folder: str, tokenizer: Tokenizer) -> frozenset[int]:
  """The ids that end a text: the tokenizer's, and the ids in generation_config.json of `folder`."""
  file = run_folder.folder(folder) / sources.GENERATION
  generation = sources.read_json(file) if file.exists() else {}
  return frozenset([tokenizer.eos_id, *named_stop_ids(generation)])


def named_stop_ids(generation: Mapping[str, Any]) -> list[int]:
  """The ids that end a text by the content of a generation_config.json, which names one, several, or none."""
  named = generation.get("eos_token_id")
  if named is None:
    return []
  return named if isinstance(named, list) else [named]
