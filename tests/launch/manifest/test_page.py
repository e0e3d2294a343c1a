"""Every command of docs/run_on_gke.md that calls this program works as it stands there."""

from __future__ import annotations

import pathlib
import re

from trainer.launch.manifest.__main__ import main

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "run_on_gke.md").read_text()


def test_the_commands_of_the_page(capsys):
  text = PAGE.replace("\\\n", " ").replace("BUCKET", "my-bucket").replace("CLUSTER", "c").replace("PROJECT", "p")
  commands = re.findall(r"^\.venv/bin/python -m trainer\.launch\.manifest (.*)$", text, re.MULTILINE)
  assert len(commands) == 2
  for command in commands:
    assert main(command.split()) == 0
  printed = capsys.readouterr().out
  assert "gcluster job submit" in printed and "kind: CheckpointConfiguration" in printed
