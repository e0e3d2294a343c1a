"""The ids of tokie are those of `tokenizers`, or the difference is found and named."""

from __future__ import annotations

import json
import pickle
import random
import string
from pathlib import Path

import numpy as np
import pytest
from tests.support.data_files import write_jsonl

from input_pipeline import datasets, fast_tokenizer
from input_pipeline.errors import ConfigError
from input_pipeline.fast_tokenizer import FastTokenizer
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import BpeTokenizer, train_bpe

tokie = pytest.importorskip("tokie")
CODE = Path(__file__).read_text() * 3
TRAINED = json.loads(train_bpe([CODE, "\u65e5\u672c\u8a9e \u043f\u0440\u0438\u0432\u0435\u0442 caf\u00e9 " * 40], 1500))
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(pattern: str, **changes) -> dict:
  part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False} | changes
  return {"type": "Sequence", "pretokenizers": [part, BYTES]}


def added(*names: str, special: bool = False, first: int = 1500, **flags: bool) -> list[dict]:
  plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | flags
  return [{"id": first + i, "content": name, "special": special, **plain} for i, name in enumerate(names)]


QWEN, LLAMA3, *_ = fast_tokenizer._SPLITS
DIGITS = {
  "type": "Sequence",
  "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES | {"use_regex": True}],
}
TOKENS = TRAINED["added_tokens"]
KINDS = {
  "GPT-2": {},
  "Llama 3": {"pre_tokenizer": split(LLAMA3), "model": TRAINED["model"] | {"ignore_merges": True}},
  "Qwen 3": {
    "pre_tokenizer": split(QWEN),
    "normalizer": {"type": "NFC"},
    "added_tokens": [*TOKENS, *added("<|im_start|>", special=True), *added("<think>", "</think>", first=1501)],
  },
  "SmolLM 2": {"pre_tokenizer": DIGITS},
  **{f"split {number}": {"pre_tokenizer": split(pattern)} for number, pattern in enumerate(fast_tokenizer._SPLITS)},
}
PARTS = [
  *" \n\t'=_/0a\u00e9\u3000\u0301\u017f\u0967",
  "  ",
  "\n\n",
  "'s",
  "'LL",
  "don't",
  "12345",
  "<think>",
  "<|eos|>",
]
PARTS += [
  "<|im_start|>",
  "word",
  " Word",
  "\u65e5\u672c",
  "\u3002",
  "\uff0c",
  "\r\n",
  "\U0001f600",
  "\u043c\u0438\u0440",
  "\x0b",
  "\x00",
]


PIECES = [[name, -1.0] for name in ("<|bos|>", "<|eos|>", *string.printable)]


def texts(seed: int) -> list[str]:
  draw = random.Random(seed)
  mixed = ["".join(draw.choices(PARTS, k=draw.choice([3, 30, 300]))) for _ in range(100)]
  long = [
    CODE,
    " " * 30_000,
    "a" * 30_000,
    "\u65e5\u672c\uff0c" * 3000,
    "word, " * 4000,
    "1\n" * 9000,
    "".join(draw.choices(PARTS[:9], k=9000)),
  ]
  return ["", "\ud800", *mixed, *long]


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_tokenizers(name):
  text = json.dumps(TRAINED | KINDS[name])
  fast, exact, given = FastTokenizer(text), BpeTokenizer(text), texts(len(name))
  for document, found, wanted in zip(given, fast.encode_batch(given), exact.encode_batch(given), strict=True):
    assert found.dtype == np.int32 and np.array_equal(found, wanted), document[:300]
  assert (fast.fingerprint, fast.eos_id) == (exact.fingerprint, exact.eos_id)
  fast.compare_vocabulary()
  assert len([1 for document in given[2:] if fast._parts(document)]) > 10  # most of the others have special tokens
  assert type(pickle.loads(pickle.dumps(fast))) is FastTokenizer


@pytest.mark.parametrize(
  ("changes", "reason"),
  [
    ({"model": TRAINED["model"] | {"byte_fallback": True}}, "a BPE with byte_fallback=True"),
    (
      {"model": {"type": "Unigram", "unk_id": 0, "vocab": PIECES}},
      "the model Unigram",
    ),
    ({"normalizer": {"type": "NFKC"}}, "the normalizer NFKC"),
    (
      {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True}},
      "Metaspace",
    ),
    ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, "ByteLevel with add_prefix_space"),
    ({"pre_tokenizer": BYTES}, "ByteLevel with use_regex=false"),
    ({"pre_tokenizer": None}, "the pre_tokenizer None"),
    ({"pre_tokenizer": split(r"\w{1,3}|\s|.")}, r"the pre_tokenizer Split \(\\w\{1,3\}"),
    ({"pre_tokenizer": split(QWEN, behavior="MergedWithNext")}, "the pre_tokenizer Split"),
    ({"added_tokens": [*TOKENS, *added("<x>", lstrip=True)]}, "the added token '<x>' with lstrip"),
    ({"added_tokens": [*TOKENS, *added("a b")]}, "the added token 'a b' with a space"),
  ],
)
def test_other_kinds_are_refused_by_name(changes, reason):
  with pytest.raises(ConfigError, match=f"--fast: tokie does not have the ids of .*{reason}.*Leave out --fast"):
    FastTokenizer(json.dumps(TRAINED | changes))


@pytest.fixture
def changed(monkeypatch):
  """tokie gets a tokenizer in which one merge makes another token: the ids of `ret` and `de` are exchanged."""
  original = tokie.Tokenizer.from_json

  def from_json(path: str):
    content = json.loads(Path(path).read_text())
    vocab = content["model"]["vocab"]
    vocab["ret"], vocab["de"] = vocab["de"], vocab["ret"]
    Path(path).write_text(json.dumps(content))
    return original(path)

  monkeypatch.setattr(tokie, "Tokenizer", type("Changed", (), {"from_json": staticmethod(from_json)}))


def splits(path: str):
  return datasets.find(DataOptions(dataset_type="grain", grain_train_files=path, grain_file_type="jsonl"))


def test_a_tokenizer_that_differs_in_one_merge_is_found(tmp_path, changed):
  """In the first documents, in an excerpt of a file, or in the vocabulary."""
  given = BpeTokenizer(json.dumps(TRAINED))
  seen = splits(write_jsonl(tmp_path / "seen", "text", ["nothing here", "", "x(ret)"]))
  named = (
    r"document 3 of .*seen.jsonl: its token \d+ is .*\[\d+\] in tokie \S+ and 'ret' \[\d+\] in tokenizers .*, after"
  )
  with pytest.raises(ConfigError, match=named):
    fast_tokenizer.make(given, seen, 0)
  far = splits(write_jsonl(tmp_path / "far", "text", ["nothing here " * 20_000, "(ret) " * 40_000]))
  with pytest.raises(ConfigError, match=r"the text '(de|ret)' of a token: its token 1 is"):
    fast_tokenizer.make(given, far, 0)
  compared = FastTokenizer(given.json_text).compared(far["train"])
  with pytest.raises(ConfigError, match=r"document 2 of .*far.jsonl, after its character 40000: its token "):
    list(compared.read(compared.pieces[0]))
