"""Chat templates: the text of a conversation, rendered as transformers renders it."""

from __future__ import annotations

import datetime
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from input_pipeline import remote, storage
from input_pipeline.input_errors import ConfigError, shorten

if TYPE_CHECKING:
  from input_pipeline.options import DataOptions  # pydantic is slow to import and not needed here
  from input_pipeline.tokenizer import BpeTokenizer

_CHATML = "chatml"
_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"
# Data must not depend on the day on which they are prepared. Llama's templates name this day where they know no other.
_TODAY = datetime.datetime(2024, 7, 26)
# Around the text of a {% generation %} block. Unicode excludes these code points from interchange.
_BEGIN, _END = "\ufdd0", "\ufdd1"

Span = tuple[int, int]


class Template:
  """A Jinja template, run in a sandbox."""

  def __init__(self, text: str, names: Mapping[str, str]) -> None:
    """names: what it may call bos_token, eos_token and so on. Raises ConfigError if the text is not a template."""
    self.text, self.names = text, dict(names)
    self.has_blocks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
    try:
      self._compiled = _environment().from_string(text)
    except Exception as error:  # an error of the syntax, or of a block
      raise ConfigError(f"{shorten(text)!r} is not a chat template ({error}). Give a template in Jinja.") from error

  def __reduce__(self) -> tuple[Any, ...]:
    """A compiled template cannot be pickled."""
    return type(self), (self.text, self.names)

  def names_field(self, name: str) -> bool:
    """Whether the template mentions a field of messages, or takes whole messages."""
    return re.search(rf"\b{re.escape(name)}\b|message\s*\|\s*tojson|\.items\(", self.text) is not None

  def render(self, messages: Sequence[Mapping[str, str]], *, prompt: bool = False) -> tuple[str, list[Span]]:
    """(the text of the messages, the places of the text in {% generation %} blocks). prompt: an answer shall follow.

    Raises ValueError if the template refuses the messages.
    """
    given = {"messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": prompt}
    try:
      found = self._compiled.render(given | self.names)
    except Exception as error:  # templates raise errors of any kind, as programs do
      remedy = ""
      if not messages or messages[0]["role"] == "assistant":
        remedy = ". It begins with the assistant, and most templates need the user first: remove its first message"
      elif messages[0]["role"] == "system" and len(messages) == 1:
        remedy = ". Its system message is followed by the assistant, and most templates need the user there"
      raise ValueError(f"the chat template refuses it ({error or type(error).__name__}){remedy}") from error
    if not self.has_blocks:
      return found, []
    if any(mark in text for message in messages for text in message.values() for mark in (_BEGIN, _END)):
      raise ValueError("it has U+FDD0 or U+FDD1, which mark the {% generation %} blocks of the chat template")
    spans, begin, place = [], 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", found):
      if part == _BEGIN:
        begin = place
      elif part == _END:
        spans.append((begin, place))
      else:
        place += len(part)
    return found.replace(_BEGIN, "").replace(_END, ""), spans


def _environment() -> Any:
  """What a template may use: the same as in transformers."""
  import jinja2.ext
  import jinja2.sandbox

  class Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: what the model says."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
      return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
      return f"{_BEGIN}{caller()}{_END}"

  class Names(jinja2.utils.Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
      if name.startswith("_"):
        raise jinja2.sandbox.SecurityError(f"a namespace cannot have {name!r}")
      super().__setitem__(name, value)

  def namespace(*given: Any, **values: Any) -> Names:
    names = Names()
    for name, value in dict(*given, **values).items():
      names[name] = value
    return names

  def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)

  def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
  )
  environment.filters["tojson"] = to_json  # Jinja's own escapes for HTML
  environment.globals |= {"raise_exception": refuse, "strftime_now": _TODAY.strftime, "namespace": namespace}
  environment.globals["dict"] = lambda *given, **values: dict(*given, **values)  # not the type, which knows others
  return environment


def find(cfg: DataOptions, tokenizer: BpeTokenizer) -> Template:
  """The template that chat_template_path names, else that beside tokenizer_path. Raises ConfigError without one."""
  place, given = cfg.tokenizer_path, cfg.chat_template_path
  if template := search(place, given, tokenizer):
    return template
  where = f"chat_template_path={given}" if given else f"tokenizer_path={place}"
  raise ConfigError(
    f"{where}: there is no chat template, which conversations need ({_FILE}, or chat_template in {_CONFIG}).\n"
    f"Set chat_template_path={_CHATML}, or to a file with a Jinja template."
  )


def search(place: str, given: str, tokenizer: BpeTokenizer) -> Template | None:
  """As `find`, of the options tokenizer_path and chat_template_path; None without a template."""
  beside = place if _is_folder(place) else place.rpartition("/")[0] or "."
  files = [_json(f"{beside}/{name}") for name in ("special_tokens_map.json", _CONFIG)]
  tokens = {key: token for file in files for key, token in file.items() if key.endswith("_token")}
  content = {key: token.get("content") if isinstance(token, dict) else token for key, token in tokens.items()}
  names = tokenizer.token_names() | {key: token for key, token in content.items() if isinstance(token, str)}
  text = _chatml(tokenizer, names) if given == _CHATML else _in(given) if given else _in_folder(beside)
  return None if text is None else Template(text, names)


def _in(place: str) -> str | None:
  """The template in a folder or a file; None if there is none."""
  if _is_folder(place):
    return _in_folder(place)
  if not place.endswith(".json"):
    return _text(place)
  found = _json(place).get("chat_template")
  if not isinstance(found, list):
    return found
  named = {one["name"]: one["template"] for one in found}
  if "default" not in named:
    raise ConfigError(
      f"{place}: its chat templates are {', '.join(named)}, and none is named default.\n"
      "Set chat_template_path to a file with one of them."
    )
  return named["default"]


def _in_folder(place: str) -> str | None:
  text = _text(f"{place}/{_FILE}")
  return _in(f"{place}/{_CONFIG}") if text is None else text


def _chatml(tokenizer: BpeTokenizer, names: Mapping[str, str]) -> str:
  """ChatML. If the tokenizer lacks its tokens, the tokens around a document take their place."""
  specials, pairs = tokenizer.special_tokens(), (("<|im_start|>", "bos_token"), ("<|im_end|>", "eos_token"))
  begin, end = (repr(token if token in specials else names.get(key, token)) for token, key in pairs)
  return (
    f"{{% for message in messages %}}{{{{ {begin} + message['role'] + '\\n' + message['content'] + {end} + '\\n' }}}}"
    f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ {begin} + 'assistant\\n' }}}}{{% endif %}}"
  )


def _is_folder(place: str) -> bool:
  return not storage.is_address(place) and Path(place).expanduser().is_dir()


def _text(place: str) -> str | None:
  """The content of a file; None if it is absent. Raises ConfigError if it cannot be read."""
  try:
    text = remote.read("chat_template_path", place).decode("utf-8-sig")
    return io.StringIO(text, newline=None).read()  # every end of a line is a newline, as in transformers
  except FileNotFoundError:
    return None
  except (OSError, UnicodeDecodeError) as error:
    storage.raise_outage("read", place, error)
    raise ConfigError(f"{place} cannot be read ({error}). Give another file.") from error


def _json(place: str) -> dict[str, Any]:
  """The mapping in a JSON file; {} if it is absent. Raises ConfigError if the file has something else."""
  try:
    found = json.loads(_text(place) or "{}")
  except ValueError as error:
    raise ConfigError(f"{place} is not JSON ({error}). Copy the tokenizer's files again.") from error
  return found if isinstance(found, dict) else {}
