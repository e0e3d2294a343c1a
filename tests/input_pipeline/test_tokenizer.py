"""Tokenizers: exact round trips, decoding that never fails, and text that cannot produce special ids."""

from __future__ import annotations

import json
import string
import sysconfig
from pathlib import Path

import pytest
import tokenizers as tokenizers_lib
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from input_pipeline.loader import make_loader
from input_pipeline.options import DataOptions
from input_pipeline.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_bpe, train_bpe
from trainer.config.errors import ConfigError

SAMPLE = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
  return {"byte": ByteTokenizer(), "bpe": BpeTokenizer(train_bpe([SAMPLE], 512))}


names = pytest.mark.parametrize("name", ["byte", "bpe"])


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
@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(-(2**70), 2**70) | st.integers(0, 600)))
def test_decoding_never_raises(tokenizers, name, ids):
  assert isinstance(tokenizers[name].decode(ids), str)


def test_bpe_compresses_and_is_the_same_every_time(tokenizers):
  assert len(tokenizers["bpe"].encode(SAMPLE)) < 0.6 * len(SAMPLE)
  assert tokenizers["bpe"].vocab_size == 512
  again = BpeTokenizer(train_bpe([SAMPLE], 512))
  assert again.fingerprint == tokenizers["bpe"].fingerprint != BpeTokenizer(train_bpe([SAMPLE], 513)).fingerprint


def saved(tmp_path: Path, *special: str, ordinary: str = "", **changes) -> str:
  """A file of a byte-level BPE with these special tokens, from id 0 on, and merges that make the text `ordinary`."""
  tokenizer = tokenizers_lib.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  tokenizer.train_from_iterator([*ordinary.split()] * 3, trainer)
  path = tmp_path / "tokenizer.json"
  path.write_text(json.dumps(json.loads(tokenizer.to_str()) | changes), encoding="utf-8")
  return str(path)


def template(before: list[str], after: list[str]) -> dict[str, object]:
  names = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (*before, *after)]
  single = [*names[: len(before)], {"Sequence": {"id": "A", "type_id": 0}}, *names[len(before) :]]
  tokens = {name: {"id": name, "ids": [id], "tokens": [name]} for id, name in enumerate([*before, *after])}
  return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}


@pytest.mark.parametrize(
  ("special", "bos", "eos"),
  [
    (["<|begin_of_text|>", "<|end_of_text|>"], 0, 1),  # Llama 3
    (["<unk>", "<s>", "</s>"], 1, 2),  # Llama 2
    (["<pad>", "<eos>", "<bos>"], 2, 1),  # Gemma
    (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], None, 0),  # Qwen3
  ],
)
def test_published_names_of_special_tokens_are_found(tmp_path, special, bos, eos):
  """The vocabularies of Qwen3 and Gemma also have <s> and </s> as ordinary tokens, which text contains."""
  ordinary = "" if "</s>" in special else "<s> </s>"
  tokenizer = load_bpe(saved(tmp_path, *special, ordinary=ordinary))
  assert (tokenizer.bos_id, tokenizer.eos_id) == (bos, eos)
  name = special[eos]
  assert eos not in tokenizer.encode(name) and tokenizer.decode(tokenizer.encode(name)) == name
  assert tokenizer.decode([eos]) == "" and tokenizer.decode([eos], specials=True) == name
  if ordinary:
    assert len(tokenizer.encode("</s>")) == len(tokenizer.encode("<s>")) == 1


def test_the_template_says_which_tokens_surround_a_text(tmp_path):
  names = ["[CLS]", "[SEP]", "<s>", "</s>"]
  bert = {"type": "BertProcessing", "sep": ["[SEP]", 1], "cls": ["[CLS]", 0]}
  bytes_only = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
  bytes_too = {"type": "Sequence", "processors": [bytes_only, template(["[CLS]"], [])]}
  for processor, expected in [
    (bert, (0, 1)),
    (template(["[CLS]"], ["[SEP]"]), (0, 1)),
    (bytes_too, (0, 3)),
    (template([], ["[SEP]"]), (2, 1)),
  ]:
    tokenizer = load_bpe(saved(tmp_path, *names, post_processor=processor))
    assert (tokenizer.bos_id, tokenizer.eos_id) == expected
  path = saved(tmp_path, *names, post_processor=template(["[CLS]", "<s>"], []))
  with pytest.raises(ConfigError, match=r"bos_token: its template has more than one token there, \[CLS\] <s>\."):
    load_bpe(path)
  assert load_bpe(path, "<s>").bos_id == 2


def test_a_special_token_that_text_makes_is_refused(tmp_path):
  path = saved(tmp_path, "<s>", ordinary="</s>")
  marked = tokenizers_lib.Tokenizer.from_file(path)
  marked.add_special_tokens(["</s>", "<eos>"])
  marked.save(path)
  with pytest.raises(ConfigError, match=r"eos_token=</s>: its model makes this token of ordinary text .*<s>, </s>"):
    load_bpe(path)
  assert load_bpe(path, eos_token="<eos>").eos_id == marked.token_to_id("<eos>")


