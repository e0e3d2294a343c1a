"""Elastic, fault-tolerant pre-training of Qwen3 and Llama in JAX.

The names below are the library (docs/library.md). Each is imported at its first use, so `import trainer` stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from trainer.config.errors import ConfigError as ConfigError
  from trainer.data.batch import Batch as Batch
  from trainer.data.batch import Example as Example
  from trainer.data.source import Source as Source
  from trainer.library import Run as Run
  from trainer.library import load as load
  from trainer.models.generation import Sampling as Sampling
  from trainer.weights.export import export_run as export_run
  from trainer.weights.importing import import_folder as import_folder
  from trainer.weights.model import Model as Model

__version__ = "0.1.0"
_PLACES = {
  "Batch": "data.batch",
  "ConfigError": "config.errors",
  "Example": "data.batch",
  "Model": "weights.model",
  "Run": "library",
  "Sampling": "models.generation",
  "Source": "data.source",
  "export_run": "weights.export",
  "import_folder": "weights.importing",
  "load": "library",
}
__all__ = tuple(_PLACES)


def __getattr__(name: str) -> Any:
  if name not in _PLACES:
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
  from importlib import import_module

  return getattr(import_module(f"trainer.{_PLACES[name]}"), name)
