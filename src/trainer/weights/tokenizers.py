"""The tokenizer of a run's folder, which every run keeps beside its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_bpe
from trainer.checkpoint import run_id
from trainer.config.errors import ConfigError
from trainer.observe import files
from trainer.run.plugins import Plugin
from trainer.weights import sources
from trainer.weights.sources import Source


class KeepTokenizer(Plugin):
  """Keeps the tokenizer in the run's folder, where generate, evaluate and exports find it."""

  def ready(self) -> None:
    keep(self.config.run_directory, self.data.train.tokenizer, self.config.run.load_parameters_path)


def keep(run_directory: str, tokenizer: Tokenizer | None, source: str = "") -> None:
  """Writes the files of `tokenizer` into the run's folder, once. source: "", or load_parameters_path.

  The other files of the source's tokenizer, such as its chat template, are kept if the run uses the same tokenizer.
  """
  target = f"{run_directory}/{sources.TOKENIZER}"
  if not isinstance(tokenizer, BpeTokenizer) or (run_id.folder(target) / "tokenizer.json").exists():
    return
  if source:
    folder = run_id.folder(sources.split(source)[0])
    theirs = folder if (folder / sources.CONFIG).exists() else folder / sources.TOKENIZER
    if (theirs / "tokenizer.json").exists() and (theirs / "tokenizer.json").read_text() == tokenizer.json_text:
      sources.copy_tokenizer(theirs, run_id.folder(target))
      return
  files.write_text(target, "tokenizer.json", tokenizer.json_text)


def of_source(source: Source) -> Tokenizer:
  """The tokenizer of a run or a Hugging Face folder. Raises ConfigError if it cannot be found."""
  file, cfg = run_id.folder(source.tokenizer_folder) / "tokenizer.json", source.data or _of_export(source)
  if file.exists() or cfg.tokenizer_path:
    return load_bpe(str(file) if file.exists() else cfg.tokenizer_path, cfg.bos_token, cfg.eos_token)
  if source.data is not None and cfg.tokenizer_type == "byte":
    return ByteTokenizer()
  raise ConfigError(f"{source.where}: {file} is missing. Copy the tokenizer of the model there.")


def _of_export(source: Source) -> DataOptions:
  """The tokens around documents that the run of an export had; the defaults for other folders."""
  marker = run_id.folder(source.directory) / sources.MARKER
  told = sources.read_json(marker) if marker.exists() else {}
  return DataOptions(**{key: told.get(key, "") for key in sources.TOKENS})


def stop_ids(folder: str, tokenizer: Tokenizer) -> frozenset[int]:
  """The ids that end a text: the tokenizer's, and those that generation_config.json in `folder` names."""
  file = run_id.folder(folder) / sources.GENERATION
  generation = sources.read_json(file) if file.exists() else {}
  return frozenset([tokenizer.eos_id, *named_stop_ids(generation)])


def named_stop_ids(generation: Mapping[str, Any]) -> list[int]:
  """The ids that end a text by the content of a generation_config.json, which names one, several, or none."""
  named = generation.get("eos_token_id")
  if named is None:
    return []
  return named if isinstance(named, list) else [named]
