"""`python -m trainer.tools.generate RUN_DIR[@STEP] "PROMPT"`: continues a text with a trained model.

Also reads a Hugging Face folder. --prompts FILE continues every line of a file, all at the same time. --chat talks with
a model that was trained on conversations: it answers every line of the standard input, and remembers the lines before.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import trainer
from input_pipeline import first_bytes, tokenizer
from trainer import cluster, commands
from trainer.config.option_types import real, whole
from trainer.observe import screen


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("model", metavar="RUN_DIR[@STEP]")
  parser.add_argument("prompt", nargs="?", metavar="PROMPT")
  parser.add_argument("--prompts", metavar="FILE", type=os.path.expanduser, help="a prompt in every line")
  parser.add_argument("--chat", action="store_true", help="answer every line of the input; /exit, or its end, ends")
  parser.add_argument("--tokens", type=whole(1), default=128, help="the most new tokens of a text (default: 128)")
  parser.add_argument(
    "--temperature", type=_temperature, default=0.7, help="0: always the most likely token (default: 0.7)"
  )
  parser.add_argument("--top-k", type=whole(0), default=0, help="only the K most likely tokens (default: 0, all)")
  parser.add_argument(
    "--top-p", type=real(1e-6, 1), default=1.0, help="only the most likely tokens with this sum (default: 1)"
  )
  parser.add_argument("--seed", type=whole(-(2**31), 2**32 - 1), default=0)
  parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="", help="default: as in training")
  return commands.main(parser, _generate, argv)


def _temperature(text: str) -> float:
  """trainer.Sampling refuses it too, once JAX is imported."""
  found = real(0, 100)(text)
  if 0 < found < 1e-4:
    raise argparse.ArgumentTypeError(f"{text} must be 0, for the most likely token, or at least 0.0001")
  return found


def _generate(options: argparse.Namespace) -> None:
  if (options.prompt is not None) + (options.prompts is not None) + options.chat != 1:
    raise trainer.ConfigError("Give a PROMPT, --prompts FILE or --chat.")
  prompts = [options.prompt] if options.prompts is None else _lines_of(options.prompts)
  if not prompts:
    raise trainer.ConfigError(f"{options.prompts}: is empty. Write a prompt in every line.")
  cluster.check_environment()
  sampling = trainer.Sampling(options.temperature, options.top_k, options.top_p, options.seed)
  model = trainer.Model.from_run(options.model, options.dtype)
  if options.chat:
    _talk(model, options.tokens, sampling)
  else:
    _write(model, prompts, options.tokens, sampling)


def _lines_of(path: str) -> list[str]:
  """The lines of a file. Only LF, CR LF and CR end a line: str.splitlines also divides at form feeds and U+2028."""
  try:
    with Path(path).open(encoding="utf-8-sig") as file:
      return [line.removesuffix("\n") for line in file]
  except UnicodeDecodeError as error:
    remedy = first_bytes.problem(error.object[:512]) or "Convert it to UTF-8"
    raise trainer.ConfigError(f"{path}: not UTF-8 ({error.reason}). {remedy}.") from error


def _write(model: trainer.Model, prompts: Sequence[str], tokens: int, sampling: trainer.Sampling) -> None:
  """Prints the texts, a single one while it grows, and the speed on stderr."""
  encoded = [model.encode(prompt) for prompt in prompts]
  rows: list[list[int]] = [[] for _ in prompts]
  text = lambda i: tokenizer.continuation(model.tokenizer, encoded[i], rows[i])
  shown, times = "", [time.monotonic()]
  if len(prompts) == 1:
    print(prompts[0], end="", flush=True)
  for step in model.stream(encoded, tokens, sampling):
    times.append(time.monotonic())
    for row, id in zip(rows, step):
      row.extend(() if id is None else (id,))
    if len(prompts) == 1:
      shown = _show(text(0), shown)
  if len(prompts) == 1:
    print(text(0)[len(shown) :])
  else:
    for i, prompt in enumerate(prompts):
      print(f"--- {prompt}{text(i)}")
  if len(times) > 3:  # the second step is compiled before the second token
    speed = (sum(map(len, rows)) - 2 * len(rows)) / max(times[-1] - times[2], 1e-9)
    print(f"first token after {times[1] - times[0]:.2f} s, then {speed:.1f} tokens/s", file=sys.stderr)


def _talk(model: trainer.Model, tokens: int, sampling: trainer.Sampling) -> None:
  """Answers the lines of the standard input until /exit or its end. Forgets the first messages if they are too many."""
  model, chat = model.for_chats()
  limit = model.functions.cfg.max_position_embeddings - tokens
  messages: list[dict[str, str]] = []
  while (line := _line()) is not None:
    messages.append({"role": "user", "content": line})
    try:
      while len(prompt := chat.prompt(messages)) > limit and len(messages) > 2:
        del messages[:2]
        print("The conversation is too long for the model, which forgets its beginning.", file=sys.stderr)
    except ValueError as error:
      raise trainer.ConfigError(str(error)) from error
    answer, shown = list[int](), ""
    for (id,) in model.stream([prompt], tokens, sampling):
      answer.extend(() if id is None else (id,))
      shown = _show(chat.decode(answer), shown)
    text = chat.decode(answer)
    print(text[len(shown) :], flush=True)
    messages.append({"role": "assistant", "content": text})


def _show(text: str, shown: str) -> str:
  """Prints what a growing text has after its printed part `shown`. Returns what has been printed."""
  if text.endswith("\ufffd"):  # a character may need more tokens
    return shown
  print(text[len(shown) :], end="", flush=True)
  return text


def _line() -> str | None:
  """The next line of the input that is not blank; None at its end, or for /exit or Ctrl-C."""
  while True:
    try:
      line = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
      return None
    if line:
      return None if line == "/exit" else line


if __name__ == "__main__":
  screen.command(main)
