"""Bad inputs of tools, launchers and the packages' own commands: exit code 2, one message, before anything is done."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

YAML = "steps: 5\nnum_slices: 1\njax_cache_dir: ''\n"
MANIFEST = (
  "trainer.launch.manifest jobset configs/base.yml base_output_directory=gs://bbb/r dataset_type=synthetic --image x"
)
# The command, and what its message has. A blank stands for an empty argument.
CASES = [
  ("trainer.tools.generate run a --temperature nan", "nan must be a number of at least 0 and at most 100"),
  ("trainer.tools.generate run a --temperature 1e-40", "must be 0, for the most likely token, or at least 0.0001"),
  ("trainer.tools.generate run a --tokens \uff11", "must be a whole number of at least 1"),
  ("trainer.tools.evaluate run eval_steps=0", "eval_steps=0: nothing would be evaluated"),
  ("trainer.tools.evaluate run@abc", "run@abc: 'abc' is not the number of a step.\nWrite run@STEP, or run alone"),
  ("trainer.tools.export_hf az://bucket/x out", "az://bucket/x: must be gs://BUCKET/FOLDER"),
  ("trainer.tools.watch run --port \uff18\uff10", "must be a whole number"),
  ("trainer.tools.watch run --period 1e300", "1e300 must be a number above 0"),
  ("trainer.tools.watch az://x/y", "az://x/y: must be gs://BUCKET/FOLDER"),
  ("trainer.tools.elastic_demo --nope", "--nope: is no option. The only option is --pathways"),
  ("trainer.tools.elastic_demo a.yml num_slices=1", "num_slices=1: "),
  ("trainer.tools.preflight a.yml steps=1 steps=2", "steps is given twice, first with 1"),
  ("trainer.launch.local --slices 2", "trainer.launch.local: needs a config file"),
  ("trainer.launch.local --slices \uff12 a.yml", "must be a whole number"),
  (
    "trainer.launch.local --slices 2 --spares 99999999 a.yml",
    "--spares: 99999999 must be a whole number of at least 0 and at most 1024",
  ),
  ("trainer.launch.agent --supervisor 127.0.0.1:1 --wait-seconds nan", "nan must be a number of at least 0"),
  ("trainer.launch.ray --min-slices 1 --max-slices 2", "trainer.launch.ray: needs a config file"),
  (f"{MANIFEST} --tpu-type v5litepod-\uff11\uff16", "--tpu-type"),
  ("pathways_standin --slices \uff11", "is not a whole number"),
  ("pathways_standin --unix /nowhere/x", "--unix /nowhere/x: its folder does not exist"),
  ("trainer a.yml run_name=\u2003", "run_name='\\u2003' (command line): has only blanks"),
  (
    "trainer a.yml elastic_min_slice_count=1",
    "elastic_min_slice_count=1: has an effect only with elastic_enabled=true",
  ),
  ("trainer a.yml steps=\uff11\uff12", "a number has the digits 0 to 9"),
  ("trainer a.yml log_period=2 --log-period=3", "log_period is given twice, first with 2"),
  ("trainer a.yml elastic_enabled=true fault_injection=slice_down@\uff11:0", "is neither KIND@STEP"),
]


def main_of(module: str):
  try:
    return importlib.import_module(f"{module}.__main__").main
  except ModuleNotFoundError:
    return importlib.import_module(module).main


@pytest.mark.parametrize(("command", "message"), CASES, ids=[command for command, _ in CASES])
def test_a_bad_input_is_one_message_and_leaves_nothing(tmp_path, monkeypatch, capsys, command, message):
  monkeypatch.chdir(tmp_path)
  Path("a.yml").write_text(YAML)
  Path("run").mkdir()
  Path("run", "config.yml").write_text(YAML)
  before = sorted(tmp_path.rglob("*"))
  module, *arguments = command.split(" ")
  try:
    code = main_of(module)(arguments)
  except SystemExit as error:  # of argparse
    code = error.code
  printed = capsys.readouterr()
  assert code == 2 and message in printed.err, printed
  assert printed.err.count("error: ") == 1 and "Traceback" not in printed.err
  assert printed.out == "" and sorted(tmp_path.rglob("*")) == before
