"""Elastic, fault-tolerant pre-training of Qwen3 and Llama in JAX.

The names below are the library (docs/library.md). Each is imported at its first use, so `import trainer` stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from trainer.config.errors import ConfigError
  from trainer.data.batch import Batch, Example
  from trainer.data.source import Source
  from trainer.library import Run, load
  from trainer.models.generation import Sampling
  from trainer.weights.export import export_run
  from trainer.weights.importing import import_folder
  from trainer.weights.model import Model

__version__ = "0.1.0"
__all__ = (
  "Batch",
  "ConfigError",
  "Example",
  "Model",
  "Run",
  "Sampling",
  "Source",
  "export_run",
  "import_folder",
  "load",
)

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


def __getattr__(name: str) -> Any:
  if name not in _PLACES:
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
  from importlib import import_module

  return getattr(import_module(f"trainer.{_PLACES[name]}"), name)
