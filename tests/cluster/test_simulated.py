from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.support.clock import Clock
from tests.support.seeds import few

from trainer import cluster
from trainer.cluster.simulated import SimulatedCluster
from trainer.config.errors import ConfigError
from trainer.config.schema import ClusterSection
from trainer.process import runtime_errors
from worlds.addresses import free_port


def make(num_slices=4, clock=None):
  devices = jax.devices()
  per = len(devices) // num_slices
  slices = {i: tuple(devices[i * per : (i + 1) * per]) for i in range(num_slices)}
  clock = clock or Clock()
  return SimulatedCluster(slices, clock=clock, sleep=clock.sleep)


def sharded_step(view):
  """A jitted step with a collective over all devices, its weight and its batch."""
  mesh = Mesh(np.array(view.devices), ("data", "fsdp"))
  weight = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, PartitionSpec(None, "fsdp")))
  batch = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, PartitionSpec("data")))

  @jax.jit
  def step(w, batch):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch["x"] @ w) ** 2))(w)
    return w - 0.01 * grad, loss

  return step, weight, {"x": batch}


@pytest.mark.parametrize(
  ("section", "message"),
  [
    (ClusterSection(num_slices=3), "8 cpu devices cannot be cut into num_slices=3"),
    (ClusterSection(num_slices=3, devices_per_slice=4), "num_slices=3 x devices_per_slice=4 does not fit the 8 cpu"),
    (ClusterSection(num_slices=9), "num_slices=9 x devices_per_slice=any does not fit"),
    (ClusterSection(cluster="multiprocess"), "the environment lacks TRAINER_SUPERVISOR"),
    (ClusterSection(cluster="pathways"), "needs JAX_PLATFORMS=proxy"),
  ],
)
def test_impossible_slices_are_refused_at_the_start(section, message):
  with pytest.raises(ConfigError, match=message):
    cluster.start(section)


@pytest.mark.parametrize(
  ("environment", "message"),
  [
    ({"JAX_NUM_PROCESSES": "2"}, "several processes need all of"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"}, "two numbers"),
    ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "must be from 0"),
    (
      {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
      "ADDRESS=a: it must be HOST:PORT",
    ),
  ],
)
def test_start_refuses_half_a_world(environment, message):
  with pytest.raises(ConfigError, match=message):
    SimulatedCluster.start(ClusterSection(), environment)


def test_a_lost_slice_fails_the_step_asynchronously_and_only_that_step():
  simulated = make()
  view = simulated.view(simulated.alive())
  step, weight, batch = sharded_step(view)
  assert simulated.poison(batch, view) is batch
  simulated.lose(2)
  new_weight, loss = simulated.on_slices(step, view)(weight, batch)  # dispatched like any other step
  with pytest.raises(jax.errors.JaxRuntimeError, match=r"DATA_LOSS: simulated loss of slices \[2\]") as caught:
    jax.block_until_ready((new_weight, loss))
  assert runtime_errors.slices_lost(str(caught.value)) == {2}
  with pytest.raises(jax.errors.JaxRuntimeError):  # arrays that were computed from it stay lost
    jax.block_until_ready(step(new_weight, batch))
  np.testing.assert_array_equal(weight, np.ones((8, 8)))  # the input is intact

  rest = simulated.view(simulated.alive())
  assert rest.slices == (0, 1, 3) and not rest.is_full
  simulated.give_back(2)
  with pytest.raises(jax.errors.JaxRuntimeError):  # the arrays of the old view stay lost
    jax.block_until_ready(simulated.poison(batch, view))
  assert simulated.died(view) == simulated.lost(view) == {2}
  view = simulated.view(simulated.alive())
  step, weight, batch = sharded_step(view)
  jax.block_until_ready(step(weight, simulated.poison(batch, view)))
  assert simulated.lost(view) == frozenset()


def test_waiting_brings_a_replacement_unless_the_slice_has_its_own_time():
  clock = Clock()
  simulated = make(clock=clock)
  simulated.lose(0)
  assert simulated.wait_for(3, timeout=1) == {1, 2, 3} and clock.now == 0
  assert simulated.wait_for(4, timeout=10) == {0, 1, 2, 3}
  assert 0 < clock.now < 2
  simulated.lose(1, seconds=float("inf"))
  with pytest.raises(TimeoutError, match=r"waited 10 s for 4 slices; only \[0, 2, 3\]"):
    simulated.wait_for(4, timeout=10)


def blocked(arrays):
  """A thread that waits for the arrays and is still waiting."""
  thread = threading.Thread(target=lambda: jax.block_until_ready(arrays), daemon=True)
  thread.start()
  thread.join(0.3)
  assert thread.is_alive()
  return thread


@pytest.mark.parametrize("end", ["given back", "after its time", "given up", "stop"])
def test_a_hang_leaves_arrays_that_are_not_ready_until_it_ends(end):
  clock = Clock()
  simulated = make(clock=clock)
  view = simulated.view(simulated.alive())
  step, weight, batch = sharded_step(view)
  expected = jax.device_get(step(weight, batch))
  simulated.hang(1, seconds=5 if end == "after its time" else None)
  assert simulated.alive() == {0, 2, 3}
  results = step(weight, simulated.poison(batch, view))  # dispatched like any other step, without an error
  thread = blocked(results)
  if end == "given back":
    simulated.give_back(1)
  elif end == "after its time":
    clock.sleep(5.1)
  elif end == "given up":
    assert simulated.lost(view) == {1}
  else:
    simulated.stop()
  thread.join(10)
  assert not thread.is_alive()
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(results), expected)


