"""Sabotages the trainer in the ways of sabotages.yml, and shows that the right row of `trainer.tools.accept` fails.

  python -m end_to_end.sabotage [NAME ...]

Each sabotage changes one text of a copy of src, and plays only the parts of accept that its row needs. Prints a line
for each; exits with 1 if one is not caught by its row. A sabotage takes about a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tests.support.command import ROOT

from trainer.tools.accept.rows import LATE

SECONDS = 600.0
_SMALL = "base_emb_dim=32 base_num_decoder_layers=1 base_mlp_dim=64 head_dim=8".split()


def play(name: str, sabotage: Mapping[str, Any], folder: Path) -> tuple[bool, str]:
  """Plays a sabotaged trainer. Returns whether it is caught, and what was seen. Caught: its row is the first one that
  does not hold, and not because the time is over, unless the sabotage makes the run wait (`minutes`)."""
  copy, out = folder / "src", folder / "out"
  shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
  for change in filter(None, (sabotage, sabotage.get("also"))):
    file = copy / (change["file"] or "sitecustomize.py")
    text = file.read_text() if change["file"] else ""
    assert change["old"] in text, f"{name}: {change['file']} has no {change['old']!r} any more"
    file.write_text(text.replace(change["old"], change["new"]) if text else change["new"])
  command = [
    sys.executable,
    "-m",
    "trainer.tools.accept",
    "--budget",
    str(sabotage.get("minutes", 8)),
    "--only",
    sabotage["parts"],
    str(out),
  ]
  if sabotage["row"] != "losses":  # otherwise the reference must fit
    command += [*_SMALL, "--slices", "3" if "kill" in sabotage["parts"] else "2"]
  environment = {**os.environ, "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
  with (folder / "log").open("wb") as log:
    accept = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
      code = accept.wait(SECONDS)
    finally:
      accept.terminate()  # then it ends its runs
      accept.wait()
  rows = yaml.safe_load((out / "card.yml").read_text())["rows"] if (out / "card.yml").exists() else []
  wrong = [f"{row['name']}: {row['seen']}" for row in rows if row["holds"] is False]
  if code == 1 and wrong and wrong[0].startswith(sabotage["row"]) and (LATE not in wrong[0] or "minutes" in sabotage):
    return True, wrong[0]
  return False, f"exit code {code}, rows that do not hold: {wrong}: {(folder / 'log').read_text()[-1000:]}"


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("names", nargs="*", metavar="NAME", help="only sabotages whose name has one of these texts")
  names = parser.parse_args().names or [""]
  signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process is left
  sabotages = yaml.safe_load(Path(__file__).with_name("sabotages.yml").read_text())
  missed = 0
  for name, sabotage in sabotages.items():
    if any(text in name for text in names):
      with tempfile.TemporaryDirectory(prefix="sabotage-") as folder:
        is_caught, seen = play(name, sabotage, Path(folder))
      missed += not is_caught
      print(f"{name}: {'caught' if is_caught else 'NOT CAUGHT'}: {seen}", flush=True)
  return int(missed > 0)


if __name__ == "__main__":
  sys.exit(main())
