"""Times CPU flash attention against dot_product, forward and backward, in one run.

    python -m end_to_end.benchmarks.attention_cpu [--repeats 11] [--dtype float32] [B,T,N,K,H ...]

The two take turns, so a busy machine slows both; a line has the medians, their ratio (above 1: flash is faster), the
least times and their ratio, and the temporaries of each program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

from end_to_end.benchmarks.arguments import positive, positives

SHAPES = "8,128,4,2,64 8,256,4,2,64 8,512,4,2,64 2,2048,4,2,64 2,512,16,8,128 8,512,4,4,64"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("shapes", type=positives, nargs="*", help=f"B,T,N,K,H; default: {SHAPES}")
  parser.add_argument("--repeats", type=positive, default=11)
  parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
  args = parser.parse_args()
  shapes = args.shapes or [positives(shape) for shape in SHAPES.split()]
  for shape in shapes:
    given = ",".join(map(str, shape))
    if len(shape) != 5:
      parser.error(f"{given}: a shape is five numbers B,T,N,K,H, for example 8,512,4,2,64")
    if shape[2] % shape[3]:
      parser.error(f"{given}: N={shape[2]} query heads must be a multiple of K={shape[3]} key-value heads")
  os.environ["JAX_PLATFORMS"] = "cpu"
  for shape in shapes:
    measure(shape, args.dtype, args.repeats)


def measure(shape: list[int], dtype: str, repeats: int) -> None:
  import jax
  import jax.numpy as jnp

  from trainer.kernels.attention_cpu import flash
  from trainer.kernels.attention_xla import dot_product

  b, t, n, k, h = shape
  keys = jax.random.split(jax.random.key(0), 4)
  q, key, value, dout = (jax.random.normal(r, (b, t, m, h), dtype) for r, m in zip(keys, (n, k, k, n), strict=True))
  ids = jnp.ones((b, t), jnp.int32)

  def both(function):
    def run(q, key, value, dout):
      out, pull = jax.vjp(lambda *a: function(*a, ids, ids), q, key, value)
      return out, pull(dout)

    return jax.jit(run).lower(q, key, value, dout).compile()

  programs = {"dot_product": both(dot_product), "flash": both(flash)}
  seconds: dict[str, list[float]] = {name: [] for name in programs}
  for repeat in range(repeats + 1):
    for name, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(q, key, value, dout))
      if repeat:  # the first touches memory for the first time
        seconds[name].append(time.perf_counter() - start)
  plain, fast = seconds["dot_product"], seconds["flash"]
  mib = {name: program.memory_analysis().temp_size_in_bytes / 2**20 for name, program in programs.items()}
  print(
    f"B={b} T={t} N={n} K={k} H={h} {dtype}: median dot_product {statistics.median(plain) * 1e3:.1f} ms, "
    f"flash {statistics.median(fast) * 1e3:.1f} ms, ratio {statistics.median(plain) / statistics.median(fast):.2f}; "
    f"least {min(plain) * 1e3:.1f} and {min(fast) * 1e3:.1f} ms, ratio {min(plain) / min(fast):.2f}; "
    f"temporaries {mib['dot_product']:.0f} and {mib['flash']:.0f} MiB",
    flush=True,
  )


if __name__ == "__main__":
  main()
