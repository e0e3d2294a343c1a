"""A model that was trained on conversations: what its run keeps, how it talks, and its export."""

from __future__ import annotations

import io
import json
import sys

import fsspec
from tests.support import chats, hf_folders

from input_pipeline import chat_template
from input_pipeline.conversations import ChatTokenizer
from input_pipeline.tokenizer import load_bpe
from trainer.config import cli
from trainer.config.schema import Config
from trainer.tools import generate
from trainer.weights import export, tokenizers
from trainer.weights.model import Model

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "\u00e9"}]
MORE = [*HELLO, {"role": "user", "content": "world"}]


def test_a_run_keeps_its_chat_template_talks_with_it_and_exports_it(tmp_path, monkeypatch, capsys):
  import transformers  # here, as in hf_folders

  given, run, exported = (tmp_path / name for name in ("given", "run", "hf"))
  chats.write_tokenizer(given, chats.CHATML)
  (given / "generation_config.json").write_text('{"eos_token_id": 7, "top_k": 5}')
  cfg = hf_folders.model("qwen3", vocab_size=300, base_num_decoder_layers=1)
  data = {"tokenizer_type": "bpe", "tokenizer_path": str(given), "max_target_length": 32}
  config, base = Config(model=cfg, data=data), load_bpe(str(given))
  chat = ChatTokenizer(base, chat_template.find(config.data, base), "assistant", 32)
  (given / "config.json").write_text("{}")
  tokenizers.keep(str(run), chat, str(given))
  hf_folders.write_run(run, config, hf_folders.random_params(cfg))
  (run / "config.yml").write_text(cli.print_config(config))

  asked, stops = [], []

  def stream(self, prompts, tokens, sampling):
    asked.append(prompts[0])
    stops.append(self.stop)
    yield from ([id] for id in chat.encode(HELLO[1]["content"]))

  with monkeypatch.context() as patch:
    patch.setattr(Model, "stream", stream)
    patch.setattr(sys, "stdin", io.StringIO("Hello\n\n world \n/exit\nno\n"))
    assert generate.main([str(run), "--chat"]) == 0
  assert capsys.readouterr().out == "\u00e9\n\u00e9\n"
  assert asked == [chat.prompt(HELLO[:1]), chat.prompt(MORE)] and stops[0] == {0, 2, 7}

  export.export_run(str(run), str(exported), report=lambda line: None)
  theirs = transformers.AutoTokenizer.from_pretrained(exported)
  for messages in (HELLO[:1], MORE):
    ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == chat.prompt(messages)
  generation = json.loads((exported / "generation_config.json").read_text())
  assert set(generation["eos_token_id"]) == {0, 2, 7} and generation["top_k"] == 5
  again, _ = Model.from_run(str(exported)).for_chats()
  assert again.stop == {0, 2, 7}

  kept = {f"/chats/tokenizer/{file.name}": file.read_bytes() for file in (run / "tokenizer").iterdir()}
  fsspec.filesystem("memory").pipe(kept)
  there = tokenizers.of_chats("memory://chats/tokenizer", base)
  assert there.prompt(MORE) == chat.prompt(MORE)

  (run / "tokenizer" / "chat_template.jinja").unlink()
  capsys.readouterr()
  assert generate.main([str(run), "--chat"]) == 2
  said = capsys.readouterr().err
  assert "the model has no chat_template.jinja. Train it on conversations" in said and said.count("\n") == 1
