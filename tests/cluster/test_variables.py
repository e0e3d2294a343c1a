"""Variables of JAX and XLA that are wrong, or with which the program cannot work: exit code 2 and one message."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest
from tests.support.command import ROOT, TINY

from trainer.cluster import cpu_compiler, variables
from trainer.config.errors import ConfigError


@pytest.mark.parametrize(
  ("changes", "told"),
  [
    ({"JAX_PLATFORMS": "cuda"}, "JAX_PLATFORMS='cuda': JAX finds no devices: the backend is not installed"),
    ({"XLA_FLAGS": "--xla_nonsense=1"}, "XLA_FLAGS=--xla_nonsense=1: Unknown flag in XLA_FLAGS: --xla_nonsense=1"),
    ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT=True: "),
  ],
  ids=lambda value: "=".join(*value.items()) if isinstance(value, dict) else "",
)
def test_the_command_ends_with_2_and_one_message(tmp_path, changes, told):
  environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
  command = [sys.executable, "-m", "trainer", *TINY, "dataset_type=synthetic", "steps=1", "run_name=a"]
  done = subprocess.run(
    [*command, f"base_output_directory={tmp_path}"],
    env=environment | changes,
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=240,
  )
  assert (done.returncode, done.stdout) == (2, ""), done.stderr
  assert done.stderr.startswith("error: ") and told in done.stderr and len(done.stderr.splitlines()) <= 3
  assert not list(tmp_path.iterdir())


def test_a_value_of_jax_with_which_the_program_cannot_work_is_refused():
  with jax.transfer_guard("disallow"), pytest.raises(ConfigError, match="JAX_TRANSFER_GUARD=disallow: each step"):
    variables.check({})


@pytest.mark.parametrize(
  ("flags", "told"),
  [
    ("--xla_dump_to=/nowhere --xla_cpu_max_isa=AVX2", None),
    ("--xla_cpu_enable_fast_math=perhaps", "Couldn't interpret value perhaps for flag xla_cpu_enable_fast_math"),
    ("no_such_file", 'Could not open file "no_such_file"'),
  ],
)
def test_flags_of_xla_are_tried_first(flags, told):
  if told is None:
    variables.check({"XLA_FLAGS": flags})
    return
  with pytest.raises(ConfigError) as raised:
    variables.check({"XLA_FLAGS": flags})
  assert told in str(raised.value) and len(str(raised.value).splitlines()) == 2


def test_a_file_of_flags_is_read(tmp_path: pathlib.Path):
  """Our own option in the same variable would become a part of the file's name."""
  file = tmp_path / "flags"
  file.write_text("--xla_cpu_max_isa=AVX2\n")
  environment = {"XLA_FLAGS": str(file)}
  variables.check(environment)
  cpu_compiler.prepare_environment(environment)
  assert environment == {"XLA_FLAGS": str(file)}