def test_text_does_not_become_a_special_token_of_a_unigram(tmp_path):
  """SentencePiece has the names of its control tokens in the vocabulary, with the best score."""
  pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, -5.0) for piece in ["\u2581", *string.printable])]
  tokenizer = tokenizers_lib.Tokenizer(models.Unigram(pieces, unk_id=0))
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
  tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  found = load_bpe(str(tmp_path / "tokenizer.json"))
  assert (found.bos_id, found.eos_id) == (1, 2)
  for text in ("a </s> b", "<s>a</s>", "<s>"):
    assert not {1, 2} & {*found.encode(text)} and found.decode(found.encode(text)) == text
  assert found.encode(SAMPLE[:5000]) == tokenizer.encode(SAMPLE[:5000], add_special_tokens=False).ids


def test_bad_tokenizer_files_are_named(tmp_path):
  path = tmp_path / "tokenizer.json"
  with pytest.raises(ConfigError, match=r"tokenizer_path=.*No such file"):
    load_bpe(str(path))
  path.write_text('{"version": "1.0"', encoding="utf-8")
  with pytest.raises(ConfigError, match=r"tokenizer_path=.*tokenizer\.json: not a tokenizers JSON file"):
    load_bpe(str(path))
  saved(tmp_path)
  with pytest.raises(ConfigError, match=r"no special token named .*: it has none, so add one to the file"):
    load_bpe(str(path))
  given = json.loads(train_bpe(["x"], 300))
  given["model"]["dropout"] = 0.1
  path.write_text(json.dumps(given), encoding="utf-8")
  with pytest.raises(ConfigError, match="its model has dropout, so each preparation would give other tokens"):
    load_bpe(str(path))


# ---- text that a tokenizer cannot represent


LETTERS = {character: number for number, character in enumerate(["<s>", "</s>", "<unk>", *"abcdefghij "])}
PIECES = [(name, -1.0) for name in ["<unk>", *"abcdefghij <s>/"]]
MODELS = {
  "BPE without unk": lambda: models.BPE(vocab=LETTERS, merges=[]),
  "BPE": lambda: models.BPE(vocab=LETTERS, merges=[], unk_token="<unk>"),
  "WordLevel": lambda: models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "abc": 3}, unk_token="<unk>"),
  "WordLevel without unk": lambda: models.WordLevel({"<s>": 0, "</s>": 1, "abc": 2}, unk_token="absent"),
  "Unigram": lambda: models.Unigram(PIECES, unk_id=0),
  "Unigram without unk": lambda: models.Unigram(PIECES[1:]),
}


def saved_model(folder: Path, name: str, **parts) -> str:
  tokenizer = tokenizers_lib.Tokenizer(MODELS[name]())
  tokenizer.add_special_tokens(["<s>", "</s>"])
  if "Word" in name:
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  for part, value in parts.items():
    setattr(tokenizer, part, value)
  tokenizer.save(str(folder / "tokenizer.json"))
  return str(folder / "tokenizer.json")


def prepared(folder: Path, tokenizer: str, texts: list[str], **keys) -> tuple[int, list[str]]:
  """(number of examples, lines of the log) of the texts, a document per example."""
  (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  files = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": f"{folder}/a.jsonl"}
  cfg = DataOptions(
    **files, packing="none", tokenizer_type="bpe", tokenizer_path=tokenizer, max_target_length=8,
    dataset_cache_directory=f"{folder}/cache", **keys,
  )  # fmt: skip
  lines: list[str] = []
  loader = make_loader(cfg, vocab_size=300, global_batch_size=1, split="train", log=lines.append)
  return loader.num_examples, lines


@pytest.mark.parametrize(
  ("name", "warning"),
  [
    ("BPE without unk", "the tokenizer has no token for 42.86% of the characters, which are lost"),
    ("BPE", "42.86% of the tokens stand for unknown text"),
    ("WordLevel", "50.00% of the tokens stand for unknown text"),
    ("Unigram", "20.00% of the tokens stand for unknown text"),
  ],
)
def test_a_warning_has_the_share_of_text_without_tokens(tmp_path, name, warning):
  path = saved_model(tmp_path, name)
  for _ in range(2):  # the second time from the cache
    _, lines = prepared(tmp_path, path, ["abc \u043c\u0438\u0440"])
    assert [line for line in lines if line.startswith("warning")] == [
      f"warning: {tmp_path}/a.jsonl: {warning}. Give a tokenizer for this text, or one that has all bytes."
    ]
  assert not [line for line in prepared(tmp_path, path, ["abc", "abc abc"])[1] if line.startswith("warning")]
