"""Examples, batches, tokenizers. Cheap to import (NumPy only): what reads text loads grain and the like when used."""

from trainer.data.batch import Batch, DataError, Example
from trainer.data.loader import Loader, make_loader
from trainer.data.prefetch import Prefetcher
from trainer.data.source import Source
from trainer.data.tokenizer import Tokenizer

__all__ = ["Batch", "DataError", "Example", "Loader", "Prefetcher", "Source", "Tokenizer", "make_loader"]
