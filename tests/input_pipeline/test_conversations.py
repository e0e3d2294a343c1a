"""Conversations: what the model is trained to say, against transformers and against the definition."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest
from tests.support import chats
from tests.support.data_files import ARROW

from input_pipeline import chat_template
from input_pipeline.conversations import ChatTokenizer, Tally, parse
from input_pipeline.input_errors import ConfigError
from input_pipeline.loader import Loader, check, make_loader, open_eval_sets
from input_pipeline.options import DataOptions, MixtureEntry
from input_pipeline.tokenizer import load_bpe

EOT = 2  # <|im_end|>
HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": " world"}]


def chat_tokenizer(folder, template: str, length: int = 10**6, train_on: str = "assistant") -> ChatTokenizer:
  folder = chats.write_tokenizer(folder, template)
  base = load_bpe(str(folder))
  cfg = DataOptions(tokenizer_type="bpe", tokenizer_path=str(folder))
  return ChatTokenizer(base, chat_template.find(cfg, base), train_on, length)


def encode(tokenizer: ChatTokenizer, made: list) -> tuple[list[list[tuple[list[int], list[int]]]], Tally]:
  """((ids, mask) of the sequences of each conversation, what became of them)."""
  tally = Tally()
  found = tokenizer.encode_conversations([parse(messages) for messages in made], tally)
  ids = lambda signed: (np.maximum(signed, ~signed).tolist(), (signed >= 0).astype(int).tolist())
  return [[ids(one) for one in sequences] for sequences in found], tally


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
  """transformers' tokenizer with a template."""
  import transformers  # here, as in hf_folders

  def make(template: str):
    folder = chats.write_tokenizer(tmp_path_factory.mktemp("theirs"), template, trim=False)
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)

  return make


def clean(text: str) -> str:
  return text.encode("utf-8", "replace").decode()


@pytest.mark.parametrize("name", chats.TEMPLATES)
def test_ids_and_masks_are_those_of_transformers_and_trl(tmp_path, theirs, name):
  """With a {% generation %} block: assistant_only_loss. Else what a turn adds after the prompt for it. A turn that the
  template changes later is trained in a text that ends with it."""
  made = [[m | {"content": clean(m["content"])} for m in one] for one in chats.conversations(40)]
  other = theirs(chats.TEMPLATES[name])
  ours, tally = encode(chat_tokenizer(tmp_path, chats.TEMPLATES[name]), made)
  for messages, sequences in zip(made, ours, strict=True):
    if name == "generation":
      found = other.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
      assert sequences == [(found["input_ids"], found["assistant_masks"])]
      continue
    trained = 0
    for ids, mask in sequences:
      whole = next(
        one
        for n in range(len(messages), 0, -1)
        if ids
        == other(one := other.apply_chat_template(messages[:n], tokenize=False), add_special_tokens=False).input_ids
      )
      encoding, expected = other(whole, add_special_tokens=False), [0] * len(ids)
      for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        prompt = other.apply_chat_template(messages[:n], tokenize=False, add_generation_prompt=True)
        text = other.apply_chat_template(messages[: n + 1], tokenize=False)
        if whole.startswith(text) and (name != "qwen3" or whole == text):
          first, last = encoding.char_to_token(len(prompt)), encoding.char_to_token(len(text) - 1)
          expected[first : last + 1] = [1] * (last + 1 - first)
          trained += 1
      assert mask == expected
    assert trained == sum(message["role"] == "assistant" for message in messages)
    assert name == "qwen3" or len(sequences) == 1
  assert (tally.rewritten > 0) == (name == "qwen3") and tally.conversations == len(made)


def test_the_end_of_a_turn_is_trained_and_the_prompt_for_it_is_not(tmp_path):
  tokenizer = chat_tokenizer(tmp_path, chats.CHATML)
  assert tokenizer.turn_end() == EOT
  [[(ids, mask)]], _ = encode(tokenizer, [HELLO])
  trained = [id for id, one in zip(ids, mask) if one]
  assert ids[: -len(trained)] == tokenizer.prompt(HELLO[:1]) and trained[-2] == EOT
  other = chat_tokenizer(
    tmp_path, chats.CHATML.replace("message['content'] +", "'<|endoftext|>' + message['content'] +")
  )
  assert other.turn_end() == EOT  # and not the first token of the turn, as gpt-oss has one
  [[(all_ids, everything)]], _ = encode(chat_tokenizer(tmp_path, chats.CHATML, train_on="all"), [HELLO])
  assert all_ids == ids and everything == [0] + [1] * (len(ids) - 1)  # the first token is no target


