"""Examples, batches, tokenizers. Cheap to import: NumPy only; grain, tokenizers and array_record load when used."""

from trainer.data.batch import Batch, DataError, Example
from trainer.data.loader import Loader, has_eval, make_loader
from trainer.data.prefetch import Prefetcher
from trainer.data.source import Source
from trainer.data.tokenizer import Tokenizer

__all__ = ["Batch", "DataError", "Example", "Loader", "Prefetcher", "Source", "Tokenizer", "has_eval", "make_loader"]
