"""Conversations, chat templates with the behaviours of published ones, and a tokenizer for them."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
  "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
  "chatml": CHATML,
  # A system message of its own.
  "smollm2": "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}"
  + CHATML,
  # No line end after a turn, trimmed contents, a token before everything.
  "llama3": "{% for m in messages %}{% set t = '<|im_start|>' + m.role + '\\n\\n' + m.content | trim + '<|im_end|>' %}"
  "{% if loop.first %}{% set t = bos_token + t %}{% endif %}{{ t }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}",
  # The last answer begins with its reasoning, and earlier answers lose theirs.
  "qwen3": """
{%- for m in messages %}
  {%- set text = m.content.split('</think>')[-1].lstrip('\\n') %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {%- if m.role == 'assistant' and loop.last %}
    {%- set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content else '' %}
    {{- '<think>\\n' + thought.strip('\\n') }}
    {{- '\\n</think>\\n\\n' }}
  {%- endif %}
  {{- (text if m.role == 'assistant' else m.content) + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}""",
  # With what only some templates use, and a token at the end of everything.
  "generation": """
{%- if documents is not none %}{{ raise_exception('documents') }}{% endif %}
{%- set space = namespace(messages=[] + messages) %}
{%- for m in space.messages %}
  {{- '<|im_start|>' + m.role + '\\n' }}
  {%- if m.role == 'assistant' %}{%+ generation %}{{- m.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
  {%- else %}{{- m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt else eos_token }}""",
}
_PIECES = [
  "Hello",
  " world",
  "\n",
  "\n\n",
  "  ",
  "\u00e9",
  "\u65e5\u672c",
  "\U0001f642",
  "42",
  "\ud800",
  "<|",
  "{{ x }}",
]


def conversations(count: int, seed: int = 0) -> list[list[dict[str, str]]]:
  """Conversations of several turns, some with a system message, empty turns, reasoning, or no last answer."""
  rng = random.Random(seed)

  def text() -> str:
    return "".join(rng.choice(_PIECES) for _ in range(rng.choice([0, 1, 2, 5])))

  made = []
  for _ in range(count):
    messages = [{"role": "system", "content": text()}] * (rng.random() < 0.5)
    for _ in range(rng.randint(1, 3)):
      answer = f"<think>\n{text()}\n</think>\n\n" * (rng.random() < 0.3) + text()
      messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": answer}]
    made.append(messages + [{"role": "user", "content": text()}] * (rng.random() < 0.2))
  return made


@functools.cache
def _tokenizer() -> str:
  import tokenizers
  from tokenizers import decoders, models, pre_tokenizers, processors, trainers

  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
  tokenizer.train_from_iterator([*_PIECES[:-3], "user assistant system\n\n think\n\n\n"] * 9, trainer)
  # As Llama 3's: it would add a token, and cut blanks off the places of tokens.
  begin = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
  tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), begin])
  return tokenizer.to_str()


def write_tokenizer(folder: Path, template: str | list | None, trim: bool = True) -> Path:
  """A folder with tokenizer.json and tokenizer_config.json, as transformers writes it.

  trim: blanks do not belong to their tokens. transformers then trains nothing of an answer that begins with a blank.
  """
  folder.mkdir(exist_ok=True, parents=True)
  content = json.loads(_tokenizer())
  content["post_processor"]["processors"][0]["trim_offsets"] = trim
  (folder / "tokenizer.json").write_text(json.dumps(content))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
  return folder


def write_jsonl(path: Path, chats: list) -> str:
  path.write_text("".join(json.dumps({"id": 1, "messages": messages}) + "\n" for messages in chats))
  return str(path)
