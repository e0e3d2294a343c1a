"""Times the fused cross-entropy on a CPU, forward and backward, for several chunk sizes, and the plain formula.

    python -m end_to_end.benchmarks.cross_entropy_cpu [--repeats 7] [--mib 2,4,8,16,32,64] [B,T,V,D ...]

Prints for each program: the median and least milliseconds, the ratio of the least time of the plain formula to its own
least time (above 1: it is faster), and its temporaries. The programs take turns.
"""

from __future__ import annotations

import argparse
import os
import statistics

from end_to_end.benchmarks.common import positive, positives, sizes, time_in_turns


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  shape = sizes("B,T,V,D", "8,512,4096,256")
  parser.add_argument("shapes", type=shape, nargs="*", default=[[8, 512, 4096, 256]], help="B,T,V,D")
  parser.add_argument("--repeats", type=positive, default=7)
  parser.add_argument("--mib", type=positives, default="2,4,8,16,32,64", help="size of a chunk's float32 logits")
  args = parser.parse_args()
  os.environ["JAX_PLATFORMS"] = "cpu"
  for sizes_of_shape in args.shapes:
    measure(sizes_of_shape, args.mib, args.repeats)


def measure(shape: list[int], mebibytes: list[int], repeats: int) -> None:
  import functools

  import jax
  import jax.numpy as jnp
  from tests.support.plain_cross_entropy import plain_cross_entropy

  from trainer.kernels.cross_entropy import linear_cross_entropy

  b, t, v, d = shape
  keys = jax.random.split(jax.random.key(0), 3)
  x, w = jax.random.normal(keys[0], (b, t, d)), 0.02 * jax.random.normal(keys[1], (v, d))
  targets, weights = jax.random.randint(keys[2], (b, t), 0, v), jnp.ones((b, t))

  def forward_and_backward(function):
    run = lambda x, w: jax.value_and_grad(lambda x, w: sum(function(x, w, targets, weights)), (0, 1))(x, w)
    return jax.jit(run).lower(x, w).compile()

  programs = {"plain": forward_and_backward(functools.partial(plain_cross_entropy, z_loss=0.0))}
  for size in mebibytes:
    chunked = functools.partial(linear_cross_entropy, z_loss=0.0, num_chunks=0, chunk_logits_bytes=size << 20)
    programs[f"{size} MiB"] = forward_and_backward(chunked)
  seconds = time_in_turns({name: lambda p=program: p(x, w) for name, program in programs.items()}, repeats)
  for name, program in programs.items():
    times = seconds[name]
    print(
      f"B={b} T={t} V={v} D={d} {name:>7}: median {statistics.median(times) * 1e3:.0f} ms, "
      f"least {min(times) * 1e3:.0f} ms, ratio {min(seconds['plain']) / min(times):.2f}; "
      f"temporaries {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB",
      flush=True,
    )


if __name__ == "__main__":
  main()
