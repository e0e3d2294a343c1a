"""docs/library.md works as written, from a wheel in an empty folder; and what the library refuses."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.pages.test_code_blocks import blocks
from tests.support import needs
from tests.support.command import TINY
from tests.support.elastic_harness import cached_in
from tests.support.wheel import build, run_in

import trainer
from trainer.checkpoint.checkpoint_errors import ConfigMismatch
from trainer.program import optimizers

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "library.md"
SMALL = {"base_emb_dim": 32, "base_num_decoder_layers": 1, "max_target_length": 32, "vocab_size": 300}
# test_quickstart.py has the optimizer, the sample and the report of configs/quickstart.yml.
SMALL |= {"opt_type": "adamw", "sample_prompt": "", "enable_report": "false"}


@needs.workshop
@pytest.mark.slow
def test_the_page_runs_from_a_wheel_in_an_empty_folder(tmp_path, once):
  site, folder = once("wheel", build) / "site", tmp_path / "empty"
  (tmp_path / "text").mkdir()
  for i in range(4):
    (tmp_path / "text" / f"{i}.txt").write_text(f"{i} lines of text are enough for a few steps.\n" * 40)
  code = "".join(text for language, text in blocks(PAGE) if language == "python")
  keys = SMALL | {
    "dataset_path": f"{tmp_path}/text",
    "dataset_cache_directory": f"{tmp_path}/cache",
    "jax_cache_dir": f"{tmp_path}/compiled",
  }
  assert code.count("steps=40") == 1
  code = code.replace("steps=40", f"steps=2, **{keys}")  # as many as the other runs of the page: one program
  checks = """
  assert trainer.__file__.startswith(%r), trainer.__file__
  assert [record.step for record in records] == [1, 2] and records[1].loss < records[0].loss
  assert records[0].tokens == 8 * 32
  """
  folder.mkdir()
  result = run_in(folder, site, "-c", code + textwrap.dedent(checks % str(site)))
  assert result.returncode == 0, result.stderr[-4000:]
  assert re.search(r"^\{'eval': \([\d.]+, \d+\.0\)\}$", result.stdout, re.MULTILINE), result.stdout
  assert (folder / "loss.png").exists() and (folder / "exported" / "config.json").exists()


def test_the_import_is_cheap_and_every_name_is_there():
  program = "import sys, trainer; print(*sorted({n.split('.')[0] for n in sys.modules} & {'jax', 'numpy', 'pydantic'}))"
  assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"
  assert trainer._PLACES.keys() == set(trainer.__all__) <= set(dir(trainer))
  assert all(getattr(trainer, name) is not None for name in trainer.__all__)
  with pytest.raises(AttributeError, match="no attribute 'loud'"):
    trainer.loud  # noqa: B018


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Iterator[str]:
  """A folder for the compiled programs of the runs in this process, which turn the cache on."""
  folder = tmp_path_factory.mktemp("compiled")
  with cached_in(folder):
    yield str(folder)


@pytest.fixture
def config(tmp_path, cache):
  keys = ["dataset_type=synthetic", "steps=3", "num_slices=1", "vocab_size=300", "run_name=a", "opt_type=adamw"]
  return trainer.load(TINY[0], *TINY[1:], *keys, f"base_output_directory={tmp_path}", f"jax_cache_dir={cache}")


def test_a_configuration_is_loaded_with_other_values(config):
  changed = trainer.load(config, "steps=5", use_qk_norm=False, learning_rate=1e-3)
  differ = {key for key, value in changed.flat().items() if config.flat()[key] != value}
  assert differ == {"steps", "use_qk_norm", "learning_rate"} and changed.run.steps == 5
  with pytest.raises(trainer.ConfigError, match="Did you mean steps"):
    trainer.load(config, stepz=1)


def test_errors_are_raised_and_not_printed_and_the_next_train_goes_on(config, capfd):
  seen = []

  def stop(record):
    seen.append(record.step)
    if record.step == 2 and len(seen) == 2:
      raise KeyError("mine")

  config = trainer.load(config, checkpoint_period=1)
  with pytest.raises(KeyError, match="mine"):
    trainer.Run(config).train([stop])
  assert trainer.Run(config).train([stop])
  assert seen[:2] == [1, 2] and seen[-1] == 3
  if not needs.deleted:  # `evaluate` goes with weights/
    with pytest.raises(trainer.ConfigError, match="no evaluation data"):
      trainer.Run(config).evaluate()
  with pytest.raises(trainer.ConfigError, match="per_device_batch_size"):
    trainer.Run(trainer.load(config, per_device_batch_size=0.3)).train()
  printed = "".join(capfd.readouterr())
  assert "error:" not in printed and "Traceback" not in printed
  assert "KeyError: 'mine'" in pathlib.Path(config.run_directory, "log.txt").read_text()


def state_of_the_process() -> dict[str, object]:
  """What a run must leave as it was."""
  descriptor = signal.set_wakeup_fd(-1)
  signal.set_wakeup_fd(descriptor)
  mask = os.umask(0)
  os.umask(mask)
  options = dict(jax.config.values)
  options.pop("jax_num_cpu_devices")  # fixed at JAX's first use
  loggers = [logging.getLogger(name) for name in (None, "absl", "asyncio", "jax")]
  ours = [entry for entry in warnings.filters if "compilation cache" in repr(entry)]
  return {
    "warnings": (warnings.showwarning, ours),
    "signals": [signal.getsignal(number) for number in signal.valid_signals()] + [descriptor],
    "logging": [(logger.level, *logger.handlers, *logger.filters) for logger in loggers],
    "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
    "streams": (sys.stdout, sys.stderr, faulthandler.is_enabled()),
    "environment": dict(os.environ),
    "jax": options,
    "folder": (os.getcwd(), mask),
    "limits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
    "random": (random.getstate(), np.random.get_state()[1].tobytes()),
    "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
    "interpreter": (sys.getrecursionlimit(), sys.getswitchinterval(), list(sys.path)),
    "children": pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text(),
  }


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_runs_leave_the_process_as_it_was(config, monkeypatch):
  monkeypatch.delenv("XLA_FLAGS", raising=False)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1000), hard))
  monkeypatch.setattr(logging.root, "handlers", [])  # pytest has some
  gc.unfreeze()  # a run of an earlier test may have frozen what was there; what dies of it changes the number
  try:
    before, files, threads = state_of_the_process(), [], set(threading.enumerate())
    for number in range(2):
      cache = config.run.jax_cache_dir + ("" if number == 0 else "2")
      run = trainer.Run(trainer.load(config, steps=1, run_name=f"left{number}", jax_cache_dir=cache))
      assert run.train()
      run.loader().close()
      assert state_of_the_process() == before
      assert not set(threading.enumerate()) - threads  # a thread of an earlier test may end meanwhile
      files.append(len(os.listdir("/proc/self/fd")))
    assert files[0] == files[1] and os.listdir(cache)  # the last run has used its own cache
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def same_as_adamw(cfg):
  """The optimizer and the schedule of `cfg`, as a program would give them."""
  adam = optax.scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps)
  return {
    "schedule": optimizers.schedule(cfg, 3).at,
    "optimizer": optax.chain(adam, optax.add_decayed_weights(cfg.adam_weight_decay), optax.scale(-1.0)),
  }


@pytest.mark.parametrize(
  "faults",
  [{}, pytest.param({"num_slices": 2, "elastic_enabled": True, "elastic_min_slice_count": 1}, marks=pytest.mark.soak)],
)
def test_an_optimizer_of_ones_own_trains_and_resumes_like_a_built_in_one(config, faults):
  losses: dict[str, dict[int, float]] = {"built_in": {}, "own": {}}
  config = trainer.load(config, run_name="built_in", checkpoint_period=1, adam_weight_decay=0, **faults)
  assert trainer.Run(config).train([lambda record: losses["built_in"].update({record.step: record.loss})])

  def record_and_stop(record):
    losses["own"][record.step] = record.loss
    if record.step == 2 and not stopped:
      stopped.append(2)
      raise KeyError("stop")

  stopped: list[int] = []
  config = trainer.load(config, run_name="own", fault_injection="slice_down@1:0" if faults else "")
  run = trainer.Run(config, **same_as_adamw(config.optimizer))
  with pytest.raises(KeyError, match="stop"):
    run.train([record_and_stop])
  assert run.train([record_and_stop])
  assert losses["own"] == (pytest.approx(losses["built_in"], rel=1e-6) if faults else losses["built_in"])
  assert len(losses["own"]) == 3
  config = trainer.load(config, "steps=4", fault_injection="")
  with pytest.raises(ConfigMismatch, match="a program's -> opt_type"):
    trainer.Run(config).train()
  with pytest.raises(ConfigMismatch, match=r"optimizer: 0.mu.embedding +float32\[300, 16\] -> -"):
    trainer.Run(config, optimizer=optax.sgd(0.1)).train()
  with pytest.raises(trainer.ConfigError, match="remat_policy=auto"):
    trainer.Run(trainer.load(config, remat_policy="auto"), optimizer=optax.sgd(0.1)).train()


def transformation(init=lambda params: (), update=lambda grads, state, params=None: (grads, state)):
  return optax.GradientTransformation(init, update)


@pytest.mark.parametrize(
  ("given", "message"),
  [
    ({"optimizer": optax.adamw}, "is not an optax.GradientTransformation"),
    ({"optimizer": transformation(lambda params: {"name": "mine"})}, "cannot be saved and sharded: TypeError"),
    ({"optimizer": transformation(lambda params: {"key": jax.random.key(0)})}, "key is a typed PRNG key"),
    ({"optimizer": optax.contrib.reduce_on_plateau()}, "cannot be traced.*required keyword-only argument: 'value'"),
    (
      {"optimizer": transformation(update=lambda g, s, p=None: (g, s) if jax.tree.leaves(g)[0].sum() > 0 else None)},
      "cannot be traced: TracerBool",
    ),
    (
      {"optimizer": transformation(lambda p: {"n": jnp.zeros(())}, lambda g, s, p=None: (g, {"n": jnp.zeros(2)}))},
      r"other arrays than its state: n float32\[\] -> float32\[2\]",
    ),
    ({"schedule": 1e-3}, "schedule=0.001: is not a function"),
    ({"schedule": lambda step: 1e-3 if step < 5 else 1e-4}, "schedule: cannot be traced: TracerBool"),
    ({"schedule": lambda step: jnp.zeros(3)}, r"an array of shape \(3,\), not one number"),
  ],
)
def test_an_optimizer_or_a_schedule_that_no_step_can_have_is_refused(given, message):
  weights = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32)}
  with pytest.raises(trainer.ConfigError, match=message):
    optimizers.UserOptimizer(**given).replace(optax.sgd(0.1), jnp.float32, lambda: weights, {"w": ("embed", "mlp")})


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda: trainer.Run("my.yml"), r"Write trainer.Run\(trainer.load\('my.yml'\)\)"),
    (lambda: trainer.Run(trainer.load(TINY[0]), source=list), "is not read by index.\nGive a grain.MapDataset"),
    (lambda: trainer.Run(trainer.load(TINY[0]), source=iter("a")), "is an iterator: it has a state"),
    (
      lambda: trainer.Run(trainer.load(TINY[0])).train(print),
      r"takes a list of functions.\nWrite run.train\(\[print\]\)",
    ),
    (lambda: trainer.Run(trainer.load(TINY[0])).train(None), "takes a list of functions"),
    (lambda: trainer.load(5), r"load\(5\): takes a YAML file or a configuration"),
  ],
)
def test_a_wrong_call_says_what_is_wanted(call, message):
  with pytest.raises(trainer.ConfigError, match=message):
    call()


def test_a_source_of_ones_own_is_trained_on(config):
  source = [{"inputs": [9] * 16, "targets": [9] * 16}]
  losses = []
  assert trainer.Run(config, source).train([lambda record: losses.append(record.loss)])
  assert len(losses) == 3 and losses[2] < losses[0]
  batch = next(iter(trainer.Run(config, source).loader()))
  assert batch.tokens.shape == (2, 16) and (batch.tokens == 9).all()
