"""What stands in records of conversations besides role and content: it is used, known to be harmless, or refused."""

from __future__ import annotations

import json

import pytest
from tests.input_pipeline.test_conversations import HELLO, chat_tokenizer, encode, load, options
from tests.support import chats
from tests.support.data_files import ARROW

from input_pipeline.conversations import Tally, parse
from input_pipeline.input_errors import ConfigError

USER, ASSISTANT = HELLO
TWICE = [*HELLO, {"role": "user", "content": "42"}, {"role": "assistant", "content": "\u00e9"}]


def said(tmp_path, messages: list, train_on: str = "assistant") -> list:
  [sequences], _ = encode(chat_tokenizer(tmp_path, chats.CHATML, train_on=train_on), [messages])
  return sequences


@pytest.mark.parametrize("name", ["loss", "loss_mask", "train", "trainable", "training", "weight"])
@pytest.mark.parametrize("no", [False, 0, 0.0])
def test_a_turn_that_says_so_is_not_trained(tmp_path, name, no):
  [(ids, mask)] = said(tmp_path, TWICE)
  first, second = TWICE[1] | {name: no}, TWICE[3] | {name: not no}
  [(same, left)] = said(tmp_path, [TWICE[0] | {name: no}, first, TWICE[2] | {name: None}, second])
  assert same == ids and 0 < sum(left) < sum(mask) and all(one <= two for one, two in zip(left, mask))
  assert left[-len(ids) // 3 :] == mask[-len(ids) // 3 :]
  assert said(tmp_path, [USER, ASSISTANT | {name: no}]) == []
  assert said(tmp_path, [USER, ASSISTANT | {name: True}]) == said(tmp_path, HELLO)


def test_a_turn_that_is_not_trained_needs_training_on_the_assistant(tmp_path):
  (found,) = chat_tokenizer(tmp_path, chats.CHATML, train_on="all").encode_conversations(
    [parse([USER, ASSISTANT | {"train": False}])], Tally()
  )
  assert "message 2 says that it is not trained, which needs train_on=assistant" in str(found)


@pytest.mark.parametrize(
  ("more", "reason"),
  [
    ({"loss": 0.5}, r"message 2 has loss=0.5. Write true or false"),
    ({"train": False, "weight": 1}, "message 2 has train and weight, which contradict each other"),
    ({"mask": True}, "message 2 has mask=True, which is not used. Remove it"),
    ({"images": ["a.png"]}, r"message 2 has images=\['a.png'\], which is not used"),
    ({"tool_calls": [{"id": 1}]}, "message 2 has tool_calls. Calls of tools cannot be trained on: leave such"),
    ({"content": [{"type": "text", "text": "a"}]}, "it is a list. Join the texts of its parts"),
    ({"role": "tool"}, "message 2 has the role 'tool', .* Calls of tools cannot be trained on"),
    ({"role": "gpt"}, "message 2 has the role 'gpt', .* Rename it to assistant"),
  ],
)
def test_what_cannot_be_used_is_refused_with_cause_and_remedy(more, reason):
  with pytest.raises(ValueError, match=reason):
    parse([USER, ASSISTANT | more])


def test_the_format_of_sharegpt_names_what_to_rename():
  with pytest.raises(ValueError, match="Rename from and value to role and content, and the roles human and gpt to"):
    parse([{"from": "human", "value": "Hello"}])


def test_only_the_assistant_can_be_trained():
  with pytest.raises(ValueError, match=r"message 1 has train=True, and only the assistant is trained. Remove it"):
    parse([USER | {"train": True}, ASSISTANT])


def test_harmless_and_empty_fields_change_nothing(tmp_path):
  harmless = {
    "id": 7,
    "metadata": {"a": [1]},
    "timestamp": 1.5,
    "model": "x",
    "tool_calls": [],
    "images": None,
    "loss": [],
  }
  assert said(tmp_path, [message | harmless for message in HELLO]) == said(tmp_path, HELLO)


def test_a_text_that_the_template_does_not_use_is_refused(tmp_path):
  tokenizer = chat_tokenizer(tmp_path, chats.CHATML)
  more = {"reasoning_content": "because"}
  (found,) = tokenizer.encode_conversations([parse([USER, ASSISTANT | more])], Tally())
  assert "message 2 has reasoning_content, which the chat template does not use. Remove the field" in str(found)
  used = chats.CHATML.replace("message['content'] +", "message.reasoning_content|default('') + message['content'] +")
  [[(ids, _)]], _ = encode(chat_tokenizer(tmp_path, used), [[USER, ASSISTANT | more]])
  assert len(ids) > len(said(tmp_path, HELLO)[0][0])


BESIDE = [
  ({"tools": [{"name": "f"}]}, "it has tools beside its messages, .* Calls of tools cannot be trained"),
  ({"chat_template_kwargs": {"enable_thinking": False}}, "it has chat_template_kwargs beside its messages"),
  ({"completion": HELLO[1:]}, "it has completion beside its messages, .* Join prompt and completion to one list of"),
  ({"images": ["a.png"]}, "it has images beside its messages, which would be lost. Remove it, or render"),
]


@pytest.mark.parametrize(("more", "reason"), BESIDE)
def test_fields_beside_the_messages_are_refused(tmp_path, more, reason):
  empty = dict.fromkeys(more) | {"source": "somewhere", "score": 0.5}
  lines = [{"messages": HELLO} | empty, {"messages": HELLO, **{name: [] for name in more}}, {"messages": HELLO} | more]
  (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
  cfg = options(tmp_path, grain_train_files=str(tmp_path / "a.jsonl"))
  with pytest.raises(ConfigError, match=f"a.jsonl:3: {reason}"):
    load(cfg)
  assert load(cfg.model_copy(update={"max_bad_records": 1})).num_examples == 2
  (tmp_path / "b.jsonl").write_text("".join(json.dumps({"a": {"messages": HELLO} | more}) + "\n" for _ in range(2)))
  nested = options(tmp_path, grain_train_files=str(tmp_path / "b.jsonl"), train_data_columns="a.messages")
  with pytest.raises(ConfigError, match=f"b.jsonl:1: {reason}"):
    load(nested)


def test_messages_as_json_text_are_not_trained_on_as_texts(tmp_path):
  (tmp_path / "a.jsonl").write_text(json.dumps({"messages": json.dumps(HELLO), "text": json.dumps(HELLO)}) + "\n")
  for keys in ({}, {"train_data_columns": "text", "chat_template_path": "chatml"}):
    with pytest.raises(ConfigError, match="it has texts that are JSON of messages, which would be trained on as texts"):
      load(options(tmp_path, grain_train_files=str(tmp_path / "a.jsonl"), **keys))
  (tmp_path / "b.jsonl").write_text('{"text": "[1, 2]"}\n' * 3)
  files = {"grain_train_files": str(tmp_path / "b.jsonl"), "train_data_columns": "text"}
  assert load(options(tmp_path, **files)).num_examples


LINES = f"{json.dumps({'messages': HELLO})}\n" * 3
POINTER = ":/".join(["version https", "/git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"]).encode()
STRICT = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('user first') }}{% endif %}" + chats.CHATML


