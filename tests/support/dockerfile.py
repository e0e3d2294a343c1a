"""Reads a Dockerfile: its stages, their instructions, and which stages a target needs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# The instructions that this project's Dockerfile uses. Another one is an error, not something to skip.
KNOWN = frozenset("ARG CMD COPY ENTRYPOINT ENV FROM LABEL RUN USER WORKDIR".split())
SYSTEM_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Instruction:
  """One instruction. `text` is its arguments on one line, `line` the number of its first line."""

  line: int
  keyword: str
  text: str

  @property
  def words(self) -> list[str]:
    """The arguments without options (--from=x)."""
    return [word for word in self.text.split() if not word.startswith("--")]

  def option(self, name: str) -> str:
    """The value of --name=value, or ''."""
    found = re.search(rf"(?:^|\s)--{name}=(\S+)", self.text)
    return found[1] if found else ""


@dataclass
class Stage:
  """`FROM base AS name` and the instructions after it."""

  name: str
  base: str
  instructions: list[Instruction] = field(default_factory=list)

  @property
  def needs(self) -> list[str]:
    """The images and stages that this stage starts from or copies from."""
    return [self.base, *[source for step in self.instructions if (source := step.option("from"))]]


def parse(text: str) -> dict[str, Stage]:
  """{name: Stage} in the order of the file, with the default values of the ARGs before the first FROM.

  Raises ValueError for an unknown instruction, and for a stage without a name.
  """
  values: dict[str, str] = {}
  stages: dict[str, Stage] = {}
  for step in instructions(text):
    if step.keyword not in KNOWN:
      raise ValueError(f"line {step.line}: {step.keyword} is not one of {', '.join(sorted(KNOWN))}.")
    if step.keyword == "FROM":
      found = re.fullmatch(r"(\S+) AS (\S+)", step.text)
      if found is None:
        raise ValueError(f"line {step.line}: FROM {step.text}: a stage needs a name. Write FROM IMAGE AS NAME.")
      stages[found[2]] = Stage(found[2], substitute(found[1], values))
    elif not stages:
      name, _, default = step.text.partition("=")
      values[name] = default
    else:
      list(stages.values())[-1].instructions.append(step)
  return stages


def instructions(text: str) -> list[Instruction]:
  """All instructions, with continuation lines joined and comments left out."""
  found: list[Instruction] = []
  parts: list[str] = []
  start = 0
  for number, line in enumerate(text.splitlines(), 1):
    stripped = line.strip()
    if not stripped or stripped.startswith("#"):
      continue
    start = start if parts else number
    parts.append(stripped.removesuffix("\\").strip())
    if not stripped.endswith("\\"):
      keyword, _, rest = " ".join(parts).partition(" ")
      found.append(Instruction(start, keyword.upper(), rest.strip()))
      parts = []
  return found


def order(stages: Mapping[str, Stage], target: str) -> list[Stage]:
  """The stages that `target` needs, each after the stages that it needs itself."""
  found: dict[str, Stage] = {}

  def visit(name: str) -> None:
    if name in stages and name not in found:
      for needed in stages[name].needs:
        visit(needed)
      found[name] = stages[name]

  visit(target)
  return list(found.values())


def environment(
  stages: Mapping[str, Stage], target: str, before: int | None = None, build_args: Mapping[str, str] | None = None
) -> dict[str, str]:
  """The environment of a stage: PATH of the base image, and ENV up to the line `before` (None: all of them).

  build_args: the values of --build-arg. The stage's ARGs are variables only while it is built, so not without `before`.
  """
  stage = stages[target]
  found = environment(stages, stage.base) if stage.base in stages else {"PATH": SYSTEM_PATH}
  for step in stage.instructions:
    if step.keyword == "ARG" and before is not None and step.line < before:
      name, _, default = step.text.partition("=")
      found[name] = (build_args or {}).get(name, default.strip('"'))
    if step.keyword == "ENV" and (before is None or step.line < before):
      pairs = re.findall(r'(\w+)=("[^"]*"|\S+)', step.text)
      found |= {name: substitute(value.strip('"'), found) for name, value in pairs}
  return found


def last(stages: Mapping[str, Stage], target: str, keyword: str) -> str:
  """The arguments of the last `keyword` of a stage or of the stages that it starts from; '' if there is none."""
  stage = stages[target]
  own = [step.text for step in stage.instructions if step.keyword == keyword]
  if own:
    return own[-1]
  return last(stages, stage.base, keyword) if stage.base in stages else ""


def exec_form(text: str) -> list[str]:
  """The words of ENTRYPOINT or CMD in exec form."""
  words = json.loads(text)
  assert isinstance(words, list) and all(isinstance(word, str) for word in words), text
  return words


def substitute(text: str, values: Mapping[str, str]) -> str:
  """`text` with ${NAME} and $NAME replaced; ValueError for a name without a value."""

  def value(match: re.Match[str]) -> str:
    name = match[1] or match[2]
    if name not in values:
      raise ValueError(f"{match[0]}: no value for this name. Declare it with ARG or ENV before its use.")
    return values[name]

  return re.sub(r"\$\{(\w+)\}|\$(\w+)", value, text)
