"""Conversations: records of messages, their token ids, and which of these the model is trained to say.

An id that is not trained is stored as its complement, ~id: packing cuts and joins such arrays like any others, and
`windows.example` makes tokens and weights of them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from input_pipeline.chat_template import Span, Template
from input_pipeline.documents import Conversation
from input_pipeline.tokenizer import BpeTokenizer, Tokenizer, continuation, encodable

_ROLES = ("system", "user", "assistant")
_UNKNOWN = ("tool_calls", "tool_call_id", "function_call", "weight", "train")  # fields that would change the meaning
_SHOWN = 600  # characters


def parse(record: Sequence[Any]) -> Conversation:
  """The conversation in a list of mappings with role and content. Raises ValueError, naming the message, if it is none.

  Other fields that are texts are the template's (reasoning_content); other ones are left out.
  """
  messages = []
  for number, message in enumerate(record, 1):
    if not isinstance(message, dict):
      raise ValueError(f"message {number} is not a mapping with role and content")
    for name in ("role", "content"):
      if not isinstance(message.get(name), str):
        found = "null" if message.get(name) is None else f"a {type(message[name]).__name__}"
        raise ValueError(f"the {name} of message {number} must be a string, and it is {found}")
    if message["role"] not in _ROLES:
      raise ValueError(f"message {number} has the role {message['role']!r}, and the roles are {', '.join(_ROLES)}")
    if unknown := [name for name in _UNKNOWN if message.get(name) not in (None, [], "")]:
      raise ValueError(f"message {number} has {unknown[0]}, which is not supported")
    messages.append({name: text for name, text in message.items() if isinstance(text, str)})
  return Conversation(tuple(messages))


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
  """A tokenizer with a chat template."""

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
    answer = "4711"  # which no template has of its own
    try:
      text, _ = self.template.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
    except ValueError:
      return None
    found, specials = self._whole.encode(text), set(self.special_tokens().values())
    after = (id for id, (start, _) in zip(found.ids, found.offsets) if start > text.rfind(answer) and id in specials)
    return next(after, None)

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
      return list(self._render(conversation.messages))
    except ValueError as error:
      return error

  def _render(self, messages: Sequence[dict[str, str]]) -> Iterator[tuple[str, list[_Turn]]]:
    """Yields (text, the turns that are trained in it). Usually there is one text, of the whole conversation.

    Some templates change earlier turns when others follow: Qwen3 removes their reasoning. Such a turn is trained in a
    text of its own, which ends with it, because this is what the model will have to say.
    """
    text, _ = self.template.render(messages)
    turns = [self._turn(messages, i) for i, message in enumerate(messages) if message["role"] == "assistant"]
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