def test_a_template_with_which_the_model_does_not_learn_to_stop_is_named(tmp_path):
  """A token behind the {% generation %} block is not trained, nor the next turn's first token (GLM's templates)."""
  blocks = chats.TEMPLATES["generation"]
  outside = blocks.replace("'<|im_end|>' }}{% endgeneration %}", "'' }}{% endgeneration %}{{- '<|im_end|>' }}")
  problem = lambda template: chat_tokenizer(tmp_path, template).turn_end_problem()
  assert [problem(template) for template in chats.TEMPLATES.values()] == [""] * len(chats.TEMPLATES)
  assert "has <|im_end|>, which ends the assistant's turn, outside its {% generation %} block" in problem(outside)
  assert "with no special token" in problem(chats.CHATML.replace("<|im_end|>", ""))


def test_a_long_conversation_is_cut_at_a_turn_or_left_out_and_counted(tmp_path):
  made = [HELLO * 2, HELLO, [HELLO[0]], [{"role": "user", "content": "x" * 50}, HELLO[1]]]
  [[(whole, _)], [(short, mask)], *_], _ = encode(chat_tokenizer(tmp_path, chats.CHATML), made)
  for length in (len(short) - 1, len(whole) - 2):
    ours, tally = encode(chat_tokenizer(tmp_path, chats.CHATML, length), made)
    assert ours == [[(short, mask)], [(short, mask)], [], []]
    assert (tally.conversations, tally.cut, tally.too_long, tally.untrained) == (4, 1, 1, 1)
  ours, tally = encode(chat_tokenizer(tmp_path, chats.CHATML, len(short) - 2), made)
  assert ours == [[], [], [], []] and tally.too_long == 3
  cfg = options(tmp_path, max_target_length=4, grain_train_files=chats.write_jsonl(tmp_path / "a.jsonl", made))
  with pytest.raises(ConfigError, match=r"3 were left out, because their first answer .*\nSet max_target_length to"):
    load(cfg)


# ---- files


def options(tmp_path, **keys) -> DataOptions:
  folder = chats.write_tokenizer(tmp_path / "tokenizer", keys.pop("template", chats.CHATML))
  given = {"dataset_type": "grain", "grain_file_type": "jsonl", "train_data_columns": "messages"}
  given |= {"tokenizer_type": "bpe", "tokenizer_path": str(folder), "max_target_length": 96, "packing": "none"}
  return DataOptions(**given | {"dataset_cache_directory": str(tmp_path / "cache")} | keys)


def load(cfg: DataOptions, said: list[str] | None = None, **keys) -> Loader:
  check([cfg], 400)
  log = said.append if said is not None else lambda line: None
  return make_loader(cfg, **{"vocab_size": 400, "global_batch_size": 2, "split": "train", "log": log, **keys})


