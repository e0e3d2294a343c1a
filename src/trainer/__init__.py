"""Elastic, fault-tolerant pre-training of Qwen3 and Llama in JAX.

The names below are the library (docs/library.md). Each is imported at its first use, so `import trainer` stays cheap.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from input_pipeline.batch import Batch as Batch
  from input_pipeline.batch import Example as Example
  from trainer.config.errors import ConfigError as ConfigError
  from trainer.library import Run as Run
  from trainer.library import load as load
  from trainer.weights.export import export_run as export_run
  from trainer.weights.generation import Sampling as Sampling
  from trainer.weights.model import Model as Model

__version__ = "0.1.0"
_PLACES = {
  "Batch": "input_pipeline.batch",
  "ConfigError": "trainer.config.errors",
  "Example": "input_pipeline.batch",
  "Model": "trainer.weights.model",
  "Run": "trainer.library",
  "Sampling": "trainer.weights.generation",
  "export_run": "trainer.weights.export",
  "load": "trainer.library",
}
__all__ = tuple(_PLACES)


def __dir__() -> list[str]:
  return sorted({*globals(), *_PLACES})


def __getattr__(name: str) -> Any:
  if name not in _PLACES:
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
  from importlib import import_module

  return getattr(import_module(_PLACES[name]), name)
