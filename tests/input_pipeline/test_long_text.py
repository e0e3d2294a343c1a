"""Texts that are encoded in windows have the ids of the whole text, with every kind of tokenizer."""

from __future__ import annotations

import json
import random
import string
import sysconfig
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import tokenizers as tokenizers_lib
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from input_pipeline import datasets, long_text, prepare
from input_pipeline.documents import BadRecords
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import BpeTokenizer

CODE = "".join(Path(sysconfig.get_path("stdlib"), name).read_text("utf-8") for name in ("argparse.py", "typing.py"))
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>"]


def bytes_with(pattern: str) -> pre_tokenizers.PreTokenizer:
  split = pre_tokenizers.Split(tokenizers_lib.Regex(pattern), "isolated")
  return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def trained(kind: str) -> tokenizers_lib.Tokenizer:
  """A small tokenizer like the published ones of these models."""
  keys = {"vocab_size": 900, "special_tokens": SPECIAL, "show_progress": False}
  spaces = normalizers.Replace(" ", "\u2581")
  if kind == "bert":
    made = tokenizers_lib.Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(**keys)
  elif kind == "t5":
    made = tokenizers_lib.Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(**keys, unk_token="<unk>")
  elif kind == "llama2":
    made = tokenizers_lib.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    made.normalizer, made.pre_tokenizer = spaces, pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(**keys)
  else:
    made = tokenizers_lib.Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = bytes_with(QWEN if kind == "qwen3" else QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"))
    trainer = trainers.BpeTrainer(**keys, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
  made.train_from_iterator([CODE[:60_000]], trainer)
  if kind == "llama2":  # a text is one word for its BPE
    content = json.loads(made.to_str())
    content["pre_tokenizer"] = None
    made = tokenizers_lib.Tokenizer.from_str(json.dumps(content))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    made.decoder = decoders.Metaspace()
  return made


@pytest.fixture(scope="module", params=["llama2", "qwen3", "llama3", "bert", "t5"])
def tokenizer(request) -> BpeTokenizer:
  return BpeTokenizer(trained(request.param).to_str())


def text_of(kind: str, size: int) -> str:
  choose = random.Random(0)
  some = lambda alphabet, count: "".join(choose.choices(alphabet, k=count))
  codes = [*range(32, 127), *range(0xA0, 0x600), *range(0x3040, 0x30A0), *range(0x1F600, 0x1F640)]
  texts = {
    "code": lambda: CODE,
    "windows line ends": lambda: CODE.replace("\n", "\r\n"),
    "words": lambda: " ".join(some(string.ascii_letters, choose.randint(1, 12)) for _ in range(size // 5)),
    "one word": lambda: some(string.ascii_letters, size),
    "one letter": lambda: "a" * size,
    "digits": lambda: some(string.digits, size),
    "long runs of spaces": lambda: "".join(" " * choose.randint(1, 900) + "x" for _ in range(size // 400)),
    "decomposed": lambda: unicodedata.normalize("NFD", some([chr(code) for code in range(0xAC00, 0xD7A3)], size // 3)),
    "any characters": lambda: some([chr(code) for code in codes], size),
    "names of special tokens": lambda: "<s> a</s>\n\n   <|endoftext|> " * (size // 30),
  }
  text = texts[kind]()
  return (text * (size // len(text) + 1))[:size]


KINDS = [
  "code", "windows line ends", "words", "one word", "one letter", "digits", "long runs of spaces", "decomposed",
  "any characters", "names of special tokens",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_windows_have_the_ids_of_the_whole(tokenizer, kind, monkeypatch):
  monkeypatch.setattr(long_text, "_WINDOW", 2000)
  monkeypatch.setattr(long_text, "_MARGIN", 128)
  for size in (1999, 2000, 9001, 20_011):
    text = text_of(kind, size)
    expected = tokenizer.encode(text)
    for size in (len(text), 333, 7000):
      parts = [text[at : at + size] for at in range(0, len(text), size)]
      np.testing.assert_array_equal(np.concatenate([*long_text.encode(tokenizer._tokenizer, parts)]), expected)


def test_a_long_document_has_the_ids_of_the_whole_text(tmp_path):
  """Cut into texts, it had a space more at each cut, with which Llama 2's tokenizer begins a text."""
  tokenizer = BpeTokenizer(trained("llama2").to_str())
  texts = {"a.txt": text_of("code", 771_032).replace("\n", " "), "b.txt": "short", "c.txt": text_of("digits", 250_001)}
  for name, text in texts.items():
    (tmp_path / name).write_text(text, encoding="utf-8")
  documents = datasets.find(DataOptions(dataset_path=str(tmp_path), eval_fraction=0))["train"]
  bad = BadRecords(0)
  groups = prepare.token_groups(prepare.groups(documents, 500_000, bad), tokenizer, tokenizer.vocab_size, bad)
  found = [ids.tolist() for group in groups for ids in group]
  assert found == [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts.values()]