def test_a_template_that_needs_the_user_first_says_what_to_remove(tmp_path):
  file = chats.write_jsonl(tmp_path / "a.jsonl", [[ASSISTANT, *HELLO]])
  cfg = options(tmp_path, grain_train_files=file, template=STRICT)
  with pytest.raises(ConfigError, match="and most templates need the user first: remove its first message"):
    load(cfg)


@pytest.mark.parametrize(
  ("content", "reason"),
  [
    (json.dumps([{"messages": HELLO}]).encode(), r"It is one JSON array. Write a record in each line: jq -c"),
    (LINES.encode("utf-16"), "It is UTF-16. Convert it: iconv"),
    (POINTER, "It is a pointer of Git LFS, .* Run git lfs pull"),
    (json.dumps({"messages": HELLO}, indent=1).encode(), "Its records have several lines"),
    (b"<!DOCTYPE html><html></html>\n", "It is a web page"),
  ],
)
def test_a_file_of_another_kind_is_named(tmp_path, content, reason):
  (tmp_path / "a.jsonl").write_bytes(content)
  with pytest.raises(ConfigError, match=reason):
    load(options(tmp_path, grain_train_files=str(tmp_path / "a.jsonl")))
  if not reason.startswith(("It is UTF-16", "It is a pointer")):
    return
  (tmp_path / "a.txt").write_bytes(content)
  text = {"dataset_type": "text", "dataset_path": str(tmp_path / "a.txt"), "tokenizer_type": "byte"}
  with pytest.raises(ConfigError, match=reason):
    load(options(tmp_path, **text, tokenizer_path="", train_data_columns="text"))
  folder = chats.write_tokenizer(tmp_path / "t", chats.CHATML)
  (folder / "tokenizer.json").write_bytes(content)
  file = chats.write_jsonl(tmp_path / "b.jsonl", [HELLO])
  with pytest.raises(ConfigError, match=f"tokenizer_path=.*{reason}"):
    load(options(tmp_path, grain_train_files=file, tokenizer_path=str(folder)))
  if ARROW:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(ConfigError, match=f"a.parquet cannot be read as Parquet. {reason}"):
      load(options(tmp_path, grain_train_files=str(tmp_path / "a.parquet"), grain_file_type="parquet"))
