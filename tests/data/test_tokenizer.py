"""Tokenizers: exact round trips, decoding that never fails, and text that cannot produce special ids."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import tokenizers as tokenizers_lib
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.errors import ConfigError
from trainer.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_bpe, train_bpe

SAMPLE = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
  return {"byte": ByteTokenizer(), "bpe": BpeTokenizer(train_bpe([SAMPLE], 512))}


names = pytest.mark.parametrize("name", ["byte", "bpe"])
AWKWARD = [
  "",
  " ",
  "\n\n \t",
  "\x00\x7f",
  "na\u00efve caf\u00e9",
  "\u65e5\u672c\u8a9e",
  "\U0001f3f3\ufe0f\u200d\U0001f308",
  "e\u0301",
  "\ufeffbom",
  "a  b   c",
  "\r\n",
  "<|eos|><|bos|>",
]


@names
@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_round_trip_of_any_text(tokenizers, name, text):
  tokenizer = tokenizers[name]
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert all(0 <= token < tokenizer.vocab_size for token in ids)
  assert tokenizer.eos_id not in ids and tokenizer.bos_id not in ids


@names
@pytest.mark.parametrize("text", AWKWARD)
def test_round_trip_of_awkward_text(tokenizers, name, text):
  tokenizer = tokenizers[name]
  ids = tokenizer.encode(text)
  assert tokenizer.decode(ids) == text
  assert tokenizer.eos_id not in ids and tokenizer.bos_id not in ids


@names
def test_batch_equals_single(tokenizers, name):
  texts = [*AWKWARD, SAMPLE, "\ud800 lone"]
  batch = tokenizers[name].encode_batch(texts)
  assert [ids.tolist() for ids in batch] == [tokenizers[name].encode(text) for text in texts]
  assert {ids.dtype for ids in batch} == {np.dtype(np.int32)}
  assert tokenizers[name].encode_batch([]) == []


@names
@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 600)))
def test_decoding_never_raises(tokenizers, name, ids):
  assert isinstance(tokenizers[name].decode(ids), str)


@names
def test_decoding_leaves_specials_out(tokenizers, name):
  tokenizer = tokenizers[name]
  ids = [tokenizer.bos_id, *tokenizer.encode("ab"), tokenizer.eos_id, tokenizer.vocab_size + 5, *tokenizer.encode("c")]
  assert tokenizer.decode(np.array(ids)) == "abc"


@names
def test_lone_surrogates_are_replaced(tokenizers, name):
  assert tokenizers[name].decode(tokenizers[name].encode("a\ud800b")) == "a?b"


def test_bytes_are_the_ids():
  assert ByteTokenizer().encode("a\u00e9") == [97, 0xC3, 0xA9]
  assert ByteTokenizer().decode([0xC3]) == "\ufffd"
  assert ByteTokenizer().vocab_size == 258


def test_bpe_compresses_and_is_the_same_every_time(tokenizers):
  assert len(tokenizers["bpe"].encode(SAMPLE)) < 0.6 * len(SAMPLE)
  assert tokenizers["bpe"].vocab_size == 512
  again = BpeTokenizer(train_bpe([SAMPLE], 512))
  assert again.fingerprint == tokenizers["bpe"].fingerprint != BpeTokenizer(train_bpe([SAMPLE], 513)).fingerprint


def test_bpe_trained_on_little_text_contains_all_bytes():
  tokenizer = BpeTokenizer(train_bpe(["x"], 4096))
  assert tokenizer.vocab_size == 258
  assert tokenizer.decode(tokenizer.encode("\u65e5\u672c\u8a9e\x00")) == "\u65e5\u672c\u8a9e\x00"


def test_bpe_needs_a_vocabulary_that_holds_all_bytes():
  with pytest.raises(ConfigError, match=r"vocab_size=257 .*at least 258"):
    train_bpe(["x"], 257)


def renamed(json_text: str, names: dict[str, str]) -> str:
  for old, new in names.items():
    json_text = json_text.replace(json.dumps(old), json.dumps(new))
  return json_text


@pytest.mark.parametrize(
  ("bos", "eos", "has_bos"),
  [("<|begin_of_text|>", "<|end_of_text|>", True), ("<s>", "</s>", True), ("<|im_start|>", "<|endoftext|>", False)],
)
def test_published_names_of_specials_are_found(tmp_path, bos, eos, has_bos):
  path = tmp_path / "tokenizer.json"
  path.write_text(renamed(train_bpe([SAMPLE], 300), {"<|bos|>": bos, "<|eos|>": eos}), encoding="utf-8")
  tokenizer = load_bpe(str(path))
  assert tokenizer.bos_id == (0 if has_bos else None) and tokenizer.eos_id == 1
  assert tokenizer.eos_id not in tokenizer.encode(eos) and tokenizer.decode(tokenizer.encode(eos)) == eos


def test_bad_tokenizer_files_are_named(tmp_path):
  path = tmp_path / "tokenizer.json"
  with pytest.raises(ConfigError, match=r"tokenizer_path=.*No such file"):
    load_bpe(str(path))
  path.write_text('{"version": "1.0"', encoding="utf-8")
  with pytest.raises(ConfigError, match=r"tokenizer_path=.*tokenizer\.json: not a tokenizers JSON file"):
    load_bpe(str(path))
  path.write_text(renamed(train_bpe(["x"], 300), {"<|eos|>": "<|stop|>"}), encoding="utf-8")
  with pytest.raises(ConfigError, match="no end-of-text token"):
    load_bpe(str(path))
  given = json.loads(train_bpe(["x"], 300))
  given["model"]["dropout"] = 0.1
  path.write_text(json.dumps(given), encoding="utf-8")
  with pytest.raises(ConfigError, match="its model has dropout, so each preparation would give other tokens"):
    load_bpe(str(path))


def test_texts_are_neither_cut_nor_padded(tmp_path):
  """Published files may ask for both, for the program that they were made for."""
  plain = tokenizers_lib.Tokenizer.from_str(train_bpe([SAMPLE], 300))
  plain.save(str(tmp_path / "plain.json"))
  plain.enable_truncation(5)
  plain.enable_padding(length=64)
  plain.save(str(tmp_path / "cutting.json"))
  paths = (str(tmp_path / name) for name in ("plain.json", "cutting.json"))
  expected, found = (load_bpe(path).encode_batch([SAMPLE, "a"]) for path in paths)
  assert len(expected[0]) > 5 and [ids.tolist() for ids in found] == [ids.tolist() for ids in expected]