def sequences_of(loader: Loader, count: int | None = None) -> list[tuple[list[int], list[int]]]:
  """(ids, mask of the targets) of every document in the first examples, sorted."""
  found = []
  for i in range(count or loader.num_examples):
    tokens, targets, weights, _, segments = (field[0] for field in loader.batch(i // 2, np.array([i % 2])))
    last = segments.max(initial=0)
    for segment in range(1, last + 1):
      here = segments == segment
      ids, mask = tokens[here].tolist(), weights[here].astype(int).tolist()
      if segment == last:  # of which the last token is only a target
        found.append(([*ids, int(targets[here][-1])], mask))
      else:
        assert mask.pop() == 0
        found.append((ids, mask))
  return sorted(found)


@pytest.mark.parametrize("packing", ["split", "best_fit", "none"])
def test_every_conversation_is_in_the_examples_once_and_whole(tmp_path, packing):
  made = chats.conversations(60)
  said: list[str] = []
  cfg = options(tmp_path, packing=packing, grain_train_files=chats.write_jsonl(tmp_path / "a.jsonl", made))
  loader = load(cfg, said)
  ours, tally = encode(chat_tokenizer(tmp_path / "tokenizer", chats.CHATML, 96), made)
  expected = sorted((ids, mask[1:]) for sequences in ours for ids, mask in sequences)
  assert sequences_of(loader) == expected
  assert loader.describe(1)["tokens"] == tally.trained
  assert any(f"{tally.trained / tally.tokens:.1%} trained" in line for line in said)
  assert "[[" in said[-1] and "<|im_end|>" in said[-1]


@pytest.mark.parametrize("kind", ["parquet", "hf"])
def test_other_files_have_the_same_examples(tmp_path, kind):
  arrow = pytest.importorskip("pyarrow", reason=ARROW)
  made = [[m | {"content": clean(m["content"])} for m in one] for one in chats.conversations(20)]
  plain = load(options(tmp_path, grain_train_files=chats.write_jsonl(tmp_path / "a.jsonl", made)))
  extra = [[m | {"tool_calls": None} for m in one] for one in made]  # as a struct has it
  table = arrow.table({"messages": arrow.array(extra)})
  if kind == "parquet":
    import pyarrow.parquet

    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    cfg = options(tmp_path, grain_file_type="parquet", grain_train_files=str(tmp_path / "a.parquet"))
  else:
    with arrow.ipc.new_stream(tmp_path / "data.arrow", table.schema) as writer:
      writer.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    cfg = options(tmp_path, dataset_type="hf", dataset_path=str(tmp_path))
  assert sequences_of(load(cfg)) == sequences_of(plain)


BAD = {
  "no field": ({"text": "a"}, 'no field "messages"'),
  "no list": ({"messages": "a"}, "document 2"),
  "a mixed list": ({"messages": [*HELLO, "a"]}, "message 3 is not a mapping"),
  "no role": ({"messages": [{"content": "a"}]}, "the role of message 1 must be a string, and it is null"),
  "another role": ({"messages": [*HELLO, {"role": "tool", "content": "a"}]}, "message 3 has the role 'tool'"),
  "no content": ({"messages": [{"role": "user"}]}, "the content of message 1 must be a string, and it is null"),
  "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, "and it is a list"),
  "tools": ({"messages": [HELLO[0], HELLO[1] | {"tool_calls": [{"name": "a"}]}]}, "message 2 has tool_calls"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_record_that_is_no_conversation_is_named(tmp_path, name):
  record, message = BAD[name]
  path = tmp_path / "a.jsonl"
  path.write_text("\n".join(json.dumps(one) for one in [{"messages": HELLO}, record, {"messages": HELLO}]))
  with pytest.raises(ConfigError) as error:
    load(options(tmp_path, grain_train_files=str(path)))
  assert message in str(error.value) and str(path) in str(error.value)
  if name != "no list":  # a text is another kind of document
    assert f"{path}:2:" in str(error.value)
    loader = load(options(tmp_path, grain_train_files=str(path), max_bad_records=1, packing="none"))
    assert loader.num_examples == 2


@pytest.mark.parametrize(
  "text",
  [
    "{{ ''.__class__.__mro__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set n = namespace() %}{% set n.__x__ = 1 %}",
    "{{ dict.mro() }}",
  ],
)
def test_a_template_does_not_get_out_of_its_sandbox(text):
  with pytest.raises(ValueError, match="the chat template refuses it"):
    chat_template.Template(text, {}).render(HELLO)


def test_marks_of_blocks_in_a_text_are_refused_and_stay_in_other_texts(tmp_path):
  made = [{"role": "user", "content": "\ufdd0"}, HELLO[1]]
  assert "\ufdd0" in chat_template.Template(chats.CHATML, {}).render(made)[0]
  path = chats.write_jsonl(tmp_path / "a.jsonl", [made])
  with pytest.raises(ConfigError, match=r"document 1 of .*a\.jsonl: it has U.FDD0"):
    load(options(tmp_path, template=chats.TEMPLATES["generation"], grain_train_files=path))


def test_chats_in_a_mixture_and_in_evaluation_sets(tmp_path):
  made = chats.conversations(30)
  (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": "Hello world " * 9}) + "\n" for _ in range(30)))
  chat = options(tmp_path, grain_train_files=chats.write_jsonl(tmp_path / "a.jsonl", made))
  text = chat.model_copy(update={"grain_train_files": str(tmp_path / "text.jsonl"), "train_data_columns": "text"})
  alone = {"chat": load(chat), "text": load(text)}
  entries = [MixtureEntry(name, ((0, Fraction(1)),), 1, cfg) for name, cfg in (("text", text), ("chat", chat))]
  mixed = load(chat, mixture=entries)
  count = mixed.last_step() * 2
  assert isinstance(mixed.tokenizer, ChatTokenizer) and sum(mixed.examples_by_source(count // 2).values()) == count
  both = [tuple(map(tuple, one)) for loader in alone.values() for one in sequences_of(loader)]
  assert {tuple(map(tuple, one)) for one in sequences_of(mixed, count)} <= set(both)
  keys = {"vocab_size": 400, "global_batch_size": 2, "log": lambda line: None}
  for tokenizer in (mixed.tokenizer, mixed.tokenizer.base):
    sets = open_eval_sets(chat, {"text": text, "chat": chat}, tokenizer=tokenizer, **keys)
    assert {name: sequences_of(loader) for name, loader in sets.items()} == {
      name: sequences_of(loader) for name, loader in alone.items()
    }
