from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import jax
import jax.numpy as jnp
import numpy as np

from trainer.observe import compiles
from trainer.observe.compiles import CompileCounter


def compile_something(seed: float) -> None:
  jax.jit(lambda x: jnp.sin(x) * seed)(np.ones((3,), np.float32)).block_until_ready()


def test_only_compilations_by_xla_are_counted():
  step = jax.jit(lambda x: x * 2 + 1)
  x = np.ones((4,), np.float32)
  with CompileCounter() as counter:
    assert counter.compilations == 0
    step(x).block_until_ready()
    step(x).block_until_ready()  # the same shape again
    assert counter.compilations == 1
    step(np.ones((5,), np.float32)).block_until_ready()
    assert counter.compilations == 2
  compile_something(3.0)
  assert counter.compilations == 2  # unregistered


def test_uncounted_applies_to_its_thread_and_block_only():
  """Neither for other threads during the block, nor for the same thread after it."""
  other = threading.Thread(target=compile_something, args=(9.0,))
  with CompileCounter() as counter:
    with compiles.uncounted():
      compile_something(10.0)
      assert counter.compilations == 0
      other.start()
      other.join()
      assert counter.compilations == 1
    compile_something(12.0)
  assert counter.compilations == 2


def test_a_hit_in_the_persistent_cache_is_not_a_compilation(tmp_path):
  code = f"""
    import jax, numpy as np
    from trainer.observe.compiles import CompileCounter
    jax.config.update("jax_compilation_cache_dir", {str(tmp_path)!r})
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    with CompileCounter() as counter:
      jax.jit(lambda x: x * 3 - 1)(np.ones((8,), np.float32)).block_until_ready()
    print(counter.compilations)
  """
  command = [sys.executable, "-c", textwrap.dedent(code)]
  runs = [subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout for _ in range(2)]
  assert runs == ["1\n", "0\n"]
