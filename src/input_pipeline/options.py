"""What a loader reads, and how. The trainer has these options as configuration keys, with the same names.

Only pydantic is imported. Where MaxText has an option, it has MaxText's name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class DataOptions(BaseModel):
  """The training and evaluation data. A batch is a pure function of (seed, step)."""

  model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)

  dataset_type: Literal["synthetic", "text", "grain", "tfds", "hf"] = "text"
  """synthetic: random tokens. text: files of text. grain: ArrayRecord, Parquet or JSONL files. tfds: a dataset that
  TensorFlow Datasets has prepared. hf: a folder that Hugging Face datasets has saved with save_to_disk. Except for
  synthetic, documents are tokenised and packed once, and cached."""
  dataset_path: str = ""
  """dataset_type=text: a file, or a folder of .txt .md .py .jsonl files. Empty: the sources of the Python standard
  library. dataset_type=tfds: the folder with dataset_info.json. dataset_type=hf: the folder with dataset_dict.json or
  state.json."""
  eval_dataset_path: str = ""
  """dataset_type=text: a file or folder for evaluation. Empty: hold out eval_fraction of the training text."""
  grain_train_files: str = ""
  """dataset_type=grain: training files, folders or patterns such as data/*.parquet, separated by ';'. Parquet and JSONL
  also at addresses such as gs://BUCKET/data or s3://BUCKET/data."""
  grain_eval_files: str = ""
  """dataset_type=grain: files for evaluation, named like grain_train_files. Empty: no evaluation."""
  grain_dataset: str = ""
  """dataset_type=grain: package.module:function, in the place of grain_train_files. The function takes no arguments and
  returns a grain.MapDataset, or another object that is read by index, of documents or examples; docs/data.md. Every
  process imports it."""
  grain_file_type: Literal[
    "arrayrecord",
    "arrayrecord_text",
    "arrayrecord_uint16",
    "arrayrecord_int32",
    "arrayrecord_windows",
    "parquet",
    "jsonl",
  ] = "arrayrecord"
  """Format of the files. arrayrecord: records are tf.train.Example. arrayrecord_text, _uint16, _int32: records are
  UTF-8 text or little-endian token ids. arrayrecord_windows: examples that trainer.tools.tokenize has packed already.
  jsonl: also .gz and .zst. parquet and .zst need the extra arrow."""
  train_data_columns: str = "text"
  """Column of Parquet, field of JSONL, feature of tf.train.Example and TFDS with the documents, in training and
  evaluation; `meta.text` is a nested column or field. Strings are tokenised. Lists of integers are token ids and stay
  as they are. Lists of messages with role and content (JSONL, Parquet, hf) are conversations."""
  train_on: Literal["assistant", "all"] = "assistant"
  """For conversations: which tokens are trained (weight 1 in the loss). assistant: what the assistant says, with the
  token that ends its turn. all: every token."""
  chat_template_path: str = ""
  """For conversations: a file with a Jinja template, a folder that has one, or chatml. Default: the template beside
  tokenizer_path (chat_template.jinja, or chat_template in tokenizer_config.json)."""
  train_split: str = "train"
  """dataset_type=tfds or hf: name of the split to train on."""
  eval_split: str = ""
  """dataset_type=tfds or hf: name of the split for evaluation. Empty: no evaluation."""
  eval_fraction: float = Field(0.05, ge=0.0, le=1.0)
  """Share of the training text that is held out for evaluation if eval_dataset_path is empty: files, and parts of large
  files, spread evenly over the text."""
  dataset_cache_directory: str = "~/.cache/trainer/data"
  """Folder for packed tokens and trained tokenizers."""
  packing: Literal["split", "best_fit", "none"] = "split"
  """How documents become examples. split: all joined into one stream, which is cut every max_target_length tokens.
  best_fit: whole documents, together where they fit; only documents longer than max_target_length are cut. none: one
  document per example, cut at max_target_length. Documents never attend to each other. Conversations are never cut
  inside a turn: split does the same as best_fit for them."""
  max_bad_records: int = Field(0, ge=0, le=2**31 - 1)
  """Records of a source, in training and in evaluation, that may be skipped because they are damaged or have no
  document. Each is logged. With records that are read in place, a value above 0 reads all of them once at the first
  start."""
  tokenizer_type: Literal["byte", "bpe"] = "byte"
  """byte: 256 bytes and special tokens. bpe: byte-level BPE, trained on the text unless tokenizer_path is set."""
  tokenizer_path: str = ""
  """tokenizer_type=bpe: a tokenizers JSON file, or a local folder with tokenizer.json. Empty: train a tokenizer."""
  bos_token: str = ""
  """Special token of tokenizer_path that begins a document; none: no token. Default: the token of its template, or
  <|begin_of_text|>, <s> or <bos> if it is special, or no token."""
  eos_token: str = ""
  """Special token of tokenizer_path that ends a document. Default: the token of its template, or <|end_of_text|>,
  <|endoftext|>, </s> or <eos> if it is special."""
  max_target_length: int = Field(1024, ge=1, le=2**27)
  """T: tokens of one training example."""
  data_shuffle_seed: int = Field(0, ge=-(2**63), le=2**64 - 1)
  """Seed of the order of examples."""
  reuse_example_batch: int = Field(0, ge=0, le=1)
  """1: train every step on the first batch, to test speed or overfitting."""

  @property
  def names_eval_data(self) -> bool:
    """Whether a key names data for evaluation. Other text may be held out, and random tokens have no end."""
    keys = {"text": self.eval_dataset_path, "grain": self.grain_eval_files}
    keys |= {"tfds": self.eval_split, "hf": self.eval_split}
    return bool(keys.get(self.dataset_type))

  def mistakes(self) -> Iterator[str]:
    """Yields a message for each option that contradicts another one, with value, rule and remedy."""
    if self.tokenizer_path and self.tokenizer_type != "bpe":
      yield (
        f"tokenizer_path={self.tokenizer_path}: has no effect with tokenizer_type={self.tokenizer_type}.\n"
        "Use tokenizer_type=bpe, or remove tokenizer_path."
      )
    for name, value in {"bos_token": self.bos_token, "eos_token": self.eos_token}.items():
      if value and not self.tokenizer_path:
        yield f"{name}={value}: has no effect without a tokenizer file.\nSet tokenizer_path, or remove {name}."
    if self.grain_dataset and not re.fullmatch(r"[\w.]+:\w+", self.grain_dataset):
      yield f"grain_dataset={self.grain_dataset}: is not a function.\nWrite package.module:function."
    for name in ("grain_train_files", "grain_eval_files"):
      if self.grain_dataset and getattr(self, name):
        yield f"grain_dataset excludes {name}.\nUse a mixture for several sources, and eval_sets for evaluation."
    if self.eval_fraction == 1 and not self.eval_dataset_path:
      yield "eval_fraction=1: leaves nothing to train on.\nUse a share below 1, such as 0.05."


@dataclass(frozen=True)
class MixtureEntry:
  """One source of a mixture."""

  name: str
  weights: tuple[tuple[int, Fraction], ...]
  """(first step, share of the examples from then on, relative to the other weights), ascending. The first step is 0."""
  epochs: float
  """How often the source may be read; infinity: without a limit."""
  options: DataOptions
  """The options of this source alone."""
