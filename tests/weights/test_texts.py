"""The text that a model adds to a prompt, as its tokenizer writes it behind the prompt, and files of prompts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import tokenizers as library
from tests.support import chats, hf_folders
from tokenizers import decoders, models, normalizers, pre_tokenizers

from input_pipeline.chat_template import Template
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_bpe
from trainer.config.schema import Config
from trainer.tools import generate
from trainer.weights import export, generation, sample, tokenizers
from trainer.weights.model import Model

SPECIAL = ["<s>", "</s>"]


def metaspace() -> library.Tokenizer:
  made = library.Tokenizer(models.WordLevel({"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "\u2581sat": 3}, "<unk>"))
  made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
  return made


def strip() -> library.Tokenizer:
  """As Llama 2: the decoder removes one blank at the beginning."""
  made = library.Tokenizer(models.WordLevel({"<unk>": 0, "\u2581the": 1, "\u2581cat": 2, "\u2581sat": 3}, "<unk>"))
  made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
  made.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
  made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
  return made


def word_piece() -> library.Tokenizer:
  made = library.Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "cat": 2, "sat": 3}, unk_token="[UNK]"))
  made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
  return made


def tokenizer(make) -> Tokenizer:
  made = make()
  made.add_special_tokens(SPECIAL)
  return BpeTokenizer(made.to_str())


@pytest.fixture(params=[metaspace, strip, word_piece, None], ids=["Metaspace", "Strip", "WordPiece", "bytes"])
def words(request) -> Tokenizer:
  return tokenizer(request.param) if request.param else ByteTokenizer()


def continued(words: Tokenizer, monkeypatch) -> Model:
  """A model that continues "the" and "the cat" with " sat"."""
  added = words.encode("the cat sat")[len(words.encode("the cat")) :]
  steps = lambda *given, **keys: ([id] * len(given[-2] if isinstance(given[0], Model) else given[2]) for id in added)
  monkeypatch.setattr(Model, "stream", lambda self, prompts, tokens, sampling: ([id] * len(prompts) for id in added))
  monkeypatch.setattr(generation, "stream", steps)
  return Model(SimpleNamespace(), {}, words, frozenset(), 8, "")


def test_a_text_goes_on_behind_its_prompt(words, monkeypatch, tmp_path, capsys):
  model = continued(words, monkeypatch)
  assert model.generate(["the cat", "the"]) == [" sat", " sat"]
  assert sample.continue_text(None, {}, words, "the cat", tokens=1) == " sat"
  monkeypatch.setattr(Model, "from_run", lambda *arguments: model)
  assert generate.main(["RUN", "the cat"]) == 0
  assert capsys.readouterr().out == "the cat sat\n"
  (tmp_path / "prompts").write_text("the cat\nthe\n")
  assert generate.main(["RUN", "--prompts", str(tmp_path / "prompts")]) == 0
  assert capsys.readouterr().out == "--- the cat sat\n--- the sat\n"


def test_a_file_of_prompts_has_a_prompt_in_each_line(monkeypatch, tmp_path, capsys):
  model = continued(ByteTokenizer(), monkeypatch)
  monkeypatch.setattr(Model, "from_run", lambda *arguments: model)
  asked = []
  monkeypatch.setattr(Model, "encode", lambda self, text: asked.append(text) or list(text.encode()))
  lines = ["one\u2028line", "a\x0cform feed", "\u00e9\x85\x1c", "", "last"]
  for end in ("\n", "\r\n"):
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbf" + end.join(lines).encode() + end.encode())
    assert generate.main(["RUN", "--prompts", str(tmp_path / "prompts")]) == 0
    assert asked == lines
    asked.clear()


@pytest.mark.parametrize(("content", "remedy"), [("\u00e9".encode("utf-16"), "It is UTF-16"), (b"\xe9", "Convert it")])
def test_a_file_of_prompts_that_is_not_utf8_is_named(tmp_path, capsys, content, remedy):
  (tmp_path / "prompts").write_bytes(content)
  assert generate.main(["RUN", "--prompts", str(tmp_path / "prompts")]) == 2
  assert f"error: {tmp_path}/prompts: not UTF-8 (" in (told := capsys.readouterr().err) and remedy in told


def test_a_tokenizer_of_windows_keeps_its_chat_template(tmp_path):
  change = lambda data: b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n")
  given, run, exported = (tmp_path / name for name in ("given", "run", "hf"))
  chats.write_tokenizer(given, chats.CHATML)
  text = json.dumps(json.loads((given / "tokenizer.json").read_text()), indent=2)
  (given / "tokenizer.json").write_bytes(change(text.encode()))
  (given / "generation_config.json").write_bytes(change(b'{"eos_token_id": 7,\n"top_k": 5}'))
  (given / "tokenizer_config.json").write_bytes(change((given / "tokenizer_config.json").read_bytes()))
  (given / "config.json").write_text("{}")
  cfg = hf_folders.model("qwen3", vocab_size=300, base_num_decoder_layers=1)
  base = load_bpe(str(given))
  tokenizers.keep(str(run), base, str(given))
  kept = {file.name for file in (run / "tokenizer").iterdir()}
  assert {"generation_config.json", "tokenizer_config.json"} <= kept
  assert tokenizers.stop_ids(f"{run}/tokenizer", base) == {base.eos_id, 7}
  data = {"tokenizer_type": "bpe", "tokenizer_path": str(given)}
  hf_folders.write_run(run, Config(model=cfg, data=data), hf_folders.random_params(cfg))
  export.export_run(str(run), str(exported), report=lambda line: None)
  assert json.loads((exported / "generation_config.json").read_bytes())["top_k"] == 5
  messages = [{"role": "user", "content": "Hello"}]
  expected = ChatTokenizer(base, Template(chats.CHATML, base.token_names()), "assistant", 32).prompt(messages)
  assert tokenizers.of_chats(str(exported), load_bpe(str(exported))).prompt(messages) == expected
