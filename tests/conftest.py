"""Test configuration: eight CPU devices per process and cheap compilations."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

# Before the first import of jax: tests must not occupy an accelerator.
os.environ["JAX_PLATFORMS"] = "cpu"
# Several processes may use the TPU compiler at the same time: there is no chip to share.
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
# Test programs run a few steps on small arrays, so that most of their time would go to LLVM's optimizer.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
# Code that mixes dtypes without a cast is an error, also in the processes that tests start.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Containers often set it. Then every process that a test starts compiles what it imports: 6.5 CPU seconds, not 2.5.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import jax
import pytest
from tests.support.forked_runs import StandaloneServer

from input_pipeline.workers import cores

jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config: pytest.Config) -> None:
  # SIGTERM ends the tests as Ctrl-C does, so that fixtures can end the processes that they have started.
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  # A job in a shell's background inherits an ignored SIGINT, and so would the processes that the tests start.
  signal.signal(signal.SIGINT, signal.default_int_handler)
  signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and the processes would ignore it too


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """Number of worker processes: 0 for files, which start faster in this process; for a folder one more than cores.

  About a third of the time of a worker is waiting: for processes of a run, and for time limits that must pass.
  """
  if all(Path(str(arg).partition("::")[0]).is_file() for arg in config.args):
    return 0
  return cores() + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  """Tests with a time limit of their own are long and come first: no worker begins one when the others have ended."""
  items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.fixture(scope="session")
def server() -> Iterator[StandaloneServer]:
  """Starts runs of the real command, and of launchers, without the seconds that their imports take."""
  started = StandaloneServer()
  yield started
  started.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
  """A folder that every worker of pytest sees. .ci/run names one for the default and the slow tests: what both need,
  such as compiled programs, the undisturbed run of the launchers and the wheel, is made once."""
  base = tmp_path_factory.getbasetemp()
  given = os.environ.get("TRAINER_TESTS_SHARED")
  folder = Path(given) if given else (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
  folder.mkdir(exist_ok=True)
  return folder


@pytest.fixture(scope="session")
def once(shared) -> Callable[[str, Callable[[Path], object]], Path]:
  """once(name, make): the folder that make(folder) has filled, in the first worker of pytest that asks for it."""

  def made(name: str, make: Callable[[Path], object]) -> Path:
    folder, complete = shared / name, shared / f"{name}.complete"
    with (shared / f"{name}.lock").open("w") as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      if not complete.exists():
        folder.mkdir(exist_ok=True)
        make(folder)
        complete.touch()
    return folder

  return made


@pytest.fixture(scope="session")
def compiled(shared) -> str:
  """The key of a compilation cache that the runs of all tests share."""
  return f"jax_cache_dir={shared / 'compiled'}"


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
  """Drops a module's compiled programs: each holds memory maps, and Linux limits a process to 65,530 maps."""
  yield
  jax.clear_caches()
  cache = jax.config.jax_compilation_cache_dir
  assert cache is None, f"tests of this module have turned on the compilation cache {cache}: set jax_cache_dir="
