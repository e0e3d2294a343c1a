"""Every key has an effect: it is read in the sources, outside the modules that only parse and check keys."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support import needs

import trainer
from input_pipeline import options
from trainer.config.keys import all_keys

SOURCE = Path(trainer.__file__).parent
OPTIONS = Path(options.__file__)
PARSING = {"schema.py", "validate.py", "document.py", "keys.py"}
# Keys that have their effect while the configuration is loaded.
USED_BY_LOADING = {"override_model_config", "max_position_embeddings"}


def names_read(tree: ast.AST) -> set[str]:
  """Attributes that a module reads. If it uses getattr, also its strings and the keys that match its f-strings."""
  nodes = list(ast.walk(tree))
  names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
  if any(isinstance(node, ast.Name) and node.id == "getattr" for node in nodes):
    names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in nodes:
      if isinstance(node, ast.JoinedStr):
        parts = [re.escape(part.value) if isinstance(part, ast.Constant) else r"[a-z]+" for part in node.values]
        names |= {key for key in all_keys() if "_" in "".join(parts) and re.fullmatch("".join(parts), key)}
  return names


def derived() -> dict[str, set[str]]:
  """{property of the schema: keys that it reads}, so that reading emb_dim counts as reading base_emb_dim."""
  trees = [ast.parse(path.read_text()) for path in (SOURCE / "config/schema.py", OPTIONS)]
  return {n.name: names_read(n) for tree in trees for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


@needs.workshop
def test_every_key_is_read():
  read: set[str] = set(USED_BY_LOADING)
  for path in [*SOURCE.rglob("*.py"), *OPTIONS.parent.glob("*.py")]:
    if (path != OPTIONS and path.parent.name != "config") or path.name not in PARSING:
      read |= names_read(ast.parse(path.read_text()))
  properties = derived()
  for _ in properties:
    read |= {name for prop, names in properties.items() if prop in read for name in names}
  assert sorted(all_keys().keys() - read) == []
