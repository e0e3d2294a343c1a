"""Builds the pages as a site: `python -m sphinx -W --keep-going -c docs . build/docs`. A broken link is an error."""

from __future__ import annotations

import pathlib

from sphinx.application import Sphinx

project = "trainer"
extensions = ["myst_parser"]
html_theme = "furo"  # loads nothing from the internet
html_title = "trainer"
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/**", "src/*/README.md"]
myst_heading_anchors = 3
nitpicky = True
# A code block without a language is a command or output; Pygments then guesses Python.
highlight_language = "none"

_FIRST = ("tutorial", "concepts", "coming_from", "elastic", "troubleshooting", "run_on_gke", "run_on_gpu_cluster")
_FOLDERS = {"How to": "how_to", "Benchmarks": "benchmarks", "Results": "results", "Decisions": "decisions"}


def setup(app: Sphinx) -> None:
  app.connect("source-read", _add_contents)


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
  """Adds the site's table of contents to its first page: on GitHub, README.md needs none."""
  if page != root_doc:
    return
  folder = pathlib.Path(app.srcdir)
  names = sorted(path.stem for path in (folder / "docs").glob("*.md"))
  guides = [f"docs/{name}" for name in (*_FIRST, *(name for name in names if name not in _FIRST))]
  packages = sorted(f"src/{path.parent.name}/README" for path in folder.glob("src/*/README.md"))
  project_pages = ["CONTRIBUTING", "CHANGELOG", "SECURITY"]
  sections = {"Guides": guides} | {
    title: sorted(f"docs/{name}/{path.stem}" for path in (folder / "docs" / name).glob("*.md"))
    for title, name in _FOLDERS.items()
  }
  sections |= {"Packages": packages, "Project": project_pages}
  for title, pages in sections.items():
    entries = "\n".join(pages)
    source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n{entries}\n```\n"
