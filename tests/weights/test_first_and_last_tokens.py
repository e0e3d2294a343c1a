"""The tokens around a document are the same in training, in texts and scores of the model, and in an export."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tests.support import hf_folders
from tests.support.seeds import few
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from input_pipeline import prepare, tokenizer
from input_pipeline.documents import BadRecords
from input_pipeline.tokenizer import train_bpe
from trainer.config import cli
from trainer.config.load import load
from trainer.config.schema import Config, ModelSection
from trainer.weights import export, sources
from trainer.weights import tokenizers as tokenizers_of_runs

TEXT = "a text of words"


def byte_level(*special):
  library = tokenizers.Tokenizer(tokenizers.Tokenizer.from_str(train_bpe([TEXT] * 3, 270)).model)
  library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
  library.add_special_tokens(list(special))
  return library


def template(library, single):
  names = [piece for piece in single.split() if piece != "$A"]
  tokens = [(name, library.token_to_id(name)) for name in names]
  library.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
  return library


def sentencepiece():
  """As Llama 2 and Mistral: no template; the class of the tokenizer adds <s>."""
  pieces = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
  pieces |= {piece: 259 + i for i, piece in enumerate("\u2581aetxofwrds")}
  library = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
  library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
  library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
  library.add_special_tokens(["<s>", "</s>"])
  return library


def unigram():
  pieces = [
    ("<unk>", 0.0),
    ("<s>", 0.0),
    ("</s>", 0.0),
    ("\u2581", -1.0),
    *((letter, -2.0) for letter in "aetxofwrds</>"),
  ]
  library = tokenizers.Tokenizer(models.Unigram(pieces, 0))
  library.pre_tokenizer = pre_tokenizers.Metaspace()
  library.add_special_tokens(["<s>", "</s>"])
  return library


def make(name):
  """(tokenizer, tokenizer_config.json that was published beside it)."""
  fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
  match name:
    case "trained here":
      return tokenizers.Tokenizer.from_str(train_bpe([TEXT] * 3, 270)), {}
    case "llama3":
      library = template(byte_level("<|begin_of_text|>", "<|end_of_text|>"), "<|begin_of_text|> $A")
      library.post_processor = processors.Sequence([processors.ByteLevel(), library.post_processor])
      return library, fast | {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    case "llama2":
      names = {
        key: {"__type": "AddedToken", "content": name} for key, name in (("bos_token", "<s>"), ("eos_token", "</s>"))
      }
      return sentencepiece(), {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": True,
        **names,
      }
    case "qwen":
      library = byte_level("<|endoftext|>", "<|im_end|>")
      library.post_processor = processors.ByteLevel()
      return library, fast | {"add_bos_token": False, "bos_token": None, "eos_token": "<|im_end|>"}
    case "unigram with an end":
      return template(unigram(), "$A </s>"), {}
    case "both in the template":
      return template(unigram(), "<s> $A </s>"), {}
    case "roberta":
      library = byte_level("<s>", "</s>", "<sep>")
      library.post_processor = processors.RobertaProcessing(
        ("</s>", library.token_to_id("</s>")), ("<s>", library.token_to_id("<s>"))
      )
      return library, {}


CASES = [
  ("trained here", {}, ["<|bos|>"], "<|eos|>"),
  ("trained here", {"bos_token": "none"}, [], "<|eos|>"),
  ("llama3", {}, ["<|begin_of_text|>"], "<|end_of_text|>"),
  ("llama3", {"bos_token": "none"}, [], "<|end_of_text|>"),
  ("llama3", {"bos_token": "<|end_of_text|>"}, ["<|end_of_text|>"], "<|end_of_text|>"),
  ("llama2", {}, ["<s>"], "</s>"),
  ("llama2", {"bos_token": "none"}, [], "</s>"),
  ("qwen", {}, [], "<|endoftext|>"),
  ("qwen", {"bos_token": "<|im_end|>", "eos_token": "<|im_end|>"}, ["<|im_end|>"], "<|im_end|>"),
  ("unigram with an end", {}, ["<s>"], "</s>"),
  ("unigram with an end", {"bos_token": "none"}, [], "</s>"),
  ("both in the template", {}, ["<s>"], "</s>"),
  ("both in the template", {"bos_token": "</s>"}, ["</s>"], "</s>"),
  ("roberta", {}, ["<s>"], "</s>"),
]


@pytest.mark.parametrize(("name", "keys", "first", "last"), few(CASES[1::4], CASES))
def test_an_export_begins_a_text_as_the_documents_of_its_run_begin(tmp_path, name, keys, first, last):
  import transformers  # here, as in hf_folders

  library, config = make(name)
  run, exported, kept = tmp_path / "run", str(tmp_path / "hf"), tmp_path / "run" / "tokenizer"
  kept.mkdir(parents=True)
  library.save(str(kept / "tokenizer.json"))
  if config:
    (kept / "tokenizer_config.json").write_text(json.dumps(config))
  unset = {"max_position_embeddings": ModelSection.model_fields["max_position_embeddings"].default}
  cfg = hf_folders.model("qwen3" if name == "qwen" else "llama3", vocab_size=300, base_num_decoder_layers=1, **unset)
  data = {"tokenizer_type": "bpe", "tokenizer_path": str(kept / "tokenizer.json"), "max_target_length": 32, **keys}
  run_config = Config(model=cfg, data=data)
  hf_folders.write_run(run, run_config, hf_folders.random_params(cfg))
  (run / "config.yml").write_text(cli.print_config(run_config))
  export.export_run(str(run), exported, report=lambda line: None)

  assert json.loads((tmp_path / "hf" / "config.json").read_text())["max_position_embeddings"] == 32

  trained = tokenizers_of_runs.of_source(sources.open_source(str(run)))
  ((document,),) = prepare.token_groups([[("", TEXT)]], trained, 300, BadRecords(0))
  plain = library.encode(TEXT, add_special_tokens=False).ids
  assert document.tolist() == [*map(library.token_to_id, first), *plain, library.token_to_id(last)]
  theirs = transformers.AutoTokenizer.from_pretrained(exported)
  assert [*theirs(TEXT).input_ids, library.token_to_id(last)] == document.tolist()
  assert not first or [theirs.bos_token] == first
  for place in (str(run), exported):
    again = tokenizers_of_runs.of_source(sources.open_source(place))
    assert tokenizer.prompt(again, TEXT) == document[:-1].tolist() and again.eos_id == document[-1]
    data = load(["configs/base.yml", f"load_parameters_path={place}"], check_paths=False).data
    continued = tokenizer.load_bpe(data.tokenizer_path, data.bos_token, data.eos_token)
    assert (continued.bos_id, continued.eos_id) == (trained.bos_id, trained.eos_id)
