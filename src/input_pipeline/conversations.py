"""Conversations: records of messages, their token ids, and which of these the model is trained to say.

An id that is not trained is stored as its complement, ~id: packing cuts and joins such arrays like any others, and
`windows.example` makes tokens and weights of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.chat_template import Span, Template
from input_pipeline.documents import Conversation
from input_pipeline.input_errors import shorten
from input_pipeline.tokenizer import BpeTokenizer, Tokenizer, continuation, encodable

_ROLES = ("system", "user", "assistant")
_TRAIN = ("loss", "loss_mask", "train", "trainable", "training", "weight")  # of a message: whether it is trained
# Of a message: they say nothing about its text or its loss.
_HARMLESS = frozenset(
  "avatar created created_at date finish_reason id idx index lang language logprobs message_id meta metadata model "
  " model_name parent_id score scores source timestamp tokens turn turn_id usage user_id uuid".split()
)
# Columns or fields beside the messages: what programs give to the template, or show to the model.
BESIDE = frozenset(
  "audio audios chat_template_kwargs chosen completion documents functions image images rejected system system_prompt "
  "tools video videos".split()
)
_OTHER_ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_OTHER_ROLES |= {"developer": "system", "chatbot": "assistant", "ai": "assistant"}
_TOOLS = "Calls of tools cannot be trained on: leave such conversations out, or render them to texts first"
_REMEDIES = {"tools": _TOOLS, "functions": _TOOLS, "completion": "Join prompt and completion to one list of messages"}
_SHOWN = 600  # characters
_ANSWER = "4711"  # which no template has of its own
_EXCHANGE = ({"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER})


class ConversationError(ValueError):
  """A record is no conversation that can be used. The message has cause and remedy."""


def parse(record: Sequence[Any], beside: Mapping[str, Any] | None = None) -> Conversation:
  """The conversation in a list of mappings with role and content. beside: the other fields of the record.

  Other fields that are texts are the template's (reasoning_content). Raises ConversationError, naming message and
  remedy, if it is no conversation, or a field would change what is trained and cannot be used.
  """
  beside = beside or {}
  for name in sorted(BESIDE & beside.keys()):
    if _says_something(beside[name]):
      remedy = _REMEDIES.get(name, "Remove it, or render the conversations to texts first")
      raise ConversationError(f"it has {name} beside its messages, which would be lost. {remedy}")
  messages, untrained = [], set()
  for number, message in enumerate(record, 1):
    if not isinstance(message, dict):
      raise ConversationError(f"message {number} is not a mapping with role and content")
    _check_fields(message, number)
    if _says_not_to_train(message, number):
      untrained.add(number - 1)
    messages.append({name: text for name, text in message.items() if isinstance(text, str)})
  return Conversation(tuple(messages), frozenset(untrained))


def _check_fields(message: Mapping[str, Any], number: int) -> None:
  """Raises ConversationError if role, content or another field of a message cannot be used."""
  for name in ("tool_calls", "tool_call_id", "function_call"):
    if _says_something(message.get(name)):
      raise ConversationError(f"message {number} has {name}. {_TOOLS}")
  for name in ("role", "content"):
    if not isinstance(message.get(name), str):
      found = "null" if message.get(name) is None else f"a {type(message[name]).__name__}"
      remedy = ""
      if {"from", "value"} <= message.keys():
        remedy = ". Rename from and value to role and content, and the roles human and gpt to user and assistant"
      elif name == "content" and isinstance(message.get(name), list):
        remedy = ". Join the texts of its parts; images and sounds cannot be trained on"
      raise ConversationError(f"the {name} of message {number} must be a string, and it is {found}{remedy}")
  if (role := message["role"]) not in _ROLES:
    remedy = f". {_TOOLS}" if role in ("tool", "function", "ipython", "observation") else ""
    if other := _OTHER_ROLES.get(role.lower(), role.lower() if role.lower() in _ROLES else ""):
      remedy = f". Rename it to {other}"
    raise ConversationError(f"message {number} has the role {role!r}, and the roles are {', '.join(_ROLES)}{remedy}")
  for name, value in message.items():
    if not isinstance(value, str) and name not in _HARMLESS and name not in _TRAIN and _says_something(value):
      raise ConversationError(f"message {number} has {name}={shorten(repr(value))}, which is not used. Remove it")
    if isinstance(value, str) and value and (name == "mask" or name in _TRAIN):
      raise ConversationError(f"message {number} has {name}={value!r}. Write true or false")


def _says_not_to_train(message: Mapping[str, Any], number: int) -> bool:
  """Whether an assistant's message says that it is not trained. Raises ConversationError for other numbers."""
  said = {name: message[name] for name in _TRAIN if message.get(name) not in (None, [], "")}
  for name, value in said.items():
    if isinstance(value, list) or value not in (0, 1):
      raise ConversationError(f"message {number} has {name}={shorten(repr(value))}. Write true or false")
    if value and message["role"] != "assistant":
      raise ConversationError(f"message {number} has {name}={value!r}, and only the assistant is trained. Remove it")
  if len({bool(value) for value in said.values()}) > 1:
    raise ConversationError(f"message {number} has {' and '.join(said)}, which contradict each other")
  return message["role"] == "assistant" and not all(said.values())


