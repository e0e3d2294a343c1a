"""Makes a run folder from a Hugging Face folder: a checkpoint of step 0 that holds only parameters."""

from __future__ import annotations

import json
from collections.abc import Callable

from rich.filesize import decimal

from input_pipeline.places import Place
from trainer.checkpoint import run_id
from trainer.checkpoint.errors import Rejected
from trainer.config import cli
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.observe import files
from trainer.weights import one_by_one, sources
from trainer.weights.new_folder import new_folder
from trainer.weights.sources import WeightSource


def import_folder(directory: str, run_directory: str, report: Callable[[str], object] = print) -> None:
  """Writes `run_directory`, which must not exist. report: takes a line of progress.

  Every tensor keeps its type. One tensor at a time is in memory. Raises ConfigError if a file of `directory` is
  wrong, or if `run_directory` cannot be written; then nothing is left there.
  """
  source = sources.open_source(directory)
  if not source.stored:
    raise ConfigError(f"{directory}: is a run already. Give a Hugging Face folder.")
  with new_folder(run_directory) as folder:
    _copy_tokenizer(run_id.folder(directory), folder / sources.TOKENIZER)
    config = _config(source, str(run_id.folder(run_directory)))
    _write_weights(source, config, folder, report)
    (folder / "config.yml").write_text(cli.print_config(config))
  report(f"{run_directory} has the parameters of {directory}. Train from it with load_parameters_path={run_directory}")


def _write_weights(source: WeightSource, config: Config, folder: Place, report: Callable[[str], object]) -> None:
  def lazy(stored: sources.Stored) -> one_by_one.Lazy:
    shape = stored.weight.shape
    return one_by_one.Lazy(shape, stored.dtype, lambda: stored.part((slice(None),) * len(shape)))

  arrays = {name: lazy(stored) for name, stored in source.stored.items()}
  progress = ByteProgress(sum(x.nbytes for x in arrays.values()), report)
  done = lambda name: progress.add(arrays[name].nbytes)
  meta = {"step": 0, "imported": source.where, "config": config.flat()}
  try:
    one_by_one.write(folder / "checkpoints" / "0", arrays, meta, done)
  except Rejected as error:
    raise ConfigError(f"{source.where}: {error}. Get the folder again.") from error


def _copy_tokenizer(source: Place, target: Place) -> None:
  """Copies the files of the tokenizer, and the ids that end a text from config.json if no other file has them."""
  sources.copy_tokenizer(source, target)
  if not (target / sources.GENERATION).exists():
    ends = {k: v for k, v in sources.read_json(source / sources.CONFIG).items() if k in sources.ENDS and v is not None}
    files.write_text(str(target), sources.GENERATION, json.dumps(ends) + "\n")


def _config(source: WeightSource, run_directory: str) -> Config:
  """The configuration of the new folder: the model, and its tokenizer."""
  parent, _, name = run_directory.rpartition("/")
  data = {"tokenizer_type": "bpe", "tokenizer_path": f"{run_directory}/{sources.TOKENIZER}/tokenizer.json"}
  has_tokenizer = (run_id.folder(source.directory) / "tokenizer.json").exists()
  sections = {"model": source.model, "run": {"base_output_directory": parent, "run_name": name}}
  return Config.model_validate({**sections, "data": data if has_tokenizer else {}})


class ByteProgress:
  """Reports a line whenever another tenth of the bytes is done."""

  def __init__(self, total: int, report: Callable[[str], object]) -> None:
    self._total, self._done, self._report = total, 0, report

  def add(self, count: int) -> None:
    """`count` more bytes are done."""
    before, self._done = self._done, self._done + count
    if 10 * before // self._total != 10 * self._done // self._total:
      percent = 100 * self._done // self._total
      self._report(f"{percent:3} %: {decimal(self._done)} of {decimal(self._total)}")
