"""Examples, batches and tokenizers.

Imports only NumPy and the configuration. Libraries that read text (grain, tokenizers, array_record) are imported when
they are used.
"""

from trainer.data.batch import Batch, DataError, Example
from trainer.data.loader import Loader, check, loader_of, make_loader, open_eval_sets
from trainer.data.prefetch import Prefetcher
from trainer.data.source import Source
from trainer.data.tokenizer import Tokenizer

__all__ = [
  "Batch",
  "DataError",
  "Example",
  "Loader",
  "Prefetcher",
  "Source",
  "Tokenizer",
  "check",
  "loader_of",
  "make_loader",
  "open_eval_sets",
]