def _says_something(value: Any) -> bool:
  """Whether a field has a value: columns of Arrow have null, or an empty list, where a record has none."""
  if isinstance(value, dict):
    return any(map(_says_something, value.values()))
  return value is not None and value not in ("", [], "[]", "{}", "null")


@dataclass
class Tally:
  """What became of conversations: JSON with `vars`."""

  conversations: int = 0
  tokens: int = 0
  trained: int = 0
  rewritten: int = 0
  """Conversations that became several sequences."""
  cut: int = 0
  too_long: int = 0
  untrained: int = 0
  example: str = ""

  def lines(self) -> Iterator[str]:
    """Yields lines for the log."""
    parts = [
      f"{self.conversations:,} conversations, {self.tokens:,} tokens, {self.trained / max(self.tokens, 1):.1%} trained",
      f"{self.rewritten:,} became several sequences, because the template changes earlier turns" * (self.rewritten > 0),
      f"{self.cut:,} were cut at a turn, because they are longer than max_target_length" * (self.cut > 0),
      f"{self.too_long:,} were left out, because their first answer ends after max_target_length" * (self.too_long > 0),
      f"{self.untrained:,} were left out, because no token is trained" * (self.untrained > 0),
    ]
    yield "; ".join(filter(None, parts))
    if self.example:
      yield f"A conversation, with the trained tokens in [[ ]]: {self.example!r}"


class _Turn(NamedTuple):
  """A turn of the assistant at the end of a text."""

  text: str
  trained: list[Span]


