"""The site of the pages: it builds, and a broken link is an error."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def build(folder: pathlib.Path, out: pathlib.Path) -> subprocess.CompletedProcess[str]:
  command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", str(out)]
  return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=250)


def test_a_broken_link_is_an_error(tmp_path):
  for page in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY", "docs/a", "docs/benchmarks/b"):
    (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / f"{page}.md").write_text("# Heading\n")
  conf = (ROOT / "docs" / "conf.py").read_text()
  (tmp_path / "docs" / "conf.py").write_text(re.sub(r"^_FIRST = .*$", "_FIRST = ()", conf, flags=re.MULTILINE))
  links = ["docs/no_page.md", "docs/a.md#no-heading", "src/no_file.py"]
  text = "# Site\n\n[Good](docs/a.md#heading).\n\n"
  (tmp_path / "README.md").write_text(text + "".join(f"[Link]({link}).\n\n" for link in links))
  result = build(tmp_path, tmp_path / "site")
  assert result.returncode != 0
  warnings = [line for line in result.stderr.splitlines() if "README.md" in line]
  assert len(warnings) == 3 and all(any(pathlib.Path(link).stem in line for line in warnings) for link in links[::2])
