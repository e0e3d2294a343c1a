"""Tools that import JAX in a wrong environment: exit code 2 and one message."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.command import ROOT, cpu_environment
from tests.support.seeds import few

from trainer import commands
from trainer.cluster import host_devices
from trainer.config.errors import ConfigError

TOOLS = {
  "generate": ["{run}", "text"],
  "evaluate": ["{run}"],
  "export_hf": ["{run}", "{new}"],
  "preflight": ["configs/base.yml", "run_name=a", "base_output_directory={new}"],
}


@pytest.mark.parametrize("tool", few(["evaluate", "generate"], TOOLS))
def test_a_variable_that_jax_refuses_is_named(tool, tmp_path):
  argv = [argument.format(run=tmp_path / "run", new=tmp_path / "new") for argument in TOOLS[tool]]
  command, changes = [sys.executable, "-m", f"trainer.tools.{tool}", *argv], {"JAX_DEBUG_NANS": "perhaps"}
  done = subprocess.run(command, env=cpu_environment(changes), cwd=ROOT, capture_output=True, text=True, timeout=240)
  assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
  assert done.stderr.startswith("error: JAX refuses a variable") and "'perhaps'" in done.stderr


def test_an_error_without_devices_is_that_there_are_none(monkeypatch, capsys):
  def find(environment):
    raise ConfigError("no devices")

  def work(options):
    raise AssertionError("of JAX")

  run = lambda: commands.main(commands.parser("`python -m x`"), work, [])
  monkeypatch.setitem(sys.modules, "jax", sys)  # imported

  with pytest.raises(AssertionError, match="of JAX"):
    run()
  monkeypatch.setattr(host_devices, "find", find)
  assert run() == 2
  assert capsys.readouterr().err == "error: no devices\n"


def test_a_tool_whose_output_is_lost_ends_as_other_commands_do():
  command, pipe = [sys.executable, "-m", "trainer.tools.checkpoints", "--help"], subprocess.PIPE
  options = {"env": cpu_environment({}), "cwd": ROOT, "stderr": pipe, "text": True}
  with subprocess.Popen(command, stdout=pipe, **options) as tool:
    tool.stdout.close()  # as `| head` does
    assert (tool.wait(120), tool.stderr.read()) == (141, "")
  with open("/dev/full", "w") as full:
    done = subprocess.run(command, stdout=full, timeout=120, **options)
  assert done.returncode == 1 and done.stderr == "error: stdout: [Errno 28] No space left on device\n"
