"""`python -m trainer.tools.puzzles FOLDER`: writes conversations about small puzzles, to teach a small model to answer.

Sums, days, months and words, made by rule: FOLDER gets train.jsonl and eval.jsonl. The questions of eval.jsonl are
not in train.jsonl. With --score RUN_DIR[@STEP], or a Hugging Face folder, it asks a model the questions of eval.jsonl
instead, and prints the share of exact answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import trainer
from trainer import cluster, commands
from trainer.config.option_types import whole
from trainer.observe import screen

_HELD_OUT = 5  # one question of so many
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_MONTHS = "January February March April May June July August September October November December".split()
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_GROUPS = {
  "an animal": "eagle horse mouse snake tiger zebra".split(),
  "a fruit": "apple cherry grape lemon melon peach".split(),
  "a colour": "black brown green purple white yellow".split(),
  "a tool": "brush hammer ladder needle shovel spoon".split(),
}
_WORD_PUZZLES = 240  # of each kind
_ROWS = 128  # questions that are asked at the same time


def questions() -> Iterator[tuple[str, str, str]]:
  """Yields (kind, question, answer) of every puzzle. A fact is asked in several ways."""
  for a, b in itertools.product(range(10), repeat=2):
    for text in ("What is {} plus {}?", "Add {} and {}.", "{} + {} = ?"):
      yield "sum", text.format(a, b), str(a + b)
  for what, names in (("day", _DAYS), ("month", _MONTHS)):
    for i, name in enumerate(names):
      for word, other in (("after", names[(i + 1) % len(names)]), ("before", names[i - 1])):
        for text in ("Which {} comes {} {}?", "Tell me the {} right {} {}.", "What {} is just {} {}?"):
          yield what, text.format(what, word, name), other
  for name, days in zip(_MONTHS, _LENGTHS):
    for text in ("How many days has {}?", "How long is {}, in days?", "Count the days of {}."):
      yield "length", text.format(name), str(days)
  rng = random.Random(1)
  for _ in range(_WORD_PUZZLES):
    words = [rng.choice(group) for group in rng.sample(list(_GROUPS.values()), 3)]
    place = rng.randrange(3)
    yield "place", f"Which word is the {('first', 'second', 'last')[place]} one: {', '.join(words)}?", words[place]
    group = next(name for name, members in _GROUPS.items() if words[place] in members)
    yield "group", f"Which one is {group}: {', '.join(words)}?", words[place]


def main(argv: list[str] | None = None) -> int:
  parser = commands.parser(__doc__)
  parser.add_argument("folder", metavar="FOLDER", type=Path)
  parser.add_argument("--conversations", type=whole(1), default=20_000, help="of train.jsonl (default: 20000)")
  parser.add_argument("--score", metavar="RUN_DIR[@STEP]", help="asks this model the questions of FOLDER/eval.jsonl")
  return commands.main(parser, _run, argv)


def _run(options: argparse.Namespace) -> None:
  if options.score:
    _score(options.folder / "eval.jsonl", options.score)
  else:
    _write(options.folder, options.conversations)


def _write(folder: Path, count: int) -> None:
  """Writes both files. A conversation has one to three questions, and some have a system message."""
  rng = random.Random(0)
  everything = sorted(set(questions()))
  rng.shuffle(everything)
  held_out, taught = everything[::_HELD_OUT], [one for i, one in enumerate(everything) if i % _HELD_OUT]
  kinds = sorted({kind for kind, _, _ in taught})
  by_kind = {kind: [one for one in taught if one[0] == kind] for kind in kinds}
  turns = lambda asked: [
    message
    for _, question, answer in asked
    for message in ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
  ]
  system = [{"role": "system", "content": "Answer with one word."}]
  folder.mkdir(parents=True, exist_ok=True)
  with (folder / "train.jsonl").open("w") as file:
    for _ in range(count):
      asked = [rng.choice(by_kind[rng.choice(kinds)]) for _ in range(rng.randint(1, 3))]
      file.write(json.dumps({"messages": system * (rng.random() < 0.1) + turns(asked)}) + "\n")
  with (folder / "eval.jsonl").open("w") as file:
    for one in held_out:
      file.write(json.dumps({"kind": one[0], "messages": turns([one])}) + "\n")
  print(f"{folder}: {count:,} conversations about {len(taught):,} questions, and {len(held_out):,} other questions")


def _score(path: Path, place: str) -> None:
  """Prints how many of the questions of a file the model answers exactly."""
  records = [json.loads(line) for line in path.read_text().splitlines()]
  cluster.check_environment()
  model, chat = trainer.Model.from_run(place).for_chats()
  right: Counter[str] = Counter()
  for start in range(0, len(records), _ROWS):
    some = records[start : start + _ROWS]
    steps = list(model.stream([chat.prompt(record["messages"][:1]) for record in some], 16, trainer.Sampling(0)))
    for i, record in enumerate(some):
      answer = chat.decode(id for step in steps if (id := step[i]) is not None)
      right[record["kind"]] += answer == record["messages"][1]["content"]
  for kind, count in sorted(Counter(record["kind"] for record in records).items()):
    print(f"{kind}: {right[kind]} of {count}")
  print(f"exact answers: {right.total()} of {len(records)}, {right.total() / len(records):.1%}")


if __name__ == "__main__":
  screen.command(main)
