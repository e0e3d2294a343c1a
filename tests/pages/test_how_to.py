"""docs/how_to/: a copy of the code with the blocks of the pages trains, and passes the tests of the pages."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from tests.pages.test_code_blocks import blocks

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [path for path in sorted((ROOT / "docs" / "how_to").glob("*.md")) if path.stem.startswith(("add_", "change_"))]
SMALL = (
  "base_emb_dim=64 base_num_decoder_layers=2 base_num_query_heads=2 base_num_kv_heads=1 head_dim=32 base_mlp_dim=128 "
  "max_target_length=32 per_device_batch_size=2 enable_report=false enable_checkpointing=false remat_policy=none "
  "jax_cache_dir=compiled dataset_cache_directory=cache eval_steps=0 opt_type=sgd"
).split()
# The walk of the cluster trains on one of two slices, in two micro-batches. So do these keys, with the same program.
ONE_DEVICE = "num_slices=1 devices_per_slice=1 gradient_accumulation_steps=2".split()
# Runs all commands, then all tests, in one process: importing JAX takes longer than two steps.
DRIVER = """
import json, os, shlex, subprocess, sys, time
import pytest
tests, sys.argv[1:] = sys.argv[1:], []
for command in json.load(open("commands.json")):
  words = shlex.split(command) if "-m trainer" in command else []
  os.environ.update(word.split("=", 1) for word in words[: words.index("-m") if words else 0] if "=" in word)
  print("$", command, flush=True)
  if ".venv/bin/python -m trainer.tools.document" in command:
    from trainer.tools import document
    document.main()
  elif ".venv/bin/python -m trainer " in command:
    from trainer.__main__ import main
    code = main(words[words.index("trainer") + 1 :])
    assert code == 0, f"exit code {code}: {command}"
  else:
    subprocess.run(["bash", "-c", command], check=True)
  print("CPU seconds so far:", round(time.process_time(), 1), flush=True)
sys.exit(pytest.main(["-q", "-o", "addopts=", "--import-mode=importlib", "--basetemp=temporary", *tests]))
"""


def apply(text: str, folder: pathlib.Path) -> str | None:
  """Writes a block that begins with `# path` to its file, or changes the file. Returns the path."""
  first, _, rest = text.partition("\n")
  if not (match := re.fullmatch(r"# ([\w./-]+\.(?:py|yml))", first)):
    return None
  path = folder / match[1]
  lines = rest.splitlines(keepends=True)
  if not any(line.startswith("+") for line in lines):
    assert not path.exists(), f"{match[1]} exists already"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(rest)
    return match[1]
  before, after = ("".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +"))
  content = path.read_text()
  assert content.count(before) == 1, f"{match[1]} has {content.count(before)} times:\n{before}"
  path.write_text(content.replace(before, after))
  return match[1]


def commands(page: pathlib.Path) -> list[str]:
  texts = [text for language, text in blocks(page) if not language]
  return [line for text in texts for line in re.sub(r" *\\\n *", " ", text).splitlines()]


def copy_of_the_code(folder: pathlib.Path) -> None:
  """With .pyc files, which are valid because copies keep the times of their sources."""
  for name in ("src", "docs"):
    shutil.copytree(ROOT / name, folder / name)
  (folder / "configs").symlink_to("src/trainer/configs")
  shutil.copy(ROOT / "pyproject.toml", folder)


def small(command: str) -> str:
  """A training command with a small model and a simple optimizer, unless it names a model or an optimizer."""
  if ".venv/bin/python -m trainer " not in command:
    return command
  named = "base_|head_dim" if "model_name=" in command else "opt_type" if "opt_type=" in command else "-"
  keys = SMALL if "num_slices=" in command else SMALL + ONE_DEVICE
  keys = [word for word in keys if not re.match(named, word)]
  replaced = {word.partition("=")[0] for word in keys}
  return " ".join([*(word for word in command.split() if word.partition("=")[0] not in replaced), *keys])


@pytest.mark.timeout(900)
@pytest.mark.soak
def test_the_walks_lead_to_a_program_that_trains(tmp_path):
  copy_of_the_code(tmp_path)
  changed = [path for page in PAGES for _, text in blocks(page) if (path := apply(text, tmp_path))]
  tests = [path for path in changed if path.startswith("tests/")]
  assert len(PAGES) == len(tests) == 5
  lines = dict.fromkeys(small(command) for page in PAGES for command in commands(page))  # `document` once
  assert sum("-m trainer " in line for line in lines) == 5
  (tmp_path / "commands.json").write_text(json.dumps(list(lines)))
  (tmp_path / "driver.py").write_text(DRIVER)
  environment = os.environ | {
    "PYTHONPATH": str(tmp_path / "src"),
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
  }
  command = [sys.executable, "driver.py", *tests]
  done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850)
  assert done.returncode == 0, done.stdout + done.stderr
  assert str(tmp_path) in done.stdout
  assert done.stdout.count("completed step: 2,") == 5
  assert "elastic_manager.good_slice_count=1" in done.stdout
  assert "geglu-tiny" in done.stdout and "Data: pages.csv" in done.stdout
  first_loss = re.search(r"\$ [^\n]*geglu-tiny.*?completed step: 1, .*?loss: ([\d.]+)", done.stdout, re.DOTALL)
  assert first_loss and float(first_loss[1]) == pytest.approx(8.32, abs=0.1)
  assert "`lion`" not in done.stdout and "lion" in (tmp_path / "docs" / "configuration.md").read_text()
