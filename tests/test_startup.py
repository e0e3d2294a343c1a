"""Start-up: libraries that a run must not import, exit codes before the first step, and the garbage collector."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import jax
import pytest
from tests.support.seeds import few

import trainer
from trainer import __main__, app
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.config.errors import ConfigError
from trainer.config.schema import Config
from trainer.elastic import retry
from trainer.process.stop import Stop
from trainer.run.session import Session
from trainer.world import SINGLE_WORLD

# tensorflow comes with tensorflow-datasets' sources, torch with transformers, matplotlib with the report.
HEAVY = ("matplotlib", "tensorflow", "tensorflow_datasets", "torch", "transformers")
TINY = (
  "base_emb_dim=32 base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=1 head_dim=16 base_mlp_dim=64 "
  "vocab_size=300 dtype=float32 steps=2 max_target_length=32 enable_report=false"
).split()
PROGRAM = """
import json, sys
from trainer.__main__ import main
code = main(sys.argv[1:])
print(json.dumps({"code": code, "modules": sorted({name.split(".")[0] for name in sys.modules})}))
"""


@pytest.mark.oldest
@pytest.mark.parametrize("dataset_type", few(["text"], ["synthetic", "text"]))  # text imports more
def test_a_run_imports_nothing_that_it_does_not_need(tmp_path, dataset_type):
  (tmp_path / "corpus").mkdir()
  for i in range(4):
    (tmp_path / "corpus" / f"{i}.txt").write_text(f"{i} lines of text are enough to train on for two steps.\n" * 20)
  data = [f"dataset_path={tmp_path}/corpus", f"dataset_cache_directory={tmp_path}/cache"]
  config = tmp_path / "tiny.yml"
  config.write_text(f"dataset_type: {dataset_type}\n")
  # If torch is installed, tensorboardX imports it in a thread.
  argv = [
    str(config),
    *TINY,
    "services=",
    *(data if dataset_type == "text" else []),
    f"base_output_directory={tmp_path}/runs",
  ]
  environment = os.environ | {"PYTHONPATH": str(pathlib.Path(trainer.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
  run = subprocess.run(
    [sys.executable, "-c", PROGRAM, *argv], capture_output=True, text=True, timeout=280, env=environment
  )
  assert run.returncode == 0, run.stderr
  assert "completed step: 2," in run.stdout
  end = json.loads(run.stdout.splitlines()[-1])
  assert end["code"] == 0, run.stdout
  assert {"jax", "orbax"} <= set(end["modules"]), "the list of modules is not one of a run"
  assert not set(HEAVY) & set(end["modules"])


def test_the_console_script_is_the_command():
  """The entry point that pyproject.toml declares is what `python -m trainer` runs."""
  root = pathlib.Path(__file__).parents[1]
  scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
  module, name = scripts["trainer"].split(":")
  assert (module, getattr(__main__, name)) == ("trainer.__main__", __main__.command)


@pytest.mark.parametrize(
  ("error", "code", "printed"),
  [
    (ConfigError("steps=0: must be at least 1."), 2, "error: steps=0: must be at least 1."),
    (ConfigMismatch("another model"), 2, "error: another model"),
    (ValueError("too many values to unpack"), 1, "Traceback"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), 1, "Lower per_device_batch_size"),
  ],
  ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_only_an_error_of_the_users_input_is_2(monkeypatch, error, code, printed):
  """An internal ValueError is a bug, with a traceback and exit code 1."""

  def fail(*arguments, **options):
    raise error

  lines = []
  monkeypatch.setattr(retry, "elastic_retry", fail)
  cluster = SimpleNamespace(is_reported=lambda: False, world=SINGLE_WORLD)
  session = SimpleNamespace(config=Config(), cluster=cluster, elastic=None, stop=None)
  assert app._train(session, lines.append).code == code
  assert printed in "".join(lines) and ("Traceback" in "".join(lines)) == (code == 1)


@pytest.mark.parametrize("part", ["cluster.start", "run.preparation.prepare"])
def test_before_the_run_is_open_an_error_of_the_users_input_is_2_and_others_are_raised(
  tmp_path, monkeypatch, capsys, part
):
  """Raised from `main`, an internal error ends the process with a traceback and exit code 1."""
  config = tmp_path / "tiny.yml"
  config.write_text("dataset_type: synthetic\n")
  argv = [str(config), *TINY, "jax_cache_dir=", f"base_output_directory={tmp_path}/runs"]

  def fail_with(error):
    def fail(*arguments, **options):
      raise error

    monkeypatch.setattr(f"trainer.{part}", fail)

  fail_with(ConfigError("num_slices=3: must be at most 2."))
  assert __main__.main(argv) == 2
  assert capsys.readouterr().err == "error: num_slices=3: must be at most 2.\n"
  fail_with(ValueError("too many values to unpack"))
  with pytest.raises(ValueError, match="too many values"):
    __main__.main(argv)
  assert gc.isenabled()
  assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("turns_it_on", ["ready", "second attempt"])
def test_the_garbage_collector_is_off_no_longer_than_the_first_attempt_starts(turns_it_on):
  nothing = SimpleNamespace(emit=lambda *args, **fields: None, step_done=lambda step: None)
  session = SimpleNamespace(
    attempts=0,
    was_ready=True,
    cluster=SimpleNamespace(is_primary=True),
    stop=Stop(),
    started=0.0,
    events=nothing,
    watchdog=nothing,
  )
  gc.unfreeze()
  gc.disable()
  try:
    Session.begin(session)
    assert not gc.isenabled()
    if turns_it_on == "ready":
      Session.ready(session, 0)
      frozen = gc.get_freeze_count()
      assert frozen
      gc.disable()
      kept = [[i] for i in range(1000)]
      Session.ready(session, 0)
      assert kept and gc.get_freeze_count() <= frozen  # a program had frozen what it has: it can still thaw just that
    else:
      Session.begin(session)
      Session.ready(session, 0)
      assert not gc.get_freeze_count()  # objects of the lost attempt can still be collected
    assert gc.isenabled()
  finally:
    gc.unfreeze()
    gc.enable()
