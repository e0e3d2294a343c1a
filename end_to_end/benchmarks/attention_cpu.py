"""Times CPU flash attention and dot_product, forward and backward.

    python -m end_to_end.benchmarks.attention_cpu [--repeats 11] [--dtype float32] [B,T,N,K,H ...]

Prints for each shape: the medians and their ratio (above 1: flash is faster), the least times and their ratio, and the
temporaries of each program. The two programs take turns, so that a busy machine slows both.
"""

from __future__ import annotations

import argparse
import os
import statistics

from end_to_end.benchmarks.common import positive, random_heads, sizes, time_in_turns

SHAPES = "8,128,4,2,64 8,256,4,2,64 8,512,4,2,64 2,2048,4,2,64 2,512,16,8,128 8,512,4,4,64"


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  shape = sizes("B,T,N,K,H", "8,512,4,2,64")
  parser.add_argument("shapes", type=shape, nargs="*", help=f"B,T,N,K,H; default: {SHAPES}")
  parser.add_argument("--repeats", type=positive, default=11)
  parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
  args = parser.parse_args()
  shapes = args.shapes or [shape(text) for text in SHAPES.split()]
  for b, t, n, k, h in shapes:
    if n % k:
      parser.error(f"{b},{t},{n},{k},{h}: N={n} query heads must be a multiple of K={k} key-value heads")
  os.environ["JAX_PLATFORMS"] = "cpu"
  for sizes_of_shape in shapes:
    measure(sizes_of_shape, args.dtype, args.repeats)


def measure(shape: list[int], dtype: str, repeats: int) -> None:
  import jax
  import jax.numpy as jnp
  from tests.support.attention_oracle import with_grads

  from trainer.kernels.attention_cpu import flash
  from trainer.kernels.attention_xla import dot_product

  b, t, n, k, h = shape
  arrays = random_heads(shape, dtype)
  ids = jnp.ones((b, t), jnp.int32)

  def forward_and_backward(function):
    run = with_grads(function)
    return jax.jit(lambda q, key, value, dout: run(q, key, value, ids, dout)).lower(*arrays).compile()

  programs = {"dot_product": forward_and_backward(dot_product), "flash": forward_and_backward(flash)}
  seconds = time_in_turns({name: lambda p=program: p(*arrays) for name, program in programs.items()}, repeats)
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