def run_python(code, **environment):
  """stdout of a fresh interpreter that runs `code`; fails with its stderr."""
  return subprocess.Popen(
    [sys.executable, "-c", textwrap.dedent(code)],
    env={k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    | {"PYTHONPATH": os.pathsep.join(sys.path)}
    | environment,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def output(process):
  try:
    out, err = process.communicate(timeout=60)
  finally:
    process.kill()
  assert process.returncode == 0, err
  return out.strip().splitlines()[-1]  # gloo prints lines of its own before


START = """
  from trainer import cluster
  from trainer.config.schema import ClusterSection
"""


def free_port_of(ports: range) -> int:
  for port in ports:
    with socket.socket() as s, contextlib.suppress(OSError):
      s.bind(("127.0.0.1", port))
      return port
  raise AssertionError("no port is free")


def of_jax(process: int, port: int) -> dict[str, str]:
  variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
  return variables | {"JAX_PROCESS_ID": str(process)}


def of_jobset(process: int, port: int) -> dict[str, str]:
  """The number comes from Kubernetes."""
  variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": "2"}
  return variables | {"JOB_COMPLETION_INDEX": str(process)}


def of_slurm(process: int, port: int) -> dict[str, str]:
  """As `srun --nodes=2 --ntasks-per-node=1` sets them. JAX derives the port from the job's id."""
  variables = {"SLURM_JOB_ID": str(port - 61440), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
  return variables | {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": str(process), "SLURM_LOCALID": "0"}


@pytest.mark.parametrize("variables", few([of_slurm], [of_jax, of_jobset, of_slurm]))
def test_two_processes_share_the_slices(variables):
  port = free_port_of(range(61440, 65536)) if variables is of_slurm else free_port()
  code = (
    START
    + """
  c = cluster.start(ClusterSection(num_slices=2, devices_per_slice=2))
  import jax, jax.numpy as jnp, numpy as np
  from jax._src import xla_bridge
  from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
  view = c.view(c.alive())
  mesh = Mesh(np.array(view.devices), ("data", "fsdp"))
  x = jax.make_array_from_callback((4,), NamedSharding(mesh, P(("data", "fsdp"))), lambda i: np.arange(4.)[i])
  total = float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x))
  print(c.world.rank, c.world.size, [d.process_index for s in view.devices for d in s], total)
  assert xla_bridge.CUDA_VISIBLE_DEVICES.value == "all"
  c.stop()
"""
  )
  processes = [run_python(code, **variables(i, port)) for i in range(2)]
  assert [output(p) for p in processes] == ["0 2 [0, 0, 1, 1] 6.0", "1 2 [0, 0, 1, 1] 6.0"]


@pytest.mark.parametrize(
  ("environment", "line", "remedy"),
  [
    (of_slurm, r"task 0 of 2 waits for 1 other, for 2 s at most \(", "SLURM_NTASKS=2: start all tasks with `srun"),
    (of_jax, r"task 1 of 2 waits for 1 other at 127.0.0.1:\d+, for 2 s at most: .*refused \(", "Start all 2 processes"),
  ],
)
def test_a_process_whose_others_do_not_come_says_so_and_ends_in_words(environment, line, remedy):
  """Before, it was silent for five minutes, and JAX aborted it."""
  code = """
from worlds import lines
lines._SLOW_SECONDS = 0.5
from trainer.cluster import joined_processes
from trainer.config.schema import ClusterSection
joined_processes._LIMIT_SECONDS = 2
import os
joined_processes.join(ClusterSection(), os.environ)
"""
  variables = environment(1 if environment is of_jax else 0, free_port_of(range(61440, 65536)))
  ended = subprocess.run(
    [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False
  )
  assert ended.returncode == 1, ended.stderr
  (told,) = ended.stdout.splitlines()
  assert re.search(line, told), told
  assert re.search(r"error: task \d of 2 has waited 2 s for 1 other", ended.stderr) and remedy in ended.stderr
  assert "Traceback" not in ended.stderr and "Check failure" not in ended.stderr


def test_a_wait_that_ends_names_the_slices_that_are_not_used_any_more():
  simulated = make(clock=Clock())
  simulated.bar([2])
  with pytest.raises(TimeoutError, match=r"slices \[2\] are not used any more, because they computed wrong sums"):
    simulated.wait_for(4, timeout=10)
