"""Draws the house: the parts of the trainer and its packages on floors, from the imports of the code.

.venv/bin/python -m tests.support.house      writes docs/images/house.svg
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from tests.test_layering import PACKAGES, imports, modules, part

PICTURE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "house.svg"
_WIDTH, _LEFT, _FLOOR, _BOX, _GAP, _LETTER = 1000, 70, 44, 30, 10, 8.2


def needs() -> dict[str, set[str]]:
  """{part of the trainer, or package: the parts and packages that it imports}."""
  found: dict[str, set[str]] = {name: set() for name in PACKAGES if name != "trainer"}
  known = modules()
  for module, tree in known.items():
    if module != "trainer":
      names = {part(name) if name.startswith("trainer.") else name.partition(".")[0] for name in imports(tree, known)}
      found.setdefault(part(module), set()).update(names - {part(module), "trainer"})
  return found


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
  """The names from the ground up: each stands one floor above the highest one that it imports."""
  result: list[list[str]] = [sorted(set(PACKAGES) - {"trainer"})]
  placed = set(result[0])
  while rest := graph.keys() - placed:
    floor = sorted(name for name in rest if graph[name] <= placed)
    assert floor, f"these import each other in a circle: {sorted(rest)}"
    result.append(floor)
    placed |= set(floor)
  return result


def picture(graph: Mapping[str, set[str]]) -> str:
  """The picture as SVG. The more parts import a part, the darker is its box."""
  rows = floors(graph)
  users = {name: sum(name in names for names in graph.values()) for name in graph}
  height = _FLOOR * len(rows) + 20
  out = [
    f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
    'font-family="DejaVu Sans, Arial, sans-serif" font-size="14">',
    f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
  ]
  for number, names in enumerate(rows):
    y = height - 10 - _FLOOR * (number + 1)
    label = str(number) if number else "ground"
    out.append(f'<text x="{_LEFT - 12}" y="{y + 21}" text-anchor="end" fill="#555">{label}</text>')
    out.append(f'<line x1="{_LEFT}" y1="{y + 37}" x2="{_WIDTH - 10}" y2="{y + 37}" stroke="#ddd"/>')
    x = float(_LEFT)
    for name in names:
      width = round(_LETTER * len(name) + 18, 1)
      shade = "#9fc5ec" if users[name] >= 10 else "#cfe3f7" if users[name] >= 4 else "#f1f5f9"
      text = f"{name}: imports {', '.join(sorted(graph[name])) or 'nothing'}; {users[name]} import it"
      out.append(
        f'<g><title>{text}</title><rect x="{x:g}" y="{y}" width="{width:g}" height="{_BOX}" rx="4" fill="{shade}" '
        f'stroke="#667"/><text x="{x + width / 2:g}" y="{y + 20}" text-anchor="middle" fill="#222">{name}</text></g>'
      )
      x += width + _GAP
  return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
  PICTURE.write_text(picture(needs()))
  print(f"wrote {PICTURE}")