class ChatTokenizer(BpeTokenizer):
  def __init__(self, base: BpeTokenizer, template: Template, train_on: str, length: int) -> None:
    """train_on, length: the options train_on and max_target_length."""
    import tokenizers

    vars(self).update(vars(base))  # not read from its JSON again, which takes a second for a large vocabulary
    self.base, self.template = base, template
    self._train_on, self._length = train_on, length
    # Without a post-processor: it adds tokens that the template has, and cuts blanks off the places of tokens.
    self._whole = tokenizers.Tokenizer.from_str(json.dumps(json.loads(base.json_text) | {"post_processor": None}))
    self._whole.no_truncation()
    self._whole.no_padding()
    content = hashlib.sha256(json.dumps([template.text, template.names], sort_keys=True).encode()).hexdigest()
    self.fingerprint = f"{base.fingerprint} chat-1-{content} train_on={train_on}"

  def __reduce__(self) -> tuple[Any, ...]:
    return type(self), (self.base, self.template, self._train_on, self._length)

  def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
    """The ids after which the assistant answers. Raises ValueError if the template refuses the messages."""
    text, _ = self.template.render(messages, prompt=True)
    return self._whole.encode(encodable(text), add_special_tokens=False).ids

  def turn_end(self) -> int | None:
    """The special token that ends a turn of the assistant; None if the template has none."""
    try:
      text, _ = self.template.render(_EXCHANGE)
    except ValueError:
      return None
    found, specials = self._whole.encode(text), set(self.special_tokens().values())
    after = (id for id, (start, _) in zip(found.ids, found.offsets) if start > text.rfind(_ANSWER) and id in specials)
    return next(after, None)

  def turn_end_problem(self) -> str:
    """Why the model will not learn to end its turn, as a sentence; "" if it will."""
    if (end := self.turn_end()) is None:
      return "The chat template ends the assistant's turn with no special token, so the model cannot say its end."
    (sequences,) = self.encode_conversations([Conversation(_EXCHANGE)], Tally())
    if isinstance(sequences, ValueError) or not sequences or any((ids == end).any() for ids in sequences):
      return ""
    token = next(name for name, id in self.special_tokens().items() if id == end)
    return (
      f"The chat template has {token}, which ends the assistant's turn, outside its {{% generation %}} block, so the "
      "model will not learn to stop. Move the token into the block."
    )

  def encode_conversations(
    self, conversations: Sequence[Conversation], tally: Tally
  ) -> list[list[np.ndarray] | ValueError]:
    """The sequences of each conversation: int32 ids, ~id where the model is not trained. ValueError: it has no text."""
    rendered = [self._try_render(conversation) for conversation in conversations]
    texts = [encodable(text) for one in rendered if isinstance(one, list) for text, _ in one]
    encoded = iter(self._whole.encode_batch(texts, add_special_tokens=False))
    return [
      self._sequences([(next(encoded), turns) for _, turns in one], tally) if isinstance(one, list) else one
      for one in rendered
    ]

  def _sequences(self, rendered: Sequence[tuple[Any, list[_Turn]]], tally: Tally) -> list[np.ndarray]:
    """The sequences of a conversation that are not too long and have trained tokens."""
    sequences, cut, too_long = [], False, False
    for encoding, turns in rendered:
      ids = np.array(encoding.ids, np.int32)
      starts, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
      trained = np.zeros(len(ids), bool)
      for begin, end in itertools.chain.from_iterable(turn.trained for turn in turns):
        trained |= (starts < end) & (ends > begin)
      trained[:1] = False  # the first token is no target
      if not trained.any():
        continue
      # A window has one token more than targets.
      lengths = [int(np.searchsorted(starts, len(turn.text))) for turn in turns]
      length = max((n for n in lengths if n <= self._length + 1), default=0)
      if len(ids) > self._length + 1:
        cut |= length > 0
        too_long |= length == 0
        ids, trained = ids[:length], trained[:length]
      if trained.any():
        sequences.append(np.where(trained, ids, ~ids))
    tally.conversations += 1
    tally.tokens += sum(map(len, sequences))
    tally.trained += sum(int((ids >= 0).sum()) for ids in sequences)
    tally.rewritten += len(sequences) > 1
    tally.cut += bool(sequences) and (cut or too_long)
    tally.too_long += too_long and not sequences
    tally.untrained += not sequences and not too_long
    if sequences and not tally.example:
      tally.example = marked(self, sequences[0], "[[", "]]")[:_SHOWN]
    return sequences

  def _try_render(self, conversation: Conversation) -> list[tuple[str, list[_Turn]]] | ValueError:
    try:
      return list(self._render(conversation.messages, conversation.untrained))
    except ValueError as error:
      return error

  def _render(self, messages: Sequence[dict[str, str]], untrained: frozenset[int]) -> Iterator[tuple[str, list[_Turn]]]:
    """Yields (text, the turns that are trained in it). Usually there is one text, of the whole conversation.

    Some templates change earlier turns when others follow: Qwen3 removes their reasoning. Such a turn is trained in a
    text of its own, which ends with it, because this is what the model will have to say.
    """
    self._check_template(messages)
    if untrained and self._train_on == "all":
      raise ValueError(f"message {min(untrained) + 1} says that it is not trained, which needs train_on=assistant")
    text, _ = self.template.render(messages)
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i not in untrained]
    turns = [self._turn(messages, i) for i in said]
    if self._train_on == "all":
      yield (
        text,
        [*(_Turn(turn.text, []) for turn in turns if text.startswith(turn.text)), _Turn(text, [(0, len(text))])],
      )
      return
    while turns:
      here = [turn for turn in turns if text.startswith(turn.text)]
      if here:
        yield text, here
      turns = [turn for turn in turns if turn not in here]
      text = turns[-1].text if turns else ""

  def _check_template(self, messages: Sequence[dict[str, str]]) -> None:
    """Raises ValueError for a text in the messages that the template would leave out."""
    for number, message in enumerate(messages, 1):
      for name in message.keys() - {"role", "content"}:
        if message[name] and name not in _HARMLESS and not self.template.names_field(name):
          raise ValueError(f"message {number} has {name}, which the chat template does not use. Remove the field")

  def _turn(self, messages: Sequence[dict[str, str]], number: int) -> _Turn:
    """The text of the messages up to this number, and what is trained of the last one. Raises ValueError."""
    text, blocks = self.template.render(messages[: number + 1])
    if self.template.has_blocks:
      before = self.template.render(messages[:number])[1] if number else []
      added = blocks[len(before) :]
      # The text behind the last block depends on whether this is the last message.
      return _Turn(text[: added[-1][1]] if added else text, added)
    prompt, _ = self.template.render(messages[:number], prompt=True)
    if self._train_on == "assistant" and not text.startswith(prompt):
      raise ValueError(
        f"message {number + 1} does not follow the chat template's prompt for an answer, which ends in {prompt[-40:]!r}"
      )
    return _Turn(text, [(len(prompt), len(text))])


def marked(tokenizer: Tokenizer, ids: np.ndarray, begin: str, end: str) -> str:
  """The text of ids as in `encode_conversations`, with `begin` and `end` around what is trained."""
  parts, before = [], list[int]()
  for is_trained, run in itertools.groupby(ids.tolist(), lambda id: id >= 0):
    here = [max(id, ~id) for id in run]
    text = continuation(tokenizer, before, here, specials=True)
    before += here
    parts.append(f"{begin}{text}{end}" if is_trained else text)
  return "".join(parts)
